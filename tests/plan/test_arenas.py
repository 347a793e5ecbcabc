"""Layouts against their rules, spelled out slowly: each byte once, aligned, in capacity, few pieces."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorlift.plan.arenas import LONG, PAGE, SMALL, SMALL_ARENA, Layout, Rules, Wanted, lay_out


def wanted(rows: list[tuple[int, int, int, int]]) -> Wanted:
    """From (file, start, size, alignment)."""
    columns = np.array(rows, np.int64).reshape(-1, 4).T
    return Wanted(columns[0].astype(np.int32), columns[1], columns[2], columns[3])


def adjacent(sizes: list[tuple[int, int]], start: int = 1000, file: int = 0) -> Wanted:
    """From (size, alignment), one after another in one file."""
    rows = []
    for size, alignment in sizes:
        rows.append((file, start, size, alignment))
        start += size
    return wanted(rows)


def check(given: Wanted, rules: Rules, layout: Layout) -> None:
    """Every rule that a layout must keep, tensor by tensor and byte range by byte range."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for at, (size, alignment) in enumerate(zip(given.sizes.tolist(), given.alignments.tolist(), strict=True)):
        arena, offset = int(layout.arenas[at]), int(layout.offsets[at])
        if size == 0:
            assert arena == -1
            continue
        assert offset % (16 if rules.device and size >= 16 else alignment) == 0
        assert offset >= 0
        assert offset + size <= layout.arena_used[arena] <= layout.arena_nbytes[arena]
        spans.setdefault(arena, []).append((offset, offset + size))
    for arena, ranges in spans.items():
        ranges.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(ranges)), "two tensors share bytes"
        if len(ranges) > 1:
            assert layout.arena_nbytes[arena] <= rules.capacity
    assert sorted(spans) == list(range(len(layout.arena_nbytes)))
    check_runs(given, layout)
    check_batches(given, layout)


def check_runs(given: Wanted, layout: Layout) -> None:
    """Runs move exactly the wanted bytes, to where the tensors are."""
    moved = {}
    for run in range(len(layout.run_start)):
        for at in range(len(given.starts)):
            inside = int(given.starts[at]) - int(layout.run_start[run])
            same = given.files[at] == layout.run_file[run] and layout.batches[at] == layout.run_batch[run]
            if same and given.sizes[at] and 0 <= inside < layout.run_nbytes[run]:
                assert inside + given.sizes[at] <= layout.run_nbytes[run]
                assert at not in moved, "a tensor is read twice"
                moved[at] = run
                assert layout.run_arena[run] == layout.arenas[at]
                assert layout.run_offset[run] + inside == layout.offsets[at]
    assert len(moved) == int((given.sizes > 0).sum())
    assert layout.run_nbytes.sum() == given.sizes.sum()
    # In an arena, runs ascend: what lies between two neighbours is padding.
    for arena in np.unique(layout.run_arena):
        mine = layout.run_arena == arena
        ends = layout.run_offset[mine] + layout.run_nbytes[mine]
        assert (layout.run_offset[mine][1:] >= ends[:-1]).all()


def check_batches(given: Wanted, layout: Layout) -> None:
    """Batches are consecutive, each of one arena, and the arenas are numbered in the order of use."""
    assert (np.diff(layout.batches) >= 0).all()
    assert layout.batch_count == (int(layout.batches[-1]) + 1 if len(given.starts) else 0)
    for batch in range(layout.batch_count):
        arenas = set(layout.arenas[layout.batches == batch].tolist()) - {-1}
        assert len(arenas) <= 1
    firsts = [int(np.flatnonzero(layout.arenas == arena)[0]) for arena in range(len(layout.arena_nbytes))]
    assert firsts == sorted(firsts)


SIZES = st.one_of(
    st.integers(0, 40), st.integers(0, 3 * SMALL), st.sampled_from([4, 8, 16, LONG - 1, LONG, 3 * LONG + 5])
)


@st.composite
def checkpoints(draw: st.DrawFn) -> Wanted:
    rows = []
    for file in range(draw(st.integers(1, 3))):
        at = draw(st.integers(8, 5000))
        for _ in range(draw(st.integers(0, 25))):
            alignment = draw(st.sampled_from([1, 2, 4, 8]))
            at += draw(st.sampled_from([0, 0, 0, 0, 1, 8, 4096]))
            size = draw(SIZES) // alignment * alignment
            rows.append((file, at, size, alignment))
            at += size
    return wanted(rows)


@settings(max_examples=300, deadline=None)
@given(checkpoints(), st.sampled_from([PAGE, 3 * PAGE + 8, 1 << 16, 1 << 20]), st.booleans(), st.booleans())
def test_every_layout_keeps_the_rules(given: Wanted, capacity: int, device: bool, uniform: bool) -> None:
    rules = Rules(capacity, device, uniform)
    layout = lay_out(given, rules)
    check(given, rules, layout)
    if not uniform:
        assert (layout.arena_nbytes == layout.arena_used).all()


@settings(max_examples=200, deadline=None)
@given(checkpoints(), st.randoms(use_true_random=False), st.booleans())
def test_what_is_no_range_is_a_run(given: Wanted, random: Random, device: bool) -> None:
    alone = np.array([random.random() < 0.4 for _ in given.sizes], bool)
    given = given._replace(alone=alone)
    rules = Rules(1 << 16, device)
    layout = lay_out(given, rules)
    check(given, rules, layout)
    firsts = layout.run_first.tolist()
    assert (given.starts[firsts] == layout.run_start).all()
    for at in np.flatnonzero(alone & (given.sizes > 0)).tolist():
        assert firsts.count(at) == 1
        assert layout.run_nbytes[firsts.index(at)] == given.sizes[at]


