"""What the ranks of one load tell each other, through the store of their group.

Not through collectives: those are what breaks when a rank fails. A thread looks at it while the load goes on
(`watch`), so that a rank that waits, or whose consumer is busy, learns of a failure and says how many gathers
it has issued. What there is to read and write is proportional to the number of ranks, not to its square:
rank 0 collects, the others read one answer.

Each load has keys of its own, by the number of loads of these ranks before it. Where a rank did not come to a
load, because its program raised before it, that rank's number stays behind. The failure of the load that was
given up names it, and when it comes to a load next it passes over those: so all meet again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from tensorlift.distributed.members import Members, Process
from tensorlift.distributed.watch import Failure, Watch, taken
from tensorlift.errors import DisagreementError, RanksError

__all__ = ["Board", "Failure"]

_SHORTEST, _LONGEST = 0.001, 0.05  # seconds between two looks at a key that is waited for


class Board:
    """One load's; made by the first thing that a rank does, closed by the last."""

    def __init__(self, members: Members, peer_timeout: float, join_timeout: float) -> None:
        """Says that this rank is there."""
        self.peer_timeout, self._join_timeout = peer_timeout, join_timeout
        self._deadline = time.monotonic() + join_timeout
        self._done = False
        self.members, self._watch = members, Watch(members, peer_timeout)
        try:
            while not self._watch.ask(self._join):
                self._watch.close()
                self.members = self.members.skipping()
                self._watch = Watch(self.members, peer_timeout)
        except BaseException as error:
            self._watch.give_up(error)
            raise

    def _join(self, store: Any) -> bool:
        found = taken(store, "failure")
        if found is not None and self.members.rank in msgspec.json.decode(found, type=Failure).absent:
            return False
        store.set(f"join/{self.members.rank}", msgspec.json.encode(self._watch.process))
        return True

    def agree(
        self, what: str, payload: bytes, decide: Callable[[list[bytes]], bytes], *, first: bool = False
    ) -> bytes:
        """What rank 0 decides from the payloads of all ranks; every rank calls it, in the same order.

        ``decide`` runs on rank 0; DisagreementError of it comes out on all. ``first``: ranks may not have
        come yet, and are waited for.
        """
        members, watch = self.members, self._watch
        watch.ask(lambda store: store.set(f"{what}/{members.rank}", payload))
        if members.rank == 0:
            for rank in range(members.count if first else 0):
                watch.processes[rank] = self._process(rank)
            given = [self._wait(f"{what}/{rank}") for rank in range(members.count)]
            try:
                answer = decide(given)
            except DisagreementError as error:
                self.fail(Failure(-1, "differ", str(error)))
                raise
            processes = msgspec.json.encode(watch.processes) if first else b""
            whole = len(processes).to_bytes(8, "big") + processes + answer
            watch.ask(partial(_publish, what=what, whole=whole, count=members.count))
            return answer
        if first:
            # Rank 0 says whom it misses; it alone is looked after until it has said who is there.
            watch.processes[0] = self._process(0)
            whole = self._wait(what, self._absent, grace=self.peer_timeout)
        else:
            whole = self._wait(what)
        length = int.from_bytes(whole[:8], "big")
        if length:
            watch.processes = msgspec.json.decode(whole[8 : 8 + length], type=dict[int, Process])
        return whole[8 + length :]

    def check(self) -> None:
        """Raises what ended the load elsewhere: DisagreementError, PeerError."""
        self._watch.check()

    @property
    def failed(self) -> bool:
        """Whether the load is over on account of a failure, here or elsewhere."""
        return self._watch.failure is not None

    def fail(self, failure: Failure) -> None:
        """Tells all; the first failure of a load is the one that counts. Raises no error."""
        # Where the store went the others find that out too.
        with contextlib.suppress(RanksError):
            self._watch.ask(partial(self._watch.post, failure=failure))

    def counted(self, width: int) -> None:
        """Counts the next gather, of so many bytes a rank; raises if the load is over.

        Before it is issued, and not under one lock with that: the first collective of a group may wait for
        the other ranks. From here on the others count on it, so whatever happens it has to be issued.
        """
        with self._watch.lock:
            if not self._watch.frozen:
                self._watch.issued.append(width)
                return
        self.check()
        raise RanksError("the load was closed")

    @property
    def issued(self) -> int:
        """Gathers that were counted."""
        return len(self._watch.issued)

    def agreed(self) -> list[int] | None:
        """Bytes a rank of all gathers that any rank has counted, after which all stop.

        None where a rank is gone, so that they will not end.
        """
        deadline, pause = time.monotonic() + self.peer_timeout, _SHORTEST
        try:
            while (found := self._watch.ask(lambda store: taken(store, "agreed"))) is None:
                failure = self._watch.failure
                if (failure is not None and failure.kind in ("gone", "absent")) or (
                    time.monotonic() > deadline
                ):
                    return None
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST)
        except RanksError:  # the store went with its host
            return None
        return msgspec.json.decode(found, type=list[int])

    def end(self) -> None:
        """Waits until every rank is through; raises what ended the load elsewhere."""
        if not self._done:
            self._done = True
            self._watch.ask(partial(_done, count=self.members.count))
        self._wait("all done")

    def through(self) -> None:
        """Says that this rank is through, and that the end of its process is no failure."""
        self._watch.ask(lambda store: store.set(f"through/{self.members.rank}", b"1"))

    def close(self) -> None:
        """Stops looking."""
        self._watch.close()

    def _process(self, rank: int) -> Process:
        return msgspec.json.decode(self._wait(f"join/{rank}", self._absent), type=Process)

    def _wait(
        self, key: str, late: Callable[[Any], Failure | None] | None = None, grace: float = 0.0
    ) -> bytes:
        """What comes under a key; ``late(store)``: what it means that it is not there in time."""
        pause = _SHORTEST
        while (found := self._watch.ask(lambda store: taken(store, key))) is None:
            self.check()
            if late is not None and time.monotonic() > self._deadline + grace:
                failure = self._watch.ask(late)
                if failure is not None:
                    self.fail(failure)
                    self.check()
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST)
        return found

    def _absent(self, store: Any) -> Failure | None:
        """Who has not come in time; those that have and are slow are waited for."""
        members = self.members
        absent = [rank for rank in range(members.count) if not store.check([f"join/{rank}"])]
        if not absent:
            return None
        text = (
            f"{', '.join(members.name(rank) for rank in absent)} did not come to load within join_timeout, "
            f"{self._join_timeout:g} seconds: every rank of the group has to load together, and equally often"
        )
        return Failure(members.world_ranks[absent[0]], "absent", text, absent)


def _publish(store: Any, *, what: str, whole: bytes, count: int) -> None:
    store.set(what, whole)
    for rank in range(count):
        try:
            store.delete_key(f"{what}/{rank}")
        except RuntimeError:
            return  # not every store can


def _done(store: Any, *, count: int) -> None:
    if store.add("done", 1) == count:
        store.set("all done", b"1")
