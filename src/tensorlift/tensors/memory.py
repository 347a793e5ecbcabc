"""Memory that tensors live in: one small contract, the host's and torch's CUDA (or ROCm) memory behind it.

The engine sees addresses and stream handles only, so whatever keeps this contract can stand in for a device.
`for_device` is the one chooser; callers take it from this module, so that a test can put another in its
place.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch

from tensorlift.engine import abi, machine
from tensorlift.errors import OutOfMemoryError, RequestError
from tensorlift.tensors import scripts
from tensorlift.tensors.devices import driver_of, parse_device

__all__ = [
    "Arena",
    "CudaMemory",
    "HostMemory",
    "Memory",
    "check_host",
    "check_no_capture",
    "for_device",
    "pci_address",
    "record_stream",
]

_log = logging.getLogger("tensorlift")

# DLDeviceType of DLPack 1.0 (dlpack.h): kDLCPU, kDLCUDA, kDLROCM.
_DL_CPU, _DL_CUDA, _DL_ROCM = 1, 2, 10


# Bytes from which on it is looked up whether the machine has so many.
_WORTH_ASKING = 1 << 30


class Arena:
    """One block of memory, held by one native reference; tensors made of it hold their own.

    ``release()`` drops this object's reference; the block goes back when the last tensor is gone. There is no
    finaliser: whoever made it closes the engine that writes into it first, then releases.
    """

    __slots__ = ("address", "handle", "nbytes", "owner")

    def __init__(self, handle: int, address: int, nbytes: int, owner: int = 0) -> None:
        self.handle, self.address, self.nbytes = handle, address, nbytes
        self.owner = owner
        """The stream in whose order the block is used again; 0 for a host."""

    def used_on(self, stream: int) -> None:
        """Has a block that goes back wait for the work of another stream than the owner's."""
        if stream != self.owner:
            abi.library().arena_record_stream(self.address, stream)

    def release(self) -> None:
        """Drops the reference; a second call does nothing."""
        if self.handle:
            handle, self.handle = self.handle, 0
            abi.library().arena_release(handle)


class Memory(Protocol):
    """The memory of one device."""

    device: torch.device
    """Where tensors say that they are; has an index unless it is the CPU."""
    native_kind: int
    """tl_device_kind for the engine: 0 means that it reads in place, others go through slots."""
    native_index: int
    """The driver's ordinal."""
    dlpack_device: tuple[int, int]
    """(DLDeviceType, index) of the tensors handed out."""
    pci_address: str | None
    """Where the device is plugged in, as sysfs names it ("0000:3b:00.0"); None where that is not known."""

    def allocate(self, sizes: Sequence[int]) -> list[Arena]:
        """Arenas of the given bytes, at addresses divisible by 64 (host: 4096 from 64 KiB on) or by 256.

        All or none: OutOfMemoryError leaves nothing behind. A block may have been in use by work on stream();
        what is written into it must come after that in stream order.
        """
        ...

    def stream(self) -> int:
        """Driver's handle of the stream that the caller's work runs on now; 0 for a host."""
        ...

    def ready(self) -> None:
        """Called when the caller's stream waits for bytes and before torch works on them.

        Nothing to do where torch's own work is ordered by that stream; memory whose torch tensors are not has
        to wait for the stream here.
        """
        ...

    def free_bytes(self) -> int | None:
        """What could be allocated now, in bytes; None where it is not known or no concern."""
        ...


