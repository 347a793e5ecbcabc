"""Versions of checkpoints: equal wherever the files lie, others where anything differs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from support.checkpoints import random_row, write_safetensors
from tensorlift.sources.identifying import checkpoint_of, is_other


def written(folder: Path, seed: int = 0, *, shards: int = 2) -> str:
    """The version of a checkpoint, whose headers are the same whatever the seed."""
    names = [f"model-{k:05}-of-{shards:05}.safetensors" for k in range(1, shards + 1)]
    for number, name in enumerate(names):
        write_safetensors(folder / name, {f"t{number}": random_row("F32", [1 << 10], seed + number)})
    index = {"weight_map": {f"t{number}": name for number, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return checkpoint_of(str(folder))


def test_two_trainings_of_one_model_are_two_versions_and_copies_are_one(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    one, other = written(tmp_path / "one"), written(tmp_path / "other", 7)
    assert one.startswith("checkpoint ")
    assert one != other
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    assert checkpoint_of(str(tmp_path / "copy"), "main") == one
    assert is_other(one, lambda: other)
    assert not is_other(one, lambda: one)
    assert not is_other(one, lambda: "")
    assert not is_other("updated 0123, 1", lambda: one)


@pytest.mark.parametrize("place", [0, 3000, 4091])
def test_a_value_that_differs_is_seen_wherever_it_is(tmp_path: Path, place: int) -> None:
    before = written(tmp_path)
    path = tmp_path / "model-00002-of-00002.safetensors"
    raw = bytearray(path.read_bytes())
    raw[len(raw) - 4096 + place] ^= 1
    path.write_bytes(raw)
    assert checkpoint_of(str(tmp_path)) not in ("", before)


def test_files_that_are_not_here_are_of_no_version(tmp_path: Path) -> None:
    assert checkpoint_of(str(tmp_path)) == ""
    assert checkpoint_of(str(tmp_path / "nowhere"), "main") == ""
    written(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert checkpoint_of(str(tmp_path)) == ""
