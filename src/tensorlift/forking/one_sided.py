"""The transport of engines that read a seed's memory without it (Mooncake, NIXL): bytes go by the engine, and
are confirmed over a socket, as on one host (see shm.py).

Behind the handshake of tcp.py the fork says which region it wants to read (4 bytes), and is told which of
them the engine knows by then, as JSON. It has the engine read a chunk to memory of its own, and then asks the
seed for the chunk's digests, copying from there, says Copied, and learns the epoch. The lease was given at
the wanted epoch, and epochs do not go back: what was read between the two is of that epoch. The limit of the
seed holds by the chunk, for the next is read when the last is confirmed.

The engine never writes to the fork's tensors. Where a read has failed it may go on writing, and that memory
stays with it: see Shared.spoil().
"""

from __future__ import annotations

import ipaddress
import mmap
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from tensorlift.engine import abi, abi_fork
from tensorlift.engine.abi_fork import Memory, Origin, OriginKind
from tensorlift.forking.chunks import Chunk
from tensorlift.forking.connection import NotHereError, SocketConnection
from tensorlift.forking.fabrics import Fabric, FabricError, Packages, Part, Shared, Wiring
from tensorlift.forking.handshake import receive
from tensorlift.forking.mooncake import PACKAGES as MOONCAKE_PACKAGES
from tensorlift.forking.mooncake import Mooncake
from tensorlift.forking.nixl import PACKAGES as NIXL_PACKAGES
from tensorlift.forking.nixl import Nixl
from tensorlift.forking.registering import Registration
from tensorlift.forking.sender import Sender
from tensorlift.forking.tables import receive_table, send_table
from tensorlift.forking.tcp import TcpServer, connected
from tensorlift.format.bounds import Count
from tensorlift.format.quoting import quote

__all__ = ["OneSidedConnection", "OneSidedServer", "check_there"]

_MAKERS: Mapping[str, Callable[[Wiring, str], Fabric]] = {"mooncake": Mooncake, "nixl": Nixl}
_PACKAGES: Mapping[str, Packages] = {"mooncake": MOONCAKE_PACKAGES, "nixl": NIXL_PACKAGES}

_PAGE_BYTES = mmap.PAGESIZE
_WANTED = struct.Struct("<I")
# A fork asks again: the seed's threads for handshakes are few.
_WAIT_SECONDS = 2.0
# Sent nowhere: the kernel only says by which of its addresses it would be.
_ELSEWHERE = ("192.0.2.1", 9)

_Room = npt.NDArray[np.uint8]


class _Table(msgspec.Struct, frozen=True):
    """What a seed's engine knows by now."""

    session: str
    how: str
    places: tuple[tuple[Count, Count, Count, Count] | None, ...]
    """As Memory has them; of those that are not known yet none."""
    problem: str = ""


def check_there(kind: str) -> None:
    """Raises OptionError, with what to install, where the engine of a transport is not there."""
    _PACKAGES[kind].check(kind)


class OneSidedServer(TcpServer):
    """Has an engine know the regions, and listens for forks that want to have chunks confirmed."""

    def __init__(self, kind: str, sender: Sender, host: str, wiring: Wiring, owner: object) -> None:
        """Begins. ``owner``: keeps the regions as long as somebody refers to it.

        Raises FabricError where the engine cannot be had, OSError where nobody can listen at host.
        """
        self.kind, self._owner, self._has_left = kind, owner, False
        self._shared = Shared.borrow(_MAKERS[kind], wiring, _address(host))
        self.registration = Registration(self._shared.fabric, sender.regions)
        try:
            super().__init__(sender, host)
        except BaseException:
            self._leave()
            raise

    def close(self) -> None:
        """Lets nobody in any more. What can still be read behind this stays as long as the engine."""
        super().close()
        self._leave()

    def address(self, seconds: float) -> str | None:
        """host:port of an engine that knows all regions; None where none does in so many seconds."""
        is_ready = self.registration.wait_for_all(seconds)
        return self._shared.fabric.session().partition("/")[0] if is_ready else None

    def _leave(self) -> None:
        if self._has_left:
            return
        self._has_left = True
        self.registration.close()
        # What somebody may still read is not freed for others to use.
        if not self._shared.fabric.revokes or self.registration.may_stay:
            self._shared.hold(self._owner)
        self._shared.give_back()

    def _tell(self, peer: socket.socket) -> None:
        super()._tell(peer)
        (region,) = _WANTED.unpack(receive(peer, _WANTED.size))
        self.registration.wait(region, _WAIT_SECONDS)
        # First what is known, so that the session has all of it.
        places = self.registration.places()
        table = _Table(
            self._shared.fabric.session(), self._shared.fabric.how, tuple(places), self.registration.problem
        )
        send_table(peer, table)


