"""The ranks behind one URL: a table of who has which weights, without a clock of its own.

Each rank of an instance is a seed with a URL of its own. They join one of them, the front, and a fork asks
that one where the weights of its own rank are. Nobody polls: a rank says now and then that it is still there,
and who has not is forgotten when somebody asks.
"""

from __future__ import annotations

import threading
from typing import Annotated

import msgspec

from tensorlift.errors import RequestError
from tensorlift.forking.keys import told_key
from tensorlift.forking.manifest import ModelKey, rank_problem

__all__ = ["JoinAnswer", "JoinRequest", "Rank", "RankTable", "RanksAnswer"]

_MOST = 1024
_SECONDS = 180.0


class JoinRequest(msgspec.Struct, frozen=True):
    """What a rank says to its front."""

    instance: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$", max_length=32)]
    key: ModelKey
    url: Annotated[str, msgspec.Meta(max_length=200)]


class JoinAnswer(msgspec.Struct):
    """How long it is known; it has to say it again before."""

    seconds: float


class Rank(msgspec.Struct, frozen=True):
    """Whose weights are where; without a URL they are those of the seed that answers."""

    key: ModelKey
    url: str = ""


class RanksAnswer(msgspec.Struct):
    """All that stand behind a URL."""

    ranks: tuple[Rank, ...]


class RankTable:
    """Who has joined a seed. Threads may call at once; ``now`` is always the same clock's."""

    def __init__(self, own: ModelKey, most: int = _MOST, seconds: float = _SECONDS) -> None:
        """``own``: the seed's; a rank that is silent for ``seconds`` is none any more."""
        self._own, self._most, self._seconds = own, most, seconds
        self._lock = threading.Lock()
        self._joined: dict[str, tuple[Rank, float]] = {}

    def put(self, instance: str, rank: Rank, now: float) -> float:
        """It is known for so many seconds; RequestError.

        Another one with the same key and URL is forgotten: a process that has begun again comes with a new
        instance. One at another URL may be of another start, whose front has its port from here: it stays.
        """
        if problem := rank_problem(rank.key):
            raise RequestError(f"its key has {problem}")
        if rank.key == self._own:
            raise RequestError(f"{told_key(rank.key)} is here already, at the seed that is joined")
        with self._lock:
            self._forget(now)
            same = [(id, known) for id, (known, _) in self._joined.items() if known.key == rank.key]
            for other, known in same:
                if other != instance and known.url != rank.url:
                    raise RequestError(
                        f"{told_key(rank.key)} is here already, at {known.url}: give each instance a port of "
                        f"its own; if that one has ended, it is forgotten within {self._seconds:g} s"
                    )
                del self._joined[other]
            if len(self._joined) >= self._most and instance not in self._joined:
                raise RequestError(f"{self._most:,} ranks have joined already")
            self._joined[instance] = rank, now + self._seconds
        return self._seconds

    def drop(self, instance: str) -> None:
        """It ends; one that is not there is none any more."""
        with self._lock:
            self._joined.pop(instance, None)

    def ranks(self, now: float) -> tuple[Rank, ...]:
        """The seed's own first."""
        with self._lock:
            self._forget(now)
            return Rank(self._own), *(rank for rank, _ in self._joined.values())

    def _forget(self, now: float) -> None:
        self._joined = {id: entry for id, entry in self._joined.items() if entry[1] > now}
