"""The C interface of weights that pass between processes (native/include/tensorlift_fork.h)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorlift.engine.abi import library
from tensorlift.engine.abi_types import (
    Error,
    Functions,
    Handle,
    Structure,
    ask,
    bind,
    each,
    i32,
    ptr,
    u32,
    u64,
)

__all__ = [
    "IPC_BYTES",
    "Chunk",
    "Memory",
    "Origin",
    "OriginKind",
    "Outcome",
    "Places",
    "SenderStats",
    "Staging",
    "copy_from",
    "fetch_chunk",
    "ipc_export",
    "sender_create",
    "sender_destroy",
    "sender_serve",
    "sender_set_epoch",
    "sender_stats",
    "shared_create",
    "shared_map",
    "shared_release",
    "tensor_digest",
]  # fmt: skip


IPC_BYTES = 64
"""Of a handle of CUDA IPC."""
Places = npt.NDArray[np.uint64]


class Memory(NamedTuple):
    """A region of memory; the device as tl_region has it."""

    address: int
    nbytes: int
    device_kind: int = 0
    device_index: int = 0


class Outcome:
    """The values of tl_chunk_outcome."""

    OK, STALE, CLOSED, RANGE, WRONG = range(5)


class SenderStats(Structure):
    """tl_sender_stats."""

    _fields_ = (
        *each(u32, "struct_size connections"),
        *each(u64, "sent_bytes sent_chunks refused_chunks stale_chunks bad_requests"),
    )


class Chunk(Structure):
    """tl_chunk."""

    _fields_ = (
        *each(u32, "struct_size region"),
        *each(u64, "offset nbytes epoch"),
        *each(u32, "digest milliseconds"),
        *each(i32, "outcome verified"),
        *each(u64, "seed_epoch done"),
    )


class _Region(ctypes.Structure):
    """tl_region."""

    _fields_ = (*each(u64, "address nbytes"), *each(i32, "device_kind device_index"))


class OriginKind:
    """The values of tl_origin_kind."""

    HERE, PROCESS, DEVICE = range(3)


class _IpcHandle(ctypes.Structure):
    """tl_ipc_handle."""

    _fields_ = (("bytes", ctypes.c_uint8 * IPC_BYTES),)


class Origin(ctypes.Structure):
    """tl_origin: where a fork reads a region of the seed itself."""

    _fields_ = (*each(i32, "kind handle"), *each(u64, "address nbytes"))


_ERROR = ctypes.POINTER(Error)
_FUNCTIONS: Functions = {
    "tl_sender_create": (i32, (ptr, u64, u64, u64, u32, ctypes.POINTER(ptr), _ERROR), True),
    "tl_sender_serve": (i32, (ptr, i32, _ERROR), False),
    "tl_sender_set_epoch": (i32, (ptr, u64, i32, _ERROR), False),
    "tl_sender_stats_of": (i32, (ptr, ctypes.POINTER(SenderStats), _ERROR), False),
    "tl_sender_destroy": (i32, (ptr, _ERROR), True),
    "tl_chunk_fetch": (i32, (i32, ctypes.POINTER(Chunk), ptr, u64, ptr, ptr, _ERROR), True),
    "tl_staging_create": (i32, (i32, i32, ctypes.POINTER(ptr), _ERROR), True),
    "tl_staging_destroy": (i32, (ptr, _ERROR), True),
    "tl_staging_map": (
        i32,
        (ptr, ctypes.POINTER(_IpcHandle), ctypes.POINTER(u64), ctypes.POINTER(u64), _ERROR),
        True,
    ),
    "tl_ipc_export": (
        i32,
        (ctypes.POINTER(_Region), ctypes.POINTER(_IpcHandle), ctypes.POINTER(u64), _ERROR),
        True,
    ),
    "tl_origin_copy": (i32, (ctypes.POINTER(Origin), u64, ptr, u64, _ERROR), True),
    "tl_shared_create": (i32, (u64, ctypes.POINTER(i32), ctypes.POINTER(u64), _ERROR), True),
    "tl_shared_map": (i32, (i32, ctypes.POINTER(u64), ctypes.POINTER(u64), _ERROR), True),
    "tl_shared_release": (None, (i32, u64, u64), True),
    "tl_tensor_digest": (None, (ptr, u64, ptr), True),
}


@functools.cache
def _bound(path: str) -> dict[str, Callable[..., Any]]:
    return bind(path, _FUNCTIONS)


def _function(name: str) -> Callable[..., Any]:
    return _bound(library().path)[name]


def sender_create(
    regions: Sequence[Memory], rate: int, burst: int, idle_milliseconds: int, handle: Handle
) -> None:
    """Fills a handle for the functions below. ``regions`` stay where they are.

    Blocks where some are a device's, which is tried.
    """
    given = (_Region * len(regions))(*(_Region(*region) for region in regions))
    ask(
        _function("tl_sender_create"),
        ctypes.addressof(given),
        len(given),
        rate,
        burst,
        idle_milliseconds,
        ctypes.byref(handle),
    )


def sender_serve(sender: Handle, descriptor: int) -> None:
    """Serves a socket, which is the sender's from now on, also when this raises."""
    ask(_function("tl_sender_serve"), sender, descriptor)


