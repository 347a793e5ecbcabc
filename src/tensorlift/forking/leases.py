"""Who reads a seed's weights, until when, and of which epoch: a table without a clock or a lock of its own.

A reader holds a lease, renews it while it reads, and gives it back. A change of the weights refuses new
leases, waits for those that are live, and then moves the epoch on, whether they ended or not. So bytes that
were read are of one epoch if the epoch behind the read is that of the lease: a reader whose lease lapsed
while it was stopped finds another one and starts again. Memory may go when no lease is live.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from tensorlift.errors import RequestError

__all__ = ["Lease", "LeaseRefusedError", "Leases"]

_ENDED = {
    "closed": "this seed is closed: nobody reads its weights, and they may be changed",
    "moved": "this seed has ended, as the log says: outside of an update a tensor got other memory than it "
    "offers; begin another one",
}


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to read until ``until``, in seconds of the seed's clock."""

    id: str
    epoch: int
    until: float


class LeaseRefusedError(Exception):
    """No lease now; ``reason`` is updating, full, closed, moved (see Leases.close()) or lapsed."""

    def __init__(self, reason: str, retry_seconds: float | None = None) -> None:
        """``retry_seconds``: when to ask again; None where that will not help."""
        super().__init__(reason)
        self.reason, self.retry_seconds = reason, retry_seconds


class Leases:
    """The leases of one seed. ``now`` is always the same clock's; the caller locks around each call."""

    def __init__(self, most_readers: int, longest_seconds: float) -> None:
        """A lease is for ``longest_seconds`` at most, and for no more than ``most_readers`` at once."""
        self.epoch = 0
        self.granted = 0
        """Leases that were given."""
        self.refused = 0
        """Leases that were not given, or not prolonged."""
        self._most, self._longest = most_readers, longest_seconds
        self._live: dict[str, Lease] = {}
        self._updating, self._closed = False, ""

    def live(self, now: float) -> int:
        """How many have not ended; those that have lapsed are forgotten."""
        self._live = {id: lease for id, lease in self._live.items() if lease.until > now}
        return len(self._live)

    def holds(self, id: str, now: float) -> bool:
        """Whether that is a live lease."""
        lease = self._live.get(id)
        return lease is not None and lease.until > now

    def next_end(self, now: float) -> float:
        """When the first of those that are live lapses; ``now`` where none is."""
        return min((lease.until for lease in self._live.values()), default=now)

    def grant(self, seconds: float, now: float) -> Lease:
        """A new one; LeaseRefusedError."""
        if self._closed:
            raise self._refusal(self._closed)
        if self._updating:
            raise self._refusal("updating", 0.1)
        if self.live(now) >= self._most:
            raise self._refusal("full", max(0.1, min(lease.until for lease in self._live.values()) - now))
        self.granted += 1
        return self._put(secrets.token_hex(16), seconds, now)

    def renew(self, id: str, seconds: float, now: float) -> Lease:
        """The same for longer; LeaseRefusedError where it has lapsed or its epoch is over."""
        self.live(now)
        lease = self._live.get(id)
        if lease is None or lease.epoch != self.epoch:
            raise self._refusal("lapsed")
        if self._updating or self._closed:
            # It keeps what it has: an update waits for that, not for ever.
            return lease
        return self._put(id, seconds, now)

    def release(self, id: str) -> None:
        """Gives it back; one that is not there is none any more."""
        self._live.pop(id, None)

    def begin_update(self) -> None:
        """From now on no lease is given or prolonged; RequestError for a second one, and behind the end."""
        if self._closed:
            raise RequestError(_ENDED[self._closed])
        if self._updating:
            raise RequestError("these weights are being updated already; one update at a time")
        self._updating = True

    def move_on(self) -> None:
        """The epoch behind the update: what is read from now on is not what a lease before was for."""
        self.epoch += 1
        self._live.clear()

    def end_update(self) -> None:
        """Leases are given again."""
        self._updating = False

    def close(self, reason: str = "closed") -> None:
        """No lease is given any more, nor prolonged beyond what it has. ``reason``: the first counts; moved:
        a tensor has other memory than what is offered.
        """
        self._closed = self._closed or reason

    def _put(self, id: str, seconds: float, now: float) -> Lease:
        lease = Lease(id, self.epoch, now + min(seconds, self._longest))
        self._live[id] = lease
        return lease

    def _refusal(self, reason: str, retry_seconds: float | None = None) -> LeaseRefusedError:
        self.refused += 1
        return LeaseRefusedError(reason, retry_seconds)
