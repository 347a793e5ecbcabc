"""The transport that needs nothing but a network: a seed listens, a fork connects, bytes pass natively.

A connection begins with a handshake in Python. From then on the seed's side is a thread of the library that
sleeps until a chunk is asked for, and the fork's a call of it without the GIL.
"""

from __future__ import annotations

import socket

from tensorlift.forking.connection import SocketConnection
from tensorlift.forking.handshake import introduce
from tensorlift.forking.listener import Listener
from tensorlift.forking.manifest import Offer
from tensorlift.forking.sender import Sender

__all__ = ["MOST_HANDSHAKES", "TcpConnection", "TcpServer", "connected"]

MOST_HANDSHAKES = 32
"""At once, each on a thread of the seed's."""
# After which the kernel asks whether the other host is still there; twice that and there is nobody.
_SILENT_SECONDS = 60


class TcpServer:
    """Listens for forks."""

    kind = "tcp"

    def __init__(self, sender: Sender, host: str) -> None:
        """Begins. Raises OSError where it cannot listen there."""
        self._sender = sender
        self._listener = Listener(host, 0, self._shake, MOST_HANDSHAKES)
        try:
            self._listener.start()
        except BaseException:
            self.close()
            raise

    @property
    def offer(self) -> Offer:
        """host:port."""
        return Offer(self.kind, self._listener.address)

    def close(self) -> None:
        """Lets nobody in any more."""
        self._listener.close()

    def _shake(self, peer: socket.socket) -> None:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that is gone says so to nobody; a connection is a thread that sleeps until it is asked.
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENT_SECONDS)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENT_SECONDS // 4)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
        self._sender.admit(peer, lambda: self._listener.is_ending, self._tell)

    def _tell(self, peer: socket.socket) -> None:
        """What a fork is told behind the handshake: nothing."""
        self._listener.known()


class TcpConnection(SocketConnection):
    """Bytes come over the network."""

    def __init__(self, address: str, token: str, lease: str, seconds: float) -> None:
        """Connects: see connected()."""
        super().__init__(connected(address, token, lease, seconds), seconds)


def connected(address: str, token: str, lease: str, seconds: float) -> socket.socket:
    """A socket to a TcpServer, behind the handshake. ``seconds``: how long the seed may do nothing for.

    Raises ConnectionRefusedError where the seed does not take token or lease; OSError.
    """
    host, _, port = address.rpartition(":")
    peer = socket.create_connection((host.strip("[]"), int(port)), timeout=seconds)
    try:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        introduce(peer, token, lease)
    except BaseException:
        peer.close()
        raise
    return peer
