"""The transport of one host: a fork copies the seed's memory itself, and has it confirmed over a socket.

The socket has a name that no file system knows. Behind the handshake the seed says where its regions lie:
those in a file of memory (see shared_memory.py) as a descriptor that goes along, those of a device as handles
of CUDA IPC, others as addresses, which the fork reads with process_vm_readv, where the kernel lets it. The
seed digests each block on its side, and says which epoch it is at behind the last one: nothing is believed
that was not confirmed. See docs/transports.md.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from tensorlift.engine import abi
from tensorlift.engine.abi_fork import (
    IPC_BYTES,
    Memory,
    Origin,
    OriginKind,
    copy_from,
    ipc_export,
    shared_map,
    shared_release,
)
from tensorlift.engine.abi_types import RefusedError
from tensorlift.forking.connection import NotHereError, SocketConnection
from tensorlift.forking.handshake import introduce
from tensorlift.forking.host import host_id
from tensorlift.forking.listener import Listener
from tensorlift.forking.manifest import Offer
from tensorlift.forking.sender import Sender
from tensorlift.forking.shared_memory import shared_at
from tensorlift.forking.tables import receive_table, send_table
from tensorlift.forking.tcp import MOST_HANDSHAKES
from tensorlift.format.bounds import Count

__all__ = ["ShmConnection", "ShmServer"]

_ADDRESS = re.compile("([0-9a-f]{32}):([0-9a-f]{32})")
# All go in one message, of which the kernel takes 253. A seed has one for a checkpoint.
_MOST_FILES = 64
_CREDENTIALS = struct.Struct("3i")
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")

# In place of the number of a file.
_IN_THE_PROCESS, _ON_A_DEVICE = -1, -2
_WAYS = {
    OriginKind.HERE: "memfd",
    OriginKind.PROCESS: "process_vm_readv",
    OriginKind.DEVICE: "CUDA IPC",
    None: "socket",
}


class _Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a region lies: in a file of those that come along, at an address of the seed, or on a device."""

    file: Annotated[int, msgspec.Meta(ge=_ON_A_DEVICE, lt=_MOST_FILES)]
    address: Count
    """In a file or an allocation of a device, from its first byte."""
    nbytes: Count
    allocation: Annotated[bytes, msgspec.Meta(max_length=IPC_BYTES)] = b""
    """Its handle, where the device's driver gives one."""


class _Table(msgspec.Struct, frozen=True):
    """What a seed says behind the handshake; so many descriptors come with the byte after it."""

    files: Annotated[int, msgspec.Meta(ge=0, le=_MOST_FILES)]
    regions: tuple[_Place, ...]


class ShmServer:
    """Listens for forks of this host."""

    def __init__(self, sender: Sender) -> None:
        """Begins. Raises OSError where it cannot listen, or the host does not say which one it is."""
        self._sender = sender
        name = secrets.token_hex(16)
        self._address = f"{host_id()}:{name}"
        self._listener = Listener(_socket_name(name), 0, self._shake, MOST_HANDSHAKES)
        try:
            self._listener.start()
        except BaseException:
            self.close()
            raise

    @property
    def offer(self) -> Offer:
        """The host, and the socket's name."""
        return Offer("shm", self._address)

    def close(self) -> None:
        """Lets nobody in any more."""
        self._listener.close()

    def _shake(self, peer: socket.socket) -> None:
        self._sender.admit(peer, lambda: self._listener.is_ending, self._tell)

    def _tell(self, peer: socket.socket) -> None:
        self._listener.known()
        files: dict[int, int] = {}
        places = []
        for region in self._sender.regions:
            address, nbytes, kind, _ = region
            if kind != abi.DEVICE_CPU:
                places.append(_on_a_device(region))
                continue
            file = shared_at(address, nbytes)
            if file is None or (file.descriptor not in files and len(files) == _MOST_FILES):
                places.append(_Place(_IN_THE_PROCESS, address, nbytes))
            else:
                number = files.setdefault(file.descriptor, len(files))
                places.append(_Place(number, address - file.address, nbytes))
        send_table(peer, _Table(len(files), tuple(places)))
        socket.send_fds(peer, [b"F"], list(files))


def _on_a_device(region: Memory) -> _Place:
    try:
        handle, offset = ipc_export(region)
    except RefusedError:  # of memory that cannot be passed the bytes are
        return _Place(_ON_A_DEVICE, 0, region.nbytes)
    return _Place(_ON_A_DEVICE, offset, region.nbytes, handle)


