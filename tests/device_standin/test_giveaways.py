"""How often a load gives the GIL away: with each time, a thread that never rests may keep it for 5 ms.

Of files, of arenas and of the load there may be some; of tensors none. numpy gives it away for arrays of more
than 500 elements, so all checkpoints here have more tensors than that in each file.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support import giveaways, standin
from support.checkpoints import random_bytes, write_sharded
from tensorlift import loading
from tensorlift.tensors import scripts

KIB, MIB = 1 << 10, 1 << 20
FILES = 3
# What a load has beside its tensors: the folder and its index, a look at each file, an operation of numpy
# here and there, the engine's end. What depends on time (a wait of several slices) is a few more.
MOST, MORE = 300, 60


def few_and_many(folder: Path, kind: str) -> list[str]:
    """Two checkpoints of as many files and as many bytes, one of three times as many tensors as the other."""
    for name, count in (("few", 700), ("many", 2100)):
        nbytes = 8400 * KIB // count if kind == "alike" else 64
        rows = {f"t{k}": ("U8", [nbytes], random_bytes("U8", nbytes, k)) for k in range(count)}
        if kind == "mixed":
            # Small ones are laid out apart, in arenas of their own.
            rows["large"] = ("U8", [MIB], random_bytes("U8", MIB))
        write_sharded(
            folder / name,
            {f"{s}.safetensors": {f"{s}.{t}": row for t, row in rows.items()} for s in range(FILES)},
        )
    return [str(folder / "few"), str(folder / "many")]


def work_of(what: str, path: str, device: str, options: dict[str, Any]) -> Callable[[], object]:
    if what == "load":
        return lambda: loading.load(path, device, **options)
    if what == "load_into":
        state = dict(loading.load(path, device))
        return lambda: loading.load_into(state, path, **options)

    def stream() -> object:
        # Kept: torch gives the GIL away for each tensor that goes, and that is the consumer's doing.
        with loading.open(path, device, **options) as weights:
            return list(weights)

    return stream


def counted(path: str, what: str, on: str, **options: Any) -> int:
    """Of one call, when everything that a first one makes is there."""
    with standin.device(cpu_too=True) if on == "standin" else contextlib.nullcontext():
        work = work_of(what, path, "cuda:0" if on == "standin" else "cpu", options)
        kept = [work()]
        counter = giveaways.Counter()
        before = counter.value
        kept.append(work())
        return counter.value - before


def all_counted(paths: list[str]) -> list[list[int]]:
    """In a child."""
    return [[counted(path, what, on) for path in paths] for what, on in CASES]


CASES = [(what, on) for what in ("load", "load_into", "open") for on in ("standin", "cpu")]


@pytest.mark.parametrize("kind", ["alike", "mixed"])
def test_nothing_is_given_away_for_each_tensor(tmp_path: Path, kind: str) -> None:
    answers = giveaways.call(all_counted, few_and_many(tmp_path, kind))
    for (what, on), (few, many) in zip(CASES, answers, strict=True):
        print(f"give-aways of {what} on {on}, {kind}: {few} and {many}")
        assert 0 < few <= MOST, (what, on)
        assert many <= few + MORE, (what, on)


def with_both_arenas(path: str) -> list[int]:
    """In a child."""
    return [counted(path, "open", "standin", arena_size=size) for size in (8 * MIB, MIB)]


def test_an_arena_costs_a_few(tmp_path: Path) -> None:
    large, small = giveaways.call(with_both_arenas, few_and_many(tmp_path, "alike")[0])
    more = FILES * 8400 * KIB // MIB - FILES * 8400 * KIB // (8 * MIB)
    print(f"give-aways of open: {large} with 8 MiB an arena and {small} with {more} arenas more")
    # Two of a wait (the engine's and the stand-in's own), and that of finding where the arena ends.
    assert small - large <= 4 * more


def basics() -> dict[str, int]:
    """In a child."""
    counter = giveaways.Counter()
    tensor = torch.zeros(3)
    scripts.empties([64, 64], torch.device("cpu"))
    kept: list[object] = []
    return {
        "nothing": counter.of(lambda: [number + 1 for number in range(100_000)]),
        "sleep": counter.of(lambda: [time.sleep(0) for _ in range(10)]),
        "is_neg": counter.of(lambda: [tensor.is_neg() for _ in range(10)]),
        "empties": counter.of(lambda: kept.append(scripts.empties([64] * 10, torch.device("cpu")))),
    }


def test_what_is_counted() -> None:
    assert giveaways.call(basics) == {"nothing": 0, "sleep": 10, "is_neg": 10, "empties": 1}
