"""A rank that fails, leaves, is killed or was asked for something else: all others say so, soon."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tensorlift
from support import ranks
from support.checkpoints import random_row, write_safetensors
from support.ranks import ARENA, Outcome
from tensorlift.errors import ReadError
from tensorlift.tensors import memory as memories

KIB = 1 << 10
LIMIT = 10  # seconds, peer_timeout's default: within it everybody knows


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """32 tensors, an arena each."""
    return ranks.even(tmp_path_factory.mktemp("ranks"))


def group_of(kind: str) -> Any:
    return "world" if kind == "world" else dist.new_group()


def others_raise(outcomes: list[Outcome], failed: int, error: str, *words: str) -> None:
    for rank, outcome in enumerate(outcomes):
        if rank != failed:
            assert outcome.error == error, (rank, outcome)
            assert outcome.seconds < 2 * LIMIT, (rank, outcome.seconds)
            for word in words:
                assert word in outcome.message, (rank, outcome.message)


def take(group: Any, path: str, fault: Any) -> int:
    """Tensors that came; ``fault(count)`` is called after each."""
    count = 0
    for _ in tensorlift.open(path, process_group=group, **ARENA):
        count += 1
        fault(count)
    return count


def killed(rank: int, path: str, kind: str, victim: int) -> None:
    group = group_of(kind)

    def fault(count: int) -> None:
        if rank == victim and count == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    take(group, path, fault)


@pytest.mark.parametrize("kind", ["world", "own"])
@pytest.mark.parametrize(("victim", "store"), [(2, "apart"), (0, "file"), (0, "rank 0")])
def test_a_killed_rank(path: str, kind: str, victim: int, store: str) -> None:
    outcomes = ranks.run(killed, 3, path, kind, victim, store=store)
    assert outcomes[victim].status == -signal.SIGKILL
    others_raise(outcomes, victim, "PeerError", f"rank {victim}", "gone")


def raising(rank: int, path: str, kind: str, how: str) -> Any:
    group = group_of(kind)

    def fault(count: int) -> None:
        if rank == 1 and count == 5 and how == "raises":
            raise ValueError("the consumer's own")

    def work() -> None:
        if how == "stops":
            weights = tensorlift.open(path, process_group=group, **ARENA)
            for count, _ in enumerate(weights):
                if rank == 1 and count == 5:
                    break
            del weights
        elif how == "with":
            with tensorlift.open(path, process_group=group, **ARENA) as weights:
                for count, _ in enumerate(weights):
                    if rank == 1 and count == 5:
                        raise ValueError("the consumer's own")
        elif how == "never" and rank == 1:
            tensorlift.open(path, process_group=group, **ARENA)
        else:
            take(group, path, fault)

    with (
        pytest.raises((tensorlift.errors.PeerError, ValueError))
        if rank != 1 or how in ("raises", "with")
        else (contextlib.nullcontext()) as raised
    ):
        work()
    return [str(raised.value) if raised else "", ranks.usable(group)]


@pytest.mark.parametrize("kind", ["world", "own"])
@pytest.mark.parametrize("how", ["raises", "stops", "with", "never"])
def test_a_consumer_that_raises_or_stops(path: str, kind: str, how: str) -> None:
    found = ranks.values(raising, 3, path, kind, how)
    said = {"with": "ValueError: the consumer's own"}.get(how, "stopped before it had taken all tensors")
    for rank in (0, 2):
        message, group_works = found[rank]
        assert "rank 1" in message
        assert said in message
        assert group_works
    assert found[1][1]


def cannot(rank: int, path: str, kind: str, what: str, call: str) -> Any:
    group = group_of(kind)
    options: dict[str, Any] = dict(ARENA)
    if rank == 1:
        if what == "open":
            path += ".not"
        elif what == "option":
            options["threads"] = 0
        elif what == "name":
            options["names"] = "nothing"
        elif what == "read":
            from tensorlift.engine.engine import Engine

            plain = Engine.wait

            def wait(self: Engine, ticket: int, tick: Any = None) -> None:
                plain(self, ticket, tick)
                if ticket > 4:
                    raise ReadError("the disk is on fire")

            Engine.wait = wait  # type: ignore[method-assign]
        elif what == "allocate":
            plain_allocate = memories.HostMemory.allocate
            calls: list[int] = []

            def allocate(self: Any, sizes: Any) -> Any:
                calls.extend(sizes)
                if len(calls) > 4:
                    raise tensorlift.errors.OutOfMemoryError("no memory at all")
                return plain_allocate(self, sizes)

            memories.HostMemory.allocate = allocate  # type: ignore[method-assign]
    begin = time.monotonic()
    try:
        if call == "open":
            for _ in tensorlift.open(path, process_group=group, **options):
                pass
        elif call == "load":
            tensorlift.load(path, process_group=group, **options)
        else:
            model = {f"t{k:02}": torch.empty(64 * KIB, dtype=torch.uint8) for k in range(32)}
            tensorlift.load_into(model, path, process_group=group, **options)
    except tensorlift.errors.TensorliftError as error:
        seconds = time.monotonic() - begin
        return [type(error).__name__, str(error), seconds, ranks.usable(group)]
    return None


@pytest.mark.parametrize("call", ["load", "open", "load_into"])
@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("open", "CheckpointNotFoundError"),
        ("option", "OptionError"),
        ("name", "TensorNotFoundError"),
        ("read", "ReadError"),
        ("allocate", "OutOfMemoryError"),
    ],
)
def test_a_rank_that_cannot(path: str, call: str, what: str, error: str) -> None:
    kind = "own" if call == "open" else "world"
    found = ranks.values(cannot, 3, path, kind, what, call)
    assert found[1][0] == error
    for rank in (0, 2):
        name, message, seconds, group_works = found[rank]
        assert name == "PeerError", found[rank]
        assert message.startswith(f"rank 1 failed: {error}: "), message
        assert seconds < LIMIT
        assert group_works
    assert found[1][3]


def absent(rank: int, path: str) -> Any:
    if rank == 1:
        time.sleep(4)
        return None
    with pytest.raises(tensorlift.errors.PeerError) as raised:
        tensorlift.load(path, process_group="world", join_timeout=1, peer_timeout=2)
    return [str(raised.value), raised.value.rank]


def test_a_rank_that_never_comes(path: str) -> None:
    found = ranks.values(absent, 3, path)
    for rank in (0, 2):
        message, who = found[rank]
        assert message.startswith("rank 1 did not come to load within join_timeout, 1 seconds")
        assert who == 1


def differing(rank: int, paths: list[str], options: list[dict[str, Any]]) -> Any:
    begin = time.monotonic()
    with pytest.raises(tensorlift.errors.DisagreementError) as raised:
        tensorlift.load(paths[rank], process_group="world", **options[rank])
    message, seconds = str(raised.value), time.monotonic() - begin
    # After a disagreement the next load of the same ranks is as good as any.
    state = tensorlift.load(paths[0], process_group="world", exchange="gather")
    return [message, seconds, len(state)]


@pytest.mark.parametrize("what", ["name", "size", "header", "count", "exchange"])
def test_ranks_with_different_files(path: str, tmp_path: Path, what: str) -> None:
    there = tmp_path / "there"
    there.mkdir()
    rows = {f"t{k:02}": random_row("U8", [64 * KIB], k) for k in range(32)}
    options: list[dict[str, Any]] = [{}, {}, {}]
    other, says = there / "model.safetensors", ""
    if what == "name":
        other, says = (
            there / "other.safetensors",
            "rank 0 has model.safetensors, rank 1 has no file of that name",
        )
        shutil.copy(path, other)
    elif what == "size":
        write_safetensors(other, {**rows, "t00": random_row("U8", [32 * KIB], 0)})
        says = "model.safetensors has "
    elif what == "header":
        rows["u00"] = rows.pop("t00")
        write_safetensors(other, dict(sorted(rows.items(), key=lambda row: row[0][1:])))
        says = "its header says different things"
    elif what == "count":
        shutil.copy(path, other)
        shutil.copy(path, there / "more.safetensors")
        os.unlink(other)
        write_safetensors(other, {"a": random_row("U8", [5], 1)})
        other, says = there, "different checkpoints"
    else:
        shutil.copy(path, other)
        options[1], says = {"exchange": "none"}, "exchange is 'auto' on one and 'none' on the other"
    found = ranks.values(differing, 3, [path, str(other), path], options)
    assert {message for message, _, _ in found} == {found[0][0]}
    assert says in found[0][0]
    assert "rank 0" in found[0][0]
    assert "rank 1" in found[0][0]
    assert all(seconds < LIMIT and count == 32 for _, seconds, count in found)
