"""Regions against sets of bytes: all tensors are in them, and nothing of blocks that are not the model's."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorlift.errors import RequestError
from tensorlift.forking.regions import Blocks, Placed, Regions, regions_by_block, regions_by_storage
from tensorlift.plan.extents import Extents


def extents(pairs: list[tuple[int, int]]) -> Extents:
    return Extents(*(np.array([pair[at] for pair in pairs], np.int64) for at in (0, 1)))


def placed(spans: list[tuple[int, int]], storages: list[int] | None = None) -> Placed:
    owners = storages or [start for start, _ in spans]
    return Placed([f"t{k}" for k in range(len(spans))], extents(spans), np.array(owners, np.int64))


def blocks(pairs: list[tuple[int, int]], segments: list[int]) -> Blocks:
    return Blocks(extents(pairs), np.array(segments, np.int64))


def pairs(regions: Regions) -> list[tuple[int, int]]:
    return list(zip(*(part.tolist() for part in regions.extents), strict=True))


def test_one_region_a_storage() -> None:
    # Two tensors of one storage with a hole between them, a tied one, and one beside them.
    found = regions_by_storage(placed([(110, 120), (100, 104), (100, 104), (120, 130)], [96, 96, 96, 120]))
    assert pairs(found) == [(100, 120), (120, 130)]
    assert found.region_of.tolist() == [0, 0, 0, 1]
    assert found.offsets.tolist() == [10, 0, 0, 0]


def test_regions_come_in_the_order_of_their_tensors() -> None:
    found = regions_by_storage(placed([(500, 510), (100, 110), (520, 530)], [500, 100, 500]))
    assert pairs(found) == [(500, 530), (100, 110)]
    assert found.region_of.tolist() == [0, 1, 0]


def test_adjacent_blocks_of_a_segment_are_one_region() -> None:
    #       segment 0: ours, ours, foreign, ours; segment 100 begins where segment 0 ends: ours
    known = blocks([(0, 20), (20, 40), (40, 60), (60, 100), (100, 120)], [0, 0, 0, 0, 100])
    found = regions_by_block(placed([(2, 18), (20, 30), (30, 40), (70, 100), (100, 110)]), known)
    assert pairs(found) == [(2, 40), (70, 100), (100, 110)]
    assert found.region_of.tolist() == [0, 0, 0, 1, 2]
    assert found.offsets.tolist() == [0, 18, 28, 0, 0]


def test_a_free_block_between_them_is_no_block() -> None:
    found = regions_by_block(placed([(0, 10), (20, 30)]), blocks([(0, 10), (20, 30)], [0, 0]))
    assert pairs(found) == [(0, 10), (20, 30)]


@pytest.mark.parametrize("span", [(0, 8), (12, 22), (15, 26), (40, 44)])
def test_what_no_block_holds_is_named(span: tuple[int, int]) -> None:
    known = blocks([(10, 20), (20, 30)], [10, 10])
    with pytest.raises(RequestError, match=rf"^'t1' \({span[1] - span[0]} bytes\) lies in no block"):
        regions_by_block(placed([(10, 20), span]), known)


def test_nothing() -> None:
    assert pairs(regions_by_storage(placed([]))) == []
    assert pairs(regions_by_block(placed([]), blocks([], []))) == []


@settings(deadline=None)
@given(st.data())
def test_every_byte_of_a_region_is_in_a_block_that_is_ours(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=12))
    gaps = data.draw(st.lists(st.sampled_from([0, 0, 3]), min_size=len(sizes), max_size=len(sizes)))
    new = data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    made, segments, end, segment = [], [], 0, 0
    for size, gap, fresh in zip(sizes, gaps, new, strict=True):
        end += gap
        segment = end if fresh else segment
        made.append((end, end + size))
        segments.append(segment)
        end += size
    owners = data.draw(st.lists(st.integers(0, len(made) - 1), max_size=20))
    spans = []
    for owner in owners:
        low = data.draw(st.integers(made[owner][0], made[owner][1] - 1))
        spans.append((low, data.draw(st.integers(low + 1, made[owner][1]))))
    found = regions_by_block(placed(spans), blocks(made, segments))
    ours = {byte for owner in owners for byte in range(*made[owner])}
    covered = [set(range(*pair)) for pair in pairs(found)]
    assert set().union(*covered) <= ours
    assert sum(map(len, covered)) == len(set().union(*covered))
    for (start, stop), region, offset in zip(spans, found.region_of, found.offsets, strict=True):
        assert pairs(found)[region][0] + offset == start
        assert stop <= pairs(found)[region][1]
    # No two that could be one.
    begins = dict(zip((start for start, _ in made), segments, strict=True))
    ascending = sorted(pairs(found))
    for (_, stop), (start, _) in itertools.pairwise(ascending):
        assert not (stop == start and start in begins and begins[start] < start)


def test_many() -> None:
    count = 100_000
    starts = np.arange(count, dtype=np.int64) * 1024
    spans = Extents(starts, starts + 1000)
    begin = time.perf_counter()
    found = regions_by_block(
        Placed(["t"] * count, spans, starts), Blocks(Extents(starts, starts + 1024), starts // (1024 * 20))
    )
    assert len(found.extents.starts) == count // 20
    print(f"{time.perf_counter() - begin:.3f} s")