class OneSidedConnection(SocketConnection):
    """Has an engine read chunks, and the seed confirm them."""

    def __init__(
        self, kind: str, address: str, token: str, lease: str, seconds: float, wiring: Wiring
    ) -> None:
        """Connects. ``seconds``: how long the seed may do nothing, here and for each chunk.

        Raises NotHereError where the engine cannot be had, here or there; ConnectionRefusedError where the
        seed does not take token or lease; OSError.
        """
        self._ask: Callable[[], socket.socket] = lambda: connected(address, token, lease, seconds)
        self._is_ended, self._here = threading.Event(), Origin()
        self._room: _Room | None = None
        peer = self._ask()
        try:
            begin = time.monotonic()
            super().__init__(peer, seconds)
            peer.settimeout(seconds)
            self._table = _learn(peer, 0)
            self._shared = _met(_MAKERS[kind], wiring, peer.getsockname()[0], self._table)
        except FabricError as error:
            peer.close()
            raise NotHereError(str(error)) from None
        except BaseException:
            peer.close()
            raise
        self.registering = time.monotonic() - begin
        peer.setblocking(True)

    @property
    def how(self) -> str:
        """What the engines move bytes by."""
        ours, theirs = self._shared.fabric.how, self._table.how
        return ours if ours == theirs else f"{ours}, the seed {quote(theirs)[1:-1]}"

    def fetch(
        self,
        chunk: Chunk,
        epoch: int,
        places: abi_fork.Places,
        digest: bool,
        device: tuple[int, int] = (abi.DEVICE_CPU, 0),
    ) -> abi_fork.Chunk:
        """See SocketConnection. NotHereError where the engine turns out not to be of use, here or there."""
        end = time.monotonic() + self._milliseconds / 1000

        def go_on() -> None:
            if self._is_ended.is_set():
                raise ConnectionError(f"it was ended (0 of {chunk.nbytes:,} bytes came)")
            if time.monotonic() >= end:
                raise TimeoutError(f"the engine brings nothing (0 of {chunk.nbytes:,} bytes came)")

        go_on()
        try:
            place = self._place(chunk, go_on)
        except FabricError as error:
            raise NotHereError(str(error)) from None
        try:
            # What no manifest says is the seed's to refuse.
            self._here = Origin() if place is None else self._read(place, chunk, go_on)
        except FabricError as error:
            raise ConnectionError(f"{error} (0 of {chunk.nbytes:,} bytes came)") from None
        return super().fetch(chunk, epoch, places, digest, device)

    def _place(self, chunk: Chunk, go_on: Callable[[], None]) -> Memory | None:
        """Where the region is, once the seed's engine knows it."""
        if chunk.region >= len(self._table.places):
            return None
        begin = time.monotonic()
        while (found := self._table.places[chunk.region]) is None:
            go_on()
            peer = self._ask()
            self._socket, old = peer, self._socket
            old.close()
            table = _sound(_learn(peer, chunk.region))
            if len(table.places) != len(self._table.places):
                raise ConnectionAbortedError("the seed says another number of regions than before")
            peer.setblocking(True)
            self._shared.fabric.meet(table.session)
            before, self._table = self._table.session, table
            self._shared.fabric.part(before)
            self.registering += time.monotonic() - begin
            begin = time.monotonic()
        place = Memory(*found)
        return place if chunk.offset + chunk.nbytes <= place.nbytes else None

    def _read(self, place: Memory, chunk: Chunk, go_on: Callable[[], None]) -> Origin:
        """A chunk, as if its region began so many bytes before the memory that it was read to."""
        room = self._room_for(chunk.nbytes)
        part = Part(place.address + chunk.offset, room.ctypes.data, chunk.nbytes, *place[2:])
        if chunk.nbytes:
            try:
                self._shared.fabric.read(self._table.session, [part], go_on)
            except BaseException:
                self._room = None
                self._shared.spoil(room)
                raise
        base = (room.ctypes.data - chunk.offset) % 2**64
        return Origin(OriginKind.HERE, 0, base, chunk.offset + chunk.nbytes)

    def _room_for(self, nbytes: int) -> _Room:
        if self._room is None or self._room.nbytes < nbytes:
            self._leave_room()
            begin = time.monotonic()
            room = _room(max(nbytes, 1))
            try:
                self._shared.fabric.register([_memory(room)])
            except FabricError as error:
                # Other transports need none.
                raise NotHereError(str(error)) from None
            self._room = room
            self.registering += time.monotonic() - begin
        return self._room

    def _leave_room(self) -> None:
        if self._room is not None:
            self._shared.fabric.unregister([_memory(self._room)])
            self._room = None

    def _origin(self, region: int, device: tuple[int, int]) -> Origin:
        return self._here

    def shutdown(self) -> None:
        """See SocketConnection."""
        self._is_ended.set()
        super().shutdown()

    def close(self) -> None:
        """See SocketConnection."""
        super().close()
        try:
            if not self._shared.is_spoilt:
                self._leave_room()
                self._shared.fabric.part(self._table.session)
        except FabricError:
            # An engine that cannot forget is not used again.
            self._shared.spoil(self._room)
        self._shared.give_back()


