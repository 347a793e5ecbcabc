"""Tensors wanted in advance and taken later, on a device whose copies come late."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support import standin
from support.checkpoints import Written
from support.tensors import raw
from tensorlift import sources
from tensorlift.engine import abi
from tensorlift.integrations.prefetch import Prefetch
from tensorlift.options import LoadOptions
from tensorlift.tensors.transfer import Clock

KIB, MIB = 1 << 10, 1 << 20
SMALL = {
    "chunk_size": 64 * KIB, "slot_size": 256 * KIB, "pinned_bytes": MIB, "arena_size": MIB,
    "backend": "PREAD", "buffer_size": 3 * MIB,
}  # fmt: skip


@pytest.fixture
def device() -> Iterator[standin.StandInMemory]:
    with standin.device(abi.DEVICE_CUDA) as made:
        yield made
        gc.collect()


def prefetch_of(path: Path) -> Prefetch:
    checkpoint = sources.read_headers(sources.find(path))
    return Prefetch(checkpoint, torch.device("cuda:0"), LoadOptions.resolve(**SMALL), Clock())


@pytest.mark.parametrize("late", [0, 2000])
@pytest.mark.parametrize("stays", [True, False])
def test_bytes(device: standin.StandInMemory, checkpoint: Written, late: int, stays: bool) -> None:
    device.driver.set_copy_delay_us(late)
    prefetch = prefetch_of(checkpoint.path)
    names = sorted(checkpoint.tensors, key=lambda name: name[::-1])
    rows = prefetch._checkpoint
    for name in names:
        prefetch.want(rows.index(name), None, stays)
    for name in names:
        # What passes is dropped at once, so that its memory is used again for what comes behind it.
        assert raw(prefetch.take(name)) == checkpoint.tensors[name][2], name
    prefetch.close()


def test_blocks_are_used_again(device: standin.StandInMemory, big: Path) -> None:
    device.driver.set_copy_delay_us(2000)
    prefetch = prefetch_of(big)
    names = prefetch._checkpoint.names
    for row in range(len(names)):
        prefetch.want(row, None, stays=False)
    for name in names:
        prefetch.take(name)
    assert prefetch.stats().device_peak_bytes <= 4 * MIB
    prefetch.close()
