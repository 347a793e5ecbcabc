"""The transport inside one process, for tests: a fork copies a seed's memory, which is its own."""

from __future__ import annotations

import secrets
import socket
import threading

from tensorlift.engine import abi, abi_fork
from tensorlift.engine.abi_fork import Origin, OriginKind
from tensorlift.forking.chunks import Chunk
from tensorlift.forking.connection import NotHereError, SocketConnection
from tensorlift.forking.handshake import NOT_TAKEN
from tensorlift.forking.manifest import Offer
from tensorlift.forking.sender import Sender

__all__ = ["MemoryConnection", "MemoryServer"]

_servers: dict[str, MemoryServer] = {}


class MemoryServer:
    """Known by a name in this process."""

    def __init__(self, sender: Sender) -> None:
        """Begins."""
        self.sender = sender
        self.connections: set[MemoryConnection] = set()
        self.is_closed = False
        self.state = threading.Condition()
        self._name = secrets.token_hex(16)
        _servers[self._name] = self

    @property
    def offer(self) -> Offer:
        """The name."""
        return Offer("memory", self._name)

    def close(self) -> None:
        """Lets nobody in any more, and waits for who is copying: the memory may be freed behind this."""
        _servers.pop(self._name, None)
        with self.state:
            self.is_closed = True
            for connection in self.connections:
                connection.shutdown()
            self.state.wait_for(lambda: not any(one.is_fetching for one in self.connections))


class MemoryConnection(SocketConnection):
    """Copies by itself; what is said goes over a pair of sockets, as elsewhere."""

    def __init__(self, address: str, token: str, lease: str, seconds: float) -> None:
        """Raises NotHereError in another process, ConnectionRefusedError for a wrong token or lease."""
        server = _servers.get(address)
        if server is None:
            raise NotHereError("the seed is in another process")
        if not server.sender.knows(token, lease):
            raise ConnectionRefusedError(NOT_TAKEN)
        self._server, self.is_fetching = server, False
        here = [
            Origin(OriginKind.HERE, 0, region.address, region.nbytes)
            if region.device_kind == abi.DEVICE_CPU
            else None
            for region in server.sender.regions
        ]
        with server.state:
            if server.is_closed:
                raise ConnectionRefusedError("the seed is closed")
            ours, theirs = socket.socketpair()
            super().__init__(ours, seconds, here)
            server.connections.add(self)
            server.sender.serve(theirs)

    def fetch(
        self,
        chunk: Chunk,
        epoch: int,
        places: abi_fork.Places,
        digest: bool,
        device: tuple[int, int] = (abi.DEVICE_CPU, 0),
    ) -> abi_fork.Chunk:
        """See SocketConnection."""
        with self._server.state:
            if self._server.is_closed:
                raise ConnectionError(f"the seed is closed (0 of {chunk.nbytes:,} bytes came)")
            self.is_fetching = True
        try:
            return super().fetch(chunk, epoch, places, digest, device)
        finally:
            with self._server.state:
                self.is_fetching = False
                self._server.state.notify_all()

    def close(self) -> None:
        """See SocketConnection."""
        with self._server.state:
            self._server.connections.discard(self)
        super().close()
