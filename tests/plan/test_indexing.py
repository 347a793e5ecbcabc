"""Slices against numpy: the shape, the bytes, and how much is read for them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tensorlift.plan.indexing import PAGE, Slice, slice_tensor


def rebuilt(raw: np.ndarray, item: int, part: Slice) -> np.ndarray:  # type: ignore[type-arg]
    """The result as `tensors.views.sliced` puts it together, in numpy."""
    blocks = [raw[a:b] for a, b in zip(part.blocks.starts.tolist(), part.blocks.stops.tolist(), strict=True)]
    flat = np.concatenate(blocks or [raw[:0]]).view(f"u{item}")
    if not part.whole:
        strides = tuple(item * step for step in (len(flat) // len(blocks), *part.inner_strides))
        flat = np.lib.stride_tricks.as_strided(flat, (len(blocks), *part.inner_sizes), strides)
        for dim, positions in part.picks:
            flat = np.take(flat, positions, dim + 1)
    return flat.reshape(part.shape)


@st.composite
def indexes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    entries: list[Any] = []
    for size in shape[: draw(st.integers(0, len(shape)))]:
        bound = st.one_of(st.none(), st.integers(-size - 2, size + 2))
        step = st.sampled_from([None, 1, 2, 3])
        entries.append(draw(st.one_of(st.integers(-size, size - 1), st.builds(slice, bound, bound, step))))
    if draw(st.booleans()):
        entries.insert(draw(st.integers(0, len(entries))), None)
    if draw(st.booleans()):
        # Not before an entry that was drawn for the size of an earlier dimension.
        entries.append(Ellipsis)
    return shape, tuple(entries)


@settings(max_examples=500, deadline=None)
@given(indexes(), st.sampled_from([1, 2, 4, 8]))
def test_basic_indexes_as_numpy(drawn: tuple[tuple[int, ...], tuple[Any, ...]], item: int) -> None:
    shape, index = drawn
    raw = np.arange(math.prod(shape) * item, dtype=np.uint8)
    wanted = raw.view(f"u{item}").reshape(shape)[index]
    part = slice_tensor(shape, item, index)
    assert part.shape == wanted.shape
    assert (rebuilt(raw, item, part) == wanted).all()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_one_list_as_numpy(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    dim = data.draw(st.integers(0, len(shape) - 1))
    positions = data.draw(st.lists(st.integers(-shape[dim], shape[dim] - 1), max_size=5))
    index = (*[slice(0, 3)] * dim, positions)
    raw = np.arange(math.prod(shape) * 2, dtype=np.uint8)
    wanted = np.take(raw.view("u2").reshape(shape)[(slice(0, 3),) * dim], np.array(positions, int), dim)
    part = slice_tensor(shape, 2, index)
    assert part.shape == wanted.shape
    assert (rebuilt(raw, 2, part) == wanted).all()


@settings(max_examples=200, deadline=None)
@given(indexes())
def test_every_block_touches_no_page_that_is_not_asked_for(
    drawn: tuple[tuple[int, ...], tuple[Any, ...]],
) -> None:
    # Items of 3 KiB stand in for rows: gaps of 3 KiB are read over, those of 6 KiB are not.
    shape, index = drawn
    item = 3 << 10
    count = math.prod(shape)
    asked = np.arange(count).reshape(shape)[index].reshape(-1)
    assume(asked.size)
    part = slice_tensor(shape, item, index)
    pages = {
        page for at in asked.tolist() for page in range(at * item // PAGE, (at * item + item - 1) // PAGE + 1)
    }
    for start, stop in zip(part.blocks.starts.tolist(), part.blocks.stops.tolist(), strict=True):
        assert set(range(start // PAGE, (stop - 1) // PAGE + 1)) <= pages


def test_rows_are_one_block_and_nothing_is_picked() -> None:
    part = slice_tensor((1000, 1000), 2, slice(100, 200))
    assert part.whole
    assert part.blocks.starts.tolist() == [200_000]
    assert part.blocks.nbytes == 200_000


def test_columns_of_long_rows_are_blocks_of_their_own() -> None:
    part = slice_tensor((10, 8192), 2, (slice(None), slice(0, 1024)))
    assert part.whole
    assert part.blocks.nbytes == 10 * 2048
    assert part.blocks.starts.tolist() == [row * 16384 for row in range(10)]


def test_columns_of_short_rows_are_one_read() -> None:
    part = slice_tensor((1000, 64), 2, (slice(None), slice(0, 32)))
    assert len(part.blocks.starts) == 1
    assert not part.whole


def test_a_huge_dimension_costs_nothing() -> None:
    part = slice_tensor((1 << 45,), 1, slice(1 << 40, (1 << 40) + 16))
    assert part.blocks.starts.tolist() == [1 << 40]
    assert part.blocks.nbytes == 16


@pytest.mark.parametrize(
    ("index", "error", "text"),
    [
        (3, IndexError, "index 3 is out of bounds for dimension 0 with size 3"),
        ((0, -5), IndexError, "index -5 is out of bounds for dimension 1 with size 4"),
        ((0, 0, 0), IndexError, "too many indices"),
        (slice(None, None, -1), ValueError, "step must be greater than zero"),
        ((..., ...), IndexError, "one ellipsis"),
        (True, IndexError, "allowed are integers, slices"),
        ("a", IndexError, "allowed are integers, slices"),
        (1.5, IndexError, "allowed are integers, slices"),
        ([[0]], IndexError, "allowed are integers, slices"),
        ([0.5], IndexError, "allowed are integers, slices"),
        (([0], [1]), IndexError, "2 lists of integers"),
        ([0, 3], IndexError, "index 3 is out of bounds"),
        (1 << 70, IndexError, f"index {1 << 70} is out of bounds for dimension 0 with size 3"),
        (-(1 << 63), IndexError, "is out of bounds for dimension 0"),
        (np.array([(1 << 64) - 1], np.uint64), IndexError, f"index {(1 << 64) - 1} is out of bounds"),
    ],
)
def test_what_is_refused(index: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        slice_tensor((3, 4), 2, index)


def test_scalars() -> None:
    for index in ((), ...):
        part = slice_tensor((), 4, index)
        assert part.shape == ()
        assert part.blocks.nbytes == 4
    with pytest.raises(IndexError):
        slice_tensor((), 4, 0)
