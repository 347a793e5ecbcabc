"""Calls that fail on demand: those of the native library (native/tests/calls), and of Python's sockets.

Both are for a process of their own (``support.child``): the library is another one, and the sockets of the
whole process are.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

from support.native_build import build
from tensorlift.engine.library import VARIABLE

SHORT = -1

# What each may fail with. EINTR is not among them: Python tries again by itself.
_SOCKET_CODES = {
    "__init__": (errno.EMFILE, errno.ENOBUFS),
    "bind": (errno.EADDRINUSE, errno.EACCES),
    "listen": (errno.EADDRINUSE,),
    "connect": (errno.ECONNREFUSED, errno.ETIMEDOUT, errno.ENETUNREACH),
    "accept": (errno.EMFILE, errno.ECONNABORTED, errno.ENOBUFS),
    "recv": (SHORT, errno.ECONNRESET, errno.ETIMEDOUT, errno.ENOMEM),
    "recv_into": (SHORT, errno.ECONNRESET, errno.ETIMEDOUT, errno.ENOMEM),
    "recvmsg": (errno.ECONNRESET, errno.ENOMEM),
    "send": (SHORT, errno.EPIPE, errno.ECONNRESET, errno.ENOBUFS),
    "sendall": (SHORT, errno.EPIPE, errno.ECONNRESET, errno.ENOBUFS),
    "sendmsg": (errno.EPIPE, errno.ECONNRESET, errno.ENOBUFS),
    "setsockopt": (errno.EINVAL, errno.ENOBUFS),
    "getsockopt": (errno.EINVAL,),
    "getsockname": (errno.ENOBUFS,),
}


def library() -> str:
    """Path of the library whose calls can fail, built if it has to be."""
    return str(build("plain", target="tensorlift_calls") / "native/tests/calls/libtensorlift_calls.so")


class Native:
    """The library's calls; to be made before the process has loaded the library."""

    def __init__(self, path: str) -> None:
        os.environ[VARIABLE] = path
        self._library = made = ctypes.CDLL(path)
        made.calls_name.restype = made.calls_last.restype = ctypes.c_char_p
        made.calls_count.restype = made.calls_failed.restype = ctypes.c_uint64
        made.calls_mapped_bytes.restype = ctypes.c_int64
        made.calls_fail.argtypes = [ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int32]
        made.calls_fail_at_random.argtypes = [ctypes.c_uint64, ctypes.c_uint32]
        self._codes = {}
        while (name := made.calls_name(at := len(self._codes))) is not None:
            self._codes[name.decode()] = tuple(_until_zero(made.calls_code, at))

    def codes(self) -> dict[str, tuple[int, ...]]:
        """By the name of each call what it may fail with."""
        return self._codes

    def reset(self) -> None:
        """Nothing fails any more."""
        self._library.calls_reset()

    def fail(self, name: str, turn: int, code: int) -> None:
        """That call from now on."""
        self._library.calls_fail(list(self._codes).index(name), turn, code)

    def fail_at_random(self, seed: int, share: float) -> None:
        """So many of all calls."""
        self._library.calls_fail_at_random(seed, int(share * 1e6))

    def count(self, name: str) -> int:
        """Calls since the reset."""
        return int(self._library.calls_count(list(self._codes).index(name)))

    def failed(self) -> int:
        """How many have failed since."""
        return int(self._library.calls_failed())

    def last(self) -> str:
        """The last one of them."""
        return str(self._library.calls_last().decode())

    def mapped(self) -> int:
        """Bytes that the library has mapped."""
        return int(self._library.calls_mapped_bytes())


def _until_zero(codes: Any, at: int) -> Iterator[int]:
    which = 0
    while (code := codes(at, which)) != 0:
        yield code
        which += 1


class Sockets:
    """The calls of all sockets of the process that are made from here on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset()
        plan = self

        class Failing(socket.socket):
            """A socket that asks first."""

        for name in _SOCKET_CODES:
            setattr(Failing, name, _failing(name, getattr(socket.socket, name), plan))
        socket.socket = Failing  # type: ignore[misc]

    def codes(self) -> dict[str, tuple[int, ...]]:
        """See Native; and so below."""
        return _SOCKET_CODES

    def reset(self) -> None:
        with self._lock:
            self._counts: Counter[str] = Counter()
            self._failed, self._last = 0, ""
            self._next: tuple[str, int, int] | None = None
            self._random, self._share = random.Random(0), 0.0

    def fail(self, name: str, turn: int, code: int) -> None:
        self._next = name, turn, code

    def fail_at_random(self, seed: int, share: float) -> None:
        self._random, self._share = random.Random(seed), share

    def count(self, name: str) -> int:
        return self._counts[name]

    def failed(self) -> int:
        return self._failed

    def last(self) -> str:
        return self._last

    def enter(self, name: str) -> int:
        """What this call is to fail with, else 0."""
        with self._lock:
            self._counts[name] += 1
            code = 0
            if self._next is not None and self._next[:2] == (name, self._counts[name]):
                code = self._next[2]
            elif self._random.random() < self._share:
                code = self._random.choice(_SOCKET_CODES[name])
            if code:
                self._failed += 1
                self._last = f"{name}, call {self._counts[name]}: {code}"
            return code


def _failing(name: str, real: Any, plan: Sockets) -> Any:
    def called(self: socket.socket, *arguments: Any, **more: Any) -> Any:
        if name == "__init__" and more.get("fileno") is not None:  # one that is there already
            return real(self, *arguments, **more)
        code = plan.enter(name)
        if code > 0:
            if name == "sendall" and len(arguments[0]) > 1:  # it may have sent a part
                real(self, memoryview(arguments[0])[: len(arguments[0]) // 2])
            if (name, code) == ("accept", errno.ECONNABORTED):
                real(self)[0].close()
            raise OSError(code, os.strerror(code))
        if code == SHORT and name == "recv":
            return real(self, max(1, arguments[0] // 2), *arguments[1:])
        if code == SHORT and name == "recv_into":
            room = memoryview(arguments[0])
            return real(self, room[: max(1, len(room) // 2)], *arguments[1:])
        if code == SHORT and name in ("send", "sendall"):
            half = memoryview(arguments[0])[: max(1, len(arguments[0]) // 2)]
            if name == "send":
                return real(self, half, *arguments[1:])
            real(self, half)
            return real(self, memoryview(arguments[0])[len(half) :])
        return real(self, *arguments, **more)

    return called