class ShmConnection(SocketConnection):
    """Copies out of files that the seed has passed, and out of the seed's process."""

    def __init__(self, address: str, token: str, lease: str, seconds: float) -> None:
        """Connects. ``seconds``: how long the seed may do nothing, here and for each chunk.

        Raises NotHereError on another host and where the kernel does not let this process read the seed's;
        ConnectionRefusedError where the seed does not take token or lease; OSError.
        """
        self._files: list[Memory] = []
        peer = _connected(address, seconds)
        try:
            introduce(peer, token, lease)
            table = self._receive(peer)
            process, user = _CREDENTIALS.unpack(
                peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )[:2]
            origins = [self._place(place, process) for place in table.regions]
            _try(origins, user)
            super().__init__(peer, seconds, origins)
            self._allocations = {
                number: place
                for number, place in enumerate(table.regions)
                if len(place.allocation) == IPC_BYTES
            }
            self._mapped: dict[tuple[bytes, tuple[int, int]], tuple[int, int] | None] = {}
            self._refused = ""
            self._ways = {
                origin.kind if origin else None for origin in origins if not origin or origin.nbytes
            }
        except BaseException:
            peer.close()
            self._close_files()
            raise

    @property
    def how(self) -> str:
        """In which ways regions were copied; why not by CUDA IPC where that was tried."""
        ways = set(self._ways)
        if any(self._mapped.values()):
            ways = (ways - {None}) | {OriginKind.DEVICE}
        text = " and ".join(way for kind, way in _WAYS.items() if kind in ways)
        return f"{text}, not CUDA IPC: {self._refused}" if self._refused else text

    def _origin(self, region: int, device: tuple[int, int]) -> Origin | None:
        """What is on the seed's device is mapped for the fork's, where both drivers allow it."""
        place = self._allocations.get(region)
        staging = self._staging_of(device)
        if place is None or staging is None:
            return super()._origin(region, device)
        key = place.allocation, device
        if key not in self._mapped:
            try:
                self._mapped[key] = staging.map(place.allocation)
            except RefusedError as refused:
                self._mapped[key], self._refused = None, refused.error.text
        mapped = self._mapped[key]
        if mapped is None:
            return None
        address, nbytes = mapped
        if place.address + place.nbytes > nbytes:
            raise ConnectionAbortedError("the seed says that a region is in an allocation that is shorter")
        return Origin(OriginKind.DEVICE, 0, address + place.address, place.nbytes)

    def close(self) -> None:
        """See SocketConnection."""
        super().close()
        self._close_files()

    def _close_files(self) -> None:
        while self._files:
            file = self._files.pop()
            shared_release(-1, file.address, file.nbytes)

    def _receive(self, peer: socket.socket) -> _Table:
        table = receive_table(peer, _Table)
        _, files, _, _ = socket.recv_fds(peer, 1, _MOST_FILES, socket.MSG_CMSG_CLOEXEC)
        try:
            if len(files) != table.files:
                raise ConnectionAbortedError(
                    f"{len(files)} of {table.files} files of memory came: has this process run out of "
                    "descriptors?"
                )
            for file in files:
                self._files.append(shared_map(file))
        except RefusedError as refused:
            raise ConnectionAbortedError(f"what the seed has passed: {refused.error.text}") from None
        finally:
            for file in files:
                os.close(file)
        return table

    def _place(self, place: _Place, process: int) -> Origin | None:
        if place.file == _ON_A_DEVICE:
            return None
        if place.file == _IN_THE_PROCESS:
            return Origin(OriginKind.PROCESS, process, place.address, place.nbytes)
        if place.file >= len(self._files):
            raise ConnectionAbortedError("the seed says that a region is in a file that has not come")
        file = self._files[place.file]
        if place.address + place.nbytes > file.nbytes:
            raise ConnectionAbortedError("the seed says that a region is in a file that is shorter")
        return Origin(OriginKind.HERE, 0, file.address + place.address, place.nbytes)


def _socket_name(name: str) -> str:
    return f"\0tensorlift-{name}"


def _connected(address: str, seconds: float) -> socket.socket:
    match = _ADDRESS.fullmatch(address)
    here = ""
    with contextlib.suppress(OSError):
        here = host_id()
    if match is None or match[1] != here:
        raise NotHereError("the seed is on another host, or in another network namespace")
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        peer.settimeout(seconds)
        peer.connect(_socket_name(match[2]))
    except BaseException as error:
        peer.close()
        if isinstance(error, ConnectionRefusedError):
            raise NotHereError("nobody listens on the seed's socket any more") from None
        raise
    return peer


def _try(origins: Sequence[Origin | None], user: int) -> None:
    """Reads a byte of the first region that lies in the seed's process, if there is one."""
    first = next((one for one in origins if one and one.kind == OriginKind.PROCESS and one.nbytes), None)
    if first is None:
        return
    if first.handle <= 0:
        raise NotHereError(
            "the seed's process cannot be seen from here: let both share a pid namespace, or offer weights "
            "in shared memory"
        )
    try:
        copy_from(first, 0, np.empty(1, np.uint8))
    except RefusedError as refused:
        raise NotHereError(f"{refused.error.text}{_remedy(refused.error.os_errno, user)}") from None


def _remedy(code: int, user: int) -> str:
    if code == errno.ESRCH:
        return ": let both share a pid namespace, or offer weights in shared memory"
    if code != errno.EPERM:
        return ""
    if user != os.geteuid():
        return f": it runs as user {user}, this process as {os.geteuid()}; run both as one"
    scope = "0"
    with contextlib.suppress(OSError):
        scope = _YAMA.read_text().strip()
    why = f" (kernel.yama.ptrace_scope is {scope})" if scope != "0" else ""
    return f"{why}: give the fork CAP_SYS_PTRACE, or offer weights in shared memory"
