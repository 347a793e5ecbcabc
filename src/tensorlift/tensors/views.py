"""Bytes to tensors: the tensors of an arena, each with a storage of exactly its own bytes.

A tensor is made from a DLPack capsule that the native library makes with the final dtype and shape; it keeps
its arena alive without a Python object. No call here gives the GIL away for each tensor: with another busy
thread, getting it back costs up to 5 ms, a capsule 3 us.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tensorlift.engine import abi
from tensorlift.errors import DtypeError
from tensorlift.format import dtypes
from tensorlift.format.checkpoint import Checkpoint
from tensorlift.format.quoting import clean, quote
from tensorlift.plan.indexing import Slice
from tensorlift.tensors.memory import Arena, Memory

__all__ = [
    "Single",
    "Table",
    "bytes_of",
    "check_expressible",
    "sliced",
    "torch_dtype",
    "torch_shape",
]

Ints = npt.NDArray[np.int64]

_ALIGNMENTS = np.array([dtype.alignment for dtype in dtypes.ALL], np.int64)
_ELEMENTS = np.array([dtype.elements for dtype in dtypes.ALL], np.int64)
# Integers of the same size, for dtypes whose DLPack this torch refuses: DLPack's code of signed ones is 0,
# unsigned 1.
_STAND_INS = {1: (1, 8, 1), 2: (0, 16, 1), 4: (0, 32, 1), 8: (0, 64, 1)}
_from_dlpack = torch._C._from_dlpack


def torch_dtype(dtype: dtypes.Dtype) -> torch.dtype | None:
    """torch's dtype for one of the format; None where the running torch has none."""
    found = None if dtype.torch_name is None else getattr(torch, dtype.torch_name, None)
    return found if isinstance(found, torch.dtype) else None


