"""Loaders in turn: what a good one leaves; what is said of one that is missing, crashes, hangs, is wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.checkpoints import Written, random_checkpoint
from tensorlift import sources
from tensorlift.bench import race
from tensorlift.bench.ceilings import Ceilings
from tensorlift.bench.report import Series
from tensorlift.bench.rivals import OURS, RIVALS, Rival

# Each sample imports torch in a process of its own.
pytestmark = pytest.mark.timeout(600)

FAKES = """
import os, pathlib, signal, time
from tensorlift.bench.rivals import load_safetensors as good

def crash(files, device):
    print("the last words", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)

def leave(files, device):
    os._exit(3)

def hang(files, device):
    signal.pause()

def fail(files, device):
    raise ValueError("no such device")

def long(files, device):
    raise ValueError("first" + "\\nsecond" * 100)

def once(files, device):
    marker = pathlib.Path(__file__).with_name("been here")
    if marker.exists():
        raise ValueError("not again")
    marker.touch()
    return good(files, device)

def incomplete(files, device):
    import a_module_that_is_nowhere

def wrong(files, device):
    state, kept = good(files, device)
    tensor = next(t for t in state.values() if t.numel())
    tensor.view(-1)[:1].zero_().add_(1)
    return state, kept

def short(files, device):
    state, kept = good(files, device)
    state.popitem()
    return state, kept

def renamed(files, device):
    state, kept = good(files, device)
    name, tensor = state.popitem()
    return state | {name + "x": tensor}, kept

def reshaped(files, device):
    state, kept = good(files, device)
    return {name: tensor.reshape(-1) for name, tensor in state.items()}, kept
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return random_checkpoint(
        tmp_path_factory.mktemp("race"), shards=2, tensors=4, codes=["I64", "F32"], seed=5
    )


@pytest.fixture(scope="module")
def ceilings() -> Iterator[Ceilings]:
    with Ceilings() as built:
        yield built


BAD = {
    "crash": ("crashed", "killed by SIGSEGV: the last words"),
    "leave": ("crashed", "ended with exit code 3"),
    "fail": ("failed", "ValueError: no such device"),
    "incomplete": ("failed", "ModuleNotFoundError: No module named 'a_module_that_is_nowhere'"),
    "long": ("failed", "ValueError: first"),
    "wrong": ("wrong", "has other bytes than its file"),
    "short": ("wrong", "it gave 7 tensors, and not those of the checkpoint"),
    "renamed": ("wrong", "it gave 8 tensors, and not those of the checkpoint"),
    "reshaped": ("wrong", "shape"),
}


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fakes")
    (folder / "fake_rivals.py").write_text(FAKES)
    return folder


def fake(folder: Path, function: str, *imports: str) -> Rival:
    return Rival(
        function,
        module="json",
        package="fake",
        pip="pip install fake",
        adapter=f"fake_rivals:{function}",
        imports=imports,
        folder=folder,
    )


def run(written: Written, ceilings: Ceilings, rivals: list[Rival], said: list[str]) -> list[race.Entry]:
    checkpoint = sources.read_headers(sources.find(written.path))
    return race.Race(checkpoint, "cpu", ceilings, 60).run(rivals, 1.0, 1, said.append)


@pytest.fixture(scope="module")
def done(written: Written, ceilings: Ceilings, fakes: Path) -> tuple[dict[str, race.Entry], list[str]]:
    """The entries of one race with every fake and every rival that is installed, and what was said."""
    said: list[str] = []
    gone = dataclasses.replace(RIVALS["runai"], name="gone", module="a_module_that_is_nowhere")
    rivals = [fake(fakes, name) for name in ("good", *BAD)] + [gone, *RIVALS.values()]
    entries = run(written, ceilings, rivals, said)
    return {entry.rival.name: entry for entry in entries}, said


Done = tuple[dict[str, race.Entry], list[str]]


def test_loaders_take_turns(done: Done) -> None:
    entries, said = done
    turns = [text.partition(",")[0] for text in said]
    assert turns[: 2 + len(BAD)] == ["tensorlift", "good", *BAD]
    good = [name for name, entry in entries.items() if entry.ok]
    assert turns[-len(good) :] == good


