"""Loads, seeds and forks whose system calls fail, once at each of their turns and at random: the library's
own and those of Python's sockets, on both sides. An error of the package or right bytes, and nothing left.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support import calls, child, leaks
from support.checkpoints import random_row, write_safetensors
from tensorlift import instances, loading
from tensorlift.errors import TensorliftError
from tensorlift.forking import fork, manifest, shared_memory

# Seconds after which a fork leaves a seed: most faults of a connection show at once.
PATIENCE = 1.0
# Random plans of each kind, or how many TENSORLIFT_TEST_FAULTS asks for; then each turn fails in all ways.
LONG = int(os.environ.get("TENSORLIFT_TEST_FAULTS", "0"))
PLANS = max(LONG, 25)
SECONDS = 7200 if LONG else 300

WAYS = {
    "a load": ["library"],
    "tcp": ["library", "sockets"],
    "shm": ["library", "sockets"],
}


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize(("what", "whose"), [(what, whose) for what in WAYS for whose in WAYS[what]])
def test_calls_that_fail(tmp_path: Path, what: str, whose: str) -> None:
    rows = {f"t{k}": random_row("U8", [100_000 + 1111 * k], k) for k in range(4)}
    path = write_safetensors(tmp_path / "model.safetensors", rows)
    runs = child.call(disturbed, what, whose, calls.library(), str(path), PLANS, LONG > 0, seconds=SECONDS)
    print(what, whose, runs)
    assert runs["each turn"] > 10
    assert runs["at random"] == PLANS
    assert 0 < runs["succeeded"] < runs["each turn"] + runs["at random"]


def disturbed(what: str, whose: str, library: str, path: str, plans: int, all_codes: bool) -> dict[str, int]:
    """In the child: runs again and again, each time with something that fails."""
    native = calls.Native(library)
    plan = native if whose == "library" else calls.Sockets()
    right = {name: tensor.clone() for name, tensor in loading.load(path).items()}
    work = _load(path, right) if what == "a load" else _fork(what, right)
    work()
    work()
    before = leaks.held(), native.mapped()

    def once(name: str, arrange: Callable[..., None], *arguments: Any) -> bool:
        plan.reset()
        arrange(*arguments)
        said = None
        try:
            work()
        except TensorliftError as error:
            said = str(error)
        except BaseException as error:
            raise AssertionError(f"{name} (last: {plan.last()}): {type(error).__name__}: {error}") from error
        assert said != "", name
        assert said is None or plan.failed(), f"{name}: an error without a cause: {said}"
        seen.update({call: plan.count(call) for call in plan.codes()})
        plan.reset()
        _nothing_left(before, native, name)
        return said is None

    seen: dict[str, int] = {}
    runs = {"each turn": 0, "at random": 0, "succeeded": 0}
    for call, codes in plan.codes().items():
        turn = 1
        while True:
            for code in codes if all_codes else [codes[turn % len(codes)]]:
                name = f"{call}, call {turn}, code {code}"
                runs["succeeded"] += once(name, plan.fail, call, turn, code)
                runs["each turn"] += 1
            if seen[call] < turn:
                break
            turn += 1 if all_codes else 1 + turn // 4
    for seed in range(plans):
        share = 0.002 * 2 ** (seed % 7)
        runs["succeeded"] += once(f"seed {seed}", plan.fail_at_random, seed, share)
        runs["at random"] += 1
    return runs


def _nothing_left(before: Any, native: calls.Native, name: str) -> None:
    (threads, files, arenas), mapped = before

    def left() -> list[str]:
        now = leaks.held()
        return [
            *([f"{now[0] - threads} threads"] if now[0] > threads else []),
            *sorted(now[1] - files),
            *([f"{now[2] - arenas} arenas"] if now[2] != arenas else []),
            *([f"{native.mapped() - mapped} mapped bytes"] if native.mapped() != mapped else []),
        ]

    assert leaks.comes_to_nothing(left), f"{name} leaves {left()}"


def _load(path: str, right: dict[str, torch.Tensor]) -> Callable[[], None]:
    def work() -> None:
        _compare(loading.load(path), right)

    return work


def _fork(transport: str, right: dict[str, torch.Tensor]) -> Callable[[], None]:
    """A seed and a fork of it, both in this process."""

    def work() -> None:
        offered = right
        if transport == "shm":
            layouts = [
                manifest.Layout(name, "uint8", tuple(tensor.shape), tensor.stride())
                for name, tensor in right.items()
            ]
            offered = shared_memory.shared_tensors(layouts)
            for name, tensor in right.items():
                offered[name].copy_(tensor)
            offered["t0"] = right["t0"]  # one that is read out of the process
        found = {name: torch.zeros_like(tensor) for name, tensor in right.items()}
        try:
            seed = instances.seed(offered, key="org/model")
        except OSError as error:  # as it says: nobody can listen there
            raise TensorliftError(str(error)) from error
        with seed:
            fork.fork_into(found, seed.url, transports=[transport], patience=PATIENCE, chunk_bytes="128KiB")
        _compare(found, right)

    return work


def _compare(found: Any, right: dict[str, torch.Tensor]) -> None:
    for name, tensor in right.items():
        if not torch.equal(found[name], tensor):
            raise ArithmeticError(f"{name} has wrong bytes")
