"""What ranks tell each other: agreement, failures, the end, over every kind of store."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from support import child
from support.boards import LIMIT, STORES, World, each, threads_left
from tensorlift.distributed.board import Board, Failure
from tensorlift.errors import DisagreementError, PeerError, RanksError


@pytest.fixture(params=STORES)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    return World(request.param, tmp_path)


def joined(given: list[bytes]) -> bytes:
    return b"+".join(given)


def meet(board: Board) -> bytes:
    return board.agree("files", b"%d" % board.members.rank, joined, first=True)


def test_load_after_load(world: World) -> None:
    def work(rank: int) -> Any:
        found = []
        for number in range(3):
            board = world.board(rank, number)
            time.sleep(0.01 * ((rank + number) % 3))
            found.append(meet(board))
            found.append(board.agree("work", bytes([number]) * 10_000, joined))
            assert not board.failed
            board.end()
            board.close()
        return found

    found = each(work, 3)
    assert found[0] == found[1] == found[2]
    assert found[0] == [b"0+1+2" if k % 2 == 0 else joined([bytes([k // 2]) * 10_000] * 3) for k in range(6)]
    assert threads_left() == []


def test_a_disagreement_is_everybodys(world: World) -> None:
    def work(rank: int) -> None:
        board = world.board(rank)

        def decide(given: list[bytes]) -> bytes:
            raise DisagreementError("rank 10 and rank 12 differ")

        try:
            board.agree("files", b"", decide, first=True)
        finally:
            board.close()

    for error in each(work, 3):
        assert type(error) is DisagreementError
        assert str(error) == "rank 10 and rank 12 differ"


def test_the_first_failure_is_the_one_that_counts(world: World) -> None:
    barrier = threading.Barrier(3)

    def work(rank: int) -> Any:
        board = world.board(rank, peer=2)
        meet(board)
        barrier.wait(LIMIT)
        if rank:
            # Whatever a program says: this is no Unicode, and there is no end of it.
            text = f"rank {10 + rank} failed: \udc80" + 20_000 * "!"
            board.fail(Failure(10 + rank, "error", text))
        with pytest.raises(PeerError) as raised:
            board.check() if rank else board.end()
        assert board.failed
        assert board.agreed() == []
        board.close()
        return [str(raised.value), raised.value.rank]

    found = each(work, 3)
    who = found[0][1]
    assert who in (11, 12)
    assert found[0][0].startswith(f"rank {who} failed: ?!!!")
    assert len(found[0][0]) <= 10_000
    assert found == [found[0]] * 3


def test_all_stop_after_the_last_gather_that_any_rank_has_counted(world: World) -> None:
    counts, barrier = [2, 4, 0], threading.Barrier(3)

    def work(rank: int) -> Any:
        board = world.board(rank)
        meet(board)
        for number in range(counts[rank]):
            board.counted(4096 * (number + 1))
        assert board.issued == counts[rank]
        barrier.wait(LIMIT)
        if rank == 2:
            board.fail(Failure(12, "left", "rank 12 stopped"))
        found = []
        while not board.failed:
            time.sleep(0.01)
        found = board.agreed()
        with pytest.raises(PeerError, match="rank 12 stopped"):
            board.counted(1)
        board.close()
        return found

    assert each(work, 3) == [[4096, 8192, 12288, 16384]] * 3


def test_nobody_is_through_before_all_are(world: World) -> None:
    through: list[int] = []

    def work(rank: int) -> Any:
        board = world.board(rank)
        meet(board)
        time.sleep(0.2 * rank)
        through.append(rank)
        board.end()
        board.close()
        return len(through)

    assert each(work, 3) == [3, 3, 3]


def test_who_did_not_come_is_named_and_meets_the_others_later(world: World) -> None:
    """Rank 11 raised before it came to two loads; its count of loads stays behind by two."""
    given_up = threading.Event()

    def work(rank: int) -> Any:
        said = []
        if rank == 1:
            assert given_up.wait(LIMIT)
        else:
            for number in range(2):
                board = world.board(rank, number, peer=2, join=0.3)
                with pytest.raises(PeerError) as raised:
                    meet(board)
                board.close()
                said.append([str(raised.value), raised.value.rank])
            if rank == 0:
                given_up.set()
        board = world.board(rank, 0 if rank == 1 else 2)
        found = meet(board)
        board.end()
        board.close()
        return [said, found, board.members.number]

    found = each(work, 3)
    text = (
        "rank 11 did not come to load within join_timeout, 0.3 seconds: every rank of the group has to load "
        "together, and equally often"
    )
    assert found[0] == found[2] == [[[text, 11]] * 2, b"0+1+2", 2]
    assert found[1] == [[], b"0+1+2", 2]
    assert threads_left() == []


@pytest.mark.parametrize("absent", [[0], [0, 2]])
def test_the_first_rank_may_be_the_one_that_does_not_come(world: World, absent: list[int]) -> None:
    def work(rank: int) -> str:
        if rank in absent:
            return ""
        board = world.board(rank, peer=0.5, join=0.3)
        try:
            with pytest.raises(PeerError) as raised:
                meet(board)
        finally:
            board.close()
        return str(raised.value)

    said = {text for text in each(work, 3) if text}
    assert said == {
        f"{', '.join(f'rank {10 + rank}' for rank in absent)} did not come to load within join_timeout, 0.3 "
        "seconds: every rank of the group has to load together, and equally often"
    }


def test_who_has_come_may_be_slow(world: World) -> None:
    """join_timeout is for those that have not begun, not for those whose headers take long."""

    def work(rank: int) -> bytes:
        board = world.board(rank, join=0.3)
        if rank != 1:
            time.sleep(0.3 * rank)
        else:
            time.sleep(1)
        found = meet(board)
        board.end()
        board.close()
        return found

    assert each(work, 3) == [b"0+1+2"] * 3


def test_a_failure_of_who_has_not_met_the_others_yet(world: World) -> None:
    def work(rank: int) -> Any:
        board = world.board(rank)
        if rank == 1:
            board.fail(Failure(11, "error", "rank 11 failed: no such file"))
            found = board.agreed()
        else:
            time.sleep(0.2)
            with pytest.raises(PeerError, match="no such file"):
                meet(board)
            found = board.agreed()
        board.close()
        return found

    # Rank 10 and 12 come, and the failure is theirs too: it is no load that was given up for their sake.
    assert each(work, 3) == [[], [], []]


def file_taken_away(folder: str) -> Any:
    world = World("file", Path(folder))
    barrier = threading.Barrier(3)

    def work(rank: int) -> Any:
        board = world.board(rank, peer=1)
        meet(board)
        if barrier.wait(LIMIT) == 0:
            os.unlink(f"{folder}/store")
        barrier.wait(LIMIT)
        begin = time.monotonic()
        with pytest.raises(PeerError, match="the store of the process group does not answer") as raised:
            board.end()
        board.fail(Failure(10, "error", "too late, and no error"))
        assert board.agreed() is None
        board.close()
        return [raised.value.rank, time.monotonic() - begin < LIMIT / 2]

    return each(work, 3)


def test_a_file_that_is_taken_away(tmp_path: Path) -> None:
    """In a process of its own: torch 2.13 reads for ever there, which only the thread that asks notices."""
    assert child.call(file_taken_away, str(tmp_path)) == [[-1, True]] * 3


def test_a_server_that_ends(tmp_path: Path) -> None:
    world = World("tcp", tmp_path)
    barrier = threading.Barrier(3)

    def work(rank: int) -> Any:
        board = world.board(rank, peer=2)
        meet(board)
        if barrier.wait(LIMIT) == 0:
            del world.server
        barrier.wait(LIMIT)
        while not board.failed:  # the thread finds out by itself
            time.sleep(0.01)
        with pytest.raises(PeerError, match="the store of the process group does not answer"):
            board.check()
        with pytest.raises(RanksError):
            board.counted(1)
        board.close()

    assert each(work, 3) == [None] * 3
    assert threads_left() == []
