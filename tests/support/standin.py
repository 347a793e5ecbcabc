"""A device for tests where there is none: the stand-in driver under the engine, memory behind the loader.

``StandInMemory`` keeps the contract of tensorlift.tensors.memory: blocks come from a free list of their
stream, as with torch's allocator, and are poisoned in stream order when they are given back. Its tensors are
CPU tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence

import pytest
import torch

from support.native_build import standin_library
from tensorlift.engine import abi
from tensorlift.errors import OutOfMemoryError
from tensorlift.tensors import memory as memory_module
from tensorlift.tensors.memory import Arena

POISON = 0xDB
LIBRARIES = {abi.DEVICE_CUDA: "libcuda.so.1", abi.DEVICE_HIP: "libamdhip64.so"}

_u64, _i64, _i32, _text, _ptr = (
    ctypes.c_uint64,
    ctypes.c_int64,
    ctypes.c_int32,
    ctypes.c_char_p,
    ctypes.c_void_p,
)
_CONTROLS = {
    "reset": (None, ()), "ready": (None, ()), "set_devices": (None, (_i32,)),
    "set_copy_delay_us": (None, (_u64,)), "set_allocation_bytes": (None, (_u64,)),
    "set_busy": (None, (_i32,)), "fail_at_random": (None, (_u64, ctypes.c_uint32, _i32)),
    "set_copy_jitter_us": (None, (_u64, _u64)),
    "fail": (None, (_text, _i64, _i32)), "calls": (_u64, (_text,)), "entry": (_text, (ctypes.c_uint32,)),
    "registered_bytes": (_u64, ()), "registered_peak_bytes": (_u64, ()), "live_streams": (_u64, ()),
    "live_events": (_u64, ()), "retained_contexts": (_i64, ()), "mapped_allocations": (_u64, ()),
    "unpinned_copies": (_u64, ()),
    "lost_copies": (_u64, ()), "blocking_streams": (_u64, ()), "stream": (_u64, ()),
    "stream_free": (None, (_u64,)), "stream_sync": (None, (_u64,)),
    "memset": (None, (_u64, _u64, _i32, _u64)),
    "copy": (None, (_u64, _u64, _u64, _u64)), "hold": (_u64, (_u64,)), "release": (None, (_u64,)),
    "settle": (None, ()), "drain": (None, ()),
}  # fmt: skip


class Driver:
    """The controls of one stand-in (native/tests/standin/standin.h), loaded so that the engine finds it."""

    def __init__(self, kind: int) -> None:
        self.kind = kind
        path = standin_library(LIBRARIES[kind])
        self._library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        for name, (result, arguments) in _CONTROLS.items():
            function = getattr(self._library, f"standin_{name}")
            function.restype, function.argtypes = result, list(arguments)
            setattr(self, name, function)

    def entries(self) -> list[str]:
        """Names of all entry points."""
        names = []
        while (name := self.entry(len(names))) is not None:
            names.append(name.decode())
        return names

    def counts(self) -> dict[str, int]:
        """Calls of each entry point since the reset."""
        return {name: self.calls(name.encode()) for name in self.entries()}

    def assert_clean(self) -> None:
        """Nothing is registered, alive or retained, and every copy was as it should be."""
        self.drain()
        left = {
            name: getattr(self, name)()
            for name in (
                "registered_bytes", "live_streams", "live_events", "retained_contexts", "mapped_allocations",
                "unpinned_copies",
                "lost_copies", "blocking_streams",
            )
        }  # fmt: skip
        assert not any(left.values()), left


@functools.cache
def driver(kind: int) -> Driver:
    """The stand-in of a kind, loaded once a process; the test is skipped where torch has the real one."""
    if torch.cuda.is_available():
        pytest.skip("the driver of a real device is in this process: its place cannot be taken")
    return Driver(kind)


class Cufile:
    """The controls of the stand-in for libcufile; its delay is that of a read."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(standin_library("libcufile.so.0")), mode=ctypes.RTLD_GLOBAL)
        for name in ("cufile_reset", "cufile_set_most", "cufile_handles", "cufile_misuses"):
            function = getattr(self._library, f"standin_{name}")
            function.restype = None if name in ("cufile_reset", "cufile_set_most") else _u64
            function.argtypes = [_u64] if name == "cufile_set_most" else []
            setattr(self, name.removeprefix("cufile_"), function)
        for name in ("set_copy_delay_us", "fail", "calls"):
            function = getattr(self._library, f"standin_{name}")
            function.restype, function.argtypes = _CONTROLS[name][0], list(_CONTROLS[name][1])
            setattr(self, name, function)

    def assert_clean(self) -> None:
        """No handle is left, and nothing was done that a right engine does not do."""
        assert (self.handles(), self.misuses()) == (0, 0)


@functools.cache
def _cufile() -> Cufile:
    driver(abi.DEVICE_CUDA)  # where there is a real device the test is skipped
    return Cufile()


def cufile() -> Cufile:
    """The stand-in for libcufile, loaded once a process, as after a reset."""
    loaded = _cufile()
    loaded.reset()
    return loaded


