"""What the ranks of one load tell each other, through the store of their group.

Not through collectives: those are what breaks when a rank fails. Every key belongs to one load. A thread
looks at it while the load goes on, so that a rank that waits, or whose consumer is busy, learns of a failure
and says how many gathers it has issued. What there is to read and write is proportional to the number of
ranks, not to its square: rank 0 collects, the others read one answer; a rank looks after the processes of its
own host, and after the next rank where that is on another one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import msgspec

from tensorlift.distributed.members import Members, Process, this_process
from tensorlift.errors import DisagreementError, PeerError, RanksError

__all__ = ["Board", "Failure"]

_SHORTEST, _LONGEST = 0.001, 0.05  # seconds between two looks at a key that is waited for
# Of peer_timeout: until a rank on another host counts as gone. The rest is for telling the others.
_SILENT = 0.6

Kind = Literal["error", "differ", "left", "gone"]


class Failure(msgspec.Struct, frozen=True):
    """Why a load of several ranks ended."""

    rank: int
    """Whose fault it is, in the world; -1: not known."""
    kind: Kind
    text: str

    def error(self) -> RanksError:
        """For the ranks that it is told to."""
        if self.kind == "differ":
            return DisagreementError(self.text)
        return PeerError(self.text, self.rank)


class Board:
    """One load's; made by the first thing that a rank does, closed by the last."""

    def __init__(self, members: Members, peer_timeout: float, join_timeout: float) -> None:
        """Says that this rank is there."""
        self.members, self.peer_timeout = members, peer_timeout
        self._deadline = time.monotonic() + join_timeout
        self._join_timeout = join_timeout
        self._shared = _Shared(members, peer_timeout)
        self._store = members.store()
        self._ask(self._store.set, f"join/{members.rank}", msgspec.json.encode(self._shared.process))
        threading.Thread(
            target=_watch, args=(self._shared, members.store()), name="tensorlift-ranks", daemon=True
        ).start()

    def agree(
        self, what: str, payload: bytes, decide: Callable[[list[bytes]], bytes], *, first: bool = False
    ) -> bytes:
        """What rank 0 decides from the payloads of all ranks; every rank calls it, in the same order.

        ``decide`` runs on rank 0; DisagreementError of it comes out on all. ``first``: ranks may not have
        come yet, and are waited for.
        """
        members, store = self.members, self._store
        self._ask(store.set, f"{what}/{members.rank}", payload)
        if members.rank == 0:
            given = []
            for rank in range(members.count):
                late = partial(self._absent, what, rank) if first else _never
                self._wait(f"{what}/{rank}", late)
                given.append(bytes(self._ask(store.get, f"{what}/{rank}")))
                if first:
                    found = bytes(self._ask(store.get, f"join/{rank}"))
                    self._shared.processes[rank] = msgspec.json.decode(found, type=Process)
            processes = msgspec.json.encode(self._shared.processes) if first else b""
            try:
                answer = decide(given)
            except DisagreementError as error:
                self.fail(Failure(-1, "differ", str(error)))
                raise
            self._ask(store.set, what, len(processes).to_bytes(8, "big") + processes + answer)
            for rank in range(members.count):
                self._ask(store.delete_key, f"{what}/{rank}")
        elif first:
            # Rank 0 says whom it misses; it alone is looked after until it has said who is there.
            self._wait("join/0", partial(self._absent, what, 0))
            found = bytes(self._ask(store.get, "join/0"))
            self._shared.processes[0] = msgspec.json.decode(found, type=Process)
            self._wait(what, partial(self._absent, what, 0), grace=self.peer_timeout)
        self._wait(what, _never)
        found = bytes(self._ask(store.get, what))
        length = int.from_bytes(found[:8], "big")
        if length:
            self._shared.processes = msgspec.json.decode(found[8 : 8 + length], type=dict[int, Process])
        return found[8 + length :]

    def check(self) -> None:
        """Raises what ended the load elsewhere: DisagreementError, PeerError."""
        failure = self._shared.failure
        if failure is not None:
            raise failure.error()

    @property
    def failed(self) -> bool:
        """Whether the load is over on account of a failure, here or elsewhere."""
        return self._shared.failure is not None

    def fail(self, failure: Failure) -> None:
        """Tells all; the first failure of a load is the one that counts. Never raises."""
        self._shared.post(self._store, failure)

    def issue(self, width: int, collective: Callable[[], Any]) -> Any:
        """Issues the next gather, of so many bytes a rank, unless the load is over."""
        # Counted before, not under the lock: the first collective of a group may wait for the other ranks.
        with self._shared.lock:
            open_still = not self._shared.frozen
            if open_still:
                self._shared.issued.append(width)
        if open_still:
            return collective()
        self.check()
        raise RanksError("the load was closed")

    @property
    def issued(self) -> int:
        """Gathers that this rank has issued."""
        return len(self._shared.issued)

    def missed(self) -> list[int] | None:
        """Bytes a rank of the gathers that others have issued and this rank has not, after which all stop.

        None where a rank is gone, so that they will not end.
        """
        deadline = time.monotonic() + self.peer_timeout
        pause = _SHORTEST
        try:
            while not self._store.check(["agreed"]):
                failure = self._shared.failure
                gone = failure is not None and failure.kind == "gone"
                if gone or time.monotonic() > deadline:
                    return None
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST)
            widths = msgspec.json.decode(bytes(self._store.get("agreed")), type=list[int])
        except RuntimeError:  # the store went with its host
            return None
        return widths[self.issued :]

    def end(self) -> None:
        """Waits until every rank is through; raises what ended the load elsewhere."""
        store, members = self._store, self.members
        self.through()
        if self._ask(store.add, "done", 1) == members.count:
            self._ask(store.set, "all done", b"1")
        self._wait("all done", _never)

    def through(self) -> None:
        """Says that this rank is through, and that the end of its process is no failure."""
        self._ask(self._store.set, f"done/{self.members.rank}", b"1")

    def close(self) -> None:
        """Stops looking."""
        self._shared.stop.set()

    def _wait(self, key: str, late: Callable[[], Failure | None], grace: float = 0.0) -> None:
        pause = _SHORTEST
        while not self._ask(self._store.check, [key]):
            self.check()
            if time.monotonic() > self._deadline + grace and (failure := late()) is not None:
                self.fail(failure)
                raise failure.error()
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST)

    def _absent(self, what: str, first: int) -> Failure:
        """Who has not come in time."""
        members = self.members
        absent = [
            rank
            for rank in range(first, members.count)
            if rank != members.rank and not self._ask(self._store.check, [f"{what}/{rank}"])
        ] or [first]
        names = ", ".join(members.name(rank) for rank in absent)
        return Failure(
            members.world_ranks[absent[0]],
            "gone",
            f"{names} did not come to load within join_timeout, {self._join_timeout:g} seconds: every rank "
            "of the group has to load together, and equally often",
        )

    def _ask(self, function: Callable[..., Any], *args: object) -> Any:
        """Asks the store; where it does not answer the load is over."""
        try:
            return function(*args)
        except RuntimeError as error:
            if function == self._store.delete_key:
                return None  # not every store can
            failure = self._shared.lost(error)
            raise failure.error() from error


