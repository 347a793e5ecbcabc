"""Bytes to tensors: the tensors of an arena, each with a storage of exactly its own bytes.

A tensor is made from a DLPack capsule that the native library makes with the final dtype and shape; it keeps
its arena alive without a Python object. No call here gives the GIL away for each tensor: with another busy
thread, getting it back costs up to 5 ms, a capsule 3 us.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tensorlift.engine import abi
from tensorlift.errors import DtypeError
from tensorlift.format import dtypes
from tensorlift.format.checkpoint import Checkpoint
from tensorlift.format.quoting import clean, quote
from tensorlift.plan.slices import Slice
from tensorlift.tensors.memory import Arena, Memory

__all__ = [
    "Single",
    "Table",
    "bytes_of",
    "check_expressible",
    "collector_paused",
    "sliced",
    "torch_dtype",
    "torch_shape",
]

Ints = npt.NDArray[np.int64]

_CODES, _BITS, _LANES = (np.array([dtype.dl[part] for dtype in dtypes.ALL]) for part in range(3))
_ALIGNMENTS = np.array([dtype.alignment for dtype in dtypes.ALL], np.int64)
_ELEMENTS = np.array([dtype.elements for dtype in dtypes.ALL], np.int64)
# Integers of the same size, for dtypes whose DLPack this torch refuses: DLPack's code of signed ones is 0,
# unsigned 1.
_STAND_INS = {1: (1, 8, 1), 2: (0, 16, 1), 4: (0, 32, 1), 8: (0, 64, 1)}
_from_dlpack = torch._C._from_dlpack


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses the garbage collector: making 30,000 tensors took 206 ms without and 463 ms with it."""
    enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if enabled:
            gc.enable()


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
    for number in np.unique(ids).tolist():
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
        every = len(rows) == len(checkpoint.names)
        wanted = rows.tolist()
        self.names: list[str] = checkpoint.names if every else [checkpoint.names[row] for row in wanted]
        shapes = checkpoint.shapes if every else [checkpoint.shapes[row] for row in wanted]
        self.ids: npt.NDArray[np.uint8] = checkpoint.dtypes[rows]
        self.files = checkpoint.shard_of[rows]
        self.starts, self.sizes = checkpoint.starts[rows], checkpoint.sizes[rows]
        self.alignments = _ALIGNMENTS[self.ids]
        self.ndims = np.fromiter(map(len, shapes), np.int32, len(shapes))
        self._dims = np.fromiter(itertools.chain.from_iterable(shapes), np.int64, int(self.ndims.sum()))
        self._edges = np.concatenate((np.zeros(1, np.int64), np.cumsum(self.ndims, dtype=np.int64)))
        packed = np.flatnonzero(_ELEMENTS[self.ids] > 1)
        self._dims[self._edges[packed + 1] - 1] //= _ELEMENTS[self.ids[packed]]

    def __len__(self) -> int:
        return len(self.names)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return int(self.sizes.sum())

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
            solid = self.sizes[first:last] > 0
            if arena is not None and solid.all():
                return self._solid(np.arange(first, last), arena, offsets, memory)
            made: list[Any] = [None] * (last - first)
            some = np.flatnonzero(solid)
            if arena is not None and len(some):
                for position, tensor in zip(
                    some.tolist(), self._solid(some + first, arena, offsets[some], memory), strict=True
                ):
                    made[position] = tensor
            for position in np.flatnonzero(~solid).tolist():
                at = first + position
                made[position] = torch.empty(self.shape(at), dtype=self.dtype(at), device=memory.device)
            return made

    def _solid(self, positions: Ints, arena: Arena, offsets: Ints, memory: Memory) -> list[torch.Tensor]:
        ids = self.ids[positions]
        codes, bits, lanes = _CODES[ids], _BITS[ids], _LANES[ids]
        replaced: list[int] = []
        for number in np.unique(ids).tolist():
            kind = _capsule_type(number)
            if kind != dtypes.ALL[number].dl:
                same = ids == number
                codes[same], bits[same], lanes[same] = kind
                replaced.append(number)
        ndims = self.ndims[positions]
        first, last = int(positions[0]), int(positions[-1])
        if last - first + 1 == len(positions):
            dims = self._dims[self._edges[first] : self._edges[last + 1]]
        else:
            parts = [self._dims[self._edges[at] : self._edges[at + 1]] for at in positions.tolist()]
            dims = np.concatenate(parts)
        spec = abi.CapsuleSpec(offsets.astype(np.uint64), codes, bits, lanes, ndims, dims)
        capsules = abi.library().capsules(arena.handle, arena.address, spec, memory.dlpack_device)
        made = list(map(_from_dlpack, capsules))
        for number in replaced:
            dtype = torch_dtype(dtypes.ALL[number])
            for at in np.flatnonzero(ids == number).tolist():
                made[at] = made[at].view(dtype)
        return made


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
