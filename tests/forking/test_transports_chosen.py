"""Which transport is taken: the best that works here, and what is told of those that do not."""

from __future__ import annotations

import contextlib
import errno
import re
import socket
import threading
import time
from typing import Any

import pytest

from support import leaks
from tensorlift.errors import OptionError
from tensorlift.forking import shm, tcp
from tensorlift.forking.connection import NotHereError
from tensorlift.forking.manifest import Offer
from tensorlift.forking.transports import Connected, Served, check_transports, connect

LEASE, TOKEN, PATIENCE = "a" * 32, "s\u00e9cret", 60.0


def test_memory_of_another_process_is_not_here() -> None:
    offers = [Offer("memory", "0" * 32)]
    with pytest.raises(ConnectionRefusedError, match="not memory: the seed is in another process"):
        connect(offers, TOKEN, LEASE, PATIENCE)


def test_the_best_that_works_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served([], lambda lease: True, token=TOKEN)
    assert [offer.kind for offer in served.offers] == ["shm", "tcp"]

    def transport(*only: str) -> str:
        found = connect(served.offers, TOKEN, LEASE, PATIENCE, only or ("shm", "tcp"))
        found.connection.close()
        return found.transport

    assert transport() == "shm"
    assert transport("tcp") == "tcp"
    monkeypatch.setattr(shm, "host_id", lambda: "0" * 32)
    assert transport() == "tcp; not shm: the seed is on another host, or in another network namespace"
    with pytest.raises(ConnectionRefusedError, match="no transport can be had: not shm: the seed is on"):
        transport("shm")
    with pytest.raises(ConnectionRefusedError, match="no transport can be had: the seed offers shm, tcp"):
        transport("memory")
    served.close()


def test_what_the_system_refuses_of_one_transport_is_tried_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full, refused = OSError(errno.EMFILE, "Too many open files"), list[type]()

    def refuse(kind: type, error: OSError) -> None:
        def fail(*_: Any) -> Any:
            refused.append(kind)
            raise error

        monkeypatch.setattr(kind, "__init__", fail)

    with leaks.nothing_left():
        served = Served([], lambda lease: True, token=TOKEN)

        def asked(*kinds: str) -> Connected:
            return connect(served.offers, TOKEN, LEASE, PATIENCE, kinds)

        refuse(shm.ShmConnection, full)
        found = asked("shm", "tcp")
        found.connection.close()
        assert found.transport == f"tcp; not shm: {full}"
        refuse(tcp.TcpConnection, TimeoutError("timed out"))
        with pytest.raises(TimeoutError, match=f"^timed out; not shm: {re.escape(str(full))}$"):
            asked("shm", "tcp")
        refuse(tcp.TcpConnection, ConnectionResetError("reset"))
        with pytest.raises(ConnectionRefusedError) as caught:
            asked("shm", "tcp")
        assert str(caught.value) == f"no transport can be had: not shm: {full}; not tcp: reset"
        # One that does nothing, or does not take the token, is not waited for again.
        for error in (TimeoutError("timed out"), ConnectionRefusedError("token")):
            refused.clear()
            refuse(shm.ShmConnection, error)
            with pytest.raises(type(error), match=f"^{error}$"):
                asked("shm", "tcp")
            assert refused == [shm.ShmConnection]
        served.close()


def filled(name: str, waiting: contextlib.ExitStack) -> None:
    """Connects until the socket of this name takes no more."""
    with contextlib.suppress(BlockingIOError):
        while True:
            peer = waiting.enter_context(socket.socket(socket.AF_UNIX))
            peer.setblocking(False)
            peer.connect(name)


def test_a_seed_whose_socket_has_no_room_is_read_by_tcp() -> None:
    accepts_nobody = threading.Event()

    def accept_one() -> None:
        accepts_nobody.set()
        time.sleep(0.01)

    with leaks.nothing_left(), contextlib.ExitStack() as waiting:
        served = Served([], lambda lease: True, token=TOKEN)
        server: Any = served._servers[0]
        server._listener._accept_one = accept_one
        name = "\0tensorlift-" + served.offers[0].address.partition(":")[2]
        filled(name, waiting)  # the first wakes who accepts, for the last time
        assert accepts_nobody.wait(60)
        filled(name, waiting)
        found = connect(served.offers, TOKEN, LEASE, PATIENCE)
        found.connection.close()
        assert found.transport == "tcp; not shm: [Errno 11] Resource temporarily unavailable"
        waiting.close()
        served.close()


def test_a_wrong_token_is_not_tried_again_elsewhere() -> None:
    served = Served([], lambda lease: True, token=TOKEN)
    with pytest.raises(ConnectionRefusedError, match="does not take this token"):
        connect(served.offers, "wrong", LEASE, PATIENCE)
    served.close()


def test_a_seed_does_without_what_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise FileNotFoundError("no /proc here")

    monkeypatch.setattr(shm, "host_id", fail)
    served = Served([], lambda lease: True)
    assert [offer.kind for offer in served.offers] == ["tcp"]
    served.close()
    with leaks.nothing_left(), pytest.raises(FileNotFoundError, match="no /proc here"):
        Served([], lambda lease: True, transports=["shm"])
    with pytest.raises(NotHereError, match="on another host"):
        shm.ShmConnection(f"{'0' * 32}:{'0' * 32}", "", LEASE, PATIENCE)


@pytest.mark.parametrize("given", ["tcp", [], ["tcp", "rdma"]])
def test_transports_that_there_are_not(given: Any) -> None:
    with pytest.raises(OptionError, match="expected some of memory, shm, mooncake, nixl, tcp, in a list"):
        check_transports(given)
    assert check_transports(["tcp", "shm"]) == ("shm", "tcp")
