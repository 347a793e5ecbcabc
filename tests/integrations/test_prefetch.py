"""Tensors that are wanted in advance and taken later: order, bound, ends."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from support import leaks
from support.checkpoints import Row, Written, random_checkpoint, random_row, write_safetensors
from support.tensors import assert_tensor, raw
from tensorlift import loading, sources
from tensorlift.errors import ReadError, RequestError, TruncatedError
from tensorlift.format.checkpoint import Checkpoint
from tensorlift.integrations.prefetch import Prefetch
from tensorlift.options import LoadOptions
from tensorlift.tensors.transfer import Clock

MIB = 1 << 20
CPU = torch.device("cpu")
BOUND = 3


@pytest.fixture(scope="module", autouse=True)
def started(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What the library and torch start once is there before anything is counted."""
    rows = {"t": random_row("U8", [MIB])}
    loading.load(write_safetensors(tmp_path_factory.mktemp("once") / "m.safetensors", rows))


@pytest.fixture
def rows() -> dict[str, Row]:
    """16 tensors of 1 MiB whose order in the file is not that of their numbers: t0, t1, t10, t11 ..."""
    return {name: random_row("U8", [MIB], k) for k, name in enumerate(sorted(f"t{k}" for k in range(16)))}


@pytest.fixture
def checkpoint(tmp_path: Path, rows: dict[str, Row]) -> Checkpoint:
    return sources.read_headers(sources.find(write_safetensors(tmp_path / "m.safetensors", rows)))


def made(checkpoint: Checkpoint, **options: object) -> Prefetch:
    settings = LoadOptions.resolve(**{"arena_size": MIB, "buffer_size": BOUND * MIB} | options)
    return Prefetch(checkpoint, CPU, settings, Clock())


def numbered(checkpoint: Checkpoint) -> list[str]:
    return sorted(checkpoint.names, key=lambda name: int(name[1:]))


@pytest.mark.parametrize("stays", [True, False])
def test_taken_in_the_order_of_wishes(checkpoint: Checkpoint, rows: dict[str, Row], stays: bool) -> None:
    with leaks.nothing_left():
        prefetch = made(checkpoint)
        for name in numbered(checkpoint):
            prefetch.want(checkpoint.index(name), None, stays)
        for name in numbered(checkpoint):
            tensor = prefetch.take(name)
            assert_tensor(tensor, rows[name], name)
            del tensor
        stats = prefetch.stats()
        assert (stats.bytes, stats.tensors) == (16 * MIB, 16)
        prefetch.close()


def test_the_bound_holds_for_what_passes(checkpoint: Checkpoint) -> None:
    prefetch = made(checkpoint)
    for name in numbered(checkpoint):
        prefetch.want(checkpoint.index(name), None, stays=False)
    for name in numbered(checkpoint):
        prefetch.take(name)
        assert prefetch._ahead <= BOUND * MIB
    assert prefetch._ahead == 0
    assert prefetch._transfer.peak_bytes <= (BOUND + 1) * MIB
    prefetch.close()


def test_what_stays_is_read_at_once(checkpoint: Checkpoint) -> None:
    prefetch = made(checkpoint)
    for row in range(len(checkpoint)):
        prefetch.want(row, None, stays=True)
    prefetch.take("t0")
    assert prefetch._transfer.submitted == prefetch._transfer.batch_count == 16
    prefetch.close()


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_taking_comes_to_its_end(
    checkpoint: Checkpoint, rows: dict[str, Row], seed: int
) -> None:
    """The window is full of tensors that nobody takes yet: what is asked for comes nevertheless."""
    chance = random.Random(seed)
    prefetch = made(checkpoint, buffer_size=MIB)
    names = list(checkpoint.names)
    chance.shuffle(names)
    for name in names:
        prefetch.want(checkpoint.index(name), None, stays=chance.random() < 0.3)
    chance.shuffle(names)
    for name in names:
        assert raw(prefetch.take(name)) == rows[name][2]
    prefetch.close()


def test_random_checkpoints_in_many_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several files, in an order that goes back and forth between them, group by group."""
    monkeypatch.setattr("tensorlift.integrations.prefetch._FIRST_GROUP", 1)
    written: Written = random_checkpoint(tmp_path / "c", shards=3, tensors=60, seed=4, elements=5000)
    checkpoint = sources.read_headers(sources.find(written.path))
    names = list(checkpoint.names)
    random.Random(1).shuffle(names)
    prefetch = made(checkpoint)
    for place, name in enumerate(names):
        prefetch.want(checkpoint.index(name), None, stays=place % 3 == 0)
    for name in names:
        assert_tensor(prefetch.take(name), written.tensors[name], name)
    assert prefetch.files() == {0, 1, 2}
    prefetch.close()


def test_neighbours_of_two_files_that_would_fit_together(tmp_path: Path) -> None:
    """First and last are of one file, and the one between begins where the first ends, but elsewhere."""
    rows = [{f"{file}{k}": random_row("U8", [MIB], k) for k in range(3)} for file in "ab"]
    paths = [write_safetensors(tmp_path / f"{k}.safetensors", of) for k, of in enumerate(rows)]
    checkpoint = sources.read_headers(sources.find(paths))
    prefetch = made(checkpoint, arena_size=8 * MIB)
    for name in ("a0", "b1", "a2"):
        prefetch.want(checkpoint.index(name), None, stays=True)
    for name in ("a0", "b1", "a2"):
        assert raw(prefetch.take(name)) == (rows[0] | rows[1])[name][2], name
    prefetch.close()


def test_parts(tmp_path: Path) -> None:
    row = random_row("F32", [64, 96], 3)
    path = write_safetensors(tmp_path / "m.safetensors", {"t": row, "u": row})
    checkpoint = sources.read_headers(sources.find(path))
    whole = torch.from_numpy(np.frombuffer(row[2], np.float32).reshape(64, 96).copy())
    prefetch = made(checkpoint)
    prefetch.want(0, (0, 16, 32), stays=True)
    prefetch.want(1, (1, 32, 64), stays=False)
    assert raw(prefetch.take("t")) == raw(whole[16:32])
    assert raw(prefetch.take("u")) == raw(whole[:, 32:64].contiguous())
    assert prefetch.stats().bytes == whole.nbytes // 4 + whole.nbytes // 3
    prefetch.close()


def test_closed_early(checkpoint: Checkpoint) -> None:
    with leaks.nothing_left():
        prefetch = made(checkpoint)
        for row in range(len(checkpoint)):
            prefetch.want(row, None, stays=row % 2 == 0)
        prefetch.take("t3")
        prefetch.close()
        prefetch.close()
        with pytest.raises(RequestError):
            prefetch.take("t9")


def test_a_file_that_became_shorter(tmp_path: Path, rows: dict[str, Row]) -> None:
    path = write_safetensors(tmp_path / "m.safetensors", rows)
    checkpoint = sources.read_headers(sources.find(path))
    with leaks.nothing_left():
        prefetch = made(checkpoint)
        prefetch.want(15, None, stays=True)
        with open(path, "r+b") as file:
            file.truncate(path.stat().st_size - 8)
        with pytest.raises((TruncatedError, ReadError)):
            prefetch.take(checkpoint.names[15])
        prefetch.close()
