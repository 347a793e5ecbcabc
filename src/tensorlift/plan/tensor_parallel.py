"""What one rank of a tensor-parallel group reads of a checkpoint, by a simple rule about names.

    q_proj, k_proj, v_proj, gate_proj, up_proj,     rows (the first dimension): one stretch of the file
    q_b_proj, kv_b_proj, embed_tokens, lm_head
    o_proj, down_proj                               columns (the last dimension): a part of every row
    all others, and what has no such dimension      whole

A part is 1/W of the dimension, rounded up; a dimension below W is not cut. Engines differ in details (key
heads that fewer than W ranks share, experts that whole ranks own), so this is an estimate. What is read is
what ``slices`` reads, gaps below a page included, in whole pages as storage gives them.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from tensorlift.format import dtypes
from tensorlift.format.checkpoint import Checkpoint
from tensorlift.plan.extents import Extents, merge_extents
from tensorlift.plan.indexing import PAGE, slice_tensor

__all__ = ["WAYS", "Portion", "tensor_parallel_portion", "tensor_parallel_slices"]

WAYS = ("rows", "columns", "")
"""How a tensor is cut; "" is not at all."""

_ROWS = frozenset(
    ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "q_b_proj", "kv_b_proj", "embed_tokens", "lm_head")
)
_COLUMNS = frozenset(("o_proj", "down_proj"))


@dataclass(frozen=True, slots=True)
class Portion:
    """Bytes of one rank: what it keeps, and what it reads for that."""

    own: int
    read: int


def tensor_parallel_portion(checkpoint: Checkpoint, ranks: int, ways: Collection[str] = WAYS) -> Portion:
    """That of the first rank, which is never smaller than that of another by more than rounding.

    ``ways``: only of tensors that are cut so.
    """
    own = read = 0
    for name, shape, code, start, size in zip(
        checkpoint.names,
        checkpoint.shapes,
        checkpoint.dtypes.tolist(),
        checkpoint.starts.tolist(),
        checkpoint.sizes.tolist(),
        strict=True,
    ):
        way = _cut(name)
        part = _part(way, shape, dtypes.ALL[code].bits, start % PAGE, ranks)
        if (way if part is not None else "") in ways:
            own += size if part is None else part.own
            read += size if part is None else min(part.read, size)
    return Portion(own, read)


def tensor_parallel_slices(
    checkpoint: Checkpoint, rank: int, ranks: int, ways: Collection[str] = WAYS
) -> dict[str, tuple[int, int, int] | None]:
    """What a rank asks a load for: (dim, start, stop) of each tensor that is cut in one of these ways, None
    for one that is wanted whole.
    """
    found: dict[str, tuple[int, int, int] | None] = {}
    for name, shape, code in zip(
        checkpoint.names, checkpoint.shapes, checkpoint.dtypes.tolist(), strict=True
    ):
        way, bits = _cut(name), dtypes.ALL[code].bits
        dim = _dim(way, shape, bits, ranks)
        if (way if dim is not None else "") not in ways:
            continue
        if dim is None:
            found[name] = None
            continue
        # Of whole bytes, where an item of the last dimension is less than one.
        unit = max(1, 8 // bits) if dim == len(shape) - 1 else 1
        width = -(-shape[dim] // (ranks * unit)) * unit
        start = min(rank * width, shape[dim])
        found[name] = dim, start, min(start + width, shape[dim])
    return found


def _cut(name: str) -> str:
    """rows, columns or nothing."""
    parts = name.split(".")
    if not _COLUMNS.isdisjoint(parts):
        return "columns"
    return "" if _ROWS.isdisjoint(parts) else "rows"


def _dim(cut: str, shape: tuple[int, ...], bits: int, ranks: int) -> int | None:
    """Along which dimension; None for a tensor that is read whole."""
    wanted_dims = {"rows": (1, 2), "columns": (2,)}.get(cut, ())
    if ranks == 1 or len(shape) not in wanted_dims or shape[-1] * bits % 8 or 0 in shape:
        return None
    dim = 0 if cut == "rows" else len(shape) - 1
    return dim if shape[dim] >= ranks else None


@functools.lru_cache(maxsize=4096)
def _part(cut: str, shape: tuple[int, ...], bits: int, start: int, ranks: int) -> Portion | None:
    """None where a tensor is read whole; experts share shapes, so few are computed."""
    dim = _dim(cut, shape, bits, ranks)
    if dim is None:
        return None
    # Along the last dimension in bytes: dtypes below a byte have no items of whole bytes.
    in_bytes = (*shape[:-1], shape[-1] * bits // 8)
    part = slice(0, -(-in_bytes[dim] // ranks))
    blocks = slice_tensor(in_bytes, 1, (part,) if dim == 0 else (slice(None), part)).blocks
    first = (blocks.starts + start) // PAGE * PAGE
    last = -(-(blocks.stops + start) // PAGE) * PAGE
    own = int(np.prod(in_bytes, dtype=np.int64)) // in_bytes[dim] * part.stop
    return Portion(own, merge_extents(Extents(first, last)).nbytes)
