"""Headers, opened, read and scanned by the native library without the GIL.

Python would give the GIL away at each of a file's system calls, and wait up to 5 ms to get it back where
another thread never rests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tensorlift.engine import abi
from tensorlift.errors import LibraryError
from tensorlift.format.dtypes import ALL
from tensorlift.format.entries import Scanned

__all__ = ["FileHeaders", "HeaderScan"]

_CODES = "".join(f"{dtype.code} " for dtype in ALL).encode()
_BITS = bytes(dtype.bits for dtype in ALL)
# The places of an array of facts: TL_HEADER_HANDLE and those behind it.
_HANDLE, _PLAIN, _NBYTES, _COUNT, _TILED, _BEGIN, _END, _FILE_BYTES, _DEVICE, _INODE, _FACTS = range(11)
# Waiting so long keeps the GIL, which Python code may keep for 5 ms: giving it away for a header that comes
# at once would cost up to those 5 ms where another thread never rests.
_SHORT_MILLISECONDS = 2
# A wait returns this often, so that Ctrl-C comes through.
_SLICE_MILLISECONDS = 100


class HeaderScan:
    """A header's JSON and, where it has the plain form, what the library read in it."""

    def __init__(self, raw: bytes) -> None:
        """Reads; what is wrong with the text shows later."""
        # Written by the library alone: whatever interrupts a call, what it made is known here.
        self._facts = np.zeros(_FACTS, np.uint64)
        self._raw: bytes | None = raw
        try:
            self._call = abi.library().call
        except LibraryError:  # nothing is loaded without it, but headers can be shown
            return
        self._call["tl_header_scan"](raw, len(raw), _CODES, _BITS, self._facts.ctypes.data)

    def __del__(self) -> None:
        facts = getattr(self, "_facts", None)
        if facts is not None and facts[_HANDLE]:
            handle, facts[_HANDLE] = int(facts[_HANDLE]), 0
            self._call["tl_header_free"](handle)

    @property
    def raw(self) -> bytes:
        """The text."""
        if self._raw is None:
            raw: bytes = self._call["tl_header_text"](int(self._facts[_HANDLE]))
            self._raw = raw
        return self._raw

    @property
    def identity(self) -> tuple[int, int, int]:
        """Size, device and inode of the file that the text is of, where one was read."""
        return int(self._facts[_FILE_BYTES]), int(self._facts[_DEVICE]), int(self._facts[_INODE])

    def result(self) -> Scanned | None:
        """The tensors in the order of the text; None where it is not plain."""
        if not self._facts[_PLAIN]:
            return None
        count, begin, end = (int(self._facts[at]) for at in (_COUNT, _BEGIN, _END))
        dtypes, starts, sizes = (
            np.empty(count, np.uint8),
            np.empty(count, np.int64),
            np.empty(count, np.int64),
        )
        pointers = [column.ctypes.data for column in (dtypes, starts, sizes)]
        try:
            names, shapes = self._call["tl_header_lists"](int(self._facts[_HANDLE]), *pointers)
        except UnicodeDecodeError:
            return None
        metadata = self.raw[begin:end] if end else None
        return Scanned(names, dtypes, shapes, starts, sizes, metadata, bool(self._facts[_TILED]))


class FileHeaders:
    """Headers of files, read by threads of the library; close() ends them."""

    def __init__(self, paths: Sequence[bytes], threads: int) -> None:
        """Begins. Twice the threads' number of headers wait in memory at most. Raises LibraryError."""
        self._reader = np.zeros(1, np.uint64)
        self._call = abi.library().call
        text = b"\0".join(paths)
        given = text, len(paths), _CODES, _BITS, threads, 2 * threads
        self._call["tl_headers_begin"](*given, self._reader.ctypes.data)

    def __del__(self) -> None:
        """Ends what an interrupted close() has left."""
        if hasattr(self, "_call"):
            self.close()

    def take(self, at: int) -> HeaderScan | None:
        """The header of a file, once and in their order; None where it could not be read."""
        reader = int(self._reader[0])
        if not reader:
            return None
        if not self._call["tl_headers_ready"](reader, at, _SHORT_MILLISECONDS):
            while not self._call["tl_headers_wait"](reader, at, _SLICE_MILLISECONDS):
                pass
        scan = HeaderScan.__new__(HeaderScan)
        scan._call, scan._raw, scan._facts = self._call, None, np.zeros(_FACTS, np.uint64)
        self._call["tl_headers_take"](reader, at, scan._facts.ctypes.data)
        return scan if scan._facts[_HANDLE] else None

    def close(self) -> None:
        """Waits for the threads, which begin with no further file."""
        if self._reader[0]:
            self._call["tl_headers_end"](self._reader.ctypes.data)
