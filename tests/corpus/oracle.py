"""The bytes that each tensor of a case has to have.

Byte j of a tensor made with seed s is
    BOOL:   (j + s) & 1
    others: (131*j + 29*(j >> 8) + 17*s + 5) & 255
Compare raw bytes, not numbers: float payloads contain NaN patterns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from support.checkpoints import nbytes_of

MARK_BYTES = 64
"""Bytes of a mark in a sparse file."""


def payload(seed: int, nbytes: int, dtype: str = "U8") -> bytes:
    """The bytes of a tensor."""
    j = np.arange(nbytes, dtype=np.uint64)
    if dtype == "BOOL":
        return ((j + np.uint64(seed)) & np.uint64(1)).astype(np.uint8).tobytes()
    v = j * np.uint64(131) + (j >> np.uint64(8)) * np.uint64(29) + np.uint64(17 * seed + 5)
    return (v & np.uint64(255)).astype(np.uint8).tobytes()


def many_rule(i: int) -> tuple[str, str, list[int], int]:
    """Entry i of a file of many tensors: short shapes of mixed widths, so that most are misaligned."""
    return f"layers.{i // 64}.experts.{i % 64}.w", ("U8", "F32", "BF16", "F8_E4M3")[i % 4], [i % 7 + 1], i


def expected(case: dict[str, Any], file: str) -> Iterator[tuple[str, str, Sequence[int], bytes | list]]:
    """(name, dtype, shape, bytes) of a file; in sparse files bytes is a list of (offset, bytes)."""
    tensors = case["tensors"][file]
    if isinstance(tensors, list):
        for e in tensors:
            yield e["name"], e["dtype"], e["shape"], payload(e["seed"], e["nbytes"], e["dtype"])
    elif tensors["rule"] == "many":
        for i in range(tensors["count"]):
            name, dtype, shape, seed = many_rule(i)
            yield name, dtype, shape, payload(seed, nbytes_of(dtype, shape), dtype)
    else:
        for e in tensors["entries"]:
            marks = [(offset, payload(seed, MARK_BYTES)) for offset, seed in e["marks"]]
            yield e["name"], e["dtype"], e["shape"], marks
