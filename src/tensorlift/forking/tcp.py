"""The transport that needs nothing but a network: a seed listens, a fork connects, chunks pass natively.

A connection begins with a handshake in Python. From then on the seed's side is a thread of the library that
sleeps until a chunk is asked for, and the fork's a call of it without the GIL.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Sequence

from tensorlift.engine import abi, abi_fork
from tensorlift.engine.abi_types import Handle, RefusedError, Status
from tensorlift.errors import DeviceError, RequestError
from tensorlift.forking.chunks import Chunk
from tensorlift.forking.handshake import introduce, welcome
from tensorlift.forking.listener import Listener

__all__ = ["TcpConnection", "TcpServer"]

# For each step of a handshake; what a silent stranger costs is a thread for so long.
_HANDSHAKE_SECONDS = 10.0
_MOST_HANDSHAKES = 32
_IDLE_MILLISECONDS = 60_000
# What a limited seed may send at once after a rest: of a second's bytes, and of all.
_BURST_SHARE, _BURST_BYTES = 20, 1 << 20


class TcpServer:
    """Listens and serves regions of memory, which have to stay until it is closed."""

    def __init__(
        self,
        regions: Sequence[abi_fork.Memory],
        is_live: Callable[[str], bool],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str = "",
        limit: int | None = None,
    ) -> None:
        """Begins. ``is_live``: whether it is a lease; ``limit``: bytes/s.

        Raises OSError where it cannot listen there, RequestError for a device that cannot be read.
        """
        self._token, self._is_live = token, is_live
        self._sender = Handle()
        self._listener = Listener(host, port, self._shake, _MOST_HANDSHAKES)
        try:
            burst = min(_BURST_BYTES, (limit or 0) // _BURST_SHARE)
            try:
                abi_fork.sender_create(regions, limit or 0, burst, _IDLE_MILLISECONDS, self._sender)
            except RefusedError as refused:
                raise RequestError(f"these weights cannot be read: {refused.error.text}") from None
            self._listener.start()
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        """host:port, as in an offer."""
        return self._listener.address

    def set_epoch(self, epoch: int, is_open: bool) -> None:
        """What is asked for with another epoch, or while it is not open, is refused from now on."""
        abi_fork.sender_set_epoch(self._sender, epoch, is_open)

    def stats(self) -> dict[str, int]:
        """connections now; sent_bytes, sent_chunks, refused_chunks, stale_chunks, bad_requests so far."""
        found = abi_fork.sender_stats(self._sender)
        names = [field[0] for field in found._fields_ if field[0] != "struct_size"]
        return {name: getattr(found, name) for name in names}

    def close(self) -> None:
        """Ends every connection; after it no byte of a region is read."""
        self._listener.close()
        abi_fork.sender_destroy(self._sender)

    def _shake(self, peer: socket.socket) -> None:
        peer.settimeout(_HANDSHAKE_SECONDS)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        lease = welcome(peer, self._token, self._is_live)
        if lease is not None and not self._listener.is_ending:
            peer.setblocking(True)
            # Where no thread can be had the socket is closed, and the fork sees that.
            with contextlib.suppress(RefusedError):
                abi_fork.sender_serve(self._sender, peer.detach())


class TcpConnection:
    """One connection of a fork; chunks come one after another, by one thread."""

    def __init__(self, address: str, token: str, lease: str, seconds: float) -> None:
        """Connects. ``seconds``: how long the seed may do nothing, here and for each chunk.

        Raises ConnectionRefusedError where the seed does not take token or lease; OSError.
        """
        host, _, port = address.rpartition(":")
        self._milliseconds = max(1, int(seconds * 1000))
        self._staging: dict[tuple[int, int], abi_fork.Staging] = {}
        self._socket = socket.create_connection((host.strip("[]"), int(port)), timeout=seconds)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            introduce(self._socket, token, lease)
            self._socket.setblocking(True)
        except BaseException:
            self._socket.close()
            raise

    def fetch(
        self,
        chunk: Chunk,
        epoch: int,
        places: abi_fork.Places,
        digest: bool,
        device: tuple[int, int] = (abi.DEVICE_CPU, 0),
    ) -> abi_fork.Chunk:
        """Writes a chunk to its places; what came of it is in ``outcome``, ``verified`` and ``seed_epoch``.

        ``device``: kind and index of the one that all places are on. Raises ConnectionError where the
        connection is of no use any more, DeviceError where the device is not.
        """
        asked = abi_fork.Chunk(
            region=chunk.region, offset=chunk.offset, nbytes=chunk.nbytes, epoch=epoch, digest=digest,
            milliseconds=self._milliseconds,
        )  # fmt: skip
        try:
            abi_fork.fetch_chunk(self._socket.fileno(), asked, places, self._staging_of(device))
        except RefusedError as refused:
            error = refused.error
            if refused.status == Status.DRIVER:
                raise DeviceError(f"bytes cannot be written to the device: {error.text}") from None
            raise ConnectionError(f"{error.text} ({error.got:,} of {chunk.nbytes:,} bytes came)") from None
        return asked

    def _staging_of(self, device: tuple[int, int]) -> abi_fork.Staging | None:
        if device[0] == abi.DEVICE_CPU:
            return None
        if device not in self._staging:
            self._staging[device] = abi_fork.Staging(*device)
        return self._staging[device]

    def shutdown(self) -> None:
        """Ends a fetch() of another thread with an error."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """No other thread may be in fetch()."""
        self._socket.close()
        for staging in self._staging.values():
            staging.close()
