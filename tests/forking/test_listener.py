"""Who listens, and its end: from a signal's handler, in a child, with strangers who say nothing."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import os
import resource
import signal
import socket
import sys
import threading
from types import FrameType
from typing import Any

import pytest
import torch

from support.waiting import SECONDS, until
from tensorlift.forking import control, shm
from tensorlift.forking.client import SeedClient
from tensorlift.forking.fork import fork_into
from tensorlift.forking.listener import Listener
from tensorlift.forking.seed import _MOST_TALKS, Seed

pytestmark = pytest.mark.usefixtures("clean")


def echo(peer: socket.socket) -> None:
    while said := peer.recv(100):
        peer.sendall(said)


def address(listener: Listener) -> tuple[str, int]:
    host, _, port = listener.address.rpartition(":")
    return host, int(port)


class Interrupting:
    """A trace function: a listener's close() is called once more at a line of it, or of what it waits in."""

    def __init__(self, listener: Listener, line: int) -> None:
        self._listener, self._left = listener, line

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        if code is not Listener.close.__code__ and code.co_filename != threading.__file__:
            return None
        if event == "line":
            self._left -= 1
            if self._left == -1:
                sys.settrace(None)
                self._listener.close()
        return self

    @property
    def is_over(self) -> bool:
        """There are no more lines."""
        return self._left >= 0


def test_close_amid_close() -> None:
    """As a signal's handler does it, between any two lines of the first one: neither waits for the other, and
    either is through only when nobody is talked to any more.
    """
    for line in itertools.count():
        listener = Listener("127.0.0.1", 0, echo, 4)
        listener.start()
        with socket.create_connection(address(listener)) as peer:
            peer.sendall(b"x")
            assert peer.recv(1) == b"x"
            interrupting = Interrupting(listener, line)

            def close(listener: Listener = listener, interrupting: Any = interrupting) -> None:
                sys.settrace(interrupting)
                listener.close()

            ending = threading.Thread(target=close, daemon=True)
            ending.start()
            ending.join(SECONDS)
            assert not ending.is_alive(), f"it waits for itself at line {line}"
            assert peer.recv(1) == b""
        if interrupting.is_over:
            break
    assert line > 15


def test_signals_at_any_time() -> None:
    """Handlers that close a seed while it is closed."""
    seeds: list[Seed] = []
    before = signal.signal(signal.SIGALRM, lambda *_: seeds[-1].close())
    try:
        with Seed({"a": torch.ones(3)}, "front") as front:
            for number in range(30):
                seeds.append(Seed({"a": torch.ones(3)}, f"m{number}", join=front.url))
                signal.setitimer(signal.ITIMER_REAL, 2e-4 * (1 + number))
                seeds[-1].close()
                signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_keeps_nothing_open() -> None:
    """Its copies would let others wait for a seed that is gone."""
    listener = Listener("127.0.0.1", 0, echo, 4)
    listener.start()
    with socket.create_connection(address(listener)) as peer:
        peer.sendall(b"x")
        assert peer.recv(1) == b"x"
        inherited = [listener._socket.fileno(), *(one.fileno() for one in listener._talking.values())]
        said, tell = os.pipe()
        child = os.fork()
        if child == 0:
            left = sum(os.path.exists(f"/proc/self/fd/{number}") for number in inherited)
            os.write(tell, b"%d" % left)
            os._exit(0)
        assert os.read(said, 10) == b"0"
        assert os.waitpid(child, 0)[1] == 0
        peer.sendall(b"y")  # the parent goes on
        assert peer.recv(1) == b"y"
        os.close(said)
        os.close(tell)
    listener.close()
    with socket.create_server(address(listener)):
        pass


def is_answered(seed: Seed) -> bool:
    connection = http.client.HTTPConnection(seed.url.removeprefix("http://"), timeout=SECONDS)
    try:
        connection.request("GET", "/v1/state")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def test_strangers_hold_a_seed_for_a_short_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All places are taken by who says nothing, or a byte now and then: they have to go."""
    monkeypatch.setattr(control, "_FIRST_SECONDS", 0.5)
    with Seed({"a": torch.ones(3)}, "m") as seed:
        host, _, port = seed.url.removeprefix("http://").rpartition(":")
        strangers = [socket.create_connection((host, int(port))) for _ in range(_MOST_TALKS)]
        dripping = strangers[:8]
        for one in dripping:
            one.sendall(b"GET /v1/state HTTP/1.1\r\n")

        def drips() -> bool:
            for one in dripping:
                with contextlib.suppress(OSError):  # sent away
                    one.sendall(b"x")
            return is_answered(seed)

        until(drips)
        for one in strangers:
            one.close()


@pytest.mark.parametrize("where", ["http", "tcp", "shm"])
def test_strangers_keep_nobody_out(where: str) -> None:
    """More than there are places, as often as they are sent away: who is known is served all the same."""
    found = {"a": torch.zeros(3)}
    with Seed({"a": torch.ones(3)}, "m", token="secret", transports=["shm", "tcp"]) as seed:
        offers = {one.kind: one.address for one in SeedClient(seed.url, "secret").manifest().transports}
        ending, strangers = threading.Event(), list[socket.socket]()

        def connect() -> socket.socket:
            if where == "shm":
                peer = socket.socket(socket.AF_UNIX)
                peer.connect(shm._socket_name(offers["shm"].rpartition(":")[2]))
                return peer
            host, _, port = {**offers, "http": seed.url.removeprefix("http://")}[where].rpartition(":")
            return socket.create_connection((host, int(port)))

        def flood() -> None:
            while not ending.wait(0.01):
                strangers.append(connect())

        thread = threading.Thread(target=flood)
        thread.start()
        try:
            until(lambda: len(strangers) > 2 * _MOST_TALKS)
            for _ in range(3):
                transports = ["tcp" if where == "http" else where]
                fork_into(found, seed.url, token="secret", transports=transports)
        finally:
            ending.set()
            thread.join()
            for one in strangers:
                one.close()


def test_strangers_keep_nobody_out_where_descriptors_are_few() -> None:
    with contextlib.ExitStack() as stack, Seed({"a": torch.ones(3)}, "m") as seed:
        host, _, port = seed.url.removeprefix("http://").rpartition(":")
        for _ in range(4):
            stack.enter_context(socket.create_connection((host, int(port))))
        other, asking = (stack.enter_context(socket.socket()) for _ in range(2))
        until(lambda: len(seed._http._talking) == 4)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, limits[1]))
        with contextlib.suppress(OSError):
            while True:
                stack.callback(os.close, os.dup(0))
        other.connect((host, int(port)))  # gets the descriptor that who accepts has already
        asking.settimeout(3)  # less than a stranger is waited for
        asking.connect((host, int(port)))
        asking.sendall(b"GET /v1/state HTTP/1.1\r\n\r\n")
        assert asking.recv(12) == b"HTTP/1.1 200"


def test_a_second_request_may_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is short is the first one's time alone."""
    given = []
    give = control._Arriving.give
    monkeypatch.setattr(
        control._Arriving, "give", lambda self, seconds: given.append(seconds) or give(self, seconds)
    )
    with Seed({"a": torch.ones(3)}, "m") as seed:
        connection = http.client.HTTPConnection(seed.url.removeprefix("http://"), timeout=SECONDS)
        for _ in range(3):
            connection.request("GET", "/v1/state")
            answer = connection.getresponse()
            assert (answer.status, len(answer.read()) > 0) == (200, True)
        connection.close()
    assert given == [5.0, 30.0, 30.0, 30.0, 30.0]