@pytest.mark.parametrize("name", ["tensorlift", "good"])
def test_good_one_has_samples_and_memory(done: Done, name: str) -> None:
    entry = done[0][name]
    assert (entry.status, entry.reason) == ("ok", "")
    assert len(entry.series.seconds) == len(entry.series.notes) == 2
    assert entry.cached == 1
    assert entry.peak("resident_peak_bytes") is not None
    assert entry.peak("device_peak_bytes") is None
    assert entry.record()["series"]["median_seconds"] == entry.series.seconds[1]


def test_ours_tells_its_statistics(done: Done) -> None:
    ours = done[0]["tensorlift"]
    assert ours.peak("pinned_peak_bytes") == 0
    assert ours.series.notes[0]["stats"]["bytes"] == ours.series.nbytes


@pytest.mark.parametrize("name", BAD)
def test_bad_rival_is_told_of_and_not_run_again(done: Done, name: str) -> None:
    entries, said = done
    status, says = BAD[name]
    assert entries[name].status == entries[name].record()["status"] == status
    assert says in entries[name].reason
    assert entries[name].series.seconds == []
    assert len([text for text in said if text.startswith(f"{name},")]) == 1


def test_rivals_that_are_not_there_are_named(done: Done) -> None:
    entries = done[0]
    assert (entries["gone"].status, entries["gone"].reason) == (
        "missing",
        "not installed: pip install runai-model-streamer",
    )
    assert (entries["instanttensor"].status, entries["instanttensor"].reason) == (
        "not here",
        "loads to cuda only",
    )


@pytest.mark.parametrize("name", [rival.name for rival in RIVALS.values() if "cpu" in rival.devices])
def test_rival_gives_right_bytes(done: Done, name: str) -> None:
    entry = done[0][name]
    if entry.status == "missing":
        pytest.skip(f"{name}: {entry.reason}")
    assert (entry.status, entry.reason) == ("ok", "")


def test_hanging_rival_is_killed(fakes: Path) -> None:
    # Ours is not in this: it must not run out of the time that shall be short for the other.
    request = {
        "module": "json",
        "package": "fake",
        "adapter": "fake_rivals:hang",
        "imports": [],
        "files": [],
        "device": "cpu",
        "watch": False,
        "sample": [],
    }
    assert race.ask(request, 0.5, fakes) == ("hung", {"error": "no end within 0.5 s, killed"})


def test_wrong_bytes_of_ours_are_told_of_too(written: Written, ceilings: Ceilings) -> None:
    checkpoint = sources.read_headers(sources.find(written.path))
    racing = race.Race(checkpoint, "cpu", ceilings, 60)
    racing._checksums = dict.fromkeys(racing._checksums, -1)
    (ours,) = racing.run([], 1.0, 1, lambda text: None)
    assert ours.status == "wrong"


def test_what_is_imported_is_no_part_of_a_load(done: Done) -> None:
    for name in ("tensorlift", "safetensors"):
        if done[0][name].ok:
            for note in done[0][name].series.notes:
                assert note["imported_meanwhile"] == []


def test_a_module_that_is_missing_and_a_failure_that_comes_later(
    written: Written, ceilings: Ceilings, fakes: Path
) -> None:
    rivals = [fake(fakes, "good", "a_module_that_is_nowhere"), fake(fakes, "once")]
    _, lacking, once = run(written, ceilings, rivals, [])
    assert (lacking.status, lacking.reason) == (
        "missing",
        "ModuleNotFoundError: No module named 'a_module_that_is_nowhere'; pip install fake",
    )
    assert (once.status, once.reason) == ("failed", "ValueError: not again")
    assert len(once.series.seconds) == len(once.record()["seconds"]) == 1


def test_samples_before_a_failure_are_kept() -> None:
    entry = race.Entry(OURS, Series("tensorlift", 6, [9.0, 1.0, 3.0]))
    entry.fail("failed", "x" * 1000)
    assert entry.record()["series"]["median_seconds"] == 2
    assert len(entry.reason) == 301


def test_no_median_of_what_was_never_measured() -> None:
    entry = race.Entry(OURS, Series("tensorlift", 1))
    entry.fail("hung", "no end")
    assert entry.record()["seconds"] == []
    assert entry.cached == 0
