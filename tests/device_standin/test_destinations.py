"""load_into existing tensors of the stand-in device."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support import standin
from support.checkpoints import random_row, write_safetensors
from support.tensors import raw
from tensorlift import loading
from tensorlift.engine import abi

KIB = 1 << 10


@pytest.fixture(params=[abi.DEVICE_CUDA, abi.DEVICE_HIP])
def device(request: pytest.FixtureRequest) -> Iterator[standin.StandInMemory]:
    with standin.device(request.param, cpu_too=True) as made:
        yield made
        gc.collect()


def test_neighbours_in_several_allocations(device: standin.StandInMemory, tmp_path: Path) -> None:
    # A driver refuses a copy from one allocation into the next, however close they are.
    rows = {f"t{k:02}": random_row("U8", [64 * KIB], k) for k in range(32)}
    path = write_safetensors(tmp_path / "m.safetensors", rows)
    room = torch.zeros(33 * 64 * KIB, dtype=torch.uint8)
    first = -room.data_ptr() % (64 * KIB)
    state = {name: room[first + k * 64 * KIB :][: 64 * KIB] for k, name in enumerate(rows)}
    device.driver.set_allocation_bytes(128 * KIB)
    options = {"slot_size": 512 * KIB, "chunk_size": 64 * KIB, "pinned_bytes": 1 << 20}
    stats = loading.load_into(state, path, **options).stats
    assert stats.copies >= 16  # one an allocation, and one where a slot ends inside of one
    assert all(raw(state[name]) == content for name, (_, _, content) in rows.items())
