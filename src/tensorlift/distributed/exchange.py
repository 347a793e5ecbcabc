"""The all-gathers that complete arenas of which each rank has read its share.

Gather k + 1 is issued when arena k is handed out, by the thread that takes tensors, once this rank's share of
it has come. So the order of all collectives of a rank, its consumer's own among them, is that of its program
and never one of timing: ranks whose programs are the same cannot wait for each other in a circle, whatever
their speed (docs/ranks.md).
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tensorlift.distributed.agreement import Schedule
from tensorlift.distributed.board import Board
from tensorlift.distributed.communicator import Communicator
from tensorlift.errors import RanksError
from tensorlift.plan.arenas import Rules
from tensorlift.plan.shares import Share, share_nbytes
from tensorlift.tensors.memory import Arena, Memory
from tensorlift.tensors.views import bytes_of

__all__ = ["Exchange"]

AHEAD = 1
_SHORTEST, _LONGEST = 0.0001, 0.002  # seconds between two looks at a gather


class _Pending(NamedTuple):
    """One gather."""

    whole: torch.Tensor
    work: list[Any]
    """Empty until it was issued."""

    @property
    def over(self) -> bool:
        return not self.work or self.work[0].is_completed()


class Exchange:
    """Of one load. Arenas are numbered here in the order of their gathers."""

    def __init__(
        self,
        board: Board,
        communicator: Communicator | None,
        memory: Memory,
        rows: npt.NDArray[np.bool_],
        schedule: Schedule,
    ) -> None:
        """Nothing is gathered yet; no communicator: nothing will be.

        ``rows``: which of the wanted tensors are exchanged.
        """
        self.share = Share(board.members.rank, board.members.count)
        self.rows, self._arena_size = rows, schedule.arena_size
        self.ranks_per_host = schedule.ranks_per_host
        self._board, self._communicator, self._memory = board, communicator, memory
        self._used: list[int] = []
        self._pending: dict[int, _Pending] = {}
        # A gather is counted and issued as one: end() may come from another thread.
        self._issuing = threading.RLock()
        # Once, whichever thread comes first; others wait until it is done.
        self._ending = threading.RLock()
        self._ended = self._stuck = False
        cuda = memory.device.type == "cuda"
        self._side = torch.cuda.Stream(memory.device) if cuda else None  # type: ignore[no-untyped-call]
        self.bytes_received = 0

    def rules(self, rules: Rules) -> Rules:
        """The rules by which all ranks lay out what is exchanged."""
        return dataclasses.replace(rules, capacity=self._arena_size, grid=self.share.grid)

    def plan(self, used: list[int]) -> None:
        """Says how many bytes of each arena are to be gathered; the same on all ranks."""
        self._used = used

    def check(self) -> None:
        """Raises what ended the load on another rank."""
        self._board.check()

    @property
    def issued(self) -> int:
        """Gathers issued so far."""
        return self._board.issued

    def due(self, number: int) -> int:
        """Gathers that are to be issued before this arena is handed out."""
        return min(number + 1 + AHEAD, len(self._used))

    def issue(self, arena: Arena, local: Callable[[int], None]) -> None:
        """Issues the next gather; ``local(stream)`` makes a stream wait for this rank's share."""
        number = self.issued
        assert self._communicator is not None
        self._communicator.wait_until_made(self._board.check)
        with self._on_side() as stream:
            local(stream)
            width = share_nbytes(self._used[number], self.share.ranks)
            whole = bytes_of(arena, self._memory, width * self.share.ranks)
            with self._issuing:
                self._board.check()  # what end() has issued under this number must not be lost
                # There before it is counted: a signal's handler may raise anywhere.
                self._pending[number] = pending = _Pending(whole, [])
                self._board.counted(width)
                self._gather(pending, width)
        self.bytes_received += len(whole) - width

    def wait(self, number: int, tick: Callable[[], object] | None) -> None:
        """Waits until an arena is whole, for work on the caller's stream.

        The host waits too: a gather that is aborted must not have been handed out.
        """
        pending = self._pending.get(number)
        if pending is None:
            self.check()  # it may be another thread that has ended all
            return
        pause = _SHORTEST
        while not pending.over:
            self.check()
            if tick is not None:
                tick()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        try:
            pending.work[0].wait()
        except RuntimeError as error:
            self._explain(error)
        # A rank that failed takes part with whatever bytes it has, but not before all have been told.
        self.check()
        self._pending.pop(number, None)

    def end_where_failed(self) -> bool:
        """See Exchanging."""
        if self._board.failed:
            self.end()
        return not self._stuck

    def end(self) -> None:
        """Has the gathers that were issued anywhere come to an end, where the load stopped before its own.

        A rank that lives takes part until the last one, with whatever bytes it has, so that nobody's gather
        waits for it and the caller's group can be used again.
        """
        with self._ending:
            if self._communicator is None or self._ended:
                return
            self._ended = True
            self._end(self._communicator)

    def _end(self, communicator: Communicator) -> None:
        broken = self._board.failed and not self._take_part()
        # Where a rank is gone they may never end.
        deadline = time.monotonic() + (0 if broken else self._board.peer_timeout)
        for pending in list(self._pending.values()):
            while not pending.over and time.monotonic() < deadline:
                time.sleep(_LONGEST)
            broken |= not pending.over
        # What is still under way keeps its memory by itself.
        self._pending.clear()
        communicator.release(broken=broken)
        # Nobody but its owner can abort the caller's group.
        self._stuck = broken and not communicator.is_temporary

    def _take_part(self) -> bool:
        """In the gathers that others have counted and this rank has not issued; whether all will end."""
        widths = self._board.agreed()
        # The thread that takes tensors, where that is another, may be at the last one that it counted.
        if widths is None or not self._issuing.acquire(timeout=self._board.peer_timeout):
            return False
        try:
            if widths and self._communicator is not None:
                # Others have it, then so will this rank; it may be in the middle of making it.
                self._communicator.wait_until_made(_within(self._board.peer_timeout))
            for number, width in enumerate(widths):
                pending = self._pending.get(number)
                if number < self._board.issued and (pending is None or pending.work):
                    continue
                # Its arena may not be there, and its bytes are nobody's.
                whole = torch.empty(width * self.share.ranks, dtype=torch.uint8, device=self._memory.device)
                self._pending[number] = pending = _Pending(whole, [])
                with self._on_side():
                    self._gather(pending, width)
        except (RuntimeError, MemoryError):
            return False
        finally:
            self._issuing.release()
        return True

    def _gather(self, pending: _Pending, width: int) -> None:
        begin = self.share.rank * width
        assert self._communicator is not None
        self._communicator.gather(pending.whole, pending.whole[begin : begin + width], pending.work)

    @contextlib.contextmanager
    def _on_side(self) -> Iterator[int]:
        """The stream that gathers are issued on; its handle."""
        if self._side is None:
            yield self._memory.stream()
            return
        # A block may be in use still by work that the caller's stream held when it was allocated; what the
        # caller will do with the arena before this one is not in that stream yet.
        self._side.wait_stream(torch.cuda.current_stream(self._memory.device))
        with torch.cuda.stream(self._side):
            yield self._side.cuda_stream

    def _explain(self, error: RuntimeError) -> None:
        """A collective that broke says nothing of who is gone; the board does, a little later."""
        deadline = time.monotonic() + self._board.peer_timeout
        while time.monotonic() < deadline:
            self._board.check()
            time.sleep(_LONGEST)
        raise RanksError(f"an all-gather failed, and no rank has said why: {error}") from error


def _within(seconds: float) -> Callable[[], None]:
    """Raises RuntimeError when that time is over."""
    deadline = time.monotonic() + seconds

    def check() -> None:
        if time.monotonic() > deadline:
            raise RuntimeError("took too long")

    return check
