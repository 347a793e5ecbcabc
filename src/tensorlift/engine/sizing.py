"""The automatic numbers: how large an engine the work, the options and this machine ask for."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from tensorlift.engine import machine
from tensorlift.errors import OptionError
from tensorlift.options import LoadOptions
from tensorlift.plan.chunks import CHUNK as DIGESTED

__all__ = ["Budget", "EngineSize", "Facts", "budget", "facts_of_this_machine", "size_engine"]

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

# Measured on one H200 (PCIe 5 x16, 300 MiB of L3): chunks of 0.5 to 2 MiB and slots of 8 to 32 MiB differ by
# a few per cent; a ring of 128 MiB ran at 99 % of the link and one of 512 MiB, which leaves the cache, at
# half of it.
CHUNK = 1 * MIB
# On a CPU there is no slot to fill, and each read of the cache leaves the processor's own caches full of
# weights for what is done between two reads: 4 MiB a read reached 0.95 of a bare loop and 1 MiB 0.89 (2-core
# machine); cold it was 0.96 and 0.94. Each thread has several all the same, so that all end together.
HOST_CHUNK = 4 * MIB
READS_A_THREAD = 8
SLOT = 16 * MIB
SMALL_SLOT = 8 * MIB
RING = 128 * MIB
LEAST_SLOTS = 3
# On a CPU, where bytes that are digested come together: tensors begin anywhere in a block, and a direct read
# splits at the edges. With 1 MiB, 1.2 GB took 3,494 of them and 2.1 times the CPU seconds of a load without
# digests; with 4 MiB 1,808 and 1.6 times, with 8 MiB about the same (2-core machine).
CHECKED = 4 * MIB
MOST_THREADS = 16
IO_DEPTH = 32
PAGE = 4096
# A huge page more than a power of two: sizes of weights often are powers of two, and the first tensor of an
# arena starts up to a page behind its begin.
SPARE = 2 * MIB


@dataclass(frozen=True, slots=True)
class Facts:
    """What this machine has for this process: CPUs, bytes of the last-level cache they reach, if known.

    ``near``: the CPUs that threads are to stay on; empty: all.
    """

    cpus: int
    cache: int | None
    near: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class EngineSize:
    """The numbers of an engine, all decided; sizes are bytes."""

    chunk_size: int
    slot_size: int
    pinned_bytes: int
    threads: int
    io_depth: int
    backends: tuple[str, ...]
    near: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory for tensors: the capacity of an arena, and the bytes of arenas read ahead of a consumer."""

    arena_size: int
    buffer_size: int


@functools.cache
def facts_of_this_machine(pci_address: str | None = None, ranks: int = 1) -> Facts:
    """Facts of the running machine, asked once; on several NUMA nodes those of the PCI device's own.

    ``ranks``: processes that share it, as far as the caller knows; the launcher may know of more.
    """
    ranks = max(ranks, machine.local_ranks())
    cpus, cache = machine.usable_cpus(ranks=ranks), machine.last_level_cache(ranks=ranks)
    near = frozenset[int]() if pci_address is None else machine.cpus_near(pci_address)
    if near:
        # A share of the machine, but no more than there is on the node.
        cpus, there = min(cpus, len(near)), machine.last_level_cache(cpus=near)
        cache = min(cache, there) if cache and there else cache
    return Facts(cpus, cache, near)


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def size_engine(
    options: LoadOptions,
    nbytes: int,
    *,
    device: bool,
    digest: bool = False,
    pci_address: str | None = None,
    ranks: int = 1,
    facts: Facts | None = None,
) -> EngineSize:
    """Decides the engine for a load of ``nbytes`` bytes; ``device``: through pinned slots, not in place;
    ``digest``: pieces are digested, so a slot holds a whole one; ``pci_address``: of the device, if any;
    ``ranks``: of this load on this host.

    Raises OptionError where explicit sizes do not fit each other.
    """
    facts = facts_of_this_machine(pci_address, ranks) if facts is None else facts
    work = _up(max(nbytes, 1), PAGE)
    most = options.threads or min(facts.cpus, MOST_THREADS)
    # Digests are made by the thread that has read the bytes, of those that it has read whole.
    share = (
        CHUNK if device and not digest else min(HOST_CHUNK, work // (READS_A_THREAD * most) // CHUNK * CHUNK)
    )
    chunk = min(options.chunk_size or max(share, CHUNK), work)
    reads = -(-work // chunk)
    threads = options.threads or max(1, min(most, reads))
    # What is digested lies in one slot, and is digested by the thread that filled the last part of it.
    least = _up(min(DIGESTED, work), chunk) if digest else chunk
    whole = max(least, _up(min(CHECKED, work), chunk)) if digest else chunk
    slot, pinned = _ring(options, work, chunk, least, facts) if device else (whole, 2 * whole)
    return EngineSize(
        chunk, slot, pinned, threads, options.io_depth or IO_DEPTH, options.backend or ("AUTO",), facts.near
    )


def _ring(options: LoadOptions, work: int, chunk: int, least: int, facts: Facts) -> tuple[int, int]:
    """(slot, pinned) of a device load: whole chunks, whole slots, at least two, no more than is needed."""
    ring = options.pinned_bytes or max(min(RING, (facts.cache or 2 * RING) // 2), LEAST_SLOTS * SMALL_SLOT)
    if options.slot_size is not None:
        slot = max(_up(options.slot_size, chunk), least)
    else:
        slot = SLOT if ring >= LEAST_SLOTS * SLOT else SMALL_SLOT
        # Half of the work a slot: the second is read while the first is copied.
        slot = min(slot, _up(-(-work // 2), PAGE), ring // 2)
        slot = max(slot // chunk * chunk, least)
    if options.pinned_bytes is not None and ring < 2 * slot:
        raise OptionError(
            f"pinned_bytes is {ring}, which holds less than two slots of {slot} bytes; "
            "raise pinned_bytes, or lower slot_size or chunk_size"
        )
    # A slot is pinned as a whole, also for less work than it was asked to hold.
    slot = min(slot, max(_up(work, chunk), least))
    slots = min(ring // slot, -(-work // slot))
    return slot, max(slots, 2) * slot


def budget(options: LoadOptions, *, device: bool, free: int | None) -> Budget:
    """Arena capacity and bytes ahead; ``free`` is what the device has free now (None: not known)."""
    if device:
        ahead = options.buffer_size or (1 * GIB if free is None else max(min(1 * GIB, free // 2), 2 * MIB))
        # Two arenas at least fit ahead, so that one is read while the other is handed out.
        arena = options.arena_size or max(min(256 * MIB + SPARE, ahead // 2), 1 * MIB)
    else:
        ahead = options.buffer_size or 256 * MIB
        # A multiple of a huge page; large enough that a read of it hides the cost of asking for it.
        arena = options.arena_size or max(min(64 * MIB + SPARE, ahead // 2), 1 * MIB)
    # With this capacity nothing shares an arena.
    return Budget(1 if options.own == "tensor" else arena, ahead)