class _DLTensor(ctypes.Structure):
    """DLTensor of dlpack.h."""

    _fields_ = [
        ("data", _ptr), ("device_type", _i32), ("device_id", _i32), ("ndim", _i32), ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(_i64)),
        ("strides", ctypes.POINTER(_i64)), ("byte_offset", _u64),
    ]  # fmt: skip


_Deleter = ctypes.CFUNCTYPE(None, _ptr)


class _Managed(ctypes.Structure):
    """DLManagedTensor of dlpack.h."""

    _fields_ = [("tensor", _DLTensor), ("context", _ptr), ("deleter", _Deleter)]


_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = [_ptr, _text, _ptr]
_NAME = ctypes.create_string_buffer(b"dltensor")


class _Block:
    """Memory of the device, page aligned; alive as long as its memory object is."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.map = mmap.mmap(-1, max(nbytes, 1))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))


# Kept until all blocks are back: tensors in a cycle with their memory may be collected after it, and giving
# them back runs its code.
_lending: set[StandInMemory] = set()


class StandInMemory:
    """See the module, and tensorlift.tensors.memory.Memory for the contract."""

    def __init__(self, kind: int = abi.DEVICE_CUDA, index: int = 0, capacity: int = 1 << 30) -> None:
        self.driver = driver(kind)
        self.device = torch.device("cpu")
        self.native_kind, self.native_index = kind, index
        self.dlpack_device = (1, 0)
        self.pci_address: str | None = None
        self.capacity = capacity
        self.consumer: int = self.driver.stream()
        self.waits_in_ready = True
        """Off: the test queues its work on the consumer's stream instead of using tensors at once."""
        self.allocated = self.peak = self.reused = 0
        self._lock = threading.Lock()
        self._blocks: list[_Block] = []
        self._free: dict[tuple[int, int], list[_Block]] = defaultdict(list)
        self._managed: dict[int, _Managed] = {}
        self._gone: list[_Managed] = []

    def allocate(self, sizes: Sequence[int]) -> list[Arena]:
        """See Memory."""
        if self.allocated + sum(sizes) > self.capacity:
            raise OutOfMemoryError(f"{sum(sizes)} bytes, {self.free_bytes()} are free")
        return [self._arena(nbytes) for nbytes in sizes]

    def _arena(self, nbytes: int) -> Arena:
        with self._lock:
            free = self._free[self.consumer, nbytes]
            if free:
                block = free.pop()
                self.reused += 1
            else:
                block = _Block(nbytes)
                self._blocks.append(block)
                # Fresh memory holds anything, never zeros that a test could take for right bytes.
                ctypes.memset(block.address, POISON, nbytes)
            self.allocated += nbytes
            self.peak = max(self.peak, self.allocated)
        capsule, owner = self._capsule_of(block, self.consumer), self.consumer
        handle, address = abi.library().arena_adopt(capsule, self.native_kind, self.native_index, owner)
        return Arena(handle, address, nbytes, owner)

    def _capsule_of(self, block: _Block, stream: int) -> object:
        managed = _Managed()
        shape = (_i64 * 1)(block.nbytes)
        managed.tensor = _DLTensor(block.address, 1, 0, 1, 1, 8, 1, shape, None, 0)
        pointer = ctypes.addressof(managed)

        def give_back(_: int) -> None:
            with self._lock:
                # Kept: what runs now is code that this object owns.
                self._gone.append(self._managed.pop(pointer))
                if not self._managed:
                    _lending.discard(self)
                self.allocated -= block.nbytes
                # In stream order, as a framework's allocator: work queued there may still read the block.
                self.driver.memset(stream, block.address, POISON, block.nbytes)
                self._free[stream, block.nbytes].append(block)

        managed.deleter = _Deleter(give_back)
        self._managed[pointer] = managed
        _lending.add(self)
        return _capsule(pointer, _NAME, None)

    def stream(self) -> int:
        """See Memory."""
        return self.consumer

    def ready(self) -> None:
        """See Memory: torch's CPU work does not follow the stand-in's stream."""
        if self.waits_in_ready:
            self.driver.stream_sync(self.consumer)

    def free_bytes(self) -> int | None:
        """See Memory."""
        return self.capacity - self.allocated

    def close(self) -> None:
        """Waits for the consumer's work and ends its stream."""
        self.driver.stream_sync(self.consumer)
        self.driver.stream_free(self.consumer)


@contextlib.contextmanager
def device(kind: int = abi.DEVICE_CUDA, cpu_too: bool = False, **options: int) -> Iterator[StandInMemory]:
    """Makes "cuda" devices of the loader come from the stand-in, on a fresh driver, clean at the end.

    ``cpu_too``: CPU tensors count as the device's, so that load_into writes to them through it.
    """
    the_driver = driver(kind)
    the_driver.reset()
    the_driver.ready()
    stand_in = StandInMemory(kind, **options)
    original = memory_module.for_device

    def for_device(wanted: object, *, private: bool = True) -> memory_module.Memory:
        return stand_in if cpu_too or str(wanted).startswith("cuda") else original(wanted, private=private)

    memory_module.for_device = for_device
    try:
        yield stand_in
        for entry in the_driver.entries():
            the_driver.fail(entry.encode(), 0, 0)
        stand_in.close()
        the_driver.assert_clean()
    finally:
        memory_module.for_device = original
        the_driver.reset()
