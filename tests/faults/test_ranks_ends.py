"""How a rank's part ends: in whichever thread, at whichever step, the others know and their group works."""

from __future__ import annotations

import contextlib
import datetime
import gc
import itertools
import os
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tensorlift
from support import ranks
from support.ranks import ARENA, load
from tensorlift.distributed.board import Board
from tensorlift.errors import DisagreementError, OptionError, PeerError, RequestError, TensorliftError


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """32 tensors, an arena each."""
    return ranks.even(tmp_path_factory.mktemp("ranks"))


def closed(rank: int, path: str) -> int:
    """Another thread of rank 1 closes what its consumer iterates over, sooner and later."""
    group = dist.new_group()
    raised = 0
    for attempt in range(10):
        weights = tensorlift.open(path, process_group=group, **ARENA)
        closing = threading.Timer(0.005 * attempt, weights.close)
        if rank == 1:
            closing.start()
        try:
            for _ in weights:
                time.sleep(0.01)
        except TensorliftError:
            raised += 1
        assert ranks.usable(group)
    return raised


def test_close_from_another_thread_leaves_the_group_as_it_was(path: str) -> None:
    assert ranks.values(closed, 3, path) == [10] * 3


def without_the_answer(rank: int, path: str) -> Any:
    """Rank 1 is interrupted when the others know already what to do, and have begun."""
    group = dist.new_group()
    plain_wait = Board._wait

    def wait(self: Board, key: str, *arguments: Any, **named: Any) -> bytes:
        if key == "work":
            time.sleep(0.5)
            raise KeyboardInterrupt
        return plain_wait(self, key, *arguments, **named)

    if rank == 1:
        Board._wait = wait  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt if rank == 1 else PeerError):
        load(path, group)
    Board._wait = plain_wait  # type: ignore[method-assign]
    return [ranks.usable(group), load(path, group)]


def before_it_came(rank: int, path: str) -> Any:
    """Rank 1 is interrupted in the first thing that it does: Thread.start() waits for the thread."""
    plain = threading.Thread.start

    def start(self: threading.Thread) -> None:
        plain(self)
        if self.name == "tensorlift-ranks":
            raise KeyboardInterrupt

    if rank == 1:
        threading.Thread.start = start  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt if rank == 1 else PeerError) as raised:
        load(path)
    threading.Thread.start = plain  # type: ignore[method-assign]
    return [str(raised.value), load(path)]


def interrupted(rank: int, path: str) -> Any:
    return [without_the_answer(rank, path), before_it_came(rank, path)]


def test_interrupts_while_ranks_agree(path: str) -> None:
    for rank, (group, came) in enumerate(ranks.values(interrupted, 3, path)):
        assert group == [True, 32]
        assert came == ["" if rank == 1 else "rank 1 failed: KeyboardInterrupt", 32]


def to_the_last(rank: int, path: str, how: str) -> str:
    """Rank 1 takes as many tensors as there are, and does not ask whether there are more."""
    try:
        if rank == 1 and how == "with":
            with tensorlift.open(path, process_group="world", **ARENA) as weights:
                assert len(list(itertools.islice(weights, 32))) == 32
        elif rank == 1:
            assert (
                len(list(itertools.islice(tensorlift.open(path, process_group="world", **ARENA), 32))) == 32
            )
        else:
            for _ in tensorlift.open(path, process_group="world", **ARENA):
                time.sleep(0.02)
    except PeerError as error:
        return str(error)
    return ""


def never_begun(rank: int, path: str) -> str:
    """Rank 1 lets go of the iterator alone, which began nothing: no other can be had."""
    weights = tensorlift.open(path, process_group="world", **ARENA)
    said = ""
    if rank == 1:
        iter(weights)
    else:
        with pytest.raises(PeerError) as raised:
            dict(weights)
        said = str(raised.value)
    dist.barrier()
    return said