def torch_shape(dtype: dtypes.Dtype, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the torch tensor: F4 has two elements of the format in one of torch."""
    if dtype.elements == 1:
        return tuple(shape)
    return (*shape[:-1], shape[-1] // dtype.elements)


def check_expressible(checkpoint: Checkpoint, rows: Ints) -> None:
    """Raises DtypeError for the first wanted tensor that the running torch cannot express."""
    ids = checkpoint.dtypes[rows]
    for number in sorted(set(ids.tobytes())):
        dtype = dtypes.ALL[number]
        if torch_dtype(dtype) is None or dtype.elements > 1:
            for row in rows[ids == number].tolist():
                _check_row(checkpoint, row, dtype)


def _check_row(checkpoint: Checkpoint, row: int, dtype: dtypes.Dtype) -> None:
    shape = checkpoint.shapes[row]
    if torch_dtype(dtype) is None:
        why = "which this torch does not have"
    elif dtype.elements > 1 and (not shape or shape[-1] % dtype.elements):
        why = f"of which torch packs {dtype.elements} in the last dimension: shape {list(shape)} does not fit"
    else:
        return
    path = checkpoint.shards[int(checkpoint.shard_of[row])].path
    raise DtypeError(
        f"{clean(path)}: tensor {quote(checkpoint.names[row])} has dtype {dtype.code}, {why} "
        f"(torch {torch.__version__}); leave it out with names=, or use another torch"
    )


@functools.cache
def _capsule_type(number: int) -> tuple[int, int, int]:
    """DLPack type to hand a dtype to torch with: its own, or that of an integer where this torch refuses it.

    float8 by DLPack came to torch after 2.8, float4 later still, so torch is asked by trying, once.
    """
    dtype = dtypes.ALL[number]
    with contextlib.closing(_Scratch()) as scratch, torch.inference_mode(False):
        capsule = abi.library().capsules(
            scratch.handle, scratch.address, _spec_of_one(dtype.dl, (1,)), (1, 0)
        )[0]
        try:
            if _from_dlpack(capsule).dtype is torch_dtype(dtype):
                return dtype.dl
        except (BufferError, RuntimeError, ValueError):
            pass
    return _STAND_INS[dtype.alignment]


class _Scratch:
    def __init__(self) -> None:
        self.handle, self.address = abi.library().arena_host(64)

    def close(self) -> None:
        abi.library().arena_release(self.handle)


class Table:
    """The wanted tensors of a checkpoint, as columns that the native library takes."""

    def __init__(self, checkpoint: Checkpoint, rows: Ints) -> None:
        """Raises DtypeError for a wanted tensor that the running torch cannot express."""
        check_expressible(checkpoint, rows)
        # In file order, that is. A comparison of lists keeps the GIL.
        count = len(checkpoint.names)
        every = len(rows) == count and rows.tolist() == list(range(count))
        wanted = [] if every else rows.tolist()
        self.names: list[str] = checkpoint.names if every else [checkpoint.names[row] for row in wanted]
        shapes = checkpoint.shapes if every else [checkpoint.shapes[row] for row in wanted]
        # Of all, the columns that are there.
        some: Any = slice(None) if every else rows
        self.ids: npt.NDArray[np.uint8] = checkpoint.dtypes[some]
        self.files = checkpoint.shard_of[some]
        self.starts, self.sizes = checkpoint.starts[some], checkpoint.sizes[some]
        self.nbytes = int(self.sizes.sum())
        """Of all tensors."""
        self._all_solid = bool(self.sizes.min(initial=1) > 0)
        self.alignments = _ALIGNMENTS[self.ids]
        self.ndims = np.fromiter(map(len, shapes), np.int32, len(shapes))
        self._dims = np.fromiter(itertools.chain.from_iterable(shapes), np.int64)
        self._edges = np.zeros(len(shapes) + 1, np.int64)
        np.cumsum(self.ndims, out=self._edges[1:])
        self._kinds = set(self.ids.tobytes())
        if any(dtypes.ALL[number].elements > 1 for number in self._kinds):
            packed = np.flatnonzero(_ELEMENTS[self.ids] > 1)
            self._dims[self._edges[packed + 1] - 1] //= _ELEMENTS[self.ids[packed]]
        self._capsule_types: tuple[npt.NDArray[Any], ...] | None = None
        self._replaced: list[int] = []

    def __len__(self) -> int:
        return len(self.names)

    def shape(self, position: int) -> tuple[int, ...]:
        """Shape in torch of one tensor."""
        return tuple(self._dims[self._edges[position] : self._edges[position + 1]].tolist())

    def dtype(self, position: int) -> torch.dtype:
        """dtype in torch of one tensor."""
        found = torch_dtype(dtypes.ALL[int(self.ids[position])])
        assert found is not None
        return found

    def tensors(
        self, first: int, last: int, arena: Arena | None, offsets: Ints, memory: Memory
    ) -> list[torch.Tensor]:
        """Tensors [first, last), in one arena at ``offsets`` (of these); arena None: none has bytes."""
        with torch.inference_mode(False):
            if arena is not None and self._all_solid:
                dims = self._dims[self._edges[first] : self._edges[last]]
                return self._solid(slice(first, last), dims, arena, offsets, memory)
            solid = self.sizes[first:last] > 0
            made: list[Any] = [None] * (last - first)
            some = np.flatnonzero(solid)
            if arena is not None and len(some):
                parts = [self._dims[self._edges[at] : self._edges[at + 1]] for at in (some + first).tolist()]
                dims = np.concatenate(parts)
                there = self._solid(some + first, dims, arena, offsets[some], memory)
                for position, tensor in zip(some.tolist(), there, strict=True):
                    made[position] = tensor
            for position in np.flatnonzero(~solid).tolist():
                at = first + position
                made[position] = torch.empty(self.shape(at), dtype=self.dtype(at), device=memory.device)
            return made

    def _solid(
        self, which: slice | Ints, dims: Ints, arena: Arena, offsets: Ints, memory: Memory
    ) -> list[torch.Tensor]:
        """Tensors that have bytes; ``dims`` are all of theirs."""
        codes, bits, lanes = self._types()
        places = offsets.view(np.uint64)
        spec = abi.CapsuleSpec(places, codes[which], bits[which], lanes[which], self.ndims[which], dims)
        capsules = abi.library().capsules(arena.handle, arena.address, spec, memory.dlpack_device)
        made = list(map(_from_dlpack, capsules))
        for number in self._replaced:
            dtype = torch_dtype(dtypes.ALL[number])
            for at in np.flatnonzero(self.ids[which] == number).tolist():
                made[at] = made[at].view(dtype)
        return made

    def _types(self) -> tuple[npt.NDArray[Any], ...]:
        """DLPack's types of all tensors, made once."""
        if self._capsule_types is None:
            kinds = [dtype.dl for dtype in dtypes.ALL]
            for number in self._kinds:
                kinds[number] = _capsule_type(number)
            self._replaced = [number for number in self._kinds if kinds[number] != dtypes.ALL[number].dl]
            tables = zip(zip(*kinds, strict=True), (np.uint8, np.uint8, np.uint16), strict=True)
            self._capsule_types = tuple(np.array(table, kind)[self.ids] for table, kind in tables)
        return self._capsule_types


def _spec_of_one(kind: tuple[int, int, int], shape: tuple[int, ...]) -> abi.CapsuleSpec:
    """One tensor at the start of its arena."""
    return abi.CapsuleSpec(
        np.zeros(1, np.uint64),
        np.array(kind[:1], np.uint8),
        np.array(kind[1:2], np.uint8),
        np.array(kind[2:], np.uint16),
        np.array((len(shape),), np.int32),
        np.array(shape, np.int64),
    )


class Single:
    """One tensor of a checkpoint, without the columns of a Table: for what is asked for one by one."""

    def __init__(self, checkpoint: Checkpoint, row: int) -> None:
        """Raises DtypeError where the running torch cannot express it."""
        self._format = dtypes.ALL[int(checkpoint.dtypes[row])]
        _check_row(checkpoint, row, self._format)
        self.shape = torch_shape(self._format, checkpoint.shapes[row])
        self.item_nbytes = self._format.alignment
        self.start, self.nbytes = int(checkpoint.starts[row]), int(checkpoint.sizes[row])

    @property
    def dtype(self) -> torch.dtype:
        """dtype in torch."""
        found = torch_dtype(self._format)
        assert found is not None
        return found

    def empty(self, shape: tuple[int, ...], memory: Memory) -> torch.Tensor:
        """A tensor of this dtype without elements."""
        with torch.inference_mode(False):
            return torch.empty(shape, dtype=self.dtype, device=memory.device)

    def tensor(self, arena: Arena, memory: Memory) -> torch.Tensor:
        """The tensor, from an arena that holds nothing else."""
        kind = _capsule_type(self._format.id)
        made = _made(arena, kind, self.shape, memory)
        return made if kind == self._format.dl else made.view(self.dtype)

    def integers(self, arena: Arena, memory: Memory) -> torch.Tensor:
        """All of an arena as integers of the size of an item, in one dimension."""
        return _made(arena, _STAND_INS[self.item_nbytes], (arena.nbytes // self.item_nbytes,), memory)


def bytes_of(arena: Arena, memory: Memory, nbytes: int) -> torch.Tensor:
    """The first bytes of an arena, which the tensor keeps."""
    return _made(arena, _STAND_INS[1], (nbytes,), memory)


def _made(arena: Arena, kind: tuple[int, int, int], shape: tuple[int, ...], memory: Memory) -> torch.Tensor:
    with torch.inference_mode(False):
        spec = _spec_of_one(kind, shape)
        (capsule,) = abi.library().capsules(arena.handle, arena.address, spec, memory.dlpack_device)
        return _from_dlpack(capsule)


def sliced(flat: torch.Tensor, part: Slice, dtype: torch.dtype) -> torch.Tensor:
    """The result of an index from the blocks that were read for it, as integers of the item's size."""
    with torch.inference_mode(False), torch.no_grad():
        if not part.whole:
            blocks = len(part.blocks.starts)
            sizes, strides = (blocks, *part.inner_sizes), (len(flat) // blocks, *part.inner_strides)
            view = flat.as_strided(sizes, strides)
            for dim, positions in part.picks:
                view = view.index_select(dim + 1, torch.from_numpy(positions).to(flat.device))
            # A copy of its own: what was read for the gaps goes.
            flat = view.contiguous()
        return flat.reshape(-1).view(dtype).view(part.shape)
