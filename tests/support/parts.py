"""Slices of written tensors, by numpy: what a load with slices= has to give."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from support.checkpoints import Row
from tensorlift.format.dtypes import BY_CODE

Part = tuple[int, int, int]
"""(dim, start, stop)."""


def expected(row: Row, part: Part | None) -> bytes:
    """The bytes of a part, by numpy. Of F4 on whole bytes alone."""
    code, shape, content = row
    if part is None:
        return content
    per_byte = BY_CODE[code].elements
    width = max(1, BY_CODE[code].bits // 8)
    extents = list(shape)
    extents[-1] //= per_byte
    dim, start, stop = part
    if dim == len(shape) - 1:
        start, stop = start // per_byte, stop // per_byte
    array = np.frombuffer(content, np.uint8).reshape(*extents, width)
    return array[(slice(None),) * dim + (slice(start, stop),)].tobytes()


def random_parts(rows: Mapping[str, Row], seed: int, share: float = 0.8) -> dict[str, Part]:
    """A part of most tensors that have a dimension, some of them empty; of F4 on whole bytes."""
    rng = np.random.default_rng(seed)
    parts: dict[str, Part] = {}
    for name, (code, shape, _) in rows.items():
        if shape and rng.random() < share:
            dim = int(rng.integers(len(shape)))
            unit = BY_CODE[code].elements if dim == len(shape) - 1 else 1
            edges = sorted(int(n) * unit for n in rng.integers(0, shape[dim] // unit + 1, 2))
            parts[name] = dim, edges[0], edges[1]
    return parts
