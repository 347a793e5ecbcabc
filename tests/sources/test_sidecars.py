"""Files of digests: where they are looked for, how they are read and written."""

from __future__ import annotations

import os
import stat
import tracemalloc
from pathlib import Path

import pytest

from support import leaks
from support.checkpoints import Written, random_checkpoint, random_row, write_safetensors
from support.digests import headers
from tensorlift import outputs
from tensorlift.errors import (
    CheckpointNotFoundError,
    DigestError,
    MachineError,
    OutOfMemoryError,
    RequestError,
)
from tensorlift.format.digests import LONGEST_SIDECAR, FileRecord, Sidecar, encode
from tensorlift.sources import sidecars
from tensorlift.sources.sidecars import find_sidecar, read_sidecar, sidecar_to_write, write_sidecar

SIDECAR = Sidecar((FileRecord("f", 7),), ())


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return random_checkpoint(tmp_path / "c", shards=2, tensors=3)


def test_a_folder_has_one(written: Written) -> None:
    path = str(written.path / "tensorlift.digests.json")
    checkpoint = headers(written.path)
    assert sidecar_to_write(checkpoint) == path
    with pytest.raises(DigestError, match=r"looked for: .*tensorlift\.digests\.json"):
        find_sidecar(checkpoint)
    write_sidecar(path, SIDECAR)
    assert find_sidecar(checkpoint) == path
    # The same files by their index, or as a list.
    assert find_sidecar(headers(written.path / "model.safetensors.index.json")) == path
    assert find_sidecar(headers(list(written.files))) == path


def test_a_file_has_its_own_or_its_folders(tmp_path: Path) -> None:
    file = write_safetensors(tmp_path / "m.safetensors", {"t": random_row("U8", [3])})
    own, common = f"{file}.digests.json", str(tmp_path / "tensorlift.digests.json")
    assert sidecar_to_write(headers(file)) == own
    assert sidecar_to_write(headers(tmp_path)) == common
    write_sidecar(common, SIDECAR)
    assert find_sidecar(headers(file)) == common
    write_sidecar(own, SIDECAR)
    assert find_sidecar(headers(file)) == own
    assert find_sidecar(headers(tmp_path)) == common
    Path(common).unlink()
    assert find_sidecar(headers(tmp_path)) == own


def test_a_list_of_files_needs_a_place(written: Written, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="--out"):
        sidecar_to_write(headers(list(written.files)))
    other = write_safetensors(tmp_path / "other" / "o.safetensors", {"o": random_row("U8", [3])})
    with pytest.raises(DigestError, match="several folders"):
        find_sidecar(headers([*written.files, other]))


def test_writing_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    path.write_text("old")
    write_sidecar(str(path), SIDECAR)
    assert path.read_bytes() == encode(SIDECAR)
    assert read_sidecar(str(path)) == SIDECAR
    assert os.listdir(tmp_path) == ["d.json"]
    reference = tmp_path / "reference"
    reference.touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(reference.stat().st_mode)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "d.json"
    path.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(outputs.os, "fsync", full)
    with pytest.raises(MachineError, match=r"d\.json could not be written: No space left"):
        write_sidecar(str(path), SIDECAR)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["d.json"]


def test_reading_takes_as_much_memory_as_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "d.json")
    write_sidecar(path, SIDECAR)
    tracemalloc.start()
    assert read_sidecar(path) == SIDECAR
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5 << 20
    os.truncate(path, LONGEST_SIDECAR + 1)
    with pytest.raises(
        DigestError, match=r"200,000,001 bytes, and files of digests have 200,000,000 at most"
    ):
        read_sidecar(path)

    def none_left(raw: bytes, path: str) -> Sidecar:
        raise MemoryError

    write_sidecar(path, SIDECAR)
    monkeypatch.setattr(sidecars, "decode", none_left)
    with pytest.raises(OutOfMemoryError, match=r"d\.json"):
        read_sidecar(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"none\.json"):
        read_sidecar(str(tmp_path / "none.json"))
    with leaks.nothing_left(), pytest.raises(DigestError, match="found a folder"):
        read_sidecar(str(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DigestError, match="no regular file"):
        read_sidecar(str(tmp_path / "pipe"))
