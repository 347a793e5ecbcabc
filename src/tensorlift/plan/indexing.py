"""An index as in numpy or torch, applied to a tensor in a file: which bytes it means and how to put them
together.

What is read is a list of equal *blocks*, each the smallest range that covers its part of the result. Inside a
block, gaps of less than a page are read too: the kernel and the device read whole pages anyway, and a system
call costs more.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorlift.plan.extents import Extents

__all__ = ["Slice", "slice_tensor"]

Ints = npt.NDArray[np.int64]

PAGE = 4096
_ALLOWED = "integers, slices with a positive step, ..., None, and one list of integers"


@dataclass(frozen=True, slots=True)
class Slice:
    r"""What an index asks for. ``blocks`` are byte offsets from the start of the tensor, all of one length.

    With the blocks one after another in memory, the result is: a view of (blocks, \*inner_sizes) with strides
    of (items in a block, \*inner_strides), both in items; of its dimension ``1 + dim`` the positions of each
    pick; then shape ``shape``. Where ``whole`` is true that is the memory itself.
    """

    shape: tuple[int, ...]
    blocks: Extents
    inner_sizes: tuple[int, ...]
    inner_strides: tuple[int, ...]
    picks: tuple[tuple[int, Ints], ...]
    whole: bool

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block."""
        return int(self.blocks.stops[0] - self.blocks.starts[0]) if len(self.blocks.starts) else 0


@dataclass(frozen=True, slots=True)
class _Axis:
    """The positions taken along one dimension: a range for a slice, else an array; is it kept."""

    positions: range | Ints
    kept: bool

    @property
    def low(self) -> int:
        return int(self.positions[0] if isinstance(self.positions, range) else self.positions.min())

    @property
    def high(self) -> int:
        return int(self.positions[-1] if isinstance(self.positions, range) else self.positions.max())

    @property
    def widest_step(self) -> int:
        if isinstance(self.positions, range):
            return self.positions.step if len(self.positions) > 1 else 0
        return int(np.diff(np.unique(self.positions)).max(initial=0))


def slice_tensor(shape: Sequence[int], item_nbytes: int, index: Any) -> Slice:
    """The bytes of ``tensor[index]`` for a contiguous tensor.

    Allowed are integers, slices with a positive step, Ellipsis, None and one list (or 1-d array) of integers.
    Raises IndexError or ValueError, as torch does, for what is out of bounds or not allowed.
    """
    entries = list(index) if isinstance(index, tuple) else [index]
    axes, result = _axes(shape, entries)
    if 0 in result:
        nothing = np.zeros(0, np.int64)
        return Slice(tuple(result), Extents(nothing, nothing), (), (), (), True)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]

    # From the innermost dimension outwards, for as long as the gaps stay small; sizes are in items.
    inner, cover = len(axes), 1
    while inner > 0:
        axis = axes[inner - 1]
        gap = axis.widest_step * strides[inner - 1] - cover
        if gap * item_nbytes >= PAGE:
            break
        inner -= 1
        cover += (axis.high - axis.low) * strides[inner]
    start = sum(axis.low * stride for axis, stride in zip(axes[inner:], strides[inner:], strict=True))
    offsets = np.full(1, start, np.int64)
    for axis, stride in zip(axes[:inner], strides[:inner], strict=True):
        # Blocks in the order of the result: an outer dimension varies slower than those inside it.
        offsets = (offsets[:, None] + np.asarray(axis.positions, np.int64)[None, :] * stride).reshape(-1)
    starts = offsets * item_nbytes
    sizes, steps, picks = _inner(axes[inner:], strides[inner:])
    whole = math.prod(sizes) == cover and not picks
    return Slice(tuple(result), Extents(starts, starts + cover * item_nbytes), sizes, steps, picks, whole)


def _inner(
    axes: Sequence[_Axis], strides: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, Ints], ...]]:
    """Sizes and strides of the view of a block, and what is picked from it."""
    sizes, steps, picks = [], [], []
    for dim, (axis, stride) in enumerate(zip(axes, strides, strict=True)):
        if isinstance(axis.positions, range):
            sizes.append(len(axis.positions))
            steps.append(stride * axis.positions.step)
        else:
            sizes.append(axis.high - axis.low + 1)
            steps.append(stride)
            if axis.kept:
                picks.append((dim, axis.positions - axis.low))
    return tuple(sizes), tuple(steps), tuple(picks)


def _axes(shape: Sequence[int], entries: list[Any]) -> tuple[list[_Axis], list[int]]:
    """Positions by dimension, and the shape of the result."""
    entries = _expanded(len(shape), entries)
    axes: list[_Axis] = []
    result: list[int] = []
    lists = 0
    for entry in entries:
        if entry is None:
            result.append(1)
            continue
        dim, size = len(axes), shape[len(axes)]
        axis = _axis(entry, dim, size)
        lists += not isinstance(entry, slice) and axis.kept
        axes.append(axis)
        if axis.kept:
            result.append(len(axis.positions))
    if lists > 1:
        raise IndexError(f"index has {lists} lists of integers; allowed are {_ALLOWED}")
    return axes, result


def _expanded(ndim: int, entries: list[Any]) -> list[Any]:
    """One entry a dimension, and Nones: Ellipsis and missing entries become full slices."""
    named = sum(entry is not None and entry is not Ellipsis for entry in entries)
    if named > ndim:
        raise IndexError(f"too many indices for a tensor of {ndim} dimensions: {named}")
    fill = [slice(None)] * (ndim - named)
    dots = [at for at, entry in enumerate(entries) if entry is Ellipsis]
    if not dots:
        return entries + fill
    if len(dots) > 1:
        raise IndexError("an index can have one ellipsis (...) only")
    return entries[: dots[0]] + fill + entries[dots[0] + 1 :]


def _axis(entry: Any, dim: int, size: int) -> _Axis:
    if isinstance(entry, slice):
        if entry.step is not None and operator.index(entry.step) <= 0:
            raise ValueError(f"step must be greater than zero, dimension {dim} has {entry.step}")
        return _Axis(range(*entry.indices(size)), True)
    if isinstance(entry, (bool, np.bool_)):
        raise IndexError(f"index {entry!r} for dimension {dim} is not supported; allowed are {_ALLOWED}")
    try:
        number = operator.index(entry)
    except TypeError:
        return _Axis(_bounded(_integers(entry, dim), dim, size), True)
    return _Axis(_bounded(np.array([number]), dim, size), False)


def _integers(entry: Any, dim: int) -> npt.NDArray[Any]:
    refused = IndexError(f"index {entry!r} for dimension {dim} is not supported; allowed are {_ALLOWED}")
    if isinstance(entry, (str, bytes)):
        raise refused
    try:
        array = np.asarray(entry.tolist() if hasattr(entry, "tolist") else entry)
    except (TypeError, ValueError) as error:
        raise refused from error
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise refused
    return array


def _bounded(positions: npt.NDArray[Any], dim: int, size: int) -> Ints:
    """Counted from 0; integers of any size come, and what int64 does not hold is out of bounds anyway."""
    wrong = (positions < -size) | (positions >= size)
    if wrong.any():
        position = int(positions[wrong][0])
        raise IndexError(f"index {position} is out of bounds for dimension {dim} with size {size}")
    return np.where(positions < 0, positions + size, positions).astype(np.int64)
