"""NCCL at world size 1, where a gather is asked for by name: a communicator comes, and leaves nothing."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from support.checkpoints import Row
from support.device import MIB, NO_DEVICE, SMALL, assert_right
from support.leaks import nothing_left
from tensorlift import loading

if not torch.cuda.is_available():
    pytest.skip(NO_DEVICE, allow_module_level=True)
if not (dist.is_available() and dist.is_nccl_available()):
    pytest.skip("this torch has no NCCL", allow_module_level=True)


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    """A world of one rank."""
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder, "store")), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        yield
        dist.destroy_process_group()


def free_bytes() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def test_a_communicator_comes_and_goes(file: Path, rows: dict[str, Row]) -> None:
    lowest: list[int] = []

    def once() -> None:
        options = {**SMALL, "process_group": "world", "exchange": "gather"}
        state = loading.load(file, "cuda", **options)
        assert_right(state, rows)
        stats = state.stats
        assert stats.exchange == "gather"
        assert stats.seconds["make_group"] > 0
        assert stats.seconds["destroy_group"] > 0
        del state
        low = []
        for count, (_, tensor) in enumerate(loading.open(file, "cuda", **options)):
            if count == 3:
                low.append(torch.cuda.mem_get_info()[0])
            del tensor
        lowest.append(min(low))

    # NCCL's first use leaves what it never gives back (about 50 MiB, nccl #604).
    once()
    before = free_bytes()
    with nothing_left():
        for _ in range(2):
            once()
            left = before - free_bytes()
            assert abs(left) <= 2 * MIB, f"{left} bytes of device memory are left"
    assert min(lowest[1:]) < before, "no communicator was there while it loaded"