class _Shared:
    """What the load's thread and the one that looks have in common."""

    def __init__(self, members: Members, peer_timeout: float) -> None:
        self.members, self.peer_timeout = members, peer_timeout
        self.stop = threading.Event()
        # Around the issue of a gather: what is counted and what was issued are one.
        self.lock = threading.Lock()
        self.frozen = self.told = False
        self.issued: list[int] = []
        self.failure: Failure | None = None
        self.process = this_process()
        self.processes: dict[int, Process] = {members.rank: self.process}
        self.through: set[int] = set()

    def post(self, store: Any, failure: Failure) -> None:
        """Puts a failure on the board, where there is none, and stops the gathers."""
        try:
            if store.add("failures", 1) == 1:
                store.set("failure", msgspec.json.encode(failure))
                self.failure = self.failure or failure
            self.look(store)
        except RuntimeError as error:
            self.lost(error)
        self.failure = self.failure or failure

    def look(self, store: Any) -> None:
        """Takes a failure from the board; says then how many gathers there were."""
        if self.failure is None and store.check(["failure"]):
            self.failure = msgspec.json.decode(bytes(store.get("failure")), type=Failure)
        if self.failure is None:
            return
        with self.lock:
            self.frozen = True
            told, self.told = self.told, True
        if told:
            return
        store.set(f"issued/{self.members.rank}", msgspec.json.encode(self.issued))
        if store.add("stopped", 1) == self.members.count:
            all_issued = [bytes(store.get(f"issued/{rank}")) for rank in range(self.members.count)]
            store.set("agreed", max(all_issued, key=lambda widths: widths.count(b",") + (widths != b"[]")))

    def lost(self, error: BaseException) -> Failure:
        """The store does not answer: its host is gone, and most likely it was a rank of this host."""
        if self.failure is None:
            gone = self.gone()
            who = self.members.name(gone) if gone is not None else "the process that serves it"
            self.failure = Failure(
                -1 if gone is None else self.members.world_ranks[gone],
                "gone",
                f"the store of the process group does not answer, {who} is gone: {_line(error)}",
            )
        with self.lock:
            self.frozen = True
        return self.failure

    def gone(self) -> int | None:
        """A rank of this host whose process has ended, and which was not through."""
        for rank, process in list(self.processes.items()):
            ours = process.host and process.host == self.process.host
            if ours and rank not in self.through and process.is_gone():
                return rank
        return None


class _Silence:
    """How long a rank of another host has given no sign."""

    def __init__(self) -> None:
        self._rank, self._heard, self._since = -1, b"", 0.0

    def seconds(self, store: Any, rank: int) -> float:
        key = f"beat/{rank}"
        heard = bytes(store.get(key)) if store.check([key]) else b""
        if (rank, heard) != (self._rank, self._heard):
            self._rank, self._heard, self._since = rank, heard, time.monotonic()
        return time.monotonic() - self._since


def _watch(shared: _Shared, store: Any) -> None:
    """The thread that looks."""
    members, silence, count = shared.members, _Silence(), 0
    period = min(1.0, shared.peer_timeout / 10)
    try:
        while not shared.stop.wait(period):
            shared.look(store)
            count += 1
            store.set(f"beat/{members.rank}", str(count))
            gone, why = shared.gone(), "its process has ended"
            # The next rank, and rank 0 until it has said who is there.
            other = (members.rank + 1) % members.count if len(shared.processes) == members.count else 0
            process = shared.processes.get(other)
            if gone is None and process is not None and process.host != shared.process.host:
                silent = silence.seconds(store, other)
                if other not in shared.through and silent > _SILENT * shared.peer_timeout:
                    gone, why = other, f"it gave no sign for {silent:.1f} seconds"
            if gone is not None and store.check([f"done/{gone}"]):
                shared.through.add(gone)
            elif gone is not None:
                text = f"{members.name(gone)} is gone: {why}"
                shared.post(store, Failure(members.world_ranks[gone], "gone", text))
    except RuntimeError as error:
        if not shared.stop.is_set():
            shared.lost(error)


def _never() -> None:
    """Of a wait that ends with its key or with the load."""


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
