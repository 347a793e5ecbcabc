"""Which seeds are too slow to be waited for: from what they hold and what has come, by a clock of its owner.

Two rules, and where their numbers come from:

- Still: a seed that holds chunks and brings less than STILL_RATE over ``patience`` seconds does as good as
  nothing. A kibibyte a second is far below any limit that somebody sets on purpose (at it a chunk of 16 MiB
  takes four and a half hours), so no seed that works is left for it, and none that drips holds a fork for
  ever. It counts also where nobody else is there: then what is missing comes from files, or the fork fails.
- Late: nothing waits any more, another seed is idle, and a chunk is held FACTOR times as long as the fastest
  of those that are idle takes for one, and at least ``patience`` / FLOOR. To bring it again then costs about
  a FACTOR-th of what was waited already; the floor keeps what a busy machine does to times out of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["FACTOR", "FLOOR", "LONGEST_STEP", "STILL_RATE", "Held", "Pace"]

STILL_RATE = 1024
"""Bytes a second."""
FACTOR = 4.0
FLOOR = 5.0
LONGEST_STEP = 1.0
"""Seconds between two looks that count: a fork that was stopped itself blames nobody for it."""


class Held(NamedTuple):
    """A chunk on its way."""

    number: int
    source: str
    nbytes: int
    idle: tuple[str, ...]
    """Other sources that have nothing to do and may bring it."""


class Pace:
    """What is known of each source. No lock and no clock of its own."""

    def __init__(self, patience: float) -> None:
        """``patience``: seconds that a source may do nothing."""
        self._patience = patience
        self._last: float | None = None
        self._watched = 0.0
        self._since: dict[tuple[int, str], float] = {}
        self._window: dict[str, tuple[float, int]] = {}
        self._spent: dict[str, tuple[int, float]] = {}

    def brought(self, source: str, nbytes: int, seconds: float) -> None:
        """A chunk has come, in so many seconds."""
        before, spent = self._spent.get(source, (0, 0.0))
        self._spent[source] = before + nbytes, spent + seconds

    def look(self, now: float, held: Sequence[Held], moved: Mapping[str, int]) -> dict[str, str]:
        """Which sources to leave, and why. ``held``: all chunks on their way; ``moved``: bytes that have come
        from each source since it was connected to, those of chunks on their way with them.
        """
        step = 0.0 if self._last is None else now - self._last
        self._last = now
        self._watched += min(max(step, 0.0), LONGEST_STEP)
        self._since = {
            (one.number, one.source): self._since.get((one.number, one.source), self._watched) for one in held
        }
        busy = {one.source for one in held}
        self._window = {source: seen for source, seen in self._window.items() if source in busy}
        left = {source: self._why_still() for source in sorted(busy) if self._is_still(source, moved[source])}
        needed: set[str] = set()
        for one in held:
            others = [source for source in one.idle if source not in left]
            # Two that are late for one another's chunks are not both left.
            if one.source not in needed.union(left) and others and self._is_late(one, others):
                needed.update(others)
                left[one.source] = (
                    f"it is slow: {one.nbytes:,} bytes were not there after {self._age(one):.1f} s, and "
                    "another seed had nothing to do"
                )
        return left

    def _is_still(self, source: str, moved: int) -> bool:
        since, before = self._window.setdefault(source, (self._watched, moved))
        if moved - before >= STILL_RATE * self._patience:
            self._window[source] = self._watched, moved
            return False
        return self._watched - since >= self._patience

    def _why_still(self) -> str:
        least = int(STILL_RATE * self._patience)
        return f"it stands still: fewer than {least:,} bytes came in {self._patience:g} s"

    def _age(self, one: Held) -> float:
        return self._watched - self._since[one.number, one.source]

    def _is_late(self, one: Held, others: Sequence[str]) -> bool:
        rates = [self._spent[source] for source in others if source in self._spent]
        usual = min((seconds / nbytes for nbytes, seconds in rates if nbytes), default=0.0) * one.nbytes
        return self._age(one) > max(self._patience / FLOOR, FACTOR * usual)