def passes(rank: int, path: str) -> list[str]:
    return [to_the_last(rank, path, "with"), to_the_last(rank, path, "for"), never_begun(rank, path)]


def test_passes_that_end_without_a_word(path: str) -> None:
    first, second = ranks.values(passes, 2, path)
    assert second == [""] * 3
    assert first[0] == ""
    assert first[1].startswith("rank 1 got its last tensor, but did not go on to the end of the iteration")
    assert first[2] == "rank 1 stopped before it had taken all tensors"


def mistakes(rank: int, path: str) -> list[str]:
    """Of one rank's program, or of all; each ends at once, on all."""

    def said(work: Any) -> str:
        with pytest.raises((OptionError, PeerError, DisagreementError, RequestError)) as raised:
            work()
        dist.barrier()
        return str(raised.value)

    gone = dist.new_group()
    dist.destroy_process_group(gone)
    framework = "tf" if rank == 1 else "pt"
    begin = time.monotonic()
    found = [
        said(lambda: tensorlift.safe_open(path, framework, process_group="world").get_tensor(str(until()))),
        said(lambda: load(path) if rank else tensorlift.safe_open(path, "pt", process_group="world")),
        said(lambda: load(path, gone)),
    ]
    assert time.monotonic() - begin < 10
    return found


def until() -> str:
    """Nothing, once a failure elsewhere must be known here."""
    time.sleep(1.5)
    return ""


def patient(rank: int, path: str) -> int:
    """The caller's group gives up after a second; a consumer takes longer."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=1))
    count = 0
    for _ in tensorlift.open(path, process_group=group, **ARENA):
        count += 1
        if rank == 1 and count == 5:
            time.sleep(2.5)
    return count


def forked(rank: int, path: str) -> int:
    """A child of rank 1 lets go of everything, the group that was made for the load among it."""
    weights = tensorlift.open(path, process_group="world", **ARENA)
    taking = iter(weights)
    names = [name for name, _ in itertools.islice(taking, 5)]
    if rank == 1:
        # Not groups of the caller's that are over: torch joins their threads, which the child does not have.
        gc.collect()
        pid = os.fork()
        if pid == 0:
            taking.close()  # type: ignore[attr-defined]
            del weights, taking
            gc.collect()
            os._exit(0)
        deadline = time.monotonic() + 10
        while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
            assert time.monotonic() < deadline, "the child waits for threads that it does not have"
            time.sleep(0.02)
        assert ended == (pid, 0)
    return len([*names, *taking])


def in_turn(rank: int, path: str) -> Any:
    """All in one world: a world costs seconds to make."""
    return [mistakes(rank, path), patient(rank, path), forked(rank, path)]


def test_mistakes_patience_and_forks(path: str) -> None:
    found = ranks.values(in_turn, 2, path)
    for rank, (said, *counts) in enumerate(found):
        assert counts == [32, 32]
        assert said[0].startswith("framework is 'tf'" if rank else "rank 1 failed: OptionError: framework is")
        assert said[1].startswith("rank 0 called safe_open, and rank 1 load, open or load_into: every rank")
        assert "it was destroyed" in said[2]


def last_of_all(rank: int, path: str) -> Any:
    """Rank 1 fails before it issues the last gather, and takes part in it with what lies in its memory."""
    group = dist.new_group()
    want = tensorlift.load(path)
    wrong, count = [], 0
    with contextlib.suppress(PeerError):
        for name, tensor in tensorlift.open(path, process_group=group, **ARENA):
            count += 1
            wrong += [] if torch.equal(tensor, want[name]) else [name]
            if rank == 1 and count == 30:
                break
            if rank == 0 and count == 31:
                time.sleep(2.5)
    return [wrong, count]


def test_what_a_failed_rank_gathers_is_not_handed_out(path: str) -> None:
    assert ranks.values(last_of_all, 2, path) == [[[], 31], [[], 30]]
