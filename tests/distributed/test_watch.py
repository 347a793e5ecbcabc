"""The thread that talks to the store: who is gone, whom it listens to, a store that says nothing."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from support import child
from support.boards import LIMIT, Elsewhere, World, each, threads_left
from tensorlift.distributed.board import Board
from tensorlift.distributed.members import Process, this_process
from tensorlift.distributed.watch import Watch, heard_by, is_served_here
from tensorlift.errors import PeerError


def joined(given: list[bytes]) -> bytes:
    return b"+".join(given)


def meet(board: Board) -> bytes:
    return board.agree("files", b"%d" % board.members.rank, joined, first=True)


@pytest.mark.parametrize(
    ("hosts", "listens"),
    [
        ("aaaa", [[], [], [], []]),
        ("aabb", [[], [2, 3], [], [0, 1]]),
        ("abab", [[1], [2], [3], [0]]),
        ("abbc", [[1, 2], [], [3], [0]]),
        ("a", [[]]),
        ("ab", [[1], [0]]),
    ],
)
def test_whom_a_rank_listens_to(hosts: str, listens: list[list[int]]) -> None:
    assert [heard_by(rank, hosts) for rank in range(len(hosts))] == listens


def test_each_rank_is_listened_to_from_another_host() -> None:
    for count in range(1, 6):
        for hosts in itertools.product(["a", "b", "c", ""], repeat=count):
            heard = [other for rank in range(count) for other in heard_by(rank, hosts)]
            # In proportion to the ranks, not to their square.
            assert len(heard) == len(set(heard))
            alone = len(set(hosts)) == 1 and hosts[0] != ""
            assert set(heard) == (set() if alone or count == 1 else set(range(count))), hosts


def on(host: str) -> Process:
    """This process, to be found there."""
    mine = this_process()
    return Process(host, mine.pid, mine.started)


def dead() -> Process:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return Process(this_process().host, process.pid, "1")


def test_a_process_that_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere, world = Elsewhere(monkeypatch), World("hash", tmp_path)
    gone = dead()

    def work(rank: int) -> Any:
        if rank == 1:
            elsewhere.be(gone)
        board = world.board(rank, peer=2)
        try:
            meet(board)
            if rank == 1:
                time.sleep(2)  # its thread is there, and says nothing of itself
                return None
            board.end()
        except PeerError as error:
            return [str(error), error.rank]
        finally:
            board.close()

    found = each(work, 3)
    assert found[0] == found[2] == ["rank 11 is gone: its process has ended", 11]


@pytest.mark.parametrize("host", ["elsewhere", ""])
def test_a_rank_elsewhere_that_gives_no_sign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    elsewhere, world = Elsewhere(monkeypatch), World("tcp", tmp_path)

    def work(rank: int) -> Any:
        if rank == 2:
            elsewhere.be(on(host))
        board = world.board(rank, peer=2)
        try:
            meet(board)
            if rank == 2:
                board.close()
                return None
            time.sleep(3)  # a slow consumer is none that gives no sign
            board.end()
        except PeerError as error:
            return str(error)
        finally:
            board.close()

    found = each(work, 3)
    assert found[0] == found[1]
    assert found[0].startswith("rank 12 is gone: it gave no sign for 1.")


def test_ranks_elsewhere_that_are_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere, world = Elsewhere(monkeypatch), World("file", tmp_path)

    def work(rank: int) -> bytes:
        elsewhere.be(on(f"host {rank}"))
        board = world.board(rank, peer=1)
        time.sleep(1.5 * (rank == 0))
        found = meet(board)
        time.sleep(1.5 * (rank == 2))
        board.end()
        board.close()
        return found

    assert each(work, 3) == [b"0+1+2"] * 3


def test_a_process_that_ended_when_it_was_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere, world = Elsewhere(monkeypatch), World("hash", tmp_path)
    gone = dead()

    def work(rank: int) -> None:
        if rank == 1:
            elsewhere.be(gone)
        board = world.board(rank, peer=1)
        if rank == 1:
            board.through()
        meet(board)
        for _ in range(0 if rank == 1 else 10):
            board.check()
            time.sleep(0.05)
        board.close()

    assert each(work, 3) == [None] * 3


class Mute:
    """A store that stops answering, as over a cut link."""

    def __init__(self, store: Any) -> None:
        self.store, self.mute, self.end = store, False, threading.Event()

    def __getattr__(self, name: str) -> Any:
        if self.mute:
            self.end.wait(LIMIT)
        return getattr(self.store, name)


def test_a_store_that_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for it: neither who asks nor who only looks whether the load is over."""
    from tensorlift.distributed.members import Members

    world, plain = World("hash", tmp_path, 2), Members.store
    mutes: list[Mute] = []

    def store(members: Members) -> Any:
        mutes.append(Mute(plain(members)))
        return mutes[-1]

    monkeypatch.setattr(Members, "store", store)
    boards = [world.board(rank, peer=1) for rank in range(2)]
    for mute in mutes:
        mute.mute = True
    begin = time.monotonic()
    with pytest.raises(PeerError, match=r"does not answer: no answer for 0\.6 seconds"):
        boards[0].end()
    while not boards[1].failed and time.monotonic() < begin + LIMIT:
        with contextlib.suppress(PeerError):
            boards[1].check()
        time.sleep(0.01)
    with pytest.raises(PeerError, match=r"no answer for 0\.6 seconds"):
        boards[1].check()
    assert boards[1].failed
    for board, mute in zip(boards, mutes, strict=True):
        assert board.agreed() is None
        board.close()
        mute.end.set()
    assert threads_left() == []


def unfinished(folder: str) -> None:
    """As at the end of a program that has left a load open."""
    import tensorlift.distributed.watch as module

    world = World("tcp", Path(folder), 2)
    boards = [world.board(rank) for rank in range(2)]
    assert all(isinstance(board._watch, Watch) for board in boards)
    module._at_exit()
    assert not [one for one in threading.enumerate() if one.name.startswith("tensorlift")]


def test_threads_end_before_the_interpreter(tmp_path: Path) -> None:
    child.call(unfinished, str(tmp_path))


def test_a_store_of_this_host_is_known_by_its_address() -> None:
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    assert is_served_here(dist.PrefixStore("a", dist.PrefixStore("b", server.clone())))
    assert not is_served_here(dist.HashStore())

    class Far:
        host = "192.0.2.1"  # of a net that is set aside for documents

    assert not is_served_here(Far())
