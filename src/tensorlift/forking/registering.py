"""A seed's regions, made known to an engine of one-sided reads while forks read those that are known already.

To register costs by the region, by the page and by the device, so that which lies together is registered as
one; and an engine may tell others of all that it knows each time, so that small ones go many at a time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tensorlift.engine.abi_fork import Memory
from tensorlift.forking.fabrics import Fabric

__all__ = ["Registration", "Span", "spans_of"]

_log = logging.getLogger("tensorlift")

_MOST_SPANS, _MOST_BYTES = 64, 1 << 30


class Span(NamedTuple):
    """Memory that is registered as one, and which regions lie in it."""

    memory: Memory
    regions: tuple[int, ...]


def spans_of(regions: Sequence[Memory]) -> list[Span]:
    """Regions that lie side by side or on one another as one, and never what lies between; in the order of
    the first region of each, for forks ask in that order. One of no bytes is in none.
    """
    found: list[tuple[Memory, list[int]]] = []
    order = sorted(range(len(regions)), key=lambda at: (regions[at][2:], regions[at][:2]))
    for at in order:
        region = regions[at]
        if not region.nbytes:
            continue
        if found:
            last, inside = found[-1]
            stop = last.address + last.nbytes
            if last[2:] == region[2:] and region.address <= stop:
                nbytes = max(stop, region.address + region.nbytes) - last.address
                found[-1] = last._replace(nbytes=nbytes), [*inside, at]
                continue
        found.append((region, [at]))
    return sorted(
        (Span(memory, tuple(inside)) for memory, inside in found), key=lambda span: min(span.regions)
    )


def _calls(spans: Sequence[Span]) -> Iterator[Sequence[Span]]:
    """Spans that go in one call: many small ones, or one that is large."""
    begin, nbytes = 0, 0
    for at, span in enumerate(spans):
        if at > begin and (at - begin == _MOST_SPANS or nbytes + span.memory.nbytes > _MOST_BYTES):
            yield spans[begin:at]
            begin, nbytes = at, 0
        nbytes += span.memory.nbytes
    if begin < len(spans):
        yield spans[begin:]


class Registration:
    """Of a seed's regions, by a thread of its own, until all are known to the engine or close()."""

    def __init__(self, fabric: Fabric, regions: Sequence[Memory]) -> None:
        """Begins."""
        self._fabric, self._regions = fabric, regions
        begin = time.monotonic()
        self._spans = spans_of(regions)
        self.planning_seconds = time.monotonic() - begin
        self._state = threading.Condition()
        self._known: list[Span] = []
        # One of no bytes is never read.
        self._ready = {at for at, region in enumerate(regions) if not region.nbytes}
        self._is_ending = False
        self.problem = ""
        """Why not all regions are known, and never will be."""
        self.may_stay = False
        """Something may be known to the engine behind close(): a call of it failed, half way or not."""
        self.seconds = 0.0
        """What registering has taken so far."""
        self._thread = threading.Thread(target=self._run, name="tensorlift-seed-register", daemon=True)
        self._thread.start()

    @property
    def nbytes(self) -> int:
        """Of memory that is known to the engine."""
        with self._state:
            return sum(span.memory.nbytes for span in self._known)

    def _run(self) -> None:
        for spans in _calls(self._spans):
            begin = time.monotonic()
            try:
                self._fabric.register([span.memory for span in spans])
            except Exception as error:  # noqa: BLE001 - who waits is told of whatever a binding raises
                _log.warning("a seed's regions are not registered, so that nobody reads them so: %s", error)
                with self._state:
                    self.problem, self.may_stay = str(error) or type(error).__name__, True
                    self._state.notify_all()
                return
            with self._state:
                self.seconds += time.monotonic() - begin
                self._known += spans
                self._ready.update(at for span in spans for at in span.regions)
                self._state.notify_all()
                if self._is_ending:
                    return

    def wait(self, region: int, seconds: float) -> None:
        """Until a region is known, or will not be, but no longer than so many seconds."""
        with self._state:
            self._state.wait_for(
                lambda: region in self._ready or region >= len(self._regions) or self._is_over(), seconds
            )

    def wait_for_all(self, seconds: float) -> bool:
        """Whether all regions are known, or were within so many seconds."""
        with self._state:
            self._state.wait_for(lambda: self._has_all() or self._is_over(), seconds)
            return self._has_all()

    def _has_all(self) -> bool:
        return len(self._ready) == len(self._regions)

    def _is_over(self) -> bool:
        """No more of them will be known."""
        return bool(self.problem) or self._is_ending

    def places(self) -> list[Memory | None]:
        """Where each region lies; None for one that is not known yet."""
        with self._state:
            return [region if at in self._ready else None for at, region in enumerate(self._regions)]

    def close(self) -> None:
        """The engine knows none any more. A call of the engine that is under way is waited for."""
        with self._state:
            self._is_ending = True
            self._state.notify_all()
        self._thread.join()
        if self._known:
            try:
                self._fabric.unregister([span.memory for span in self._known])
            except Exception as error:  # noqa: BLE001 - the rest of a seed's end does not depend on it
                _log.warning("a seed's regions may stay registered: %s", error)
                self.may_stay = True
