"""Tensors that somebody has, as files: all of them, or nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from tensorlift.errors import ForkError, MachineError
from tensorlift.sources import writing
from tensorlift.sources.writing import Spec, write_tensors

TENSORS = {"b": torch.arange(10.0), "a": torch.arange(5, dtype=torch.uint8), "c": torch.ones(3, 4)}
SPECS = [Spec("b", "F32", (10,)), Spec("a", "U8", (5,)), Spec("c", "F32", (3, 4))]


def read(names: Sequence[str]) -> Iterator[memoryview]:
    return (TENSORS[name].reshape(-1).view(torch.uint8).numpy().data for name in names)


@pytest.mark.parametrize(("shard_bytes", "files"), [(1000, 1), (50, 2)])
def test_tensors_are_there_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int, files: int
) -> None:
    monkeypatch.setattr(writing, "SHARD_BYTES", shard_bytes)
    case = write_tensors(tmp_path / "new", SPECS, read)
    assert (case.tensors, case.nbytes, len(case.files)) == (3, 93, files)
    found = {name: tensor for file in case.files for name, tensor in load_file(file).items()}
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    assert (tmp_path / "new" / "model.safetensors.index.json").exists() == (files > 1)


def test_a_read_only_file_system_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of them say that nothing is free on them."""
    facts = SimpleNamespace(f_flag=os.ST_RDONLY, f_bavail=0, f_blocks=0, f_bfree=0, f_frsize=4096)
    monkeypatch.setattr(writing.os, "statvfs", lambda _: facts)
    with pytest.raises(MachineError, match="new: cannot write: Read-only file system; name a folder else"):
        write_tensors(tmp_path / "new", SPECS, read)


def test_nothing_is_left_where_they_do_not_come(tmp_path: Path) -> None:
    def stopping(names: Sequence[str]) -> Iterator[memoryview]:
        yield next(read(names))
        raise ForkError("gone")

    with pytest.raises(ForkError):
        write_tensors(tmp_path / "new", SPECS, stopping)
    assert list(tmp_path.iterdir()) == []
