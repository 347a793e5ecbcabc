"""The embedded registry: a table in memory, and behind it a file for what must not be lost.

Of a seed the file has what it announced; who reads from it, and until when it is known, is memory's alone:
behind a restart every seed is known for one lease, in which it renews or is gone.
"""

from __future__ import annotations

import collections
import contextlib
import random
import threading
import time
from collections.abc import Callable, Collection

import msgspec

from tensorlift.errors import RequestError, SeedError
from tensorlift.fleet.choosing import Seen, chosen
from tensorlift.fleet.contract import (
    LEASE_SECONDS,
    RECENT,
    SENT_SECONDS,
    Announcement,
    ForkReport,
    Load,
    Near,
    View,
    check_announcement,
    check_report,
    lease_seconds,
)
from tensorlift.fleet.store import NotWrittenError, Store
from tensorlift.forking.keys import told_key, what_is_there
from tensorlift.forking.manifest import ModelKey

__all__ = ["Table"]

_MOST_SEEDS = _MOST_FORKS = 20_000
# Of keys, three for each: nobody withdraws them, and each is a line of the metrics.
_MOST_COUNTS = 60_000


class _Known(msgspec.Struct):
    seed: Announcement
    until: float
    sent: tuple[float, ...] = ()
    """Forks that were sent to it and have not come: until when each counts."""


class Table:
    """A Registry in this process. Raises NotWrittenError too, where the file takes no more."""

    def __init__(
        self,
        store: Store,
        lease: float = LEASE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """With what the store has; closes it. Raises FileError."""
        self._store, self._least, self._clock, self._chance = store, lease, clock, chance
        self._lock = threading.Lock()
        end = clock() + lease
        self._seeds = {seed.instance: _Known(seed, end) for seed in store.seeds()}
        self._forks: dict[str, tuple[ForkReport, float]] = {}
        self._ended = collections.Counter(store.ended())
        self._recent: collections.deque[tuple[ForkReport, str]] = collections.deque(maxlen=RECENT)

    def announce(self, seed: Announcement) -> float:
        """See Registry. RequestError for what is none."""
        check_announcement(seed)
        with self._lock:
            self._forget()
            if len(self._seeds) >= _MOST_SEEDS and seed.instance not in self._seeds:
                raise RequestError(f"{_MOST_SEEDS:,} seeds are known already")
            self._store.put(seed)
            # A process that has begun again on the same port is another instance.
            for other in [id for id, known in self._seeds.items() if known.seed.url == seed.url]:
                if other != seed.instance:
                    self._drop(other)
            return self._kept(seed)

    def _kept(self, seed: Announcement) -> float:
        seconds, before = lease_seconds(len(self._seeds), self._least), self._seeds.get(seed.instance)
        sent = () if before is None else before.sent[max(0, seed.load.leases - before.seed.load.leases) :]
        self._seeds[seed.instance] = _Known(seed, self._clock() + seconds, sent)
        return seconds

    def renew(self, instance: str, load: Load) -> float | None:
        """See Registry."""
        with self._lock:
            self._forget()
            known = self._seeds.get(instance)
            return None if known is None else self._kept(msgspec.structs.replace(known.seed, load=load))

    def withdraw(self, instance: str) -> None:
        """See Registry."""
        with self._lock:
            if self._seeds.pop(instance, None) is not None:
                self._store.drop(instance)

    def candidates(
        self, key: ModelKey, near: Near, count: int = 1, without: Collection[str] = ()
    ) -> list[str]:
        """See Registry."""
        with self._lock:
            self._forget()
            waiting = sum(fork.key == key and fork.state == "waiting" for fork, _ in self._forks.values())
            try:
                found = chosen(self._seen(key), near, count, without, self._chance, waiting)
            except SeedError as error:
                there = "" if error.retry_seconds else f"; there is {self._what_else(key) or 'nothing'}"
                raise SeedError(f"{told_key(key)}: {error}{there}", error.retry_seconds) from None
            for one in found:
                self._seeds[one.instance].sent += (self._clock() + SENT_SECONDS,)
            return [one.url for one in found]

    def _seen(self, key: ModelKey) -> list[Seen]:
        found, now = list[Seen](), self._clock()
        for id, known in self._seeds.items():
            if (seed := known.seed).key == key:
                load = seed.load.readers + sum(until > now for until in known.sent)
                found.append(Seen(id, seed.url, seed.weights, seed.near, load, seed.most_readers))
        return found

    def _what_else(self, key: ModelKey) -> str:
        return what_is_there(dict.fromkeys(known.seed.key for known in self._seeds.values()), key)

    def report(self, fork: ForkReport) -> float:
        """See Registry. RequestError for what is none."""
        check_report(fork)
        with self._lock:
            self._forget()
            seconds = lease_seconds(len(self._forks), self._least)
            if fork.has_ended:
                if self._is_counted(fork.key, fork.state):
                    self._store.count(fork.key, fork.state)
                self._end(fork, fork.state)
            else:
                if len(self._forks) >= _MOST_FORKS and fork.fork not in self._forks:
                    raise RequestError(f"{_MOST_FORKS:,} forks are under way already")
                self._forks[fork.fork] = fork, self._clock() + seconds
            return seconds

    def _end(self, fork: ForkReport, state: str) -> None:
        self._forks.pop(fork.fork, None)
        if self._is_counted(fork.key, state):
            self._ended[fork.key, state] += 1
        self._recent.appendleft((fork, state))

    def _is_counted(self, key: ModelKey, state: str) -> bool:
        """Unless too many others are."""
        return (key, state) in self._ended or len(self._ended) < _MOST_COUNTS

    def view(self) -> View:
        """What a page shows."""
        with self._lock:
            self._forget()
            seeds = [known.seed for known in self._seeds.values()]
            forks = [fork for fork, _ in self._forks.values()]
            return View(seeds, forks, dict(self._ended), list(self._recent))

    def close(self) -> None:
        """See Registry."""
        with self._lock:
            self._store.close()

    def _drop(self, instance: str) -> None:
        del self._seeds[instance]
        # One that cannot be taken out of the file is known for one lease more behind a restart.
        with contextlib.suppress(NotWrittenError):
            self._store.drop(instance)

    def _forget(self) -> None:
        now = self._clock()
        for id in [id for id, known in self._seeds.items() if known.until <= now]:
            self._drop(id)
        for fork in [fork for fork, until in self._forks.values() if until <= now]:
            with contextlib.suppress(NotWrittenError):
                if self._is_counted(fork.key, "lost"):
                    self._store.count(fork.key, "lost")
            self._end(fork, "lost")
