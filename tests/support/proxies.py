"""A network in the middle that is as slow as a test wants it."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import NoReturn


class Dripping:
    """Passes so many bytes of what a server says as they come, and then one every ``pause`` seconds."""

    def __init__(self, address: str, fast_bytes: int, pause: float) -> None:
        """``address``: host:port of the server; ``fast_bytes``: over all connections."""
        host, _, port = address.rpartition(":")
        self._server, self._left, self._pause = (host, int(port)), fast_bytes, pause
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._ending, self._lock = threading.Event(), threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        """Ends all connections."""
        self._ending.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()
        for one in (*self._sockets, self._listener):
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            self._accept_all()

    def _accept_all(self) -> NoReturn:
        while True:
            client, _ = self._listener.accept()
            server = socket.create_connection(self._server)
            self._sockets += [client, server]
            for source, target, slow in ((client, server, False), (server, client, True)):
                thread = threading.Thread(target=self._pass, args=[source, target, slow])
                self._threads.append(thread)
                thread.start()

    def _pass(self, source: socket.socket, target: socket.socket, slow: bool) -> None:
        with contextlib.suppress(OSError):
            while not self._ending.is_set() and (
                some := source.recv(1 if slow and self._is_slow() else 4096)
            ):
                target.sendall(some)
                if slow:
                    with self._lock:
                        self._left -= len(some)
                    if self._is_slow():
                        self._ending.wait(self._pause)
            target.shutdown(socket.SHUT_RDWR)

    def _is_slow(self) -> bool:
        with self._lock:
            return self._left <= 0
