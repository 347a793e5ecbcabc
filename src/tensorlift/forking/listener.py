"""Who listens: one thread that accepts, a few that talk, none that spins, and an end that leaves nothing."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable

__all__ = ["Listener"]

_HANDSHAKE_SECONDS = 10.0


class Listener:
    """Accepts connections and hands each to ``talk`` on a thread of its own."""

    def __init__(
        self,
        host: str,
        port: int,
        talk: Callable[[socket.socket], object],
        most: int,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Listens; accepts from start() on. ``most``: threads at once, more connections are sent away.
        ``tls``: talked under it.

        ``host``: or a name of Linux's abstract namespace, which begins with a zero byte.

        ``talk`` may detach the socket; else it is closed when that returns. It has to end when the socket is
        shut down, and raises OSError at most. Raises OSError where nobody can listen there.
        """
        self._talk, self._tls = talk, tls
        self._ending = threading.Event()
        self._free = threading.BoundedSemaphore(most)
        self._lock = threading.Lock()
        self._talking: dict[threading.Thread, socket.socket] = {}
        self._socket = _listening(host, port)
        self.address = _name_of(self._socket)
        """host:port, or the name."""
        self._thread = threading.Thread(target=self._accept, name="tensorlift-seed", daemon=True)

    def start(self) -> None:
        """Accepts from now on."""
        self._thread.start()

    @property
    def is_ending(self) -> bool:
        """close() was called."""
        return self._ending.is_set()

    def close(self) -> None:
        """Shuts every connection down that is talked to, and waits for its thread."""
        self._ending.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        if self._thread.ident is not None:
            self._thread.join()
        self._socket.close()
        with self._lock:
            talking = dict(self._talking)
            for peer in talking.values():
                with contextlib.suppress(OSError):
                    # The socket's alone: TLS would be taken away below the thread that talks.
                    socket.socket.shutdown(peer, socket.SHUT_RDWR)
        for thread in talking:
            thread.join()

    def _accept(self) -> None:
        while not self._ending.is_set():
            try:
                peer, _ = self._socket.accept()
            except OSError:
                # Closed; or out of descriptors, or a peer that went at once: the next may fare better.
                if self._ending.wait(0.05):
                    return
                continue
            if not self._free.acquire(blocking=False):
                peer.close()
                continue
            thread = threading.Thread(target=self._run, args=[peer], name="tensorlift-seed-talk", daemon=True)
            with self._lock:
                self._talking[thread] = peer
            try:
                thread.start()
            except RuntimeError:  # no more threads
                self._done(thread, peer)

    def _run(self, peer: socket.socket) -> None:
        thread = threading.current_thread()
        try:
            if self._tls is not None:
                peer = self._encrypted(thread, peer, self._tls)
            self._talk(peer)
        except OSError:
            pass  # the peer is gone
        finally:
            self._done(thread, peer)

    def _encrypted(self, thread: threading.Thread, peer: socket.socket, tls: ssl.SSLContext) -> ssl.SSLSocket:
        peer.settimeout(_HANDSHAKE_SECONDS)
        # close() has to find one of both that has the descriptor.
        with self._lock:
            wrapped = tls.wrap_socket(peer, server_side=True, do_handshake_on_connect=False)
            self._talking[thread] = wrapped
        try:
            wrapped.do_handshake()
        except BaseException:
            wrapped.close()
            raise
        return wrapped

    def _done(self, thread: threading.Thread, peer: socket.socket) -> None:
        with self._lock:
            self._talking.pop(thread, None)
        peer.close()
        self._free.release()


def _listening(host: str, port: int) -> socket.socket:
    if not host.startswith("\0"):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=128)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.bind(host)
        made.listen(128)
    except BaseException:
        made.close()
        raise
    return made


def _name_of(listening: socket.socket) -> str:
    name = listening.getsockname()
    if isinstance(name, bytes):
        return name.decode("ascii")
    host, port = name[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
