"""An index as in numpy or torch, applied to a tensor in a file: which bytes it means and how to put them together.

What is read is a list of equal *blocks*, each the smallest range that covers its part of the result. Inside a block, gaps
of less than a page are read too: the kernel and the device read whole pages anyway, and a system call costs more.
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
    """What an index asks for. ``blocks`` are offsets in bytes from the start of the tensor, all of one length.

    With the blocks one after another in memory, the elements of the result are those at ``block_items`` (or, for
    ``whole``, all of them in order) of each block; ``shape`` is the shape of the result.
    """

    shape: tuple[int, ...]
    blocks: Extents
    block_items: Ints
    whole: bool

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block."""
        return int(self.blocks.stops[0] - self.blocks.starts[0]) if len(self.blocks.starts) else 0


@dataclass(frozen=True, slots=True)
class _Axis:
    """The positions taken along one dimension; ``kept``: whether the dimension is in the result."""

    positions: Ints
    kept: bool


def slice_tensor(shape: Sequence[int], item_nbytes: int, index: Any) -> Slice:
    """The bytes of ``tensor[index]`` for a contiguous tensor.

    Allowed are integers, slices with a positive step, Ellipsis, None and one list (or 1-d array) of integers. Raises
    IndexError, as numpy and torch do, for what is out of bounds or not allowed.
    """
    entries = list(index) if isinstance(index, tuple) else [index]
    axes, result = _axes(shape, entries)
    strides = [item_nbytes * math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    if 0 in result:
        nothing = np.zeros(0, np.int64)
        return Slice(tuple(result), Extents(nothing, nothing), nothing, True)

    # From the innermost dimension outwards, for as long as the gaps stay small.
    inner, cover = len(axes), item_nbytes
    items = np.zeros(1, np.int64)
    for dim in range(len(axes) - 1, -1, -1):
        taken = np.unique(axes[dim].positions)
        gap = int(np.diff(taken).max(initial=0)) * strides[dim] - cover if len(taken) > 1 else 0
        if gap >= PAGE:
            break
        low = int(taken[0])
        steps = (axes[dim].positions - low) * (strides[dim] // item_nbytes)
        items = (steps[:, None] + items[None, :]).reshape(-1)
        cover += (int(taken[-1]) - low) * strides[dim]
        inner = dim
    start = sum(int(axes[dim].positions.min()) * strides[dim] for dim in range(inner, len(axes)))
    offsets = np.full(1, start, np.int64)
    for dim in range(inner):
        # Blocks in the order of the result: an outer dimension varies slower than those inside it.
        offsets = (offsets[:, None] + (axes[dim].positions * strides[dim])[None, :]).reshape(-1)
    whole = len(items) * item_nbytes == cover and bool((np.diff(items) == 1).all())
    return Slice(tuple(result), Extents(offsets, offsets + cover), items, whole)


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
    """The index with one entry a dimension (and its Nones): Ellipsis and missing entries become full slices."""
    named = sum(entry is not None and entry is not Ellipsis for entry in entries)
    if named > ndim:
        raise IndexError(f"too many indices for a tensor of {ndim} dimensions: {named}")
    fill = [slice(None)] * (ndim - named)
    dots = [at for at, entry in enumerate(entries) if entry is Ellipsis]
    if not dots:
        return entries + fill
    # A second Ellipsis stands for no dimension, as in torch.
    rest = [entry for entry in entries[dots[0] + 1 :] if entry is not Ellipsis]
    return entries[: dots[0]] + fill + rest


def _axis(entry: Any, dim: int, size: int) -> _Axis:
    if isinstance(entry, slice):
        if entry.step is not None and operator.index(entry.step) <= 0:
            raise ValueError(f"step must be greater than zero, dimension {dim} has {entry.step}")
        return _Axis(np.arange(*entry.indices(size), dtype=np.int64), True)
    if isinstance(entry, (bool, np.bool_)):
        raise IndexError(f"index {entry!r} for dimension {dim} is not supported; allowed are {_ALLOWED}")
    try:
        number = operator.index(entry)
    except TypeError:
        return _Axis(_bounded(_integers(entry, dim), dim, size), True)
    return _Axis(_bounded(np.array([number], np.int64), dim, size), False)


def _integers(entry: Any, dim: int) -> Ints:
    refused = IndexError(f"index {entry!r} for dimension {dim} is not supported; allowed are {_ALLOWED}")
    if isinstance(entry, (str, bytes)):
        raise refused
    try:
        array = np.asarray(entry.tolist() if hasattr(entry, "tolist") else entry)
    except (TypeError, ValueError) as error:
        raise refused from error
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise refused
    return array.astype(np.int64)


def _bounded(positions: Ints, dim: int, size: int) -> Ints:
    wrong = (positions < -size) | (positions >= size)
    if wrong.any():
        position = int(positions[wrong][0])
        raise IndexError(f"index {position} is out of bounds for dimension {dim} with size {size}")
    return np.where(positions < 0, positions + size, positions)
