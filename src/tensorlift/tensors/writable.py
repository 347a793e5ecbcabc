"""Host memory that may be written, and that which may not: a read-only map of a file above all."""

from __future__ import annotations

import contextlib

import numpy as np
import numpy.typing as npt

from tensorlift.format.quoting import quote

__all__ = ["first_read_only", "read_only"]


def first_read_only(addresses: npt.NDArray[np.uint64], sizes: npt.NDArray[np.int64]) -> int | None:
    """Which of these ranges is the first that cannot be written: who does ends the process."""
    begins, ends = _writable_maps()
    if not len(begins):
        return None
    at = np.maximum(np.searchsorted(begins, addresses, side="right") - 1, 0)
    outside = (sizes > 0) & ((addresses < begins[at]) | (addresses + sizes.astype(np.uint64) > ends[at]))
    return int(np.argmax(outside)) if outside.any() else None


def read_only(name: str) -> str:
    """What is said of a tensor that lies there."""
    return f"the memory of {quote(name)} cannot be written: a map of a file that is open for reading only?"


def _writable_maps() -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Begins and ends of this process's writable memory, ascending; nothing where the kernel does not say."""
    begins: list[int] = []
    ends: list[int] = []
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            span, access = line.split(maxsplit=2)[:2]
            if "w" not in access:
                continue
            begin, end = (int(part, 16) for part in span.split("-"))
            if ends and ends[-1] == begin:
                ends[-1] = end
            else:
                begins.append(begin)
                ends.append(end)
    return np.array(begins, np.uint64), np.array(ends, np.uint64)