def sender_set_epoch(sender: Handle, epoch: int, is_open: bool) -> None:
    """What is asked for with another epoch, or while it is not open, is refused from now on."""
    ask(_function("tl_sender_set_epoch"), sender, epoch, is_open)


def sender_stats(sender: Handle) -> SenderStats:
    """Counters."""
    stats = SenderStats()
    ask(_function("tl_sender_stats_of"), sender, ctypes.byref(stats))
    return stats


def sender_destroy(sender: Handle) -> None:
    """Ends all connections and empties the handle; nothing where it is empty. Blocks."""
    destroy, error = _function("tl_sender_destroy"), ctypes.byref(Error())
    # No call comes between these: see engine_destroy in abi.py.
    address, sender.value = sender.value, None
    destroy(address, error)


class Staging:
    """Pinned blocks through which one connection writes to a device; close() gives them back."""

    def __init__(self, device_kind: int, device_index: int) -> None:
        """Raises RefusedError where the device cannot be used."""
        self._handle = Handle()
        ask(_function("tl_staging_create"), device_kind, device_index, ctypes.byref(self._handle))

    @property
    def address(self) -> int | None:
        """For fetch_chunk()."""
        return self._handle.value

    def map(self, handle: bytes) -> tuple[int, int]:
        """Another process's allocation, by its handle of ipc_export(): its address until close(), its bytes.

        Raises RefusedError where the driver does not give it.
        """
        given, address, nbytes = _IpcHandle.from_buffer_copy(handle), u64(), u64()
        ask(
            _function("tl_staging_map"),
            self._handle, ctypes.byref(given), ctypes.byref(address), ctypes.byref(nbytes),
        )  # fmt: skip
        return address.value, nbytes.value

    def close(self) -> None:
        """Waits for copies."""
        address, self._handle.value = self._handle.value, None
        _function("tl_staging_destroy")(address, ctypes.byref(Error()))


def ipc_export(region: Memory) -> tuple[bytes, int]:
    """The handle of the allocation that holds a region, and how many bytes into it the region begins.

    Raises RefusedError where the driver gives none.
    """
    handle, offset, given = _IpcHandle(), u64(), _Region(*region)
    ask(_function("tl_ipc_export"), ctypes.byref(given), ctypes.byref(handle), ctypes.byref(offset))
    return bytes(handle.bytes), offset.value


def fetch_chunk(
    descriptor: int,
    chunk: Chunk,
    places: Places,
    staging: Staging | None = None,
    origin: Origin | None = None,
) -> None:
    """Asks for a chunk, writes it to its places and fills in what came of it. Blocks.

    ``places``: (n, 3) of bytes from the chunk's first, bytes, address; ascending, and without overlaps.
    ``staging``: of the device that all of them are on; None for host memory. ``origin``: of the chunk's
    region, where it is copied from there instead of coming over the socket.
    """
    given = np.ascontiguousarray(places, np.uint64)
    to = None if staging is None else staging.address
    of = None if origin is None else ctypes.addressof(origin)
    ask(_function("tl_chunk_fetch"), descriptor, ctypes.byref(chunk), given.ctypes.data, len(given), to, of)


def copy_from(origin: Origin, offset: int, to: npt.NDArray[np.uint8]) -> None:
    """Fills an array with bytes of an origin; RefusedError says why it cannot be read. Blocks."""
    ask(_function("tl_origin_copy"), ctypes.byref(origin), offset, to.ctypes.data, to.nbytes)


def shared_create(nbytes: int) -> tuple[int, ctypes.Array[ctypes.c_char]]:
    """A file of memory that others may read, as a descriptor and as memory. Blocks; RefusedError.

    What holds neither the array nor a view of it any more has to call shared_release().
    """
    descriptor, address = i32(-1), u64()
    ask(_function("tl_shared_create"), nbytes, ctypes.byref(descriptor), ctypes.byref(address))
    return descriptor.value, (ctypes.c_char * nbytes).from_address(address.value)


def shared_map(descriptor: int) -> Memory:
    """Such a file of another process, mapped here to be read; the descriptor can be closed behind this.

    For shared_release(). Blocks; raises RefusedError where it is no such file.
    """
    address, nbytes = u64(), u64()
    ask(_function("tl_shared_map"), descriptor, ctypes.byref(address), ctypes.byref(nbytes))
    return Memory(address.value, nbytes.value)


def shared_release(descriptor: int, address: int, nbytes: int) -> None:
    """The end of both; ``descriptor``: below 0 where there is none any more."""
    _function("tl_shared_release")(descriptor, address, nbytes)


def tensor_digest(address: int, nbytes: int) -> bytes:
    """What a chunk is sent with, 16 bytes. Blocks."""
    digest = (ctypes.c_uint8 * 16)()
    _function("tl_tensor_digest")(address, nbytes, digest)
    return bytes(digest)
