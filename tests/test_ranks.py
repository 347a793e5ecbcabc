"""Several ranks load one checkpoint together, over gloo."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tensorlift
from support import ranks
from support.checkpoints import Written, random_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Every dtype, odd shapes, several files."""
    folder = tmp_path_factory.mktemp("ranks") / "checkpoint"
    return random_checkpoint(folder, shards=3, tensors=25, seed=1, elements=60_000)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def digest(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    import hashlib

    return {
        name: [str(t.dtype), list(t.shape), hashlib.sha256(raw(t)).hexdigest()] for name, t in state.items()
    }


def load_twice(rank: int, path: str, how: str) -> Any:
    found = []
    for _ in range(2):
        options: dict[str, Any] = {"process_group": "world", "exchange": how, "arena_size": 1 << 20}
        state = tensorlift.load(path, **options)
        stats = state.stats
        assert stats.ranks == dist.get_world_size()
        found.append(digest(state))
        with tensorlift.open(path, buffer_size=2 << 20, **options) as weights:
            found.append(digest(dict(weights)))
    assert all(one == found[0] for one in found)
    return found[0], stats.to_dict()


@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("how", ["gather", "none"])
def test_all_bytes_are_right_on_every_rank(checkpoint: Written, world: int, how: str) -> None:
    found = ranks.values(load_twice, world, str(checkpoint.path), how)
    want = digest(tensorlift.load(checkpoint.path))
    for state, stats in found:
        assert state == want
        assert stats["exchange"] == how
    total = sum(sum(stats["readers"].values()) for _, stats in found)
    print([stats["readers"] for _, stats in found], found[0][1])