@settings(max_examples=200, deadline=None)
@given(checkpoints(), st.sampled_from([3 * PAGE + 8, 1 << 16]))
def test_uniform_arenas_have_one_capacity(given: Wanted, capacity: int) -> None:
    given = Wanted(*(column[given.sizes >= SMALL] for column in given[:4]))
    layout = lay_out(given, Rules(capacity, uniform=True))
    shared = layout.arena_used <= capacity
    if len(layout.arena_nbytes) > 1:
        assert (layout.arena_nbytes[shared] == capacity).all()
    assert (layout.arena_nbytes[~shared] == layout.arena_used[~shared]).all()


@settings(max_examples=200, deadline=None)
@given(checkpoints(), st.booleans())
def test_padding_is_bounded(given: Wanted, device: bool) -> None:
    layout = lay_out(given, Rules(1 << 24, device))
    used, arenas = int(layout.arena_used.sum()), len(layout.arena_nbytes)
    long_runs = int((layout.run_nbytes >= LONG).sum())
    assert used <= given.sizes.sum() + PAGE * (arenas + long_runs) + 32 * len(layout.run_start)


def test_adjacent_aligned_tensors_are_one_run() -> None:
    given = adjacent([(4 * LONG, 4), (2 * LONG, 2), (8 * LONG, 4)], start=4096)
    for device in (True, False):
        layout = lay_out(given, Rules(1 << 30, device))
        assert len(layout.run_start) == 1
        assert (layout.run_offset - layout.run_start) % PAGE == 0


def test_cpu_offsets_agree_with_the_file_where_dtypes_allow() -> None:
    given = adjacent([(LONG, 2), (7, 1), (LONG, 1), (9, 1)], start=10 * PAGE + 8)
    layout = lay_out(given, Rules(1 << 30))
    assert len(layout.run_start) == 1
    assert ((layout.offsets - given.starts) % PAGE == 0).all()


def test_one_odd_scalar_costs_one_gap() -> None:
    given = adjacent([(64, 4)] * 3 + [(1, 1)] + [(64, 4)] * 5, start=4096)
    for device in (True, False):
        layout = lay_out(given, Rules(1 << 20, device))
        assert len(layout.run_start) == 2
        check(given, Rules(1 << 20, device), layout)


def test_scalars_take_the_residue_of_their_neighbours() -> None:
    sizes = [(4, 4), (4096 * 4, 2)] * 20
    layout = lay_out(adjacent(sizes, start=8), Rules(1 << 24, device=True))
    # A scalar of 4 bytes moves each matrix by 4: their 16 bytes ask for a gap, the scalars do not.
    assert len(layout.run_start) <= 21


def test_header_padded_to_8_needs_no_gap() -> None:
    layout = lay_out(adjacent([(LONG, 2)] * 50, start=8 + 16 * 100), Rules(1 << 30, device=True))
    assert len(layout.run_start) == 1
    assert layout.run_offset[0] % 16 == 0


def test_not_adjacent_or_other_files_are_other_runs() -> None:
    given = wanted([(0, 16, 64, 4), (0, 96, 64, 4), (1, 160, 64, 4), (1, 224, 64, 4)])
    layout = lay_out(given, Rules(1 << 20))
    assert layout.run_start.tolist() == [16, 96, 160]
    assert len(layout.arena_nbytes) == 1


def test_larger_tensors_have_their_own_exact_arena() -> None:
    given = adjacent([(LONG, 4), (10 * LONG, 4), (LONG, 4)], start=4096)
    layout = lay_out(given, Rules(4 * LONG, uniform=True))
    assert layout.arena_nbytes.tolist() == [4 * LONG, 10 * LONG, 4 * LONG]


def test_a_small_load_takes_what_it_needs() -> None:
    given = adjacent([(100, 4), (28, 4)], start=4096)
    for uniform in (True, False):
        layout = lay_out(given, Rules(1 << 28, uniform=uniform))
        assert layout.arena_nbytes.tolist() == [128]


def test_scalars_are_packed_apart_and_few_reads() -> None:
    sizes = ([(4, 4)] * 3000 + [(96 << 10, 1)] * 100) * 2
    given = adjacent(sizes, start=4096)
    layout = lay_out(given, Rules(1 << 28, device=True))
    scalars = given.sizes == 4
    held = set(layout.arenas[scalars].tolist())
    assert not held & set(layout.arenas[~scalars].tolist())
    assert sum(int(layout.arena_nbytes[arena]) for arena in held) <= SMALL_ARENA
    assert len(layout.run_start) <= 8
    assert layout.batch_count == 4


@pytest.mark.parametrize("count", [0, 3])
def test_nothing_with_bytes(count: int) -> None:
    layout = lay_out(wanted([(0, 16, 0, 4)] * count), Rules(1 << 20))
    assert layout.arenas.tolist() == [-1] * count
    assert len(layout.arena_nbytes) == len(layout.run_start) == 0
    assert layout.batch_count == (1 if count else 0)


def test_many_tensors_are_few_runs() -> None:
    parts = [(4, 4)] * 3000 + [(8192, 1)] * 1500 + [(1024, 1)] * 1500
    layout = lay_out(adjacent(parts * 4, start=4096), Rules(64 << 20))
    assert len(layout.run_start) <= 40
