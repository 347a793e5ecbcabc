"""The bytes that a fork still lacks: chunks that sources pull from one queue, each done once.

A source is a seed, or the files of a checkpoint. What one of them has not brought, or has brought wrongly,
goes back into the queue for others; when nobody is left who may bring it, it is what the caller has to get
elsewhere. What was brought and verified stays done, whatever becomes of its source.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tensorlift.plan.extents import Extents, merge_extents

__all__ = ["DIGESTS", "SAMPLED", "Chunk", "ChunkQueue", "checked", "cut"]

DIGESTS = ("full", "sample", "off")
"""Which chunks are compared with their digests."""
SAMPLED = 1 / 8
"""Of the chunks, with ``sample``."""


class Chunk(NamedTuple):
    """Bytes [offset, offset + nbytes) of a region."""

    region: int
    offset: int
    nbytes: int


def cut(region: int, wanted: Extents, chunk_bytes: int) -> list[Chunk]:
    """What is wanted of a region, each byte once, in chunks of at most so many bytes."""
    starts, stops = merge_extents(wanted)
    return [
        Chunk(region, at, min(chunk_bytes, stop - at))
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
        for at in range(start, stop, chunk_bytes)
    ]


def checked(
    chunks: Sequence[Chunk], digests: str, chance: Callable[[], float] = random.random
) -> frozenset[int]:
    """Numbers of the chunks that are compared with their digests, by one of DIGESTS.

    A sample is the first and the last of each region, and each other one with a chance of SAMPLED: of k
    wrong chunks among those all stay unseen with a chance of (1 - SAMPLED) ** k; 88 % for one, 1.4 % for 32.
    A chunk that comes again is checked as it was before.
    """
    if digests != "sample":
        return frozenset(range(len(chunks)) if digests == "full" else ())
    regions = [chunk.region for chunk in chunks]
    last = {region: number for number, region in enumerate(regions)}
    first = {region: number for number, region in reversed(list(enumerate(regions)))}
    drawn = (number for number in range(len(chunks)) if chance() < SAMPLED)
    return frozenset((*first.values(), *last.values(), *drawn))


@dataclass(slots=True)
class _State:
    chunk: Chunk
    failed: set[str] = field(default_factory=set)
    """Sources that brought it wrongly twice, or are gone."""
    holder: str | None = None
    done_by: str | None = None
    attempts: dict[str, int] = field(default_factory=dict)


class ChunkQueue:
    """Which chunks wait, are on their way, or are done. No lock of its own; sources are known by name."""

    ATTEMPTS = 2
    """Of one source at one chunk."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        """All wait, in this order."""
        self._states = [_State(chunk) for chunk in chunks]
        self._waiting = deque(range(len(self._states)))
        self._gone: set[str] = set()
        self.moved_bytes: dict[str, int] = {}
        """By source, what came over the wire, right or wrong."""

    @property
    def is_done(self) -> bool:
        """Nothing is lacking."""
        return not self._waiting and all(state.done_by is not None for state in self._states)

    def take(self, source: str) -> int | None:
        """The number of a chunk for this source to bring; None where there is none for it now."""
        if source in self._gone:
            return None
        for _ in range(len(self._waiting)):
            number = self._waiting.popleft()
            state = self._states[number]
            if source not in state.failed:
                state.holder = source
                state.attempts[source] = state.attempts.get(source, 0) + 1
                return number
            self._waiting.append(number)
        return None

    def chunk(self, number: int) -> Chunk:
        """By its number."""
        return self._states[number].chunk

    def done(self, number: int, source: str) -> None:
        """It was brought and verified."""
        state = self._held(number, source)
        state.holder, state.done_by = None, source
        self._count(source, state.chunk.nbytes)

    def wrong(self, number: int, source: str) -> bool:
        """It was brought wrongly: again, and from somebody else after that. Whether it was the last time."""
        state = self._states[number]
        self.give_back(number, source, state.chunk.nbytes)
        if state.attempts[source] >= self.ATTEMPTS:
            state.failed.add(source)
        return source in state.failed

    def give_back(self, number: int, source: str, moved_bytes: int = 0) -> None:
        """It was not brought, and nothing writes it any more: only now may somebody else bring it."""
        state = self._held(number, source)
        state.holder = None
        self._count(source, moved_bytes)
        self._waiting.appendleft(number)

    def leave(self, source: str) -> None:
        """The source is gone or too slow: it gets nothing more. What it has done stays; what it holds it has
        to give back or to do, for it may still be writing.
        """
        self._gone.add(source)

    def held(self) -> Iterator[tuple[int, str]]:
        """Chunks on their way, by number, and with whom."""
        return ((number, state.holder) for number, state in enumerate(self._states) if state.holder)

    def may(self, number: int, source: str) -> bool:
        """Whether this source would get that chunk."""
        return source not in self._gone and source not in self._states[number].failed

    def kept(self) -> Iterator[tuple[int, str]]:
        """Chunks that are done, by number, and who brought them."""
        return ((number, state.done_by) for number, state in enumerate(self._states) if state.done_by)

    def bytes_by_source(self) -> dict[str, int]:
        """What is done, by who brought it."""
        found: dict[str, int] = {}
        for state in self._states:
            if state.done_by is not None:
                found[state.done_by] = found.get(state.done_by, 0) + state.chunk.nbytes
        return found

    def _count(self, source: str, nbytes: int) -> None:
        self.moved_bytes[source] = self.moved_bytes.get(source, 0) + nbytes

    def _held(self, number: int, source: str) -> _State:
        state = self._states[number]
        if state.holder != source:
            raise LookupError(f"chunk {number} is not with {source!r}, but with {state.holder!r}")
        return state
