"""What only TCP has: strangers who connect, ports, addresses. What it shares: test_transports.py."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import numpy as np
import pytest

from support import leaks
from tensorlift.engine.abi_fork import Memory, Outcome
from tensorlift.forking.chunks import Chunk
from tensorlift.forking.handshake import receive
from tensorlift.forking.sender import Sender
from tensorlift.forking.tcp import TcpConnection, TcpServer

MIB = 1 << 20
LEASE, PATIENCE = "a" * 32, 60.0


class Seed:
    """Two regions, and a server of them."""

    def __init__(self, token: str = "secret", host: str = "127.0.0.1") -> None:
        random = np.random.default_rng(1)
        self.regions = [random.integers(0, 256, size, np.uint8) for size in (5 * MIB + 3, 100)]
        places = [Memory(array.ctypes.data, array.nbytes) for array in self.regions]
        self.sender = Sender(places, lambda lease: lease == LEASE, token)
        try:
            self.server = TcpServer(self.sender, host)
        except BaseException:
            self.sender.close()
            raise

    @property
    def address(self) -> str:
        return self.server.offer.address

    def connect(self, token: str = "secret") -> TcpConnection:
        return TcpConnection(self.address, token, LEASE, PATIENCE)

    def close(self) -> None:
        self.server.close()
        self.sender.close()


@pytest.fixture
def seed() -> Iterator[Seed]:
    with leaks.nothing_left():
        made = Seed()
        yield made
        made.close()


def fetch(connection: TcpConnection, chunk: Chunk) -> tuple[int, bytes]:
    memory = np.zeros(chunk.nbytes, np.uint8)
    places = np.array([[0, chunk.nbytes, memory.ctypes.data]], np.uint64)
    came = connection.fetch(chunk, 0, places, digest=True)
    assert came.verified == (came.outcome in (Outcome.OK, Outcome.WRONG))
    return came.outcome, memory.tobytes()


def test_a_seed_that_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(TimeoutError):
        TcpConnection(f"127.0.0.1:{silent.getsockname()[1]}", "", LEASE, 0.2)


def test_strangers_who_say_nothing_keep_nobody_out(seed: Seed) -> None:
    host, port = seed.address.rsplit(":", 1)
    strangers = [socket.create_connection((host, int(port))) for _ in range(20)]
    connection = seed.connect()
    assert fetch(connection, Chunk(1, 0, 5))[0] == Outcome.OK
    connection.close()
    seed.close()  # does not wait for them
    for stranger in strangers:
        stranger.close()


def test_more_strangers_than_hands_are_sent_away(seed: Seed) -> None:
    host, port = seed.address.rsplit(":", 1)
    strangers = []
    for _ in range(40):
        strangers.append(socket.create_connection((host, int(port)), timeout=PATIENCE))
    assert [len(receive(stranger, 36)) for stranger in strangers] == [36] * 40
    # Those that came first make room.
    assert [stranger.recv(1) for stranger in strangers[:8]] == [b""] * 8
    for stranger in strangers[8:]:
        stranger.setblocking(False)
        with pytest.raises(BlockingIOError):
            stranger.recv(1)
    for stranger in strangers:
        stranger.close()


def test_a_host_that_is_gone_is_noticed(seed: Seed, monkeypatch: pytest.MonkeyPatch) -> None:
    """It closes nothing: the kernel has to ask, or a thread and a descriptor stay for ever."""
    asks: list[int] = []
    real = Sender.serve

    def serve(sender: Sender, peer: socket.socket) -> None:
        asks.append(peer.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))
        asks.append(peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE))
        real(sender, peer)

    monkeypatch.setattr(Sender, "serve", serve)
    connection = seed.connect()
    assert fetch(connection, Chunk(1, 0, 5))[0] == Outcome.OK
    connection.close()
    assert asks == [1, 60]


def test_without_a_token() -> None:
    seed = Seed(token="")
    connection = seed.connect(token="")
    assert fetch(connection, Chunk(1, 0, 100))[1] == seed.regions[1].tobytes()
    connection.close()
    seed.close()


def test_version_6_of_the_protocol() -> None:
    try:
        seed = Seed(host="::1")
    except OSError:
        pytest.skip("no IPv6 loopback here")
    assert seed.address.startswith("[::1]:")
    connection = seed.connect()
    assert fetch(connection, Chunk(1, 0, 100))[1] == seed.regions[1].tobytes()
    connection.close()
    seed.close()


def test_an_address_that_is_not_here(seed: Seed) -> None:
    with leaks.nothing_left(), pytest.raises(OSError):
        TcpServer(seed.sender, "192.0.2.1")
