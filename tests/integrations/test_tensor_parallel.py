"""from_pretrained with tensor parallelism: each rank reads the bytes of its shard, and no more."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="transformers wants accelerate for tensor parallelism")

from support import models, ranks
from support.tensors import raw


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def loaded(rank: int, folder: str, kind: str, dtype: str) -> dict[str, Any]:
    """In a rank: what differs from the plain way, and the bytes."""
    warnings.simplefilter("ignore")
    from transformers.distributed import DistributedConfig

    from tensorlift.integrations.transformers import from_pretrained

    auto = models.auto(kind)

    def more() -> dict[str, Any]:
        return {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=2), "dtype": dtype}

    plain = auto.from_pretrained(folder, **more())
    mine = from_pretrained(auto, folder, **more())
    ours, theirs = mine.state_dict(), plain.state_dict()
    pairs = {name: (local(ours[name]), local(theirs[name])) for name in theirs}
    words = torch.arange(20).reshape(1, 20)
    with torch.no_grad():
        same = torch.equal(local(mine(words).logits), local(plain(words).logits))
    return {
        "names": ours.keys() == theirs.keys(),
        "differ": [name for name, (one, other) in pairs.items() if raw(one) != raw(other)],
        "logits": same,
        "shard": sum(one.nbytes for one, _ in pairs.values()),
        "read": mine.tensorlift_stats.bytes,
    }


@pytest.mark.parametrize(("kind", "dtype"), [("llama", "bfloat16"), ("experts", "float32")])
def test_each_rank_reads_its_shard(kind: str, dtype: str, tmp_path: Path) -> None:
    folder = models.saved(kind, tmp_path, shards=True, dtype=torch.bfloat16)
    for found in ranks.values(loaded, 2, str(folder), kind, dtype, seconds=100):
        assert found["names"]
        assert found["logits"]
        assert found["differ"] == []
        assert found["read"] == found["shard"] // (1 if dtype == "bfloat16" else 2)
        assert found["read"] < models.data_bytes(folder)
