"""What the kernel has cached of a file, and how to change that, for tests on a real disk."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

PAGE = mmap.PAGESIZE
# File systems on which the tests know that dropping, reading and asking work page by page.
ON_DISK = {"ext4", "xfs"}


def file_system(path: Path) -> str:
    """Type of the file system that holds a path, as the kernel calls it."""
    best, kind = "", "unknown"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, right = line.split(" - ")
        point = left.split()[4].encode().decode("unicode_escape")
        inside = f"{path.resolve()}/".startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, right.split()[0]
    return kind


def resident(path: Path) -> npt.NDArray[np.bool_]:
    """For each page of a file whether it is cached: mincore, right for the owner. Touches no page."""
    libc = ctypes.CDLL(None, use_errno=True)
    nbytes = path.stat().st_size
    answer = np.zeros(-(-nbytes // PAGE), np.uint8)
    # Writable only because ctypes wants a writable buffer to take the address of; nothing is written.
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), nbytes) as view:
        place = ctypes.c_char.from_buffer(view)
        pointer = ctypes.c_void_p(ctypes.addressof(place))
        if libc.mincore(pointer, ctypes.c_size_t(nbytes), ctypes.c_void_p(answer.ctypes.data)):
            raise OSError(ctypes.get_errno(), "mincore failed")
        del place
    return (answer & 1).astype(bool)


def missing_bytes(path: Path, begin: int, end: int) -> int:
    """Bytes of ``[begin, end)`` that lie in pages which are not cached."""
    first = np.arange(len(pages := resident(path)), dtype=np.int64) * PAGE
    inside = np.minimum(first + PAGE, end) - np.maximum(first, begin)
    return int(np.maximum(inside, 0)[~pages].sum())


def drop(path: Path) -> None:
    """Makes the kernel forget all it has cached of a file."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def bring(path: Path, ranges: Iterable[tuple[int, int]]) -> None:
    """Caches exactly these ranges, without reading ahead."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        for begin, end in ranges:
            os.pread(fd, end - begin, begin)
    finally:
        os.close(fd)


def disk_bytes_read() -> int:
    """Bytes that this process has caused to be read from storage so far."""
    for line in Path("/proc/self/io").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "read_bytes":
            return int(value)
    raise RuntimeError("/proc/self/io has no read_bytes")
