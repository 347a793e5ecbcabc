"""Timed loads of a part of a checkpoint: which tensors, and what was cached."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.checkpoints import Written, random_checkpoint, random_row, write_safetensors
from support.page_cache import ON_DISK, file_system, resident
from tensorlift.bench import trials as module
from tensorlift.bench.trials import Trials
from tensorlift.bench.tuning import AUTOMATIC, Choice
from tensorlift.errors import BackendError, CheckpointError, CheckpointNotFoundError


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return random_checkpoint(tmp_path, shards=3, tensors=4, elements=40_000, seed=2)


def test_part_is_the_first_tensors_and_their_files(written: Written) -> None:
    trials = Trials([str(written.path)], "cpu")
    sizes = [len(raw) for _, _, raw in written.tensors.values()]
    assert (trials.bytes, trials.files) == (sum(sizes), list(written.files))
    trials.take(sizes[0] + 1)
    assert trials.bytes >= sizes[0] + 1
    assert trials.files == [written.files[0]]
    trials.take(1 << 50)
    assert trials.bytes == trials.total_bytes == sum(sizes)


def test_loads_take_time_and_options(written: Written) -> None:
    trials = Trials([str(file) for file in written.files], "cpu")
    assert trials.measure("warm", AUTOMATIC) > 0
    assert trials.measure("warm", Choice(backend="MMAP", threads=1, chunk_size=8192)) > 0
    assert trials.fetched == []
    trials.fit("warm", 1.0)
    assert trials.bytes == trials.total_bytes
    assert trials.size().backends == ("AUTO",)


def test_warm_is_cached_and_cold_comes_from_storage(tmp_path: Path) -> None:
    if (kind := file_system(tmp_path)) not in ON_DISK:
        pytest.skip(f"{kind} cannot be told to forget pages")
    file = write_safetensors(tmp_path / "a.safetensors", {"a": random_row("U8", [8 << 20])})
    trials = Trials([str(file)], "cpu")
    trials.measure("cold", AUTOMATIC)
    trials.measure("cold", Choice(backend="BUFFERED"))
    assert trials.cold_is_proven
    # What was read directly is not cached now, so a warm load has to bring it first.
    trials.measure("cold", AUTOMATIC)
    trials.measure("warm", AUTOMATIC)
    assert resident(file).all()


def test_cold_is_not_claimed_without_proof(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = Trials([str(written.path)], "cpu")
    assert not trials.cold_is_proven
    monkeypatch.setattr(module, "_fetched_bytes", lambda: None)
    trials.measure("cold", AUTOMATIC)
    assert not trials.cold_is_proven
    # As on a memory file system: nothing comes from storage.
    monkeypatch.setattr(module, "_fetched_bytes", lambda: 0)
    trials.measure("cold", AUTOMATIC)
    assert not trials.cold_is_proven


def test_nothing_to_measure(tmp_path: Path) -> None:
    file = write_safetensors(tmp_path / "a.safetensors", {"a": ("U8", (0,), b"")})
    with pytest.raises(CheckpointError, match="no tensor has a byte"):
        Trials([str(file)], "cpu")
    with pytest.raises(CheckpointNotFoundError):
        Trials([str(tmp_path / "gone")], "cpu")


def test_refusal_comes_out(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorlift import loading

    def refuse(*_: object, **__: object) -> None:
        raise BackendError("refused")

    trials = Trials([str(written.path)], "cpu")
    monkeypatch.setattr(loading, "load", refuse)
    with pytest.raises(BackendError):
        trials.measure("warm", AUTOMATIC)
