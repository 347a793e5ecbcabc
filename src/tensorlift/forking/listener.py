"""Who listens: one thread that accepts, a few that talk, none that spins, and an end that leaves nothing."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable

__all__ = ["Listener"]

_HANDSHAKE_SECONDS = 5.0
_NAP_SECONDS = 0.001
# For a stranger's thread to end that has to make room.
_ROOM_SECONDS = 0.5


class Listener:
    """Accepts connections and hands each to ``talk`` on a thread of its own.

    A signal's handler may call close() while the same thread is in it: nothing here waits for what that
    thread holds. A child of the process keeps none of its sockets.
    """

    def __init__(
        self,
        host: str,
        port: int,
        talk: Callable[[socket.socket], object],
        most: int,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Listens; accepts from start() on. ``most``: threads at once; for one more the stranger goes that
        came first, and where all are known() it is sent away itself. ``tls``: talked under it.

        ``host``: or a name of Linux's abstract namespace, which begins with a zero byte.

        ``talk`` may detach the socket; else it is closed when that returns. It has to end when the socket is
        shut down, and raises OSError at most. Raises OSError where nobody can listen there.
        """
        self._talk, self._tls = talk, tls
        self.is_ending = False
        """close() was called."""
        self._is_accepting = self._is_joining = False
        self._free = threading.BoundedSemaphore(most)
        # Without a lock, which close() would have to take: single operations on a dict need none.
        self._talking: dict[threading.Thread, socket.socket] = {}
        self._strangers: dict[threading.Thread, None] = {}
        self._socket = _listening(host, port)
        self.address = _name_of(self._socket)
        """host:port, or the name."""
        self._thread = threading.Thread(target=self._accept, name="tensorlift-seed", daemon=True)
        _listeners.add(self)

    def start(self) -> None:
        """Accepts from now on."""
        self._is_accepting = True
        try:
            self._thread.start()
        except BaseException:
            self._is_accepting = False
            raise

    def close(self) -> None:
        """Shuts every connection down that is talked to, and waits for its thread."""
        self.is_ending = True
        # Who has interrupted one that joins must not: that one may hold the lock of the thread joined.
        joins, self._is_joining = not self._is_joining, True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        _until(lambda: not self._is_accepting)
        if joins and self._thread.ident is not None:
            self._thread.join()
        self._socket.close()
        talking = dict(self._talking)
        for peer in talking.values():
            _shut(peer)
        _until(lambda: not self._talking)
        for thread in talking if joins else ():
            thread.join()

    def _accept(self) -> None:
        try:
            while not self.is_ending:
                self._accept_one()
        finally:
            self._is_accepting = False

    def _accept_one(self) -> None:
        try:
            peer, _ = self._socket.accept()
        except OSError as error:
            # Closed; or out of descriptors, or a peer that went at once: the next may fare better.
            is_brief = self.is_ending or (error.errno in (errno.EMFILE, errno.ENFILE) and self._send_away())
            time.sleep(_NAP_SECONDS if is_brief else 50 * _NAP_SECONDS)
            return
        if not self._has_room():
            peer.close()
            return
        thread = threading.Thread(target=self._run, args=[peer], name="tensorlift-seed-talk", daemon=True)
        self._talking[thread] = peer
        self._strangers[thread] = None
        try:
            thread.start()
        except RuntimeError:  # no more threads
            self._done(thread, peer)

    def known(self) -> None:
        """Who is talked to on this thread makes room for nobody any more."""
        self._strangers.pop(threading.current_thread(), None)

    def _has_room(self) -> bool:
        """There is, or the oldest stranger makes it: else some that say nothing would keep all others out."""
        if self._free.acquire(blocking=False):
            return True
        return self._send_away() and self._free.acquire(timeout=_ROOM_SECONDS)

    def _send_away(self) -> bool:
        """The oldest stranger, if there is one; its thread ends soon."""
        for thread in list(self._strangers)[:1]:
            self._strangers.pop(thread, None)  # it goes once
            _shut(self._talking.get(thread))
            return True
        return False

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
        wrapped = tls.wrap_socket(peer, server_side=True, do_handshake_on_connect=False)
        self._talking[thread] = wrapped
        try:
            # close() may have found the one that has no descriptor any more.
            if self.is_ending:
                raise ConnectionAbortedError("the seed ends")
            wrapped.do_handshake()
        except BaseException:
            wrapped.close()
            raise
        return wrapped

    def _done(self, thread: threading.Thread, peer: socket.socket) -> None:
        peer.close()
        self._strangers.pop(thread, None)
        self._free.release()
        self._talking.pop(thread, None)

    def drop(self) -> None:
        """In a child of the process, where no thread runs that would: what it would keep open for others."""
        for inherited in (self._socket, *self._talking.values()):
            descriptor = inherited.detach()
            if descriptor >= 0:
                os.close(descriptor)


_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()


def _drop_all() -> None:
    for listener in list(_listeners):
        listener.drop()


os.register_at_fork(after_in_child=_drop_all)


def _shut(peer: socket.socket | None) -> None:
    """Ends what another thread says to it."""
    with contextlib.suppress(OSError):
        if peer is not None:
            # The socket's alone: TLS would be taken away below the thread that talks.
            socket.socket.shutdown(peer, socket.SHUT_RDWR)


def _until(happens: Callable[[], bool]) -> None:
    """By looking again and again: locks and events are no friends of signals' handlers."""
    while not happens():
        time.sleep(_NAP_SECONDS)


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
