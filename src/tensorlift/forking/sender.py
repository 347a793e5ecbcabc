"""A seed's memory and who may read it: one limit, one epoch and one count for all its transports."""

from __future__ import annotations

import contextlib
import hmac
import socket
from collections.abc import Callable, Sequence

from tensorlift.engine import abi_fork
from tensorlift.engine.abi_types import Handle, RefusedError
from tensorlift.errors import RequestError
from tensorlift.forking.handshake import welcome

__all__ = ["Sender"]

# For a handshake; what a silent stranger costs is a thread for so long.
_HANDSHAKE_SECONDS = 10.0
_IDLE_MILLISECONDS = 60_000
# What a limited seed may send at once after a rest: of a second's bytes, and of all.
_BURST_SHARE, _BURST_BYTES = 20, 1 << 20


class Sender:
    """Serves connected sockets, each by a thread of the library that sleeps until a chunk is asked for."""

    def __init__(
        self,
        regions: Sequence[abi_fork.Memory],
        is_live: Callable[[str], bool],
        token: str = "",
        limit: int | None = None,
    ) -> None:
        """``regions``: stay until close(); ``is_live``: whether it is a lease; ``limit``: bytes/s.

        Raises RequestError for a device that cannot be read.
        """
        self.regions = tuple(regions)
        self._is_live, self._token = is_live, token
        self._handle, self._counted = Handle(), abi_fork.SenderStats()
        burst = min(_BURST_BYTES, (limit or 0) // _BURST_SHARE)
        try:
            abi_fork.sender_create(self.regions, limit or 0, burst, _IDLE_MILLISECONDS, self._handle)
        except RefusedError as refused:
            raise RequestError(f"these weights cannot be read: {refused.error.text}") from None

    def admit(
        self,
        peer: socket.socket,
        is_ending: Callable[[], bool],
        tell: Callable[[socket.socket], object] | None = None,
    ) -> None:
        """Shakes hands with a fork, ``tell``s it what its transport has to, and serves it; or does nothing.

        ``is_ending``: whether nobody is let in any more. Raises OSError where the connection ends.
        """
        peer.settimeout(_HANDSHAKE_SECONDS)
        lease = welcome(peer, self._token, self._is_live)
        if lease is not None and not is_ending():
            if tell is not None:
                tell(peer)
            # It may have been given back meanwhile, and with the last one the memory.
            if self._is_live(lease):
                self.serve(peer)

    def knows(self, token: str, lease: str) -> bool:
        """Whether a fork of this process may read, which need not prove it over a socket."""
        return hmac.compare_digest(token.encode(), self._token.encode()) and self._is_live(lease)

    def serve(self, peer: socket.socket) -> None:
        """A socket whose other side is known; it is the sender's from now on."""
        peer.setblocking(True)
        # Where no thread can be had the socket is closed, and the fork sees that.
        with contextlib.suppress(RefusedError):
            abi_fork.sender_serve(self._handle, peer.detach())

    def set_epoch(self, epoch: int, is_open: bool) -> None:
        """What is asked for with another epoch, or while it is not open, is refused from now on."""
        with contextlib.suppress(RefusedError):  # closed, be it amid this
            abi_fork.sender_set_epoch(self._handle, epoch, is_open)

    def stats(self) -> dict[str, int]:
        """connections now; sent_bytes, sent_chunks, refused_chunks, stale_chunks, bad_requests so far."""
        with contextlib.suppress(RefusedError):  # closed, be it amid this: what was counted last
            self._counted = abi_fork.sender_stats(self._handle)
        names = [field[0] for field in self._counted._fields_ if field[0] != "struct_size"]
        return {name: getattr(self._counted, name) for name in names}

    def close(self) -> None:
        """Ends every connection; after it no byte of a region is read here."""
        self.stats()
        abi_fork.sender_destroy(self._handle)
        self._counted.connections = 0
