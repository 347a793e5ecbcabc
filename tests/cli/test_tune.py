"""``tensorlift tune`` on small files, with few loads: what it prints, not what it measures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from support.checkpoints import Written, random_checkpoint
from tensorlift.bench import trials, tuning
from tensorlift.bench.tuning import Choice
from tensorlift.cli.main import app


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return random_checkpoint(tmp_path, tensors=4, elements=20_000, seed=5)


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner(env={"NO_COLOR": "1"}).invoke(app, ["tune", *(str(a) for a in arguments)])
    return result.exit_code, result.stdout, result.stderr


def times(seconds: dict[int | None, float]) -> Any:
    """Stands in for Trials.measure: seconds by threads; AIO is refused."""

    def measure(self: trials.Trials, state: str, choice: Choice) -> float:
        if choice.backend == "AIO":
            raise tuning.MachineError("no such system call")
        if state == "cold":
            self.fetched.append(1.0)
        return seconds.get(choice.threads, 1.0)

    return measure


def test_real_loads(written: Written) -> None:
    code, out, err = run(written.path, "--seconds", "1", "--json")
    assert (code, err) == (0, "")
    facts = json.loads(out)
    assert set(facts["states"]) == {"warm", "cold"}
    for found in facts["states"].values():
        assert found["sample_bytes"] == facts["bytes"]
        finals = [row for row in found["trials"] if row["final"]]
        assert len(finals) == tuning.FINALISTS + 1
        assert all(len(row["samples"]) >= tuning.ROUNDS for row in finals)
        assert "automatic" in [row["choice"] for row in finals]
        assert found["gap"] >= 0


def test_what_to_set_can_be_copied(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials.Trials, "measure", times({2: 0.5}))
    monkeypatch.setattr(tuning, "ROUNDS", 2)
    ticks = iter(range(10_000))
    monkeypatch.setattr("tensorlift.cli.tune.time.monotonic", lambda: next(ticks))
    code, out, _ = run(written.path, "--seconds", "200", "--state", "cold")
    assert code == 0
    assert "at least 100% came from storage" in out
    assert "cold: the automatic choice takes 100.0% longer than the best" in out
    assert "set if your files are always cold:\n  --threads 2\n" in out
    assert "TENSORLIFT_THREADS=2" in out
    assert "AIO" in out
    assert "refused" in out
    code, out, _ = run(written.path, "--seconds", "200", "--state", "cold", "--json")
    found = json.loads(out)["states"]["cold"]
    assert found["set"] == {"threads": 2}
    (refused,) = (row for row in found["trials"] if row["choice"] == "backend=AIO")
    assert refused["refused"] == "no such system call"


def test_nothing_to_set(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials.Trials, "measure", times({None: 0.999}))
    ticks = iter(range(10_000))
    monkeypatch.setattr("tensorlift.cli.tune.time.monotonic", lambda: next(ticks))
    monkeypatch.setenv("TENSORLIFT_IO_DEPTH", "7")
    code, out, _ = run(written.path, "--seconds", "20", "--state", "warm")
    assert code == 0
    assert "set in the environment, and so in every load here: TENSORLIFT_IO_DEPTH" in out
    assert "io_depth 7" in out
    assert "set nothing if your files are always warm" in out
    assert "the rule: a choice is recommended where" in out
    assert "the time was over before every choice was tried" in out


def by_state(warm: dict[int | None, float], cold: dict[int | None, float]) -> Any:
    def measure(self: trials.Trials, state: str, choice: Choice) -> float:
        self.fetched.append(1.0)
        return {"warm": warm, "cold": cold}[state].get(choice.threads, 1.0)

    return measure


@pytest.mark.parametrize(("cold", "for_all"), [(1.0, True), (2.0, False)])
def test_one_verdict_for_both_states(
    written: Written, monkeypatch: pytest.MonkeyPatch, cold: float, for_all: bool
) -> None:
    monkeypatch.setattr(trials.Trials, "measure", by_state({2: 0.5}, {2: cold}))
    monkeypatch.setattr(tuning, "ROUNDS", 2)
    ticks = iter(range(10_000))
    monkeypatch.setattr("tensorlift.cli.tune.time.monotonic", lambda: next(ticks))
    monkeypatch.setattr(tuning, "axes", lambda *_, cold, **__: {"threads": [4, 8, 16] if cold else [2, 4, 8]})
    code, out, _ = run(written.path, "--seconds", "400")
    assert code == 0
    end = out[out.rindex("cold: ") :]
    if for_all:
        assert "\nset:\n  --threads 2\n  TENSORLIFT_THREADS=2\n" in end
    else:
        assert "\nset nothing\nif your files are always warm:\n  --threads 2\n" in end
        assert "tried when cold too: threads=2: 2.0000 s" in end


def test_unproven_cold_is_said(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_fetched_bytes", lambda: 0)
    code, out, _ = run(written.path, "--seconds", "1", "--state", "cold")
    assert code == 0
    assert "not proven to be cold: what came from storage, in one load only 0%" in out


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--state", "lukewarm"), 2, "--state is 'lukewarm'"),
        (("--seconds", "0"), 2, "seconds"),
        (("--device", "toaster"), 2, "toaster"),
    ],
)
def test_bad_requests(arguments: tuple[str, ...], code: int, says: str, written: Written) -> None:
    found, _, err = run(written.path, *arguments)
    assert found == code
    assert says in err


def test_missing_path_is_1(tmp_path: Path) -> None:
    code, _, err = run(tmp_path / "gone")
    assert code == 1
    assert err.startswith("error: CheckpointNotFoundError\n")
