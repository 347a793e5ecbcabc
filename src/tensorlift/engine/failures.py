"""What the engine reports, as an exception that says where: file, tensor, bytes."""

from __future__ import annotations

import errno
import os
from typing import NamedTuple

import numpy as np

from tensorlift.engine.abi import Status
from tensorlift.errors import (
    BackendError,
    CheckpointNotFoundError,
    DriverError,
    FileError,
    LibraryError,
    MachineError,
    OutOfMemoryError,
    ReadError,
    RequestError,
    TensorliftError,
    TruncatedError,
)
from tensorlift.format.checkpoint import Shard
from tensorlift.format.quoting import clean, quote

__all__ = ["Failure", "exception_of", "tensor_at"]

# cuMemAlloc, cuMemHostRegister and hipMalloc answer 2 for "out of memory".
_DRIVER_OUT_OF_MEMORY = 2


class Failure(NamedTuple):
    """A tl_error as plain values."""

    status: int
    message: str
    os_errno: int = 0
    driver_code: int = 0
    offset: int = 0
    wanted: int = 0
    got: int = 0


def tensor_at(shard: Shard, offset: int) -> str | None:
    """Name of the tensor that holds the byte at ``offset`` of a file, or None for its header and its end."""
    header = shard.header
    row = int(np.searchsorted(header.starts, offset, side="right")) - 1
    # Tensors without bytes share their place with the one after them.
    while row >= 0 and header.sizes[row] == 0:
        row -= 1
    if row < 0 or offset >= header.starts[row] + header.sizes[row]:
        return None
    return header.names[row]


def exception_of(failure: Failure, shard: Shard | None) -> TensorliftError:
    """The exception for a failure; ``shard`` is the file it is about, if any."""
    where = "" if shard is None else f"{clean(shard.path)}: "
    name = None if shard is None else tensor_at(shard, failure.offset + failure.got)
    place = f"at offset {failure.offset}" + ("" if name is None else f" (tensor {quote(name)})")
    said = f" ({failure.message})" if failure.message else ""
    status = failure.status
    if status == Status.TRUNCATED:
        size = "" if shard is None else f"; its header was read when it had {shard.nbytes} bytes"
        return TruncatedError(
            f"{where}the file ends too early: wanted {failure.wanted} bytes {place}, "
            f"found {failure.got}{size}{said}; "
            "was it being written or downloaded? Load it again when it is complete"
        )
    if status == Status.REPLACED:
        return FileError(
            f"{where}the file was replaced or changed after its header was read{said}; "
            "load again when nothing writes it"
        )
    if status == Status.OPEN:
        return _open_error(failure, where, said)
    if status == Status.READ:
        reason = os.strerror(failure.os_errno) if failure.os_errno else "read failed"
        return _with_errno(
            ReadError(f"{where}{reason}: wanted {failure.wanted} bytes {place}, got {failure.got}{said}"),
            failure.os_errno,
        )
    if status == Status.BACKEND:
        # Where it was a read that the last of them refused.
        read = f"; wanted {failure.wanted} bytes {place}, got {failure.got}" if failure.wanted else ""
        return BackendError(
            f"{where}every back end that may be used was refused: {failure.message}{read}; "
            "allow others with backend="
        )
    if status == Status.DRIVER:
        kind = OutOfMemoryError if failure.driver_code == _DRIVER_OUT_OF_MEMORY else DriverError
        return kind(f"{where}the device's driver failed with code {failure.driver_code}{said}")
    if status == Status.MEMORY:
        return OutOfMemoryError(f"{where}host memory could not be had{said}; lower pinned_bytes or io_depth")
    if status == Status.CANCELLED:
        return RequestError(f"{where}the load was cancelled")
    if status == Status.FORKED:
        return RequestError(
            "this load belongs to the parent process; after os.fork() start a load of your own"
        )
    if status == Status.ABI:
        return LibraryError(f"library and package do not fit together{said}; install them together")
    if status == Status.ARGUMENT:
        return RequestError(f"{where}the engine refused what it was given{said}")
    return MachineError(f"{where}the engine failed with status {status}{said}")


def _open_error(failure: Failure, where: str, said: str) -> TensorliftError:
    reason = os.strerror(failure.os_errno) if failure.os_errno else "not to be opened"
    if failure.os_errno == errno.ENOENT:
        text = f"{where}the file is gone since its header was read{said}"
        return _with_errno(CheckpointNotFoundError(text), failure.os_errno)
    return _with_errno(ReadError(f"{where}could not be opened: {reason}{said}"), failure.os_errno)


def _with_errno(error: ReadError | CheckpointNotFoundError, number: int) -> TensorliftError:
    # errno alone: with a filename too, OSError would put its own text in the place of the message.
    error.errno = number
    return error
