"""A seed that listens and forks that connect: bytes, tokens, leases, epochs, and ends on either side."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from support import leaks
from tensorlift.engine.abi_fork import Memory, Outcome
from tensorlift.forking.chunks import Chunk, ChunkQueue, cut
from tensorlift.forking.tcp import TcpConnection, TcpServer
from tensorlift.plan.extents import Extents

MIB = 1 << 20
LEASE, PATIENCE = "a" * 32, 60.0
WHOLE = Extents(np.array([0], np.int64), np.array([5 * MIB + 3], np.int64))


class Seed:
    """Two regions, and a server of them."""

    def __init__(self, token: str = "secret", host: str = "127.0.0.1") -> None:
        random = np.random.default_rng(1)
        self.regions = [random.integers(0, 256, size, np.uint8) for size in (5 * MIB + 3, 100)]
        self.leases = {LEASE}
        places = [Memory(array.ctypes.data, array.nbytes) for array in self.regions]
        self.server = TcpServer(
            [Memory(*place) for place in places], self.leases.__contains__, host=host, token=token
        )

    def connect(self, token: str = "secret", lease: str = LEASE, seconds: float = PATIENCE) -> TcpConnection:
        return TcpConnection(self.server.address, token, lease, seconds)


@pytest.fixture
def seed() -> Iterator[Seed]:
    with leaks.nothing_left():
        made = Seed()
        yield made
        made.server.close()


def fetch(connection: TcpConnection, chunk: Chunk, epoch: int = 0) -> tuple[int, bytes]:
    memory = np.zeros(chunk.nbytes, np.uint8)
    places = np.array([[0, chunk.nbytes, memory.ctypes.data]], np.uint64)
    came = connection.fetch(chunk, epoch, places, digest=True)
    assert came.verified == (came.outcome in (Outcome.OK, Outcome.WRONG))
    return came.outcome, memory.tobytes()


def test_bytes(seed: Seed) -> None:
    connection = seed.connect()
    for chunk in (Chunk(1, 0, 100), Chunk(0, 3, 5 * MIB), Chunk(1, 99, 1)):
        expected = seed.regions[chunk.region][chunk.offset : chunk.offset + chunk.nbytes].tobytes()
        assert fetch(connection, chunk) == (Outcome.OK, expected)
    connection.close()
    assert seed.server.stats()["sent_chunks"] == 3


def test_connections_pull_from_one_queue(seed: Seed) -> None:
    queue = ChunkQueue(cut(0, WHOLE, 300_000))
    memory = np.zeros(seed.regions[0].nbytes, np.uint8)
    lock = threading.Lock()

    def pull(name: str) -> None:
        connection = seed.connect()
        while True:
            with lock:
                number = queue.take(name)
            if number is None:
                break
            chunk = queue.chunk(number)
            places = np.array([[0, chunk.nbytes, memory.ctypes.data + chunk.offset]], np.uint64)
            came = connection.fetch(chunk, 0, places, digest=True)
            assert came.outcome == Outcome.OK
            with lock:
                queue.done(number, name)
        connection.close()

    threads = [threading.Thread(target=pull, args=[f"c{k}"]) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert queue.is_done
    assert memory.tobytes() == seed.regions[0].tobytes()
    assert sum(queue.moved_bytes.values()) == memory.nbytes


@pytest.mark.parametrize(("token", "lease"), [("Secret", LEASE), ("", LEASE), ("secret", "b" * 32)])
def test_who_does_not_get_in(seed: Seed, token: str, lease: str) -> None:
    with pytest.raises(ConnectionRefusedError, match="does not take this token or lease"):
        seed.connect(token, lease)
    assert seed.server.stats()["connections"] == 0


def test_a_lease_that_has_ended(seed: Seed) -> None:
    seed.leases.clear()
    with pytest.raises(ConnectionRefusedError):
        seed.connect()


def test_an_epoch_that_is_over(seed: Seed) -> None:
    connection = seed.connect()
    seed.server.set_epoch(1, False)
    assert fetch(connection, Chunk(1, 0, 5))[0] == Outcome.STALE
    assert fetch(connection, Chunk(1, 0, 5), epoch=1)[0] == Outcome.CLOSED
    seed.server.set_epoch(1, True)
    assert fetch(connection, Chunk(1, 0, 5), epoch=1)[0] == Outcome.OK
    connection.close()


def test_what_no_manifest_says_ends_the_connection(seed: Seed) -> None:
    connection = seed.connect()
    assert fetch(connection, Chunk(7, 0, 5))[0] == Outcome.RANGE
    with pytest.raises(ConnectionError):
        fetch(connection, Chunk(1, 0, 5))
    connection.close()


def test_a_seed_that_ends(seed: Seed) -> None:
    connection = seed.connect()
    seed.server.close()
    with pytest.raises(ConnectionError, match="0 of 5 bytes came"):
        fetch(connection, Chunk(1, 0, 5))
    connection.close()
    with pytest.raises(OSError):
        seed.connect()


def test_a_fork_that_gives_up(seed: Seed) -> None:
    """From another thread, while nothing comes: the seed that is connected to never answers."""
    silent = socket.create_server(("127.0.0.1", 0))
    failures: list[BaseException] = []

    def connect() -> None:
        try:
            TcpConnection(f"127.0.0.1:{silent.getsockname()[1]}", "", LEASE, 0.2)
        except OSError as error:
            failures.append(error)

    thread = threading.Thread(target=connect)
    thread.start()
    thread.join()
    assert isinstance(failures[0], TimeoutError)
    silent.close()
    connection = seed.connect()
    connection.shutdown()
    with pytest.raises(ConnectionError):
        fetch(connection, Chunk(1, 0, 5))
    connection.close()


def test_strangers_who_say_nothing_keep_nobody_out(seed: Seed) -> None:
    host, port = seed.server.address.rsplit(":", 1)
    strangers = [socket.create_connection((host, int(port))) for _ in range(20)]
    connection = seed.connect()
    assert fetch(connection, Chunk(1, 0, 5))[0] == Outcome.OK
    connection.close()
    seed.server.close()  # does not wait for them
    for stranger in strangers:
        stranger.close()


def test_more_strangers_than_hands_are_sent_away(seed: Seed) -> None:
    host, port = seed.server.address.rsplit(":", 1)
    strangers = []
    for _ in range(40):
        strangers.append(socket.create_connection((host, int(port)), timeout=PATIENCE))
    said = [stranger.recv(1) for stranger in strangers]
    assert said.count(b"") == 8
    assert said.count(b"T") == 32
    for stranger in strangers:
        stranger.close()


def test_without_a_token() -> None:
    seed = Seed(token="")
    connection = seed.connect(token="")
    assert fetch(connection, Chunk(1, 0, 100))[1] == seed.regions[1].tobytes()
    connection.close()
    seed.server.close()


def test_version_6_of_the_protocol() -> None:
    try:
        seed = Seed(host="::1")
    except OSError:
        pytest.skip("no IPv6 loopback here")
    assert seed.server.address.startswith("[::1]:")
    connection = seed.connect()
    assert fetch(connection, Chunk(1, 0, 100))[1] == seed.regions[1].tobytes()
    connection.close()
    seed.server.close()


def test_a_port_that_is_taken(seed: Seed) -> None:
    port = int(seed.server.address.rsplit(":", 1)[1])
    with leaks.nothing_left(), pytest.raises(OSError):
        TcpServer([], lambda lease: True, port=port)
