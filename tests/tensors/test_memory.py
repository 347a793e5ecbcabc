"""Memory: the contract for the host, and torch's CUDA memory with its calls pretended."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tensorlift.engine import abi, machine
from tensorlift.errors import OutOfMemoryError
from tensorlift.tensors import memory, scripts


def test_the_host() -> None:
    host = memory.for_device("cpu")
    assert (host.device, host.native_kind, host.dlpack_device) == (
        torch.device("cpu"),
        abi.DEVICE_CPU,
        (1, 0),
    )
    assert host.stream() == 0
    assert host.free_bytes() is None
    host.ready()
    before = abi.library().arena_live()
    arenas = host.allocate([1, 5 << 20])
    assert all(arena.address % 64 == 0 for arena in arenas)
    assert arenas[1].address % (2 << 20) == 0
    assert ctypes.string_at(arenas[1].address, arenas[1].nbytes) == bytes(5 << 20)
    for arena in arenas * 2:
        arena.release()
    assert abi.library().arena_live() == before
    assert host.allocate([]) == []


def test_host_memory_is_all_or_nothing() -> None:
    before = abi.library().arena_live()
    with pytest.raises(OutOfMemoryError, match="bytes of host memory"):
        memory.HostMemory().allocate([4096, 1 << 60])
    assert abi.library().arena_live() == before


class Stage:
    """torch.cuda as CudaMemory sees it, on CPU tensors."""

    def __init__(self) -> None:
        self.active: list[object] = []
        self.in_pool: list[int] = []
        self.made: list[weakref.ref[torch.Tensor]] = []
        self.fails = 0
        self.emptied = 0
        self.users: dict[int, int] = {}

    def begin(self, index: int, pool: int) -> None:
        assert index == 0
        # As torch: a pool that nobody has any more cannot be begun again.
        assert self.users.get(pool) != 0
        self.users[pool] = self.users.get(pool, 0) + 1
        self.active.append(pool)

    def end(self, index: int, pool: int) -> None:
        assert self.active.pop() == pool

    def release(self, index: int, pool: int) -> None:
        self.users[pool] -= 1

    def empty(self, nbytes: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert device == torch.device("cuda", 0)
        if self.fails:
            self.fails -= 1
            raise torch.cuda.OutOfMemoryError("no")
        made = self.real_empty(nbytes, dtype=dtype)
        self.made.append(weakref.ref(made))
        # As within somebody else's pool: a thread that has one already gets nothing from another.
        if self.active and threading.current_thread() is not threading.main_thread():
            self.in_pool.append(made.data_ptr())
        return made

    def empty_cache(self) -> None:
        assert not self.active, "inside the pool torch gives nothing back"
        self.emptied += 1


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    stage = Stage()
    stage.real_empty = torch.empty  # type: ignore[attr-defined]

    nothing = contextlib.nullcontext
    stream = type("Stream", (), {"cuda_stream": 77})()
    pretended: dict[str, Any] = {
        "is_current_stream_capturing": lambda: False,
        "device": lambda index: nothing(),
        "synchronize": lambda: None,
        "get_allocator_backend": lambda: "native",
        "graph_pool_handle": lambda: len(stage.users),
        "empty_cache": stage.empty_cache,
        "current_stream": lambda device: stream,
        "stream": lambda stream: nothing(),
        "get_device_properties": lambda index: SimpleNamespace(
            pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=1
        ),
        "mem_get_info": lambda device: (100, 1000),
        "memory_reserved": lambda device: 50,
        "memory_allocated": lambda device: 20,
    }
    for name, value in pretended.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name, call in (
        ("_cuda_beginAllocateCurrentThreadToPool", stage.begin),
        ("_cuda_endAllocateToPool", stage.end),
        ("_cuda_releasePool", stage.release),
        ("_cuda_getCurrentRawStream", lambda index: 77),
    ):
        monkeypatch.setattr(torch._C, name, call, raising=False)
    monkeypatch.setattr(memory.torch, "empty", stage.empty)
    monkeypatch.setattr(
        scripts, "empties", lambda sizes, device: [stage.empty(n, torch.uint8, device) for n in sizes]
    )
    return stage


def released(arenas: list[memory.Arena]) -> None:
    for arena in arenas:
        arena.release()


def test_blocks_come_from_the_pool_and_go_back_without_python(stage: Stage) -> None:
    cuda = memory.CudaMemory(0)
    assert (cuda.native_kind, cuda.dlpack_device) == (abi.DEVICE_CUDA, (2, 0))
    assert cuda.stream() == 77
    assert cuda.free_bytes() == 130
    cuda.ready()
    before = abi.library().arena_live()
    arenas = cuda.allocate([100, 200])
    assert [arena.address for arena in arenas] == stage.in_pool
    assert [arena.nbytes for arena in arenas] == [100, 200]
    assert stage.active == []
    assert abi.library().arena_live() == before + 2
    released(arenas)
    assert abi.library().arena_live() == before


def test_where_no_thread_can_be_had_blocks_come_all_the_same(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    arenas = memory.CudaMemory(0).allocate([100, 200])
    assert [arena.nbytes for arena in arenas] == [100, 200]
    released(arenas)


def test_out_of_memory_is_tried_again_outside_of_the_pool(stage: Stage) -> None:
    cuda = memory.CudaMemory(0)
    released(cuda.allocate([8]))
    stage.fails = 1
    gc.disable()
    try:
        released(cuda.allocate([8]))
        # None of it waits for the collector, behind an error.
        assert [one() for one in stage.made] == [None, None]
    finally:
        gc.enable()
    assert stage.emptied == 1
    stage.fails = 2
    with pytest.raises(
        OutOfMemoryError, match=r"8 bytes on cuda:0 in 1 arenas could not be had, 130 bytes are free"
    ):
        cuda.allocate([8])


def test_blocks_that_cannot_be_taken_over_leave_nothing(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = abi.library()
    real, before = library.arena_adopt, library.arena_live()

    def adopt(capsule: object, *where: int) -> tuple[int, int]:
        if library.arena_live() > before:
            raise OutOfMemoryError("no")
        return real(capsule, *where)

    monkeypatch.setattr(library, "arena_adopt", adopt)
    with pytest.raises(OutOfMemoryError):
        memory.CudaMemory(0).allocate([8, 8])
    assert library.arena_live() == before


def test_without_pools_the_plain_allocator_with_a_notice(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    cuda = memory.CudaMemory(0)
    assert "no private memory pool (allocator cudaMallocAsync)" in caplog.text
    released(cuda.allocate([8]))
    assert stage.in_pool == []


def test_where_a_device_is_plugged_in(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory.CudaMemory(0).pci_address == "0000:3b:01.0"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace())
    assert memory.CudaMemory(0).pci_address is None
    assert memory.HostMemory().pci_address is None


def test_rocm_is_named_as_such(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    cuda = memory.CudaMemory(0)
    assert (cuda.native_kind, cuda.dlpack_device) == (abi.DEVICE_HIP, (10, 0))


def test_more_than_the_machine_has_is_refused_though_each_block_would_be_promised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = abi.library().arena_live()
    monkeypatch.setattr(machine, "host_memory", lambda: 2 << 30)
    with pytest.raises(OutOfMemoryError, match="machine has 2147483648,"):
        memory.HostMemory().allocate([1 << 30] * 3)
    assert abi.library().arena_live() == before


def test_blocks_one_by_one_where_a_script_fails(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(sizes: object, device: object) -> None:
        raise RuntimeError("The following operation failed in the TorchScript interpreter")

    monkeypatch.setattr(scripts, "empties", fail)
    arenas = memory.CudaMemory(0).allocate([8, 8])
    assert [arena.nbytes for arena in arenas] == [8, 8]
    released(arenas)
    stage.fails = 9
    with pytest.raises(OutOfMemoryError, match="16 bytes on cuda:0 in 2 arenas could not be had"):
        memory.CudaMemory(0).allocate([8, 8])


def test_a_pool_lasts_from_use_to_use_and_is_let_go_of(stage: Stage) -> None:
    cuda, other = memory.CudaMemory(0), memory.CudaMemory(0)
    for one in (cuda, cuda, other):
        released(one.allocate([8]))
    assert stage.users == {0: 1, 1: 1}
    del cuda, one
    gc.collect()
    assert stage.users == {0: 0, 1: 1}


def test_without_an_allocation_there_is_no_pool(stage: Stage) -> None:
    assert memory.CudaMemory(0)._pool is None