class HostMemory:
    """Anonymous memory of the host, huge pages advised."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.native_kind, self.native_index = abi.DEVICE_CPU, 0
        self.dlpack_device = (_DL_CPU, 0)
        self.pci_address: str | None = None

    def allocate(self, sizes: Sequence[int]) -> list[Arena]:
        """See Memory."""
        library = abi.library()
        check_host(sum(sizes))
        return _all_or_none(Arena(*library.arena_host(nbytes), nbytes) for nbytes in sizes)

    def stream(self) -> int:
        """See Memory."""
        return 0

    def ready(self) -> None:
        """See Memory."""

    def free_bytes(self) -> int | None:
        """See Memory: the kernel gives pages when they are touched."""
        return None


class _Pool:
    """A pool of torch's allocator, by its number, as torch's own graphs have theirs.

    What is free in it when this ends, or will be, goes with the next torch.cuda.empty_cache(). No MemPool: at
    its end it empties its cache at once, and inside anybody's use_mem_pool, or while a graph is captured,
    torch (2.11) ends the process then ("captures_underway.empty()").
    """

    def __init__(self, index: int) -> None:
        self.id, self._index = torch.cuda.graph_pool_handle(), index
        # Begun once more than it is released, so that it lasts from one use to the next.
        torch._C._cuda_beginAllocateCurrentThreadToPool(index, self.id)
        torch._C._cuda_endAllocateToPool(index, self.id)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter is ending
            torch._C._cuda_releasePool(self._index, self.id)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """This thread's blocks come from it."""
        torch._C._cuda_beginAllocateCurrentThreadToPool(self._index, self.id)
        try:
            yield
        finally:
            torch._C._cuda_endAllocateToPool(self._index, self.id)
            torch._C._cuda_releasePool(self._index, self.id)


