"""Extents: half-open byte ranges [start, stop) of one named thing, a file or memory, as two int64 arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Extents", "merge_extents", "overlapping", "overlaps_itself"]

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


def overlaps_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements of a strided tensor share one place; strides, in elements, are not negative."""
    dims = sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1)
    if any(size == 0 for _, size in dims):
        return False
    if any(stride == 0 for stride, _ in dims):
        return True
    reach, nested = 1, True
    for stride, size in dims:
        nested = nested and stride >= reach
        reach += stride * (size - 1)
    if nested:
        return False
    count = math.prod(size for _, size in dims)
    if count > reach:
        return True
    # Dimensions that are not nested may still miss each other, such as strides 2 and 5: only looking tells.
    taken = np.zeros(reach, bool)
    np.lib.stride_tricks.as_strided(taken, [size for _, size in dims], [stride for stride, _ in dims])[
        ...
    ] = 1
    return int(np.count_nonzero(taken)) < count
