"""Extents: half-open byte ranges [start, stop) of one named thing, a file or memory, as two int64 arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Extents", "merge_extents", "overlapping"]

Ints = npt.NDArray[np.int64]


class Extents(NamedTuple):
    """Ranges [starts[i], stops[i]) in bytes."""

    starts: Ints
    stops: Ints

    @property
    def nbytes(self) -> int:
        """Bytes of all, counted with repetition."""
        return int((self.stops - self.starts).sum())


def merge_extents(extents: Extents, gap: int = 0) -> Extents:
    """The union in ascending order; ranges that overlap, touch or lie at most ``gap`` bytes apart become one.

    Empty ranges are dropped.
    """
    some = extents.stops > extents.starts
    order = np.argsort(extents.starts[some], kind="stable")
    starts, stops = extents.starts[some][order], extents.stops[some][order]
    if len(starts) == 0:
        return Extents(starts, stops)
    reach = np.maximum.accumulate(stops)
    first = np.concatenate(([True], starts[1:] > reach[:-1] + gap))
    last = np.concatenate((first[1:], [True]))
    return Extents(starts[first], reach[last])


def overlapping(extents: Extents) -> npt.NDArray[np.bool_]:
    """For each range, whether it shares a byte with another one; an empty range shares none."""
    found = np.zeros(len(extents.starts), bool)
    some = np.flatnonzero(extents.stops > extents.starts)
    if len(some) < 2:
        return found
    order = some[np.argsort(extents.starts[some], kind="stable")]
    starts, stops = extents.starts[order], extents.stops[order]
    reach = np.maximum.accumulate(stops)
    # A range overlaps an earlier one if it starts before their reach; the next one overlaps it if it starts
    # before its own end (all later ones start no earlier than the next).
    behind = starts[1:] < reach[:-1]
    ahead = starts[1:] < stops[:-1]
    found[order[1:]] |= behind
    found[order[:-1]] |= ahead
    return found
