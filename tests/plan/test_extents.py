"""Extents against sets of bytes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tensorlift.plan.extents import Extents, merge_extents, overlapping, overlaps_itself

RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=12)


def extents(ranges: list[tuple[int, int]]) -> Extents:
    starts = np.array([start for start, _ in ranges], np.int64)
    return Extents(starts, starts + np.array([size for _, size in ranges], np.int64))


def covered(given: Extents) -> set[int]:
    return {byte for start, stop in zip(*given, strict=True) for byte in range(start, stop)}


@given(RANGES)
def test_merging_keeps_every_byte_and_leaves_gaps(ranges: list[tuple[int, int]]) -> None:
    merged = merge_extents(extents(ranges))
    assert covered(merged) == covered(extents(ranges))
    assert (merged.starts[1:] > merged.stops[:-1]).all()
    assert merged.nbytes == len(covered(merged))


@given(RANGES, st.integers(0, 10))
def test_merging_over_gaps(ranges: list[tuple[int, int]], gap: int) -> None:
    merged = merge_extents(extents(ranges), gap)
    assert covered(merged) >= covered(extents(ranges))
    assert (merged.starts[1:] - merged.stops[:-1] > gap).all()
    ends = {byte for start, stop in zip(*merged, strict=True) for byte in (start, stop - 1)}
    assert ends <= covered(extents(ranges))


@given(RANGES)
def test_overlapping_is_sharing_a_byte(ranges: list[tuple[int, int]]) -> None:
    sets = [set(range(start, start + size)) for start, size in ranges]
    slow = [any(one & other for at, other in enumerate(sets) if at != this) for this, one in enumerate(sets)]
    assert overlapping(extents(ranges)).tolist() == slow


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=4))
def test_a_strided_tensor_that_overlaps_itself(dims: list[tuple[int, int]]) -> None:
    shape, strides = [size for size, _ in dims], [stride for _, stride in dims]
    places = [sum(map(int.__mul__, at, strides)) for at in np.ndindex(*shape)]
    assert overlaps_itself(shape, strides) == (len(set(places)) < len(places))
