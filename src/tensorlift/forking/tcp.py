"""The transport that needs nothing but a network: a seed listens, a fork connects, chunks pass natively.

A connection begins with a handshake in Python. From then on the seed's side is a thread of the library that
sleeps until a chunk is asked for, and the fork's a call of it without the GIL.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence

from tensorlift.engine import abi_fork
from tensorlift.engine.abi_types import Handle, RefusedError
from tensorlift.forking.chunks import Chunk
from tensorlift.forking.handshake import introduce, welcome

__all__ = ["TcpConnection", "TcpServer"]

# For each step of a handshake; what a silent stranger costs is a thread for so long.
_HANDSHAKE_SECONDS = 10.0
_MOST_HANDSHAKES = 32
_IDLE_MILLISECONDS = 60_000
# Of a limited seed at once: what one connection sends between two looks at the clock.
_BURST_BYTES = 1 << 20


class TcpServer:
    """Listens and serves regions of host memory, which have to stay until it is closed."""

    def __init__(
        self,
        regions: Sequence[tuple[int, int]],
        is_live: Callable[[str], bool],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str = "",
        limit: int | None = None,
    ) -> None:
        """Begins. ``regions``: (address, bytes); ``is_live``: whether it is a lease; ``limit``: bytes/s.

        Raises OSError where it cannot listen there.
        """
        self._token, self._is_live = token, is_live
        self._sender = Handle()
        self._ending = threading.Event()
        self._hands = threading.BoundedSemaphore(_MOST_HANDSHAKES)
        self._lock = threading.Lock()
        self._shaking: dict[threading.Thread, socket.socket] = {}
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=128)
        try:
            abi_fork.sender_create(regions, limit or 0, _BURST_BYTES, _IDLE_MILLISECONDS, self._sender)
            self._thread = threading.Thread(target=self._accept, name="tensorlift-seed", daemon=True)
            self._thread.start()
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        """host:port, as in an offer."""
        host, port = self._listener.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

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
        self._ending.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        thread = getattr(self, "_thread", None)
        if thread is not None and thread.ident is not None:
            thread.join()
        self._listener.close()
        with self._lock:
            shaking = dict(self._shaking)
            for peer in shaking.values():
                with contextlib.suppress(OSError):
                    peer.shutdown(socket.SHUT_RDWR)
        for hand in shaking:
            hand.join()
        abi_fork.sender_destroy(self._sender)

    def _accept(self) -> None:
        while not self._ending.is_set():
            try:
                peer, _ = self._listener.accept()
            except OSError:
                # Closed; or out of descriptors, or a peer that went at once: the next may fare better.
                if self._ending.wait(0.05):
                    return
                continue
            if not self._hands.acquire(blocking=False):
                peer.close()
                continue
            hand = threading.Thread(target=self._shake, args=[peer], name="tensorlift-hand", daemon=True)
            with self._lock:
                self._shaking[hand] = peer
            try:
                hand.start()
            except RuntimeError:  # no more threads
                self._done(hand, peer)

    def _shake(self, peer: socket.socket) -> None:
        try:
            peer.settimeout(_HANDSHAKE_SECONDS)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            lease = welcome(peer, self._token, self._is_live)
            if lease is not None and not self._ending.is_set():
                peer.setblocking(True)
                abi_fork.sender_serve(self._sender, peer.detach())
        except (OSError, RefusedError):
            pass  # the fork sees a closed connection
        finally:
            self._done(threading.current_thread(), peer)

    def _done(self, hand: threading.Thread, peer: socket.socket) -> None:
        with self._lock:
            self._shaking.pop(hand, None)
        peer.close()
        self._hands.release()


class TcpConnection:
    """One connection of a fork; chunks come one after another, by one thread."""

    def __init__(self, address: str, token: str, lease: str, seconds: float) -> None:
        """Connects. ``seconds``: how long the seed may do nothing, here and for each chunk.

        Raises ConnectionRefusedError where the seed does not take token or lease; OSError.
        """
        host, _, port = address.rpartition(":")
        self._milliseconds = max(1, int(seconds * 1000))
        self._socket = socket.create_connection((host.strip("[]"), int(port)), timeout=seconds)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            introduce(self._socket, token, lease)
            self._socket.setblocking(True)
        except BaseException:
            self._socket.close()
            raise

    def fetch(self, chunk: Chunk, epoch: int, places: abi_fork.Places, digest: bool) -> abi_fork.Chunk:
        """Writes a chunk to its places; what came of it is in ``outcome``, ``verified`` and ``seed_epoch``.

        Raises ConnectionError where the connection is of no use any more.
        """
        asked = abi_fork.Chunk(
            region=chunk.region, offset=chunk.offset, nbytes=chunk.nbytes, epoch=epoch, digest=digest,
            milliseconds=self._milliseconds,
        )  # fmt: skip
        try:
            abi_fork.fetch_chunk(self._socket.fileno(), asked, places)
        except RefusedError as refused:
            error = refused.error
            raise ConnectionError(f"{error.text} ({error.got:,} of {chunk.nbytes:,} bytes came)") from None
        return asked

    def shutdown(self) -> None:
        """Ends a fetch() of another thread with an error."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """No other thread may be in fetch()."""
        self._socket.close()
