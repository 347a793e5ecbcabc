"""The C interface of the native library (native/include/tensorlift.h).

Calls that may sleep go through CDLL, which lets the GIL go; all others through PyDLL, which keeps it: giving
it away costs up to 5 ms when another Python thread is busy, and making capsules needs it. The library is
loaded at the first use and never unloaded, since tensors that outlive a load call into it when they go.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorlift.engine.abi_types import (
    Error,
    FileInfo,
    Functions,
    Handle,
    Options,
    RefusedError,
    Stats,
    Status,
    ask,
    bind,
    i32,
    ptr,
    text,
    u32,
    u64,
)
from tensorlift.engine.events import PATH_NAMES, TRACE_EVENT
from tensorlift.engine.library import VARIABLE, find_library
from tensorlift.errors import LibraryError, MachineError, OutOfMemoryError
from tensorlift.options import BACKENDS

__all__ = [
    "ABI_VERSION", "BACKEND_CODES", "PATH_NAMES", "Abi", "CapsuleSpec", "Error", "FileInfo", "Handle",
    "Options", "RefusedError", "Stats", "Status", "library", "pread",
]  # fmt: skip

ABI_VERSION = 8
BACKEND_CODES = {name: code for code, name in enumerate(BACKENDS)}
DEVICE_CPU, DEVICE_CUDA, DEVICE_HIP = 0, 1, 2
OPTION_TRACE, OPTION_WARM, OPTION_KEEP, DIGEST_BYTES = 1, 2, 4, 16


class CapsuleSpec(NamedTuple):
    """What tl_arena_capsules wants for n tensors: arrays of n, and all dimensions one after another."""

    offsets: npt.NDArray[np.uint64]
    codes: npt.NDArray[np.uint8]
    bits: npt.NDArray[np.uint8]
    lanes: npt.NDArray[np.uint16]
    ndims: npt.NDArray[np.int32]
    shapes: npt.NDArray[np.int64]


_CAPSULE_TYPES = ("u8", "u1", "u1", "u2", "i4", "i8")

_ERROR = ctypes.POINTER(Error)
_ARENA = ctypes.POINTER(ptr), ctypes.POINTER(u64)
_FUNCTIONS: Functions = {
    "tl_abi_version": (u32, (), False),
    "tl_backend_not_built": (text, (u32,), False),
    "tl_backend_probe": (i32, (u32, text, _ERROR), True),
    "tl_cached_share": (ctypes.c_double, (text,), True),
    "tl_driver_probe": (i32, (i32, ctypes.POINTER(i32), _ERROR), True),
    "tl_engine_create": (i32, (ctypes.POINTER(Options), ctypes.POINTER(ptr), _ERROR), True),
    "tl_pinned_release": (i32, (ctypes.POINTER(u64), _ERROR), True),
    "tl_engine_add_file": (i32, (ptr, text, u64, u64, u64, ctypes.POINTER(i32), _ERROR), False),
    "tl_engine_submit": (i32, (ptr, ptr, u64, u64, ctypes.POINTER(u64), _ERROR), False),
    "tl_engine_landed": (ctypes.POINTER(u64), (ptr,), False),
    "tl_engine_wait": (i32, (ptr, u64, u32, _ERROR), True),
    "tl_engine_stream_wait": (i32, (ptr, u64, _ERROR), False),
    "tl_engine_digests": (i32, (ptr, u64, u64, ptr, _ERROR), False),
    "tl_engine_trace": (i32, (ptr, u64, ptr, u64, ctypes.POINTER(u64), _ERROR), True),
    "tl_digest": (None, (ptr, u64, ptr), False),
    "tl_engine_stats": (i32, (ptr, ctypes.POINTER(Stats), _ERROR), False),
    "tl_engine_file_info": (i32, (ptr, i32, ctypes.POINTER(FileInfo), _ERROR), False),
    "tl_engine_cancel": (i32, (ptr, _ERROR), False),
    "tl_engine_set_aside": (i32, (ptr, _ERROR), False),
    "tl_engine_destroy": (i32, (ptr, _ERROR), True),
    "tl_header_scan": (None, (text, u64, text, text, ptr), True),
    "tl_header_lists": (ctypes.py_object, (ptr, ptr, ptr, ptr), False),
    "tl_header_text": (ctypes.py_object, (ptr,), False),
    "tl_header_free": (None, (ptr,), False),
    "tl_headers_begin": (None, (text, u64, text, text, u32, u32, ptr), False),
    "tl_headers_ready": (i32, (ptr, u64, u32), False),
    "tl_headers_wait": (i32, (ptr, u64, u32), True),
    "tl_headers_take": (None, (ptr, u64, ptr), False),
    "tl_headers_end": (None, (ptr,), True),
    "tl_arena_host": (i32, (u64, *_ARENA, _ERROR), False),
    "tl_arena_adopt": (i32, (ptr, i32, i32, u64, *_ARENA, _ERROR), False),
    "tl_arena_record_stream": (i32, (u64, u64, _ERROR), False),
    "tl_arena_release": (None, (ptr,), False),
    "tl_arena_live": (u64, (), False),
    "tl_arena_capsules": (ctypes.py_object, (ptr, u64, u64, *[ptr] * 6, i32, i32), False),
}

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ptr
_capsule_pointer.argtypes = [ctypes.py_object, text]
_capsule_rename = ctypes.pythonapi.PyCapsule_SetName
_capsule_rename.restype = ctypes.c_int
_capsule_rename.argtypes = [ctypes.py_object, text]
# A capsule keeps the pointer to its name, so these must live as long as the process.
_FRESH, _USED = ctypes.create_string_buffer(b"dltensor"), ctypes.create_string_buffer(b"used_dltensor")


class Abi:
    """The functions of one loaded library, with Python values in and out."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.call = bind(path, _FUNCTIONS)
        version = self.call["tl_abi_version"]()
        if version != ABI_VERSION:
            raise LibraryError(
                f"{path} has version {version} of the interface, this package needs {ABI_VERSION}; "
                "install them together"
            )

    def backend_not_built(self, backend: str) -> str | None:
        """Why a back end is not in this library, or None where it is."""
        reason = self.call["tl_backend_not_built"](BACKEND_CODES[backend])
        return None if reason is None else reason.decode()

    def backend_probe(self, backend: str, path: str) -> str | None:
        """Tries one back end on a file, CUFILE without a read: None where it works, else why not. Blocks."""
        error = Error()
        status = self.call["tl_backend_probe"](BACKEND_CODES[backend], os.fsencode(path), ctypes.byref(error))
        return None if status == Status.OK else error.text or f"status {status}"

    def driver_probe(self, device_kind: int) -> tuple[int, str | None]:
        """(devices, None) where the driver's library of a kind opens, else (0, why not). Blocks."""
        count, error = i32(0), Error()
        status = self.call["tl_driver_probe"](device_kind, ctypes.byref(count), ctypes.byref(error))
        return (count.value, None) if status == Status.OK else (0, error.text or f"status {status}")

    def cached_share(self, path: bytes) -> float:
        """What share of a file is in the page cache, 0 to 1; -1 where that is not known. Blocks."""
        return float(self.call["tl_cached_share"](path))

    def _ask(self, name: str, *arguments: Any) -> int:
        return ask(self.call[name], *arguments)

    def engine_create(self, options: Options, handle: Handle) -> None:
        """Fills a handle for the functions below. Blocks."""
        self._ask("tl_engine_create", ctypes.byref(options), ctypes.byref(handle))

    def engine_add_file(self, engine: Handle, path: bytes, device: int, inode: int, nbytes: int) -> int:
        """Index of the file for pieces."""
        index = i32(-1)
        self._ask("tl_engine_add_file", engine, path, device, inode, nbytes, ctypes.byref(index))
        return index.value

    def engine_submit(self, engine: Handle, pieces: int, count: int, stream: int) -> int:
        """Ticket of all pieces so far; ``pieces`` is the address of an array of them."""
        ticket = u64()
        self._ask("tl_engine_submit", engine, pieces, count, stream, ctypes.byref(ticket))
        return ticket.value

    def engine_landed(self, engine: Handle) -> int:
        """Number of leading pieces that have landed."""
        landed = self.call["tl_engine_landed"](engine)
        return int(landed[0]) if landed else 0

    def engine_wait(self, engine: Handle, ticket: int, milliseconds: int) -> bool:
        """Whether the ticket landed within the time. Blocks."""
        return self._ask("tl_engine_wait", engine, ticket, milliseconds) == Status.OK

    def engine_stream_wait(self, engine: Handle, stream: int) -> None:
        """Makes a stream wait for all copies issued."""
        self._ask("tl_engine_stream_wait", engine, stream)

    def engine_digests(self, engine: Handle, first: int, count: int) -> npt.NDArray[np.uint8]:
        """(count, 16) bytes: the digests of landed pieces, zeros where none was asked for."""
        digests = np.zeros((count, DIGEST_BYTES), np.uint8)
        self._ask("tl_engine_digests", engine, first, count, digests.ctypes.data)
        return digests

    def engine_trace(self, engine: Handle) -> npt.NDArray[Any]:
        """All events so far, an array of TRACE_EVENT in no order; empty where the engine keeps none."""
        count = u64()
        self._ask("tl_engine_trace", engine, 0, None, 0, ctypes.byref(count))
        events = np.zeros(count.value, TRACE_EVENT)
        self._ask("tl_engine_trace", engine, 0, events.ctypes.data, len(events), ctypes.byref(count))
        return events

    def engine_stats(self, engine: Handle) -> Stats:
        """Counters."""
        stats = Stats()
        self._ask("tl_engine_stats", engine, ctypes.byref(stats))
        return stats

    def engine_file_info(self, engine: Handle, file: int) -> FileInfo:
        """What was decided for a file."""
        info = FileInfo()
        self._ask("tl_engine_file_info", engine, file, ctypes.byref(info))
        return info

    def engine_cancel(self, engine: Handle) -> None:
        """Starts no further read; that it may be forked or cancelled already is no matter."""
        self.call["tl_engine_cancel"](engine, ctypes.byref(Error()))

    def engine_set_aside(self, engine: Handle) -> None:
        """Its end keeps what it has pinned, for pinned_release()."""
        self.call["tl_engine_set_aside"](engine, ctypes.byref(Error()))

    def engine_destroy(self, engine: Handle) -> RefusedError | None:
        """Frees the engine, whatever its state, and empties the handle; nothing where it is empty. Blocks.

        What the driver has said, also of copies that had landed.
        """
        error = Error()
        destroy, place = self.call["tl_engine_destroy"], ctypes.byref(error)
        # No call comes between these, so that no signal's handler does: the engine is freed once, and surely.
        address, engine.value = engine.value, None
        status = destroy(address, place)
        return None if status == Status.OK else RefusedError(status, error)

    def pinned_release(self) -> int:
        """Bytes of the rings that were kept, and are given back now. Blocks."""
        nbytes = u64()
        self._ask("tl_pinned_release", ctypes.byref(nbytes))
        return nbytes.value

    def arena_host(self, nbytes: int) -> tuple[int, int]:
        """(arena, address) of fresh host memory, zero filled, at a multiple of 64; of 4096 from 64 KiB on."""
        arena, address, error = ptr(), u64(), Error()
        status = self.call["tl_arena_host"](
            nbytes, ctypes.byref(arena), ctypes.byref(address), ctypes.byref(error)
        )
        if status != Status.OK or not arena.value:
            kind = OutOfMemoryError if status == Status.MEMORY else MachineError
            raise kind(f"{nbytes} bytes of host memory could not be had: {error.text}")
        return arena.value, address.value

    def arena_adopt(self, capsule: object, kind: int, index: int, owner: int) -> tuple[int, int]:
        """(arena, address) of the memory of a DLPack capsule, which is used up by this; ``owner``: the stream
        of the device in whose order the memory is used again.
        """
        arena, address, error = ptr(), u64(), Error()
        given = _capsule_pointer(capsule, _FRESH), kind, index, owner
        status = self.call["tl_arena_adopt"](
            *given, ctypes.byref(arena), ctypes.byref(address), ctypes.byref(error)
        )
        if status != Status.OK or not arena.value:
            raise MachineError(f"a block of device memory could not be taken over: {error.text}")
        _capsule_rename(capsule, _USED)
        return arena.value, address.value

    def arena_record_stream(self, address: int, stream: int) -> bool:
        """Whether an adopted arena has this address; its owner's stream will wait for this one.

        Raises OutOfMemoryError where that cannot be kept in mind.
        """
        try:
            self._ask("tl_arena_record_stream", address, stream)
        except RefusedError as refused:
            if refused.status == Status.ARGUMENT:
                return False
            raise OutOfMemoryError(f"a stream could not be recorded: {refused.error.text}") from None
        return True

    def arena_release(self, arena: int) -> None:
        """Drops the reference that arena_host or arena_adopt gave."""
        self.call["tl_arena_release"](arena)

    def arena_live(self) -> int:
        """Arenas alive in this process."""
        return int(self.call["tl_arena_live"]())

    def capsules(
        self, arena: int, address: int, spec: CapsuleSpec, device: tuple[int, int]
    ) -> Sequence[object]:
        """One DLPack capsule a tensor, each holding a reference of the arena. Keeps the GIL."""
        # Kept in a list until the call is over: the library reads through their addresses.
        arrays = [np.ascontiguousarray(a, t) for a, t in zip(spec, _CAPSULE_TYPES, strict=True)]
        pointers = [array.ctypes.data for array in arrays]
        capsules: list[object] = self.call["tl_arena_capsules"](
            arena, address, len(arrays[0]), *pointers, *device
        )
        return capsules


def keep_for_ever(thing: object) -> None:
    """Has an object never end, not even with the interpreter."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


_pread = ctypes.CDLL(None, use_errno=True).pread64
_pread.restype = ctypes.c_ssize_t
_pread.argtypes = [ctypes.c_int, ptr, ctypes.c_size_t, ctypes.c_int64]


def pread(descriptor: int, address: int, nbytes: int, offset: int) -> int:
    """pread(2) into memory that is known by its address only; bytes read, or OSError. Blocks."""
    got = int(_pread(descriptor, address, nbytes, offset))
    if got < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return got


_lock = threading.Lock()
# By what the environment chose, so that asking again costs no look at the disk.
_loaded: dict[str | None, Abi] = {}


def library() -> Abi:
    """The native library, loaded at the first call; LibraryError where it is missing or does not fit."""
    chosen = os.environ.get(VARIABLE)
    found = _loaded.get(chosen)
    if found is None:
        with _lock:
            found = _loaded.get(chosen)
            if found is None:
                found = _loaded[chosen] = Abi(find_library())
    return found
