"""Tensors in a file of memory: laid out as asked, found by address, sealed, gone with the last of them."""

from __future__ import annotations

import fcntl
import gc
import os

import numpy as np
import pytest
import torch

from support import leaks
from tensorlift.engine import abi_fork
from tensorlift.engine.abi_fork import Origin, OriginKind
from tensorlift.engine.abi_types import RefusedError
from tensorlift.errors import MachineError
from tensorlift.forking.manifest import ITEM_BYTES, Layout
from tensorlift.forking.shared_memory import shared_at, shared_tensors

MIB = 1 << 20


def test_tensors() -> None:
    layouts = [
        Layout("odd", "uint8", (3,), (1,)),
        Layout("matrix", "bfloat16", (4, 5), (5, 1)),
        Layout("transposed", "float32", (7, 3), (1, 7)),
        Layout("holes", "int64", (2, 2), (10, 3)),
        Layout("expanded", "float16", (4, 6), (0, 1)),
        Layout("scalar", "float64", (), ()),
        Layout("empty", "float32", (0, 3), (3, 1)),
    ]
    with leaks.nothing_left():
        made = shared_tensors(layouts)
        for one in layouts:
            tensor = made[one.name]
            assert (str(tensor.dtype), tuple(tensor.shape)) == (f"torch.{one.dtype}", one.shape)
            assert tensor.stride() == one.stride
            assert not tensor.any()
            if tensor.numel():
                assert tensor.data_ptr() % 64 == 0
        # None of them shares a byte with another.
        for number, tensor in enumerate(made.values()):
            tensor.fill_(number)
        assert [int(tensor.max()) for tensor in made.values() if tensor.numel()] == list(range(6))
        del made, tensor


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_every_dtype(dtype: str) -> None:
    if not hasattr(torch, dtype):
        pytest.skip("this torch does not have it")
    tensor = shared_tensors([Layout("before", "uint8", (1,), (1,)), Layout("t", dtype, (3,), (1,))])["t"]
    assert tensor.untyped_storage().nbytes() >= 64
    assert tensor.element_size() == ITEM_BYTES[dtype]


def test_the_file_of_an_address() -> None:
    made = shared_tensors([Layout("a", "uint8", (100,), (1,)), Layout("b", "uint8", (100,), (1,))])
    first, second = (tensor.data_ptr() for tensor in made.values())
    file = shared_at(first, 100)
    assert file is not None
    assert shared_at(second, 100) == shared_at(first, second + 100 - first) == file
    assert shared_at(first - 1, 10) is None
    assert shared_at(second, file.nbytes) is None
    assert shared_at(torch.zeros(5).data_ptr(), 5) is None
    made["b"].fill_(7)
    assert os.pread(file.descriptor, 100, second - file.address) == b"\7" * 100


def test_nobody_else_can_shorten_or_write_it() -> None:
    made = shared_tensors([Layout("a", "uint8", (MIB,), (1,))])
    file = shared_at(made["a"].data_ptr(), MIB)
    assert file is not None
    for change in (
        lambda: os.ftruncate(file.descriptor, 0),
        lambda: os.ftruncate(file.descriptor, 2 * MIB),
        lambda: os.pwrite(file.descriptor, b"x", 0),
        lambda: fcntl.fcntl(file.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
    ):
        with pytest.raises(PermissionError):
            change()
    made["a"].fill_(1)


def test_it_goes_with_the_last_tensor() -> None:
    with leaks.nothing_left():
        made = shared_tensors([Layout("a", "uint8", (100,), (1,)), Layout("b", "uint8", (100,), (1,))])
        kept = made.pop("b")[50:]
        made.clear()
        gc.collect()
        file = shared_at(kept.data_ptr(), 50)
        assert file is not None
        kept.fill_(3)
        del kept
        gc.collect()
        assert shared_at(file.address, 1) is None


def test_more_than_there_is() -> None:
    with leaks.nothing_left(), pytest.raises(MachineError, match="bytes of shared memory: "):
        shared_tensors([Layout("a", "uint8", (2**62,), (1,))])


def test_nothing() -> None:
    assert shared_tensors([]) == {}
    with leaks.nothing_left():
        assert shared_tensors([Layout("a", "float32", (0,), (1,))])["a"].shape == (0,)


def test_a_file_of_memory_is_mapped_only_where_it_stays_as_large() -> None:
    descriptor, memory = abi_fork.shared_create(5000)
    memory[4999] = b"x"
    with leaks.nothing_left():
        mapped = abi_fork.shared_map(descriptor)
        assert mapped.nbytes == 5000
        abi_fork.copy_from(Origin(OriginKind.HERE, 0, *mapped[:2]), 4998, to := np.zeros(2, np.uint8))
        abi_fork.shared_release(-1, *mapped[:2])
        assert to.tolist() == [0, ord("x")]
        shrinkable = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        os.truncate(shrinkable, 5000)
        for no_such in (shrinkable, -1):
            with pytest.raises(RefusedError, match="no file of memory that stays as large as it is"):
                abi_fork.shared_map(no_such)
        os.close(shrinkable)
    abi_fork.shared_release(descriptor, np.frombuffer(memory, np.uint8).ctypes.data, 5000)
