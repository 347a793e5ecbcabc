"""Samples in turn: what settles before each, what a rival may do, and what pairs say."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tensorlift.bench import instanttensor, samples
from tensorlift.bench.report import Series
from tensorlift.bench.samples import Contender, Sampler, busy_thread, pair_ratios


def contender(name: str, work: Any = lambda: None, **more: Any) -> Contender:
    return Contender(Series(name, 1000), work, **more)


def test_contenders_take_turns_and_notes_are_kept() -> None:
    seen: list[str] = []
    stats = SimpleNamespace(to_dict=lambda: {"threads": 4})
    first = contender(
        "first", lambda: seen.append("first") or SimpleNamespace(stats=stats), before=lambda: {"cached": 1.0}
    )
    second = contender("second", lambda: seen.append("second") or 2.5, tells=True)
    Sampler("cpu", 2).take_turns(first, second)
    assert seen == ["first", "second"] * 3
    assert first.series.notes == [{"cached": 1.0, "threads": 4}] * 3
    assert second.series.seconds == [2.5] * 3
    assert first.ok


def test_the_memory_of_the_sample_before_is_given_back_and_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append("empty_cache"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: seen.append(f"synchronize {device}"))
    monkeypatch.setattr(samples.time, "sleep", lambda seconds: seen.append(f"sleep {seconds}"))
    Sampler("cuda:0", 0).take_turns(contender("x", lambda: seen.append("work")))
    assert seen == ["empty_cache", "synchronize cuda:0", "sleep 0.5", "work", "synchronize cuda:0"]


def test_a_rival_that_fails_ends_alone_and_ours_does_not_go_unnoticed() -> None:
    def fail() -> None:
        raise OSError("it broke")

    ours, rival = contender("ours"), contender("rival", fail, rival=True)
    Sampler("cpu", 2).take_turns(ours, rival)
    assert ours.ok
    assert not rival.ok
    assert rival.failed == "OSError: it broke"
    with pytest.raises(OSError, match="it broke"):
        Sampler("cpu", 2).take_turns(contender("ours", fail))


def test_a_slow_rival_runs_few_times() -> None:
    slow, ours = contender("slow", lambda: 6.0, tells=True, rival=True), contender("ours")
    Sampler("cpu", 8).take_turns(slow, ours)
    assert len(slow.series.seconds) == 4
    assert len(ours.series.seconds) == 9
    assert len(pair_ratios(ours.series, slow.series)) == 3


def test_pairs_leave_the_first_out() -> None:
    assert pair_ratios(Series("a", 0, [9, 1, 2]), Series("b", 0, [1, 2, 3])) == [2, 1.5]


def test_the_busy_thread_ends() -> None:
    with busy_thread():
        assert any(thread.name == "busy" for thread in threading.enumerate())
    assert not any(thread.name == "busy" for thread in threading.enumerate())


def test_the_link_is_the_higher_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter([3.0, 2.0])
    sampler = Sampler("cpu", 1)
    monkeypatch.setattr(sampler, "link_rate", lambda: next(rates))
    with sampler.link() as link:
        pass
    assert (link.before, link.after, link.rate) == (3.0, 2.0, 3.0)


def test_a_rival_that_is_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    monkeypatch.delitem(__import__("sys").modules, "instanttensor", raising=False)
    assert "cannot be imported (ModuleNotFoundError" in str(instanttensor.obstacle(tmp_path))
    (tmp_path / "instanttensor.py").write_text("raise OSError('libaio.so.1: cannot open')")
    assert "libaio" in str(instanttensor.obstacle(tmp_path))
