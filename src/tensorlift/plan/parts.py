"""Slices of tensors in a load: a checkpoint whose rows are the parts that are wanted.

What is cut off in dimension `dim` of a contiguous tensor are bytes at equal distances, as many times as the
dimensions before `dim` have elements:

    tensor (2, 5, 3), part (1, 2, 4)      |......######...|......######...|      2 rows, stride 15 elements
    tensor (5, 3),    part (0, 2, 4)      |......######...|                      one range

So a part is a first byte, a number of bytes and, where it is not one range, rows and their stride, which is
what a piece of the engine has. All that works with the starts, sizes and shapes of a checkpoint works with
parts as it does with tensors.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from tensorlift.errors import RequestError, TensorNotFoundError
from tensorlift.format.checkpoint import Checkpoint
from tensorlift.format.digests import Expected
from tensorlift.format.dtypes import ALL, Dtype
from tensorlift.format.quoting import clean, quote

__all__ = ["Asked", "Parts", "Slices", "Spread", "spread_of", "take_parts"]

Ints = npt.NDArray[np.int64]

_One = tuple[int, int, int]
Slices: TypeAlias = "Mapping[str, _One] | Callable[[str, tuple[int, ...]], _One | None] | None"
"""What a caller may give as `slices=`: (dim, start, stop) by name, or a function of name and shape."""


class Spread(NamedTuple):
    """How the bytes of some tensors lie in their files: arrays of one element a tensor."""

    counts: Ints
    """Rows of bytes; 0: one range."""
    strides: Ints
    """Bytes from the begin of a row to that of the next; 0 for one range."""

    def take(self, which: slice | Ints) -> Spread:
        """The same of some of the tensors."""
        return Spread(self.counts[which], self.strides[which])


class Parts(Checkpoint):
    """A checkpoint of which some tensors are taken in part: `starts`, `sizes`, `shapes` are the parts'."""

    def __init__(self, whole: Checkpoint) -> None:
        """All of every tensor, to begin with."""
        super().__init__(
            whole.shards,
            whole.names,
            whole.shard_of,
            whole.dtypes,
            whole.starts.copy(),
            whole.sizes.copy(),
            list(whole.shapes),
            whole.where,
        )
        count = len(whole.names)
        self.spread = Spread(np.zeros(count, np.int64), np.zeros(count, np.int64))
        self.is_part = np.zeros(count, bool)
        """Which tensors are not whole."""

    def cut(self, row: int, wanted: object) -> None:
        """Takes (dim, start, stop) of one tensor; RequestError that names tensor, shape and slice."""
        shape, dtype = self.shapes[row], ALL[int(self.dtypes[row])]
        try:
            dim, start, stop = _checked(wanted, shape)
            if (start, stop) == (0, shape[dim]):
                return
            part = _part(shape, dtype, dim, start, stop)
        except ValueError as error:
            path = self.shards[int(self.shard_of[row])].path
            raise RequestError(
                f"{clean(path)}: tensor {quote(self.names[row])} of shape {list(shape)}: the slice "
                f"{quote(wanted)} {error}"
            ) from None
        self.is_part[row] = True
        self.starts[row] += part.skipped
        self.sizes[row], self.shapes[row] = part.nbytes, part.shape
        self.spread.counts[row], self.spread.strides[row] = part.rows, part.stride


class Asked(NamedTuple):
    """What is to be loaded: rows of a checkpoint, and the digests that they must have, if any."""

    checkpoint: Checkpoint
    rows: Ints
    expected: Expected | None


def take_parts(asked: Asked, slices: Slices, *, given: bool) -> Asked:
    """The same with a checkpoint that has the parts that ``slices`` wants of the selected tensors.

    A part has no digest: only whole tensors are left to be checked. ``given``: the caller named each tensor
    that is to be checked, so none of them may be a part. Raises TensorNotFoundError for a name that the
    checkpoint lacks, RequestError for slices that make no sense.
    """
    checkpoint, rows, expected = asked
    if slices is None:
        return asked
    parts = Parts(checkpoint)
    for row, wanted in _wanted(checkpoint, rows, slices):
        parts.cut(row, wanted)
    if expected is None:
        return Asked(parts, rows, None)
    both = np.flatnonzero(expected.known & parts.is_part)
    if given and len(both):
        raise RequestError(
            f"{clean(checkpoint.where)}: verify names tensor {quote(checkpoint.names[both[0]])}, of which "
            "slices takes a part: digests are those of whole tensors"
        )
    return Asked(parts, rows, Expected(expected.digests, expected.known & ~parts.is_part, expected.where))


def spread_of(checkpoint: Checkpoint, rows: Ints) -> Spread | None:
    """How the bytes of the rows lie in their files; None where each is one range."""
    if not isinstance(checkpoint, Parts):
        return None
    spread = checkpoint.spread.take(rows)
    return spread if spread.counts.any() else None


def _wanted(checkpoint: Checkpoint, rows: Ints, slices: Slices) -> Iterator[tuple[int, object]]:
    """Row and slice of each selected tensor that is asked for in part."""
    if isinstance(slices, Mapping):
        selected = np.zeros(len(checkpoint.names), bool)
        selected[rows] = True
        for name, wanted in slices.items():
            try:
                row = checkpoint.index(name)
            except TensorNotFoundError as error:
                raise TensorNotFoundError(f"slices: {error}") from None
            if selected[row]:
                yield row, wanted
    elif callable(slices):
        for row in rows.tolist():
            found = slices(checkpoint.names[row], checkpoint.shapes[row])
            if found is not None:
                yield row, found
    else:
        raise RequestError(
            "slices: wanted None, a mapping from names to (dim, start, stop), or a function of name and "
            f"shape that returns such or None; found {type(slices).__name__}"
        )


def _checked(wanted: Any, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """A slice as three integers that fit the shape; ValueError that says what is wrong with it."""
    if not isinstance(wanted, (tuple, list)) or len(wanted) != 3:
        raise ValueError("is not (dim, start, stop)")
    if any(isinstance(number, (bool, np.bool_)) for number in wanted):
        raise ValueError("has a bool where an integer is wanted")
    try:
        dim, start, stop = map(operator.index, wanted)
    except TypeError:
        raise ValueError("has something else than integers") from None
    if not 0 <= dim < len(shape):
        raise ValueError(f"names dimension {quote(dim)}, and there are {len(shape)}, counted from 0")
    if not 0 <= start <= stop <= shape[dim]:
        raise ValueError(f"is outside of dimension {dim}: 0 <= start <= stop <= {shape[dim]} is wanted")
    return dim, start, stop


class _Part(NamedTuple):
    """Sizes are bytes; ``skipped``: before the first one that is wanted."""

    skipped: int
    nbytes: int
    rows: int
    stride: int
    shape: tuple[int, ...]


def _part(shape: tuple[int, ...], dtype: Dtype, dim: int, start: int, stop: int) -> _Part:
    """What [start, stop) of dimension ``dim`` is in bytes; ValueError where it cuts one in two."""
    left = (*shape[:dim], stop - start, *shape[dim + 1 :])
    if 0 in left:
        return _Part(0, 0, 0, 0, left)
    outer, inner = math.prod(shape[:dim]), math.prod(shape[dim + 1 :]) * dtype.bits
    bits = (start * inner, (stop - start) * inner, shape[dim] * inner if outer > 1 else 0)
    if any(number % 8 for number in bits):
        raise ValueError(f"begins or ends inside a byte: an element of {dtype.code} has {dtype.bits} bits")
    skipped, row, stride = (number // 8 for number in bits)
    return _Part(skipped, outer * row, outer if outer > 1 else 0, stride, left)
