"""One load of several ranks, from the moment that they meet until all are through or all have failed."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType

import msgspec
import numpy as np
import numpy.typing as npt

from tensorlift.distributed import policy
from tensorlift.distributed.agreement import (
    SEVERAL,
    File,
    Request,
    Schedule,
    agree_on_call,
    agree_on_files,
    files_of,
    pack,
    schedule_of,
    unpack,
)
from tensorlift.distributed.board import Board, Failure
from tensorlift.distributed.communicator import Communicator
from tensorlift.distributed.exchange import Exchange
from tensorlift.distributed.members import Members, machine, members_of
from tensorlift.errors import OptionError
from tensorlift.format.checkpoint import Checkpoint
from tensorlift.options import LoadOptions
from tensorlift.plan.parts import Parts
from tensorlift.stats import LoadStats
from tensorlift.tensors.memory import Memory

__all__ = ["Ranks", "join"]

# As the settings page gives them.
PEER_TIMEOUT, JOIN_TIMEOUT = 10.0, 300.0
_GRACE = 1.0  # seconds for the reason of an iteration's early end to come


def join(
    process_group: object, resolve: Callable[[], LoadOptions], *, at_random: bool = False
) -> tuple[Ranks | None, LoadOptions]:
    """The ranks of a load and its options, which ``resolve()`` gives; None for this process alone.

    The first thing that a load does: whatever fails from here on, the other ranks learn of. ``at_random``:
    tensors will be asked for in any order, so that a rank may be through at any time.
    """
    failed: Exception | None = None
    try:
        settings = resolve()
    except Exception as error:  # noqa: BLE001 - raised again below
        settings, failed = LoadOptions(), error
    members = members_of(process_group, alone=settings.exchange != "gather")
    ranks = None if members is None else Ranks(members, settings, at_random)
    if failed is not None:
        if ranks is not None:
            ranks.leave(failed)
        raise failed
    return ranks, settings


class Ranks:
    """A context manager: an exception that leaves it is told to the other ranks, and so is a load that was
    not ``complete``; one that was waits for them, and raises PeerError if one of them fails.
    """

    def __init__(self, members: Members, settings: LoadOptions, at_random: bool = False) -> None:
        """Says that this rank is there; ``at_random``: see join()."""
        self._ended = True  # until there is something to end
        self._ending = threading.RLock()
        self._at_random = at_random
        self._board = Board(
            members, settings.peer_timeout or PEER_TIMEOUT, settings.join_timeout or JOIN_TIMEOUT
        )
        self.members = self._board.members
        self._pid = os.getpid()
        self._exchange: Exchange | None = None
        self._communicator: Communicator | None = None
        self.schedule: Schedule | None = None
        self.complete = False
        self.taken = False
        """The last tensor was handed out, and whoever got it has not come back yet."""
        self.held = False
        """Somebody else will say why an iteration ended early."""
        self.seconds_agreeing = 0.0
        self._telling: threading.Timer | None = None
        self._ended = False
        _open.add(self)

    def __enter__(self) -> Ranks:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends this rank's part, once."""
        if self._ended:
            self._end(_nothing)  # another thread may be at it
            return
        if self._forked:
            return
        if self.held and isinstance(error, GeneratorExit):
            # What leaves the with statement says why. Where nothing does, because this rank waits inside it
            # for others that wait for its tensors, they are told all the same.
            failure = self._left()
            self._telling = threading.Timer(_GRACE, lambda: self._board.fail(failure))
            self._telling.daemon = True
            self._telling.start()
            return
        if self._telling is not None:
            self._telling.cancel()
        if error is not None or not self.complete:
            self.leave(error)
            return
        try:
            self._board.end()
        except BaseException as failed:
            self.leave(failed)
            raise
        self._end(_nothing)

    def __del__(self) -> None:
        """The other ranks must not wait for a load that nobody holds, or whose end was interrupted."""
        self.drop()

    def drop(self) -> None:
        """Ends this rank's part where nobody else will, however that may be."""
        if not self._ended:
            with contextlib.suppress(Exception):
                self.through() if self._at_random else self.leave(None)

    def leave(self, error: BaseException | None) -> None:
        """Ends this rank's part before its time; the others raise PeerError with the reason."""
        failure = self._left()
        if error is not None and not isinstance(error, GeneratorExit):
            who = self.members.name(self.members.rank)
            failure = Failure(failure.rank, "error", f"{who} failed: {_said(error)}")
        self._end(lambda: self._board.fail(failure))

    def _left(self) -> Failure:
        who, number = self.members.name(self.members.rank), self.members.world_ranks[self.members.rank]
        if not self.taken:
            return Failure(number, "left", f"{who} stopped before it had taken all tensors")
        text = f"{who} got its last tensor, but did not go on to the end of the iteration, where ranks wait"
        return Failure(number, "left", f"{text} for each other: let the loop end by itself")

    def through(self) -> None:
        """Ends this rank's part without waiting for the others."""
        self._end(self._board.through)

    @property
    def _forked(self) -> bool:
        """In a child the load is the parent's still: what the child lets go of is no end of it."""
        return os.getpid() != self._pid

    def _end(self, say: Callable[[], None]) -> None:
        """Says something to the others and ends this rank's part: once, whichever thread comes first.

        Other threads wait until that is done: whoever returns may use the caller's group.
        """
        if self._forked:
            return
        with self._ending:
            if self._ended:
                return
            self._ended = True
            if self._telling is not None:
                self._telling.cancel()
            try:
                say()
            except Exception:
                self._board.close()
                raise
            except BaseException:
                self._ended = False  # interrupted: the next one says it
                raise
            try:
                if self._exchange is not None:
                    self._exchange.end()
            finally:
                self._board.close()

    def check(self) -> None:
        """Raises what ended the load on another rank."""
        self._board.check()

    def same_files(
        self, checkpoint: Checkpoint, in_order: Callable[[Sequence[int]], Checkpoint]
    ) -> Checkpoint:
        """The checkpoint with its files in the order of the first rank; DisagreementError if they differ.

        ``in_order``: the same, with its shards in the order of the given numbers.
        """
        begin = time.perf_counter()
        ours = files_of(checkpoint)

        def decide(given: list[bytes]) -> bytes:
            said = [msgspec.json.decode(part, type=tuple[bool, list[File]]) for part in given]
            agree_on_call([at_random for at_random, _ in said], self.members.name)
            agree_on_files([files for _, files in said], self.members.name)
            return given[0]

        answer = self._board.agree("files", msgspec.json.encode((self._at_random, ours)), decide, first=True)
        _, theirs = msgspec.json.decode(answer, type=tuple[bool, list[File]])
        self.seconds_agreeing += time.perf_counter() - begin
        if ours == theirs:
            return checkpoint
        places: dict[File, list[int]] = {}
        for at in reversed(range(len(ours))):
            places.setdefault(ours[at], []).append(at)
        return in_order([places[file].pop() for file in theirs])

    def exchange(
        self,
        checkpoint: Checkpoint,
        rows: npt.NDArray[np.int64],
        memory: Memory,
        settings: LoadOptions,
        arena_size: int,
        *,
        several: bool = False,
    ) -> Exchange:
        """What of ``rows`` comes from other ranks.

        ``several``: they go to several devices, of which ``memory`` is one.
        """
        begin = time.perf_counter()
        verify = settings.verify not in (None, False)
        whole = np.zeros(len(checkpoint), bool)
        whole[rows] = True
        if isinstance(checkpoint, Parts):
            whole &= ~checkpoint.is_part
        sizes = checkpoint.sizes
        wanted = settings.exchange or "auto"
        if verify and wanted == "gather":
            raise OptionError(
                "exchange='gather' with verify: digests are of whole tensors as their bytes are read, and a "
                "rank reads parts of them; leave exchange out, and each rank reads and checks all"
            )
        request = Request(
            exchange=wanted,
            device=SEVERAL if several else memory.device.type,
            verify=verify,
            own=settings.own or "arena",
            arena_size=arena_size,
            rows=pack(whole),
            temporary=self.members.temporary,
            host=machine(),
            cached=policy.cached(checkpoint),
        )

        def decide(given: list[bytes]) -> bytes:
            requests = [msgspec.msgpack.decode(part, type=Request) for part in given]
            per_host = policy.ranks_per_host(requests)
            schedule = schedule_of(requests, sizes, self.members.name, policy.choose, per_host)
            return msgspec.msgpack.encode(schedule)

        if not self.members.temporary:
            # Another rank may have the answer, and begin, before this one: if this one ends meanwhile, it
            # takes part all the same, so that the caller's group can be used again.
            nothing = Schedule("none", "", 0, b"", {}, 1)
            given = Communicator(self.members, memory.device)
            self._exchange = Exchange(self._board, given, memory, whole[:0], nothing)
        answer = self._board.agree("work", msgspec.msgpack.encode(request), decide)
        self.schedule = schedule = msgspec.msgpack.decode(answer, type=Schedule)
        if schedule.exchange == "gather":
            self._communicator = Communicator(self.members, memory.device)
        mask = unpack(schedule.rows, len(checkpoint))
        self._exchange = Exchange(self._board, self._communicator, memory, mask[rows], schedule)
        self.seconds_agreeing += time.perf_counter() - begin
        return self._exchange

    def told(self, stats: LoadStats) -> LoadStats:
        """The same record with what concerns the other ranks."""
        schedule, exchange, made = self.schedule, self._exchange, self._communicator
        seconds = {**stats.seconds, "agree": self.seconds_agreeing}
        if made is not None and self.members.temporary:
            seconds |= {"make_group": made.seconds_made, "destroy_group": made.seconds_destroyed}
        return dataclasses.replace(
            stats,
            seconds=seconds,
            ranks=self.members.count,
            exchange="none" if schedule is None else schedule.exchange,
            exchange_reason="" if schedule is None else schedule.why,
            prediction={} if schedule is None else schedule.figures,
            received_bytes=0 if exchange is None else exchange.bytes_received,
        )


def _nothing() -> None:
    """Is said where all are through."""


def _said(error: BaseException) -> str:
    name = type(error).__name__
    try:
        return f"{name}: {error}" if str(error) else name
    except Exception:  # noqa: BLE001 - of a program's own exception
        return name


# Ended before the interpreter does: threads, which that wants, cannot be started afterwards.
_open: weakref.WeakSet[Ranks] = weakref.WeakSet()


@atexit.register
def _at_exit() -> None:
    for ranks in list(_open):
        with contextlib.suppress(Exception):
            ranks.drop()
