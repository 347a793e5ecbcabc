"""``python -m tensorlift.bench.crew_member``: one process of a crew (see crew.py).

It does one order after the other. A thread reads them, so that it ends with its parent, whatever it does.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["ANSWER", "ERROR", "STOP", "TOLD", "Member", "begin"]

ANSWER, ERROR, TOLD = "answer", "error", "told"
STOP = b"stop"


class Member:
    """What a function that is ordered knows of its process."""

    def __init__(self, rank: int, ranks: int, device: str, connection: Connection | None = None) -> None:
        self.rank, self.ranks, self.device = rank, ranks, device
        self.is_cuda = device != "cpu"
        self.stop = threading.Event()
        """Set by Crew.stop, unset by the next order."""
        self.kept: dict[str, Any] = {}
        """What stays from order to order."""
        self._connection = connection

    def tell(self, value: Any) -> None:
        """Says something before the order is done."""
        assert self._connection is not None
        self._connection.send((TOLD, value))

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.is_cuda:
            import torch

            torch.cuda.synchronize(self.device)


def begin(member: Member, backend: str, port: int) -> None:
    """The first order: the device's context, and the group with its communicator."""
    import torch
    import torch.distributed as dist

    if member.is_cuda:
        torch.cuda.set_device(torch.device(member.device))
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(backend, init_method=where, rank=member.rank, world_size=member.ranks)
    device = member.device if backend == "nccl" else "cpu"
    once = torch.ones(1, device=device)
    dist.all_reduce(once)
    if int(once.item()) != member.ranks:
        raise RuntimeError(f"an all-reduce of ones over {member.ranks} ranks gave {once.item()}")


def _read(connection: Connection, member: Member, orders: queue.SimpleQueue[bytes]) -> None:
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            # Nothing is torn down: whatever the main thread is in may never end.
            os._exit(1)
        if message == STOP:
            member.stop.set()
        else:
            member.stop.clear()
            orders.put(message)


def _answer(member: Member, order: bytes) -> tuple[str, Any]:
    try:
        function, about = pickle.loads(order)
        return ANSWER, function(member, **about)
    except Exception as error:  # noqa: BLE001 - told to the parent, which decides
        traceback.print_exc()
        lines = str(error).strip().splitlines()
        # Its frames may hold what was loaded.
        traceback.clear_frames(error.__traceback__)
        return ERROR, f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


def main(arguments: list[str]) -> None:
    """Answers orders until the parent is gone."""
    faulthandler.register(signal.SIGUSR1)
    fd, rank, ranks, device = arguments
    connection = Connection(int(fd))
    member = Member(int(rank), int(ranks), device, connection)
    orders: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, member, orders), daemon=True).start()
    while True:
        answer = _answer(member, orders.get())
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send(answer)


if __name__ == "__main__":
    # Functions come by the name of their module: this one as it is imported, not as __main__.
    from tensorlift.bench import crew_member

    crew_member.main(sys.argv[1:])
