"""What the engine reports becomes an exception that says where."""

from __future__ import annotations

import errno

import numpy as np
import pytest

from tensorlift.engine.abi import Status
from tensorlift.engine.failures import Failure, exception_of, tensor_at
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
from tensorlift.format.header import Header

HEADER = Header(
    None,
    ["a", "none", "b"],
    np.zeros(3, np.uint8),
    [(100,), (0,), (50,)],
    np.array([64, 164, 164], np.int64),
    np.array([100, 0, 50], np.int64),
)
SHARD = Shard("dir/m.safetensors", b"/dir/m.safetensors", 214, 1, 2, HEADER)


@pytest.mark.parametrize(
    ("offset", "name"), [(0, None), (63, None), (64, "a"), (163, "a"), (164, "b"), (213, "b"), (214, None)]
)
def test_the_tensor_at_an_offset(offset: int, name: str | None) -> None:
    assert tensor_at(SHARD, offset) == name


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (Status.ARGUMENT, RequestError),
        (Status.ABI, LibraryError),
        (Status.OPEN, ReadError),
        (Status.READ, ReadError),
        (Status.TRUNCATED, TruncatedError),
        (Status.REPLACED, FileError),
        (Status.BACKEND, BackendError),
        (Status.DRIVER, DriverError),
        (Status.MEMORY, OutOfMemoryError),
        (Status.CANCELLED, RequestError),
        (Status.FORKED, RequestError),
        (Status.INTERNAL, MachineError),
        (99, MachineError),
    ],
)
@pytest.mark.parametrize("shard", [SHARD, None])
def test_every_status_has_its_exception(status: int, kind: type[Exception], shard: Shard | None) -> None:
    error = exception_of(Failure(status, "what the engine says", 5, 700), shard)
    assert type(error) is kind
    assert isinstance(error, TensorliftError)


def test_truncated_says_file_tensor_wanted_and_found() -> None:
    error = exception_of(Failure(Status.TRUNCATED, "", 0, 0, 150, 64, 20), SHARD)
    for part in ("dir/m.safetensors", "'b'", "wanted 64 bytes at offset 150", "found 20", "214 bytes"):
        assert part in str(error)


def test_read_errors_carry_errno_and_file() -> None:
    error = exception_of(Failure(Status.READ, "uring", errno.EIO, 0, 70, 10, 0), SHARD)
    assert isinstance(error, OSError)
    assert error.errno == errno.EIO
    assert (
        "dir/m.safetensors: Input/output error: wanted 10 bytes at offset 70 (tensor 'a'), got 0 (uring)"
        in str(error)
    )


def test_a_file_that_is_gone() -> None:
    error = exception_of(Failure(Status.OPEN, "", errno.ENOENT), SHARD)
    assert type(error) is CheckpointNotFoundError
    assert error.errno == errno.ENOENT


def test_device_memory() -> None:
    assert type(exception_of(Failure(Status.DRIVER, "", 0, 2), None)) is OutOfMemoryError
    assert "code 700" in str(exception_of(Failure(Status.DRIVER, "", 0, 700), None))


def test_back_ends_give_each_reason() -> None:
    error = exception_of(Failure(Status.BACKEND, "URING: EPERM; MMAP: ENODEV"), SHARD)
    assert "URING: EPERM; MMAP: ENODEV" in str(error)
    assert "backend=" in str(error)
