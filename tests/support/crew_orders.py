"""What processes of a crew are told to do in tests."""

from __future__ import annotations

import os
import signal
import time

from tensorlift.bench.crew_member import Member


def whoami(member: Member) -> tuple[int, int, str]:
    return member.rank, member.ranks, member.device


def wait_for_stop(member: Member) -> int:
    member.tell("waiting")
    return int(member.stop.wait(60))


def fail_or_hang(member: Member, nap: float) -> None:
    if member.rank == 0:
        raise ValueError("of no use\nand more")
    time.sleep(nap)


def die(member: Member, victim: int) -> int:
    if member.rank == victim:
        print("farewell", flush=True)
        member.tell("dying")
        os.kill(os.getpid(), signal.SIGKILL)
    return member.rank
