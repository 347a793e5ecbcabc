"""Ranks that are threads of this process, with the boards of one load, over any store of torch."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tensorlift.distributed import watch
from tensorlift.distributed.board import Board
from tensorlift.distributed.members import Members, Process, this_process

LIMIT = 30
"""Seconds after which a thread that has not ended is a fault."""
STORES = ("hash", "file", "tcp")


class Group:
    """What members want of a ProcessGroup."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def get_group_store(self) -> Any:
        return self.store


@dataclasses.dataclass
class World:
    """The ranks of one group."""

    kind: str
    folder: Path
    count: int = 3

    def __post_init__(self) -> None:
        if self.kind == "hash":
            shared = dist.HashStore()
            stores = [shared] * self.count
        elif self.kind == "file":
            stores = [dist.FileStore(str(self.folder / "store"), self.count) for _ in range(self.count)]
        else:
            self.server: Any = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
            port = self.server.port
            stores = [dist.TCPStore("127.0.0.1", port, wait_for_workers=False) for _ in range(self.count)]
        self.groups = [Group(store) for store in stores]

    def members(self, rank: int, number: int = 0) -> Members:
        """Ranks 10, 11, ... of a world."""
        ranks = tuple(range(10, 10 + self.count))
        return Members(self.groups[rank], True, rank, ranks, number)

    def board(self, rank: int, number: int = 0, peer: float = 10, join: float = 20) -> Board:
        """That of one rank, which has begun a load."""
        return Board(self.members(rank, number), peer, join)


def each(work: Callable[[int], Any], count: int) -> list[Any]:
    """What ``work(rank)`` returned in a thread of each rank, or the exception that it raised."""
    found: list[Any] = [None] * count

    def run(rank: int) -> None:
        try:
            found[rank] = work(rank)
        except Exception as error:  # noqa: BLE001 - told to the test
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive(), "a rank waits for ever"
    return found


def threads_left() -> list[str]:
    """Names of the threads of loads that do not end."""
    deadline = time.monotonic() + LIMIT
    while True:
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("tensorlift")]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.01)


class Elsewhere:
    """Lets the boards that a thread makes believe that they are another process."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._local = threading.local()
        plain = this_process()
        patch.setattr(watch, "this_process", lambda: getattr(self._local, "process", plain))

    def be(self, process: Process) -> None:
        """From now on, in this thread."""
        self._local.process = process
