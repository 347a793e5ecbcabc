"""A rank of an instance with a target and a draft, and a rank that forks out of one, each as a process.

python -m support.instance seed RANK SIZE [FRONT]     prints its URLs as JSON, ends with its standard input
python -m support.instance fork RANK SIZE FRONT       prints what came as JSON
"""

from __future__ import annotations

import json
import sys

import torch

import tensorlift

ROLES = ("target", "draft")
TOKEN = "töken"


def key(role: str, rank: int, size: int) -> tensorlift.ModelKey:
    return tensorlift.ModelKey(model="org/model", role=role, tp=(rank, size))


def weights(role: str, rank: int) -> dict[str, torch.Tensor]:
    """Another number of bytes for each role; other bytes for each rank."""
    generator = torch.Generator().manual_seed(10 * rank + ROLES.index(role))
    rows = 300 if role == "target" else 100
    return {f"layer{k}": torch.rand(rows, 50, generator=generator) for k in range(4)}


def seed(rank: int, size: int, front: str | None) -> None:
    target, draft = (weights(role, rank) for role in ROLES)
    with (
        tensorlift.seed(target, key=key("target", rank, size), token=TOKEN, join=front) as first,
        tensorlift.seed(draft, key=key("draft", rank, size), token=TOKEN, join=front or first.url) as second,
    ):
        print(json.dumps([first.url, second.url]), flush=True)
        sys.stdin.read()
        print(json.dumps([one.stats()["sent_bytes"] for one in (first, second)]), flush=True)


def fork(rank: int, size: int, front: str) -> None:
    told = {}
    for role in ROLES:
        wanted = weights(role, rank)
        into = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
        try:
            came = tensorlift.fork(front, into=into, token=TOKEN, key=key(role, rank, size), patience=60)
        except tensorlift.ForkError as error:
            told[role] = {"error": str(error)}
            continue
        right = all(torch.equal(into[name], tensor) for name, tensor in wanted.items())
        told[role] = {"right": right, "by_source": dict(came.by_source)}
    print(json.dumps(told))


if __name__ == "__main__":
    verb, (rank, size), front = sys.argv[1], map(int, sys.argv[2:4]), (sys.argv[4:] or [None])[0]
    {"seed": seed, "fork": fork}[verb](rank, size, front)
