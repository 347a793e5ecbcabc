"""Structures and simple types of the C interface (native/include); how its functions are found and asked."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

from tensorlift.engine.events import PATH_NAMES
from tensorlift.errors import LibraryError
from tensorlift.format.quoting import clean

__all__ = [
    "Error", "FileInfo", "Functions", "Handle", "Options", "RefusedError", "Stats", "Status", "Structure",
    "ask", "bind", "each",
]  # fmt: skip

u32, u64 = ctypes.c_uint32, ctypes.c_uint64
i32, ptr, text = ctypes.c_int32, ctypes.c_void_p, ctypes.c_char_p


class Handle(ctypes.c_void_p):
    """Where an engine is; empty before it is made and after it is freed, which every function notices.

    Functions take this object, not the address: it is looked at when the call is under way already.
    """


class Status:
    """The values of tl_status."""

    OK, PENDING, ARGUMENT, ABI, OPEN, READ, TRUNCATED, REPLACED = range(8)
    BACKEND, DRIVER, MEMORY, CANCELLED, FORKED, INTERNAL = range(8, 14)


class Structure(ctypes.Structure):
    """A structure of the interface: it starts with its own size."""

    def __init__(self, **values: Any) -> None:
        super().__init__(struct_size=ctypes.sizeof(type(self)), **values)


def each(kind: Any, names: str) -> list[tuple[str, Any]]:
    """Fields of one type, in order."""
    return [(name, kind) for name in names.split()]


class Error(Structure):
    """tl_error."""

    _fields_ = [
        ("struct_size", u32),
        *each(i32, "status os_errno driver_code file reserved"),
        *each(u64, "offset wanted got"),
        ("message", ctypes.c_char * 1024),
    ]

    @property
    def text(self) -> str:
        """The message."""
        return bytes(self.message).decode("utf-8", "replace")


class Options(Structure):
    """tl_options."""

    _fields_ = [
        *each(u32, "struct_size abi_version"),
        *each(i32, "device_kind device_index"),
        *each(u64, "chunk_bytes slot_bytes pinned_bytes"),
        *each(u32, "threads io_depth backend_count"),
        ("backends", u32 * 16),
        *each(u32, "flags reserved"),
        ("cpus", u64 * 16),
    ]


class Stats(Structure):
    """tl_stats."""

    _fields_ = [
        *each(u32, "struct_size reserved"),
        *each(u64 * len(PATH_NAMES), "bytes_by_path reads_by_path"),
        *each(u64, "direct_bytes_read bounced_bytes copies"),
        *each(u64, "pinned_bytes pinned_peak_bytes pinned_reused_bytes slot_wait_ns"),
        *each(u32, "threads open_files"),
        ("notes", ctypes.c_char * 512),
    ]


class FileInfo(Structure):
    """tl_file_info."""

    _fields_ = [
        ("struct_size", u32),
        *each(i32, "backend cached_path waiting_path"),
        ("residency", ctypes.c_char * 32),
        ("fallback", ctypes.c_char * 512),
    ]


class RefusedError(Exception):
    """A function of an engine answered with an error; not for users, engine.py makes theirs of it."""

    def __init__(self, status: int, error: Error) -> None:
        super().__init__(status, error.text)
        self.status, self.error = status, error


Functions = Mapping[str, tuple[Any, tuple[Any, ...], bool]]
"""By name: result, arguments, and whether it blocks."""


def bind(path: str, functions: Functions) -> dict[str, Callable[..., Any]]:
    """The functions of a library that is loaded by this; LibraryError where it does not load or lacks one."""
    try:
        blocking, quick = ctypes.CDLL(path), ctypes.PyDLL(path)
    except (OSError, UnicodeError) as error:  # the latter where the system's own message cannot be read
        raise LibraryError(f"the native library {clean(path)} does not load: {error}") from error
    found: dict[str, Callable[..., Any]] = {}
    for name, (result, arguments, blocks) in functions.items():
        try:
            function = getattr(blocking if blocks else quick, name)
        except AttributeError:
            raise LibraryError(f"{path} has no {name}: it is no tensorlift library of this version") from None
        function.restype, function.argtypes = result, list(arguments)
        found[name] = function
    return found


def ask(function: Callable[..., Any], *arguments: Any) -> int:
    """Calls a function whose last argument is a tl_error; OK or PENDING, else RefusedError."""
    error = Error()
    status = int(function(*arguments, ctypes.byref(error)))
    if status not in (Status.OK, Status.PENDING):
        raise RefusedError(status, error)
    return status