def _sound(table: _Table) -> _Table:
    if table.problem:
        raise FabricError(f"the seed cannot register all of its memory: {quote(table.problem, 300)[1:-1]}")
    return table


def _met(make: Callable[[Wiring, str], Fabric], wiring: Wiring, host: str, table: _Table) -> Shared:
    """An engine that can read the seed: a fresh one where the one that is there takes it for another."""
    _sound(table)
    for is_last in (False, True):
        shared = Shared.borrow(make, wiring, host)
        try:
            shared.fabric.meet(table.session)
            return shared
        except BaseException as error:
            shared.spoil(None)
            shared.give_back()
            if is_last or not isinstance(error, FabricError):
                raise
    raise AssertionError


def _room(nbytes: int) -> _Room:
    """Memory that begins with a page: where it begins a few bytes into one, as numpy's does, what receives
    over TCP takes twice as long for it ("rep movsb", as in streaming.hpp).
    """
    wide = np.empty(nbytes + _PAGE_BYTES, np.uint8)
    begin = -wide.ctypes.data % _PAGE_BYTES
    return wide[begin : begin + nbytes]


def _memory(room: _Room) -> Memory:
    return Memory(room.ctypes.data, room.nbytes)


def _learn(peer: socket.socket, region: int) -> _Table:
    """What the seed's engine knows once it knows that region, or has been waited for long enough."""
    peer.sendall(_WANTED.pack(region))
    return receive_table(peer, _Table)


def _address(host: str) -> str:
    """An address in numbers that others reach a seed by which listens at ``host``."""
    found: str = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]  # type: ignore[assignment]
    if not ipaddress.ip_address(found).is_unspecified:
        return found
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            any_socket.connect(_ELSEWHERE)
        except OSError:  # no network but loopback
            return "127.0.0.1"
        return str(any_socket.getsockname()[0])
