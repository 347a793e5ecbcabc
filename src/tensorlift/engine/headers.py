"""The JSON of headers, read by the native library without the GIL, on whichever thread read the file."""

from __future__ import annotations

import contextlib

import numpy as np

from tensorlift.engine import abi
from tensorlift.errors import LibraryError
from tensorlift.format.dtypes import ALL
from tensorlift.format.entries import Scanned

__all__ = ["HeaderScan"]

_CODES = "".join(f"{dtype.code} " for dtype in ALL).encode()


class HeaderScan:
    """A header's JSON and, where it has the plain form, what the library read in it."""

    def __init__(self, raw: bytes) -> None:
        """Reads; what is wrong with the text shows later."""
        self.raw = raw
        self._facts = facts = np.zeros(3, np.uint64)
        begin = facts.ctypes.data
        self._handle = None
        # Without the library nothing is loaded, but headers can be shown.
        with contextlib.suppress(LibraryError):
            self._call = abi.library().call
            self._handle = self._call["tl_header_scan"](raw, len(raw), _CODES, begin, begin + 8, begin + 16)

    def __del__(self) -> None:
        handle, self._handle = getattr(self, "_handle", None), None
        if handle:
            self._call["tl_header_free"](handle)

    def result(self) -> Scanned | None:
        """The tensors in the order of the text; None where it is not plain."""
        if not self._handle:
            return None
        count, begin, end = self._facts.tolist()
        dtypes = np.empty(count, np.uint8)
        begins, ends, elements = (np.empty(count, np.int64) for _ in range(3))
        pointers = [column.ctypes.data for column in (dtypes, begins, ends, elements)]
        try:
            names, shapes = self._call["tl_header_lists"](self._handle, *pointers)
        except UnicodeDecodeError:
            return None
        return Scanned(names, dtypes, shapes, begins, ends, elements, self.raw[begin:end] if end else None)
