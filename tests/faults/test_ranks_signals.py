"""Signals, forks, threads and ends of the interpreter while several ranks load."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import tensorlift
from support import ranks
from support.leaks import nothing_left
from support.ranks import ARENA, load
from tensorlift.distributed.communicator import Communicator
from tensorlift.distributed.meeting import Meeting
from tensorlift.errors import PeerError

KIB = 1 << 10


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """32 tensors, an arena each."""
    return ranks.even(tmp_path_factory.mktemp("ranks"))


def while_meeting(rank: int, path: str) -> Any:
    load(path)  # starts what torch starts once
    time.sleep(1.5)
    with nothing_left():
        if rank == 1:
            plain = Meeting.wait

            def wait(self: Meeting, keys: list[str], timeout: Any = None) -> None:
                os.kill(os.getpid(), signal.SIGKILL)
                plain(self, keys, timeout)

            Meeting.wait = Meeting.get = wait  # type: ignore[method-assign,assignment]
            # Before it says where it is to be found.
            Meeting.set = wait  # type: ignore[method-assign,assignment]
        begin = time.monotonic()
        with pytest.raises(PeerError) as raised:
            load(path)
        seconds, message = time.monotonic() - begin, str(raised.value)
        del raised  # its frames hold what the load had
        time.sleep(1.5)
    return [message, seconds]


def test_a_rank_that_is_killed_while_the_group_is_made(path: str) -> None:
    outcomes = ranks.run(while_meeting, 3, path)
    assert outcomes[1].status == -signal.SIGKILL
    for rank in (0, 2):
        assert outcomes[rank].error is None, outcomes[rank].trace
        message, seconds = outcomes[rank].value
        assert message == "rank 1 is gone: its process has ended"
        assert seconds < 10


def interrupted(rank: int, path: str, where: str) -> Any:
    """Ctrl-C on one rank, in a wait and between the count of a gather and its issue."""
    group = dist.new_group()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGUSR1, interrupt)
    gathered: list[int] = []
    if rank == 1:
        plain = Communicator.gather

        def gather(self: Communicator, *arguments: Any) -> None:
            gathered.append(1)
            if len(gathered) == 5 and where == "before":
                os.kill(os.getpid(), signal.SIGUSR1)
            plain(self, *arguments)
            if len(gathered) == 5 and where == "after":
                os.kill(os.getpid(), signal.SIGUSR1)

        Communicator.gather = gather  # type: ignore[method-assign]
    if rank == 2 and where == "wait":
        time.sleep(1)
    if rank == 1 and where == "wait":
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    with pytest.raises(KeyboardInterrupt if rank == 1 else PeerError) as raised:
        load(path, group)
    # The caller's group is as it was, and so are loads over it.
    return [str(raised.value), ranks.usable(group), load(path, group)]


@pytest.mark.parametrize("where", ["before", "after", "wait"])
def test_an_interrupt(path: str, where: str) -> None:
    found = ranks.values(interrupted, 3, path, where)
    assert [one[1:] for one in found] == [[True, 32]] * 3
    for rank in (0, 2):
        assert found[rank][0] == "rank 1 failed: KeyboardInterrupt"


def forking(rank: int, path: str) -> Any:
    """A child, of a data loader say, that lets go of what its parent has open."""
    names = []
    weights = tensorlift.open(path, process_group="world", **ARENA)
    for name, _ in weights:
        names.append(name)
        if len(names) == 5 and rank == 1:
            pid = os.fork()
            if pid == 0:
                weights._ranks.leave(None)  # type: ignore[union-attr]
                weights._ranks.__exit__(None, None, None)  # type: ignore[union-attr]
                weights._ranks.through()  # type: ignore[union-attr]
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
    return len(names)


def over_two_groups(rank: int, path: str) -> Any:
    """Two threads of each process, each with a group of its own."""
    groups = [dist.new_group(), dist.new_group()]
    found: list[list[int]] = [[], []]

    def work(which: int) -> None:
        for _ in range(3):
            found[which].append(load(path, groups[which]))

    threads = [threading.Thread(target=work, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def missing_one(rank: int, path: str) -> Any:
    """Rank 1's own program raises before it comes to the first load; then all load on."""
    said = ""
    if rank != 1:
        with pytest.raises(PeerError) as raised:
            tensorlift.load(path, process_group="world", join_timeout=1)
        said = str(raised.value)
    dist.barrier()
    return [said.partition(",")[0], [load(path) for _ in range(2)]]


def in_turn(rank: int, path: str) -> Any:
    """All in one world: a world costs seconds to make."""
    return [forking(rank, path), over_two_groups(rank, path), missing_one(rank, path)]


def test_forks_threads_and_a_load_that_one_rank_missed(path: str) -> None:
    for rank, found in enumerate(ranks.values(in_turn, 2, path)):
        said = "" if rank == 1 else "rank 1 did not come to load within join_timeout"
        assert found == [32, [[32] * 3] * 2, [said, [32, 32]]]


PROGRAM = """
import sys
import torch.distributed as dist
import tensorlift
path, store, rank = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
file = tensorlift.safe_open(path, "pt", process_group="world", peer_timeout=3)
options = {"arena_size": 1 << 16, "buffer_size": 1 << 17, "exchange": "gather", "peer_timeout": 3}
weights = tensorlift.open(path, process_group="world", **options)
taking = iter(weights)
for _ in range(3):
    next(taking)
if rank == "1":
    sys.exit(7)  # with both open
try:
    for _ in taking:
        pass
except tensorlift.errors.PeerError as error:
    print(error)
import time
time.sleep(1)  # until its process must be seen to have ended
print(len(file.get_tensor("t00")))
"""


def test_a_program_that_ends_in_the_middle(path: str, tmp_path: Path) -> None:
    """Its interpreter ends in order, with the threads that look; the other rank hears of it."""
    command = [sys.executable, "-W", "error", "-c", PROGRAM, path, str(tmp_path / "store")]
    programs = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        said = [program.communicate(timeout=60) for program in programs]
    finally:
        for program in programs:
            program.kill()
            program.communicate()
    assert [program.returncode for program in programs] == [0, 7], said
    assert said[0][0].splitlines() == ["rank 1 stopped before it had taken all tensors", str(64 * KIB)]
    for word in ("terminate called", "Traceback", "Exception ignored"):
        assert word not in said[1][1]
