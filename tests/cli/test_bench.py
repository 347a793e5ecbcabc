"""``bench`` on the command line: tables and JSON on stdout, the course of things on stderr, exit codes."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from support.checkpoints import Written, random_checkpoint
from support.command_line import run
from tensorlift.bench import race, rates
from tensorlift.bench.race import SHARES
from tensorlift.bench.rivals import DEFAULT, RIVALS
from tensorlift.cli import bench

# Each sample imports torch in a process of its own.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return random_checkpoint(tmp_path_factory.mktemp("bench"), shards=2, tensors=3, codes=["F32"], seed=3)


def test_json_and_file_have_machine_ceilings_and_samples(written: Written, tmp_path: Path) -> None:
    code, out, err = run(
        "bench", written.path, "--rivals", "safetensors", "--runs", 1, "--json", "--results", tmp_path
    )
    assert code == 0, err
    record = json.loads(out)
    assert list(record)[:4] == ["theme", "date", "machine", "settings"]
    assert record["settings"]["cache"] == "warm"
    assert {rate["kind"] for rate in record["ceilings"]} == {"memory", "cache", "direct"}
    assert [loader["name"] for loader in record["loaders"]] == ["tensorlift", "safetensors"]
    assert any("best of its samples" in note for note in record["notes"])
    assert [len(loader["series"]["seconds"]) for loader in record["loaders"]] == [2, 2]
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("rivals-warm-cpu-")
    assert json.loads(file.read_text()) == record
    assert "measuring the ceilings" in err
    assert f"written: {file}" in err


def test_tables_for_people_name_what_is_missing(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = dataclasses.replace(RIVALS["runai"], module="a_module_that_is_nowhere")
    monkeypatch.setitem(RIVALS, "runai", gone)
    code, out, _ = run("bench", written.path, "--rivals", "runai", "--runs", 1)
    assert code == 0
    assert "page cache to fresh memory, 1 thread" in out
    assert "not installed: pip install runai-model-streamer" in out
    assert "cached before each sample: 1.000" in out
    assert "GB/s, best" in out
    assert "GB/s, median" in out
    assert "each tensor is cloned" in out


def test_ours_failing_is_3(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "measure", lambda *_: [])
    monkeypatch.setattr(race, "ask", lambda *_: ("crashed", {"error": "killed by SIGSEGV"}))
    code, out, err = run("bench", written.path, "--rivals", "", "--runs", 1)
    assert code == 3
    assert "killed by SIGSEGV" in out
    assert "tensorlift, not counted: crashed" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--cache", "tepid"), "there are warm, cold, half or as-is"),
        (("--rivals", "dcp"), "there are safetensors, safetensors-rc"),
        (("--rival-path", "runai=/nowhere/at/all"), "NAME=FOLDER"),
        (("--runs", "0"), "runs"),
        (("--timeout", "0"), "timeout"),
        (("--timeout", "inf"), "timeout"),
        (("--timeout", "nan"), "timeout"),
        (("--device", "toaster"), "toaster"),
    ],
)
def test_wrong_requests_are_2(written: Written, arguments: tuple[str, ...], says: str) -> None:
    code, out, err = run("bench", written.path, *arguments)
    assert (code, out) == (2, "")
    assert says in err


def test_chart_without_matplotlib_is_2(
    written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, out, err = run("bench", written.path, "--plot", tmp_path / "out.png")
    assert (code, out) == (2, "")
    assert "pip install 'tensorlift[plot]'" in err


def test_places_that_cannot_be_written_are_refused_first(written: Written, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder.png").mkdir()
    for option, place in (("--results", "file"), ("--results", "file/in"), ("--plot", "folder.png")):
        code, out, err = run("bench", written.path, option, tmp_path / place)
        assert (code, out) == (2, "")
        assert option in err
        assert "measuring" not in err
    code, _, err = run("bench", written.path, "--plot", written.files[0].with_suffix(".png") / "x.png")
    assert code == 2


def test_samples_before_a_failure_are_shown(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "measure", lambda *_: [])
    real, asked = race.ask, [0]

    def then_fails(*arguments: Any) -> Any:
        asked[0] += 1
        return real(*arguments) if asked[0] == 1 else ("failed", {"error": "ValueError: no\nmore"})

    monkeypatch.setattr(race, "ask", then_fails)
    code, out, _ = run("bench", written.path, "--rivals", "", "--runs", 1)
    assert code == 3
    assert "ValueError: no (samples before it, s: 0." in out


def test_missing_path_is_1(tmp_path: Path) -> None:
    assert run("bench", tmp_path / "gone")[0] == 1


def test_help_knows_the_same_words_as_the_code() -> None:
    assert bench._CACHES.replace(" or ", ", ").split(", ") == list(SHARES)
    assert bench._DEFAULT.split(",") == list(DEFAULT)
    out = run("bench", "--help")[1]
    assert all(name in out for name in RIVALS)
