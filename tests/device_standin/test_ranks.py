"""Ranks with a device each: gathers come after the copies of a rank's own share, whose ends come late."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch.distributed as dist

from support import ranks, standin
from support.checkpoints import Written
from support.native_build import standin_library
from support.tensors import raw
from tensorlift import loading
from tensorlift.engine.engine import release_pinned
from tensorlift.errors import PeerError

KIB = 1 << 10
SMALL: dict[str, Any] = {
    "chunk_size": 16 * KIB, "slot_size": 64 * KIB, "pinned_bytes": 256 * KIB, "arena_size": 256 * KIB,
    "buffer_size": 768 * KIB, "exchange": "gather", "process_group": "world",
}  # fmt: skip


def late_copies(rank: int, path: str, rows: dict[str, str]) -> Any:
    with standin.device() as memory:
        memory.driver.set_copy_delay_us(2000 * (rank + 1))
        state = loading.load(path, "cuda", **SMALL)
        wrong = [name for name, tensor in state.items() if raw(tensor).hex() != rows[name]]
        stats = state.stats
        state.clear()
        kept = 0
        for name, tensor in loading.open(path, "cuda", **SMALL):
            wrong += [name] * (raw(tensor).hex() != rows[name])
            kept += 1
            del tensor
        # The arenas ahead are the rank's own budget, whatever the number of ranks.
        assert memory.peak <= stats.device_peak_bytes
        return [wrong, kept, stats.copies, sum(stats.readers.values()), memory.allocated]


@pytest.mark.parametrize("world", [2, 3])
def test_late_copies_and_gathers(checkpoint: Written, world: int) -> None:
    standin_library("libcuda.so.1")  # built once, here
    rows = {name: row[2].hex() for name, row in checkpoint.tensors.items()}
    found = ranks.values(late_copies, world, str(checkpoint.path), rows)
    nbytes = sum(len(row[2]) for row in checkpoint.tensors.values())
    for wrong, kept, copies, _, left in found:
        assert wrong == []
        assert kept == len(rows)
        assert copies > 0
        assert left == 0
    assert sum(read for *_, read, _ in found) == nbytes


def ahead(rank: int, path: str) -> int:
    with standin.device() as memory:
        for _, tensor in loading.open(path, "cuda", **SMALL):
            del tensor
        return memory.peak


def test_what_is_read_ahead_does_not_grow_with_the_ranks(checkpoint: Written) -> None:
    standin_library("libcuda.so.1")
    path = str(checkpoint.path)
    largest = max(len(row[2]) for row in checkpoint.tensors.values())
    for world in (2, 4):
        for peak in ranks.values(ahead, world, path):
            # One arena more than reads ahead may have: the gather of the next is issued before it is due.
            assert peak <= SMALL["buffer_size"] + SMALL["arena_size"] + 2 * max(largest, 256 * KIB)


def gathers_that_never_end(rank: int, path: str) -> list[int]:
    """The device of who is left has work for ever, as behind NCCL's kernel; rank 1 is gone."""
    with standin.device() as memory:
        driver, group = memory.driver, dist.group.WORLD

        def take() -> None:
            for count, _ in enumerate(loading.open(path, "cuda", **{**SMALL, "process_group": group})):
                driver.set_busy(1)
                if rank == 1 and count == 5:
                    os.kill(os.getpid(), signal.SIGKILL)

        with pytest.raises(PeerError, match="gone"):
            take()
        aside = driver.registered_bytes()
        driver.set_busy(0)
        return [aside, release_pinned(), driver.registered_bytes()]


def test_who_is_left_does_not_wait_for_a_device_that_never_rests(checkpoint: Written) -> None:
    standin_library("libcuda.so.1")
    left, gone = ranks.run(gathers_that_never_end, 2, str(checkpoint.path))
    assert gone.status == -signal.SIGKILL
    assert left.value is not None, left
    aside, released, kept = left.value
    assert aside == released > 0
    assert kept == 0
