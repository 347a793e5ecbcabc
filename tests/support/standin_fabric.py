"""A stand-in for engines of one-sided reads, inside one process: it charges for what registering costs, can
be held back, and fails as they do, with bytes that come late.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tensorlift.engine.abi_fork import Memory, Origin, OriginKind, copy_from
from tensorlift.forking.fabrics import FabricError, Part, Wiring

PAGE_BYTES = 4096


@dataclass
class Costs:
    """Seconds of the engine's own clock."""

    call: float = 0.0
    region: float = 1e-3
    page: float = 1e-6
    device: float = 10e-3
    """Of the first memory of each device in a call."""

    def of(self, memories: Sequence[Memory]) -> float:
        """Of one call of register()."""
        pages = sum(-(-memory.nbytes // PAGE_BYTES) for memory in memories)
        devices = len({memory[2:] for memory in memories})
        return self.call + self.region * len(memories) + self.page * pages + self.device * devices


@dataclass
class World:
    """All engines of a test."""

    costs: Costs = field(default_factory=Costs)
    made: list[StandIn] = field(default_factory=list)
    refused: str = ""
    """Why none begins."""

    def make(self, wiring: Wiring, host: str) -> StandIn:
        """In place of an engine's class."""
        if self.refused:
            raise FabricError(self.refused)
        self.made.append(StandIn(self, wiring))
        return self.made[-1]


class StandIn:
    """See Fabric."""

    how, lasts, revokes = "stand-in", False, True

    def __init__(self, world: World, wiring: Wiring) -> None:
        self.world, self.wiring = world, wiring
        self.registered: list[Memory] = []
        self.calls: list[list[Memory]] = []
        self.clock = 0.0
        self.reads: list[tuple[str, list[Part]]] = []
        self.late: list[tuple[Part, int]] = []
        """What a failed read still writes, when late_bytes() says so."""
        self.may_register = threading.Semaphore(1 << 20)
        self.fails: Callable[[Sequence[Part]], bool] = lambda parts: False
        self.fails_to_register = lambda memories: False
        self.stale: set[str] = set()
        """Sessions that it takes for others."""
        self.is_closed = False

    def register(self, memories: Sequence[Memory]) -> None:
        assert self.may_register.acquire(timeout=60)
        if self.fails_to_register(memories):
            raise FabricError("no more pages can be pinned")
        self.clock += self.world.costs.of(memories)
        self.calls.append(list(memories))
        self.registered += memories

    def unregister(self, memories: Sequence[Memory]) -> None:
        for memory in memories:
            self.registered.remove(memory)

    def session(self) -> str:
        return str(self.world.made.index(self))

    def meet(self, session: str) -> None:
        if session in self.stale:
            raise FabricError("it is taken for another one")

    def part(self, session: str) -> None:
        pass

    def read(self, session: str, parts: Sequence[Part], go_on: Callable[[], None]) -> None:
        go_on()
        self.reads.append((session, list(parts)))
        peer = self.world.made[int(session)]
        for part in parts:
            assert _holds(peer.registered, part.remote, part.nbytes), "a read spans what is registered"
            assert _holds(self.registered, part.local, part.nbytes), "a read goes to what is not registered"
        if self.fails(parts):
            self.late += [(part, 0xEE) for part in parts]
            raise FabricError("the peer is gone")
        for part in parts:
            _copy(part)

    def late_bytes(self) -> None:
        """What a failed read still writes to its destinations, which have to be there."""
        assert not self.is_closed
        for part, byte in self.late:
            source = np.full(part.nbytes, byte, np.uint8)
            _copy(part._replace(remote=source.ctypes.data))

    def close(self) -> None:
        self.is_closed = True


def _holds(registered: Sequence[Memory], address: int, nbytes: int) -> bool:
    return any(one.address <= address and address + nbytes <= one.address + one.nbytes for one in registered)


class _At:
    """Memory at an address, for numpy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def _copy(part: Part) -> None:
    to = np.asarray(_At(part.local, part.nbytes))
    copy_from(Origin(OriginKind.HERE, 0, part.remote, part.nbytes), 0, to)


def side_by_side(sizes: Sequence[int]) -> tuple[np.ndarray, list[Memory]]:
    """One block of memory, and regions of it of these sizes, each where the one before ends."""
    block = np.random.default_rng(3).integers(0, 256, sum(sizes), np.uint8)
    begins = itertools.accumulate(sizes, initial=block.ctypes.data)
    return block, [Memory(begin, nbytes) for begin, nbytes in zip(begins, sizes, strict=False)]