class CudaMemory:
    """torch's CUDA or ROCm memory: blocks of a private pool, so that the caller's allocator is left as it
    was.

    The pool is active only inside allocate(). Where torch's allocator has no pools, it is taken as it
    is, with a notice.
    """

    def __init__(self, index: int, *, private: bool = True) -> None:
        """``private``: blocks from a pool of their own."""
        hip = torch.version.hip is not None
        self.device = torch.device("cuda", index)
        self.native_kind, self.native_index = abi.DEVICE_HIP if hip else abi.DEVICE_CUDA, index
        self.dlpack_device = (_DL_ROCM if hip else _DL_CUDA, index)
        self.pci_address = pci_address(index)
        self._pool: _Pool | None = None
        with torch.cuda.device(index):
            # The engine needs the primary context of this device; torch makes it at the first synchronise.
            torch.cuda.synchronize()
        backend = torch.cuda.get_allocator_backend()
        self._private = private and backend == "native"
        if private and not self._private:
            _log.warning("no private memory pool (allocator %s): tensors come from torch's own", backend)

    def allocate(self, sizes: Sequence[int]) -> list[Arena]:
        """See Memory."""
        try:
            blocks = self._blocks(sizes)
        except torch.cuda.OutOfMemoryError:
            # Inside a pool torch does not hand back what it caches (pytorch #159674): do it outside and try
            # again.
            torch.cuda.empty_cache()
            try:
                blocks = self._blocks(sizes)
            except torch.cuda.OutOfMemoryError as error:
                raise OutOfMemoryError(
                    f"{sum(sizes)} bytes on {self.device} in {len(sizes)} arenas could not be had, "
                    f"{self.free_bytes()} bytes are free; lower buffer_size or arena_size: {error}"
                ) from error
        library = abi.library()
        where = self.native_kind, self.native_index, self.stream()
        return _all_or_none(
            Arena(*library.arena_adopt(torch._C._to_dlpack(block), *where), nbytes, where[-1])
            for block, nbytes in zip(blocks, sizes, strict=True)
        )

    def stream(self) -> int:
        """See Memory."""
        # Asked for each tensor that open() hands out, so the number alone, not an object of torch's for it.
        return torch._C._cuda_getCurrentRawStream(self.native_index)

    def ready(self) -> None:
        """See Memory: torch's kernels follow the current stream."""

    def free_bytes(self) -> int | None:
        """See Memory: what the driver has free, and what torch keeps for reuse."""
        free, _ = torch.cuda.mem_get_info(self.device)
        kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return int(free) + max(int(kept), 0)

    def _blocks(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        if not self._private:
            return self._empty(sizes)
        if self._pool is None:
            self._pool = _Pool(self.native_index)
        return self._in_another_thread(self._pool, sizes)

    def _empty(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        with torch.inference_mode(False):
            if len(sizes) > 1:
                try:
                    return scripts.empties(sizes, self.device)
                except RuntimeError:  # a script's error has lost its kind
                    pass
            return [torch.empty(nbytes, dtype=torch.uint8, device=self.device) for nbytes in sizes]

    def _in_another_thread(self, pool: _Pool, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Out of the pool, wherever the caller is.

        Inside somebody else's use_mem_pool an inner one gets nothing (pytorch #161193), and pools are chosen
        by thread. Looking afterwards where a block came from is no way: from a process' 257th pool on, a
        snapshot of torch's (2.11) damages Python's memory, for it drops a reference to the pool's number that
        it does not have, and only smaller numbers never end.
        """
        stream = torch.cuda.current_stream(self.device)
        made: list[list[torch.Tensor]] = []
        failed: list[BaseException] = []

        def work() -> None:
            try:
                # Blocks return in the order of the stream that was current when they were made: the caller's.
                with torch.cuda.stream(stream), pool.in_use():
                    made.append(self._empty(sizes))
            except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
                failed.append(error)

        thread = threading.Thread(target=work, name="tensorlift-allocate")
        try:
            thread.start()
        except RuntimeError:  # no more threads can be had: out of the pool all the same, but within another's
            work()
        else:
            thread.join()
        if failed:
            # Not kept in a list of this frame, which its traceback has: that cycle would hold blocks too.
            raise failed.pop()
        return made[0]


def for_device(device: object, *, private: bool = True) -> Memory:
    """The memory of a device: a str, an index or a torch.device; "cuda" means the current one.

    ``private``: apart from what the caller's own allocations come from. Raises DeviceError for a device that
    is not there or not supported (no file or driver is touched for that), DriverError for one that does not
    work, RequestError while a graph is captured.
    """
    parsed = parse_device(device)
    if parsed.type == "cpu":
        return HostMemory()
    assert parsed.index is not None
    with driver_of(parsed):
        check_no_capture()
        return CudaMemory(parsed.index, private=private)


def check_no_capture() -> None:
    """Raises RequestError where the current stream records a graph, which would replay copies."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RequestError(
            "the current stream is being captured into a CUDA graph, which would replay the load's copies; "
            "load before the capture begins"
        )


def check_host(wanted: int) -> None:
    """Raises OutOfMemoryError for more bytes than the machine has.

    The kernel promises each block by itself, and ends processes when the promises come due: a file of holes
    costs nothing and may say that it is larger than any memory.
    """
    there = machine.host_memory() if wanted >= _WORTH_ASKING else None
    if there is not None and wanted > there:
        raise OutOfMemoryError(
            f"{wanted} bytes of host memory could not be had: the machine has {there}, swap included; "
            "load a part with names=, or tensor after tensor with open()"
        )


def record_stream(tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Says that work on ``stream`` uses a CUDA tensor, so that its memory is used again only after that work.

    For a tensor of this package, whose memory ``tensor.record_stream`` does not know: its whole arena waits,
    once its last tensor is gone, for what the stream holds then. Other tensors are passed on to torch.
    """
    if not isinstance(tensor, torch.Tensor) or not isinstance(getattr(stream, "cuda_stream", None), int):
        raise RequestError(
            f"record_stream takes a tensor and a torch.cuda.Stream, not {type(tensor).__name__} and "
            f"{type(stream).__name__}"
        )
    if not abi.library().arena_record_stream(tensor.untyped_storage().data_ptr(), stream.cuda_stream):
        tensor.record_stream(stream)


def pci_address(index: int) -> str | None:
    """Where a device is plugged in, as sysfs names it; None where this torch does not say."""
    about = torch.cuda.get_device_properties(index)
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    domain, bus, device = (getattr(about, name, None) for name in names)
    return (
        None if domain is None or bus is None or device is None else f"{domain:04x}:{bus:02x}:{device:02x}.0"
    )


def _all_or_none(makes: Iterable[Arena]) -> list[Arena]:
    """The arenas; where making one fails, those before it are given back."""
    made: list[Arena] = []
    try:
        for arena in makes:
            made.append(arena)
    except BaseException:
        for arena in made:
            arena.release()
        raise
    return made
