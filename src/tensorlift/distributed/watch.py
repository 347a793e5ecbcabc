"""The thread of a load that talks to the store of the group, and looks after the other ranks meanwhile.

It alone uses the connection: a store that stops answering, which a cut network does without a word, keeps
this thread waiting and nobody else. Every key belongs to one load. A rank looks after the processes of its
own host by their ids, and after those that follow it on another host by the signs that they give.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, Literal, TypeVar

import msgspec

from tensorlift.distributed.members import Members, Process, this_process
from tensorlift.errors import DisagreementError, PeerError, RanksError

__all__ = ["Failure", "Watch", "heard_by", "taken"]

T = TypeVar("T")
# Of peer_timeout: until a rank on another host, or the store, counts as gone. The rest is for telling others.
_SILENT = 0.6
# Seconds for a store on this host, whose end shows at once. torch's server looks up the name of whoever
# connects and answers nobody meanwhile: 5 s for each where name servers are silent.
_STALLED = 60.0
_LONGEST_TEXT = 10_000
_SLICE = 0.1  # seconds, at most: one look of a thread that waits for another


class Failure(msgspec.Struct, frozen=True):
    """Why a load of several ranks ended."""

    rank: int
    """Whose fault it is, in the world; -1: not known."""
    kind: Literal["error", "differ", "left", "gone", "absent"]
    text: str
    absent: list[int] = []
    """Who did not come, in the group."""

    def error(self) -> RanksError:
        """For the ranks that it is told to."""
        if self.kind == "differ":
            return DisagreementError(self.text)
        return PeerError(self.text, self.rank)


class Watch:
    """One load's, begun when a rank joins; ``close()`` ends its thread."""

    def __init__(self, members: Members, peer_timeout: float) -> None:
        """The thread connects to the store by itself; the first that is asked of it waits for that."""
        self.members, self._period = members, min(1.0, peer_timeout / 10)
        self._limit = _SILENT * peer_timeout
        # Of the store; until there is a connection nobody knows how fast it answers.
        self._patience = max(self._limit, _STALLED)
        # Around what a gather counts: what was told and what was counted are one.
        self.lock = threading.Lock()
        self.frozen = self._told = self._lost = False
        self.issued: list[int] = []
        """Bytes a rank of each gather that this rank has begun to issue."""
        self.failure: Failure | None = None
        self.process = this_process()
        self.processes: dict[int, Process] = {members.rank: self.process}
        """Of the ranks that are known, by their rank in the group."""
        self._through: set[int] = set()
        self._silence: dict[int, _Silence] = {}
        self._beats = 0
        self._busy: float | None = None
        self._calls: queue.SimpleQueue[_Call[Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="tensorlift-ranks", daemon=True)
        _all.add(self)
        try:
            self._thread.start()  # waits for it, and may be interrupted
        except BaseException as error:
            self.give_up(error)
            raise

    def ask(self, what: Callable[[Any], T]) -> T:
        """``what(store)``; raises the end of the load where the store does not answer."""
        if self._lost and self.failure is not None:
            raise self.failure.error()
        call = _Call(what)
        self._calls.put(call)
        if not self._waited(call.done):
            raise self.lost(f"no answer for {self._patience:g} seconds").error()
        if call.failed is not None:
            raise self.lost(_line(call.failed)).error() from call.failed
        return call.value

    def check(self) -> None:
        """Raises what ended the load elsewhere: DisagreementError, PeerError."""
        busy = self._busy
        if self.failure is None and busy is not None and time.monotonic() - busy > self._patience:
            # This process may have stood still, and the answer be there: the thread gets the time to say so.
            for _ in range(max(1, round(self._period / _SLICE))):
                if self._busy != busy:
                    break
                time.sleep(_SLICE)
            if self._busy == busy:
                self.lost(f"no answer for {self._patience:g} seconds")
        if self.failure is not None:
            raise self.failure.error()

    def give_up(self, error: BaseException) -> None:
        """Tells the others why this rank does not come after all, and ends the thread."""
        rank = self.members.rank
        text = f"{self.members.name(rank)} failed: {type(error).__name__}"
        failure = Failure(self.members.world_ranks[rank], "error", text)
        if self._thread.is_alive():
            with contextlib.suppress(RanksError):
                self.ask(partial(self.post, failure=failure))
        self.close()

    def close(self) -> None:
        """Ends the thread, which is not waited for."""
        self._calls.put(None)

    def join(self, seconds: float) -> None:
        """Waits for the thread."""
        self._thread.join(seconds)

    def post(self, store: Any, failure: Failure) -> None:
        """Puts a failure on the board, where there is none, and stops the gathers; to be asked."""
        # Text of any program: what is no Unicode would not get through.
        text = failure.text.encode(errors="replace").decode()[:_LONGEST_TEXT]
        failure = msgspec.structs.replace(failure, text=text)
        first = store.compare_set("failure", "", msgspec.json.encode(failure).decode())
        self.failure = self.failure or msgspec.json.decode(bytes(first), type=Failure)
        self._look(store)

    def lost(self, why: str) -> Failure:
        """The store does not answer: its host is gone, and most likely it was a rank of this host."""
        failure = self.failure
        if failure is None:
            gone = self._ended()
            who = "" if gone is None else f", {self.members.name(gone)} is gone"
            rank = -1 if gone is None else self.members.world_ranks[gone]
            failure = Failure(rank, "gone", f"the store of the process group does not answer{who}: {why}")
            self.failure = failure
        self._lost = True
        with self.lock:
            self.frozen = True
        return failure

    def _waited(self, done: threading.Event) -> bool:
        # In slices: a process that stood still for long must not take that for the store's silence.
        waited = 0.0
        while waited < self._patience + self._period:
            if done.wait(_SLICE):
                return True
            if not self._thread.is_alive():
                return done.is_set()
            waited += _SLICE
        return False

    def _run(self) -> None:
        due = 0.0
        call: _Call[Any] | None
        try:
            self._busy = time.monotonic()
            store = self.members.store()
            if not is_served_here(store):
                self._patience = self._limit
            while True:
                self._busy = None
                try:
                    call = self._calls.get(timeout=max(0.0, due - time.monotonic()))
                except queue.Empty:
                    self._busy = time.monotonic()
                    self._look(store)
                    self._look_after(store)
                    due = time.monotonic() + self._period
                    continue
                if call is None:
                    return
                self._busy = time.monotonic()
                call.run(store)
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody looks any more
            self.lost(_line(error))
        finally:
            self._busy = None

    def _look(self, store: Any) -> None:
        """Takes a failure from the board; says then how many gathers there were."""
        if self.failure is None and (found := taken(store, "failure")) is not None:
            self.failure = msgspec.json.decode(found, type=Failure)
        if self.failure is None:
            return
        with self.lock:
            self.frozen = True
            told, self._told = self._told, True
        if told:
            return
        count = self.members.count
        store.set(f"issued/{self.members.rank}", msgspec.json.encode(self.issued))
        if store.add("stopped", 1) == count:
            issued = [bytes(store.get(f"issued/{rank}")) for rank in range(count)]
            store.set("agreed", max(issued, key=lambda widths: len(msgspec.json.decode(widths))))

    def _look_after(self, store: Any) -> None:
        """Gives a sign, and says who is gone."""
        members = self.members
        self._beats += 1
        store.set(f"beat/{members.rank}", str(self._beats))
        gone, why = self._ended(), "its process has ended"
        for rank in self._listened_to() if gone is None else ():
            silence = self._silence.setdefault(rank, _Silence())
            silent = silence.seconds(taken(store, f"beat/{rank}"), 3 * self._period)
            if silent > self._limit:
                gone, why = rank, f"it gave no sign for {silent:.1f} seconds"
                break
        if gone is None:
            return
        if store.check([f"through/{gone}"]) or store.check(["all done"]):
            self._through.add(gone)
        elif self.failure is None:
            text = f"{members.name(gone)} is gone: {why}"
            self.post(store, Failure(members.world_ranks[gone], "gone", text))

    def _listened_to(self) -> list[int]:
        """Ranks that this process can only hear."""
        me, known, count = self.members.rank, dict(self.processes), self.members.count
        if len(known) == count:
            ranks: Sequence[int] = heard_by(me, [known[rank].host for rank in range(count)])
        else:
            # Rank 0 has not said yet who is there: it listens to all, and they to it.
            ranks = list(known) if me == 0 else [0] if 0 in known else []
        return [
            rank
            for rank in ranks
            if rank != me and rank not in self._through and not known[rank].is_beside(self.process)
        ]

    def _ended(self) -> int | None:
        """A rank of this host whose process has ended, and which was not through."""
        for rank, process in list(self.processes.items()):
            if rank == self.members.rank or rank in self._through:
                continue
            if process.is_beside(self.process) and process.is_gone():
                return rank
        return None


def taken(store: Any, key: str) -> bytes | None:
    """What is there under a key, without waiting for it."""
    return bytes(store.get(key)) if store.check([key]) else None


def is_served_here(store: Any) -> bool:
    """Whether the store's server is on this host, as far as its address tells."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = getattr(store, "host", None)
    if not isinstance(host, str):
        return False
    with contextlib.suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            # Only an address of one's own can be bound to.
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as own:
                own.bind((address[0], 0))
                return True
    return False


def heard_by(rank: int, hosts: Sequence[str]) -> list[int]:
    """The ranks that ``rank`` listens to: those after it that are on one host, and that another one.

    So each rank that any other host has ranks beside is listened to by one rank of another host: the nearest
    before it. An unknown host ("") is like no other.
    """
    found: list[int] = []
    for step in range(1, len(hosts)):
        other = (rank + step) % len(hosts)
        if hosts[other] == "":
            return found or [other]
        if hosts[other] == hosts[rank] or (found and hosts[other] != hosts[found[0]]):
            break
        found.append(other)
    return found


class _Call(Generic[T]):
    """Something that is asked of the store by another thread."""

    value: T

    def __init__(self, what: Callable[[Any], T]) -> None:
        self._what = what
        self.failed: Exception | None = None
        self.done = threading.Event()

    def run(self, store: Any) -> None:
        try:
            self.value = self._what(store)
        except Exception as error:  # noqa: BLE001 - raised where it was asked
            self.failed = error
        self.done.set()


class _Silence:
    """How long a rank has given no sign, as far as somebody listened."""

    def __init__(self) -> None:
        self._heard: bytes | None = b"none yet"
        self._seconds, self._last = 0.0, time.monotonic()

    def seconds(self, sign: bytes | None, most: float) -> float:
        """``most``: what one look adds; whoever stood still for longer has not listened."""
        now = time.monotonic()
        self._seconds += min(now - self._last, most)
        self._last = now
        if sign != self._heard:
            self._heard, self._seconds = sign, 0.0
        return self._seconds


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


# A daemon thread that comes back from the store while the interpreter ends takes the process down with it.
_all: weakref.WeakSet[Watch] = weakref.WeakSet()


@atexit.register
def _at_exit() -> None:
    watches = list(_all)
    for watch in watches:
        watch.close()
    for watch in watches:
        with contextlib.suppress(RuntimeError):  # it was never started
            watch.join(1.0)
