"""Slices of a load: as bytes of the file against numpy, and what is refused."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorlift.errors import RequestError, TensorNotFoundError
from tensorlift.format.checkpoint import Checkpoint, Shard
from tensorlift.format.digests import Expected
from tensorlift.format.dtypes import ALL, BY_CODE, Dtype
from tensorlift.format.header import Header
from tensorlift.plan.parts import Asked, Parts, spread_of, take_parts

NONE = np.zeros(0, np.int64)
HEADER = Header(None, [], NONE.astype(np.uint8), [], NONE, NONE)
SHARD = Shard("model.safetensors", b"/model.safetensors", 0, 1, 2, HEADER)


def table(*tensors: tuple[Dtype, tuple[int, ...]]) -> Checkpoint:
    """Tensors t0, t1 and so on, one after another from byte 8 on."""
    sizes = np.array([math.prod(shape) * dtype.bits // 8 for dtype, shape in tensors], np.int64)
    return Checkpoint(
        (SHARD,),
        [f"t{k}" for k in range(len(tensors))],
        np.zeros(len(tensors), np.int32),
        np.array([dtype.id for dtype, _ in tensors], np.uint8),
        8 + np.cumsum(sizes) - sizes,
        sizes,
        [shape for _, shape in tensors],
        "model",
    )


def taken(checkpoint: Checkpoint, slices: object, rows: list[int] | None = None) -> Checkpoint:
    chosen = np.arange(len(checkpoint)) if rows is None else np.array(rows, np.int64)
    return take_parts(Asked(checkpoint, chosen, None), slices, given=False).checkpoint  # type: ignore[arg-type]


@st.composite
def requests(draw: st.DrawFn) -> tuple[tuple[int, ...], Dtype, tuple[int, int, int]]:
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=4)))
    dtype = draw(st.sampled_from([dtype for dtype in ALL if dtype.bits >= 8]))
    dim = draw(st.integers(0, len(shape) - 1))
    start = draw(st.integers(0, shape[dim]))
    return shape, dtype, (dim, start, draw(st.integers(start, shape[dim])))


@given(requests(), requests())
def test_the_bytes_are_those_of_numpy(
    one: tuple[tuple[int, ...], Dtype, tuple[int, int, int]],
    two: tuple[tuple[int, ...], Dtype, tuple[int, int, int]],
) -> None:
    whole = table((one[1], one[0]), (two[1], two[0]))
    file = np.random.default_rng(0).integers(0, 256, int(whole.sizes.sum()) + 8, np.uint8)
    slices = {"t0": one[2], "t1": two[2]}
    parts = taken(whole, slices)
    spread = spread_of(parts, np.arange(2))
    for row, (shape, dtype, (dim, start, stop)) in enumerate((one, two)):
        begin, size = int(whole.starts[row]), int(whole.sizes[row])
        array = file[begin : begin + size].reshape(*shape, dtype.bits // 8)
        wanted = array[(slice(None),) * dim + (slice(start, stop),)]
        assert parts.shapes[row] == wanted.shape[:-1]
        assert parts.sizes[row] == wanted.size
        count, stride = (0, 0) if spread is None else (spread.counts[row], spread.strides[row])
        if count == 0:
            found = file[parts.starts[row] : parts.starts[row] + parts.sizes[row]]
        else:
            width = int(parts.sizes[row]) // int(count)
            rows = [file[parts.starts[row] + k * stride :][:width] for k in range(int(count))]
            found = np.concatenate(rows)
            assert math.prod(shape[:dim]) == count > 1
            assert width < stride
        assert found.tobytes() == wanted.tobytes()
    # What was there before stays as it was.
    assert whole.shapes == [one[0], two[0]]


def test_ranges_are_no_rows() -> None:
    f32 = BY_CODE["F32"]
    parts = taken(table((f32, (6, 4)), (f32, (1, 1, 6, 4))), {"t0": (0, 2, 5), "t1": (2, 2, 5)})
    assert spread_of(parts, np.arange(2)) is None
    assert parts.starts.tolist() == [8 + 32, 8 + 96 + 32]
    assert parts.sizes.tolist() == [48, 48]


def test_all_of_a_tensor_is_no_part() -> None:
    parts = taken(table((BY_CODE["F32"], (6, 4))), {"t0": (1, 0, 4)})
    assert isinstance(parts, Parts)
    assert not parts.is_part.any()
    assert parts.sizes.tolist() == [96]


def test_without_slices_nothing_is_copied() -> None:
    whole = table((BY_CODE["F32"], (6, 4)))
    assert taken(whole, None) is whole
    assert spread_of(whole, np.arange(1)) is None


def test_a_function_is_asked_for_selected_tensors_alone() -> None:
    asked = []

    def wants(name: str, shape: tuple[int, ...]) -> tuple[int, int, int] | None:
        asked.append((name, shape))
        return (0, 1, 2) if name == "t2" else None

    parts = taken(table(*[(BY_CODE["U8"], (4, k)) for k in range(1, 4)]), wants, rows=[1, 2])
    assert asked == [("t1", (4, 2)), ("t2", (4, 3))]
    assert parts.shapes == [(4, 1), (4, 2), (1, 3)]


def test_names_that_are_not_selected_are_passed_over() -> None:
    whole = table(*[(BY_CODE["U8"], (4, 2))] * 2)
    assert taken(whole, {"t0": "nonsense", "t1": (0, 0, 1)}, rows=[1]).shapes == [(4, 2), (1, 2)]
    with pytest.raises(TensorNotFoundError, match="no tensor 't2' among 2"):
        taken(whole, {"t2": (0, 0, 1)}, rows=[1])


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ((0, 0), "is not (dim, start, stop)"),
        ((0, 0, 1, 1), "is not (dim, start, stop)"),
        (None, "is not (dim, start, stop)"),
        (slice(0, 1), "is not (dim, start, stop)"),
        ("012", "is not (dim, start, stop)"),
        ((False, 0, 1), "[false, 0, 1] has a bool where an integer is wanted"),
        ((0, np.True_, 1), "has a bool where an integer is wanted"),
        ((0, 0.0, 1), "has something else than integers"),
        ((0, None, 1), "has something else than integers"),
        ((2, 0, 1), "names dimension 2, and there are 2, counted from 0"),
        ((-1, 0, 1), "names dimension -1, and there are 2, counted from 0"),
        ((10**5000, 0, 1), "names dimension an integer of 16,610 bits, and there are 2"),
        ((1, 0, 7), "is outside of dimension 1: 0 <= start <= stop <= 6 is wanted"),
        ((1, -1, 2), "is outside of dimension 1"),
        ((1, 3, 2), "is outside of dimension 1"),
        ((0, 5, 5), "is outside of dimension 0"),
    ],
)
def test_what_is_refused(wanted: object, text: str) -> None:
    with pytest.raises(RequestError) as caught:
        taken(table((BY_CODE["F32"], (4, 6))), {"t0": wanted})
    assert str(caught.value).startswith("model.safetensors: tensor 't0' of shape [4, 6]: the slice ")
    assert text in str(caught.value)


def test_a_scalar_has_no_dimension() -> None:
    with pytest.raises(RequestError, match=re.escape("of shape []: the slice [0, 0, 1] names dimension 0")):
        taken(table((BY_CODE["F32"], ())), {"t0": (0, 0, 1)})


@pytest.mark.parametrize("slices", [3, "t0", [("t0", (0, 0, 1))]])
def test_what_slices_can_be(slices: object) -> None:
    with pytest.raises(RequestError, match=f"found {type(slices).__name__}"):
        taken(table((BY_CODE["F32"], (4, 6))), slices)


def test_numbers_of_numpy_are_integers() -> None:
    parts = taken(table((BY_CODE["F32"], (4, 6))), {"t0": [np.int8(1), np.uint64(2), np.int64(4)]})
    assert parts.shapes == [(4, 2)]


@pytest.mark.parametrize(
    ("shape", "wanted", "fits"),
    [
        ((4, 6), (1, 2, 4), True),
        ((4, 6), (0, 1, 3), True),
        ((4, 6), (1, 0, 0), True),
        ((6,), (0, 4, 6), True),
        ((4, 6), (1, 1, 3), False),
        ((4, 6), (1, 2, 5), False),
        ((4, 5), (1, 2, 4), False),
        ((1, 5), (1, 2, 4), True),
        ((3, 1, 2), (1, 0, 0), True),
    ],
)
def test_half_bytes(shape: tuple[int, ...], wanted: tuple[int, int, int], fits: bool) -> None:
    whole = table((BY_CODE["F4"], shape))
    if fits:
        dim, start, stop = wanted
        assert taken(whole, {"t0": wanted}).shapes == [(*shape[:dim], stop - start, *shape[dim + 1 :])]
        return
    with pytest.raises(RequestError, match="begins or ends inside a byte: an element of F4 has 4 bits"):
        taken(whole, {"t0": wanted})


def test_parts_have_no_digests() -> None:
    whole = table(*[(BY_CODE["U8"], (4, 2))] * 3)
    known = np.array([True, True, False])
    asked = Asked(whole, np.arange(3), Expected(np.zeros((3, 16), np.uint8), known, "here"))
    expected = take_parts(asked, {"t0": (0, 1, 2), "t2": (1, 0, 1)}, given=False).expected
    assert expected is not None
    assert expected.known.tolist() == [False, True, False]
    assert known.tolist() == [True, True, False]
    take_parts(asked, {"t0": (0, 0, 4), "t2": (1, 0, 1)}, given=True)
    with pytest.raises(RequestError, match="model: verify names tensor 't0', of which slices takes a part"):
        take_parts(asked, {"t0": (0, 1, 2)}, given=True)
