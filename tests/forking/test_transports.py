"""What every transport has to do, in one body."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from support import leaks, one_sided
from support.waiting import until
from tensorlift.engine.abi_fork import Memory, Outcome
from tensorlift.forking.chunks import Chunk
from tensorlift.forking.manifest import Layout, Offer
from tensorlift.forking.shared_memory import shared_tensors
from tensorlift.forking.transports import (
    Connected,
    Connection,
    Served,
    connect,
)

MIB = 1 << 20
SIZES = (5 * MIB + 3, 100, 0)
LEASE, TOKEN, PATIENCE = "a" * 32, "s\u00e9cret", 60.0
WAYS = ("memory", "shm-memfd", "shm-readv", "tcp", *one_sided.WAYS)
HOW = {
    "memory": "memory", "shm-memfd": "shm (memfd)", "shm-readv": "shm (process_vm_readv)", "tcp": "tcp",
    "mooncake": "mooncake (tcp)", "nixl": "nixl (UCX, tcp)",
}  # fmt: skip
Array = npt.NDArray[np.uint8]


def contents() -> list[Array]:
    random = np.random.default_rng(1)
    return [random.integers(0, 256, size, np.uint8) for size in SIZES]


def kind_of(way: str) -> str:
    return way.split("-")[0]


class Seed:
    """Regions in the kind of memory that a way wants, and a server of them."""

    def __init__(self, way: str, limit: int | None = None, epoch: int = 0) -> None:
        self.way, self.kind, self.regions = way, kind_of(way), contents()
        if way == "shm-memfd":
            made = shared_tensors([Layout(f"r{k}", "uint8", (n,), (1,)) for k, n in enumerate(SIZES)])
            shared = [tensor.numpy() for tensor in made.values()]
            for there, here in zip(shared, self.regions, strict=True):
                there[:] = here
            self.regions = shared
        self.leases = {LEASE}
        places = [Memory(array.ctypes.data, array.nbytes) for array in self.regions]
        self.served = Served(
            places, self.leases.__contains__, token=TOKEN, limit=limit, transports=[self.kind],
            wiring=one_sided.OVER_TCP, owner=self.regions,
        )  # fmt: skip
        self.served.set_epoch(epoch, True)

    def connect(self, token: str = TOKEN, lease: str = LEASE) -> Connection:
        found = connect(self.served.offers, token, lease, PATIENCE, [self.kind], one_sided.OVER_TCP)
        assert found.transport == HOW[self.way]
        return found.connection

    def close(self) -> None:
        self.served.close()
        self.regions.clear()


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    one_sided.need(request.param)
    return str(request.param)


@contextlib.contextmanager
def running(way: str, **more: Any) -> Iterator[Seed]:
    with one_sided.nothing_left() if way in one_sided.WAYS else leaks.nothing_left():
        made = Seed(way, **more)
        try:
            yield made
        finally:
            made.close()


@pytest.fixture
def seed(way: str) -> Iterator[Seed]:
    with running(way) as made:
        yield made


def fetch(connection: Connection, chunk: Chunk, epoch: int = 0, digest: bool = True) -> tuple[int, bytes]:
    memory = np.zeros(chunk.nbytes, np.uint8)
    places = np.array([[0, chunk.nbytes, memory.ctypes.data]], np.uint64)
    came = connection.fetch(chunk, epoch, places, digest)
    if came.outcome != Outcome.STALE:  # which shows before or behind the bytes
        assert came.verified == (digest and came.outcome in (Outcome.OK, Outcome.WRONG))
    return came.outcome, memory.tobytes()


def fetching(connection: Connection, chunk: Chunk) -> tuple[threading.Thread, list[object]]:
    """Fetches on another thread; what it came to."""
    found: list[object] = []

    def run() -> None:
        try:
            found.append(fetch(connection, chunk)[0])
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


def test_bytes(seed: Seed) -> None:
    connection = seed.connect()
    for chunk in (Chunk(1, 0, 100), Chunk(0, 3, 5 * MIB), Chunk(1, 99, 1), Chunk(0, 0, SIZES[0])):
        expected = seed.regions[chunk.region][chunk.offset : chunk.offset + chunk.nbytes].tobytes()
        for digest in (True, False):
            assert fetch(connection, chunk, digest=digest) == (Outcome.OK, expected)
    connection.close()
    stats = seed.served.stats()
    assert stats["sent_chunks"] == 8
    assert stats["sent_bytes"] == 2 * (100 + 5 * MIB + 1 + SIZES[0])


def test_no_bytes(seed: Seed) -> None:
    connection = seed.connect()
    for chunk in (Chunk(2, 0, 0), Chunk(0, SIZES[0], 0), Chunk(1, 5, 0)):
        assert fetch(connection, chunk) == (Outcome.OK, b"")
    connection.close()


def test_places_with_holes(seed: Seed) -> None:
    """The first is cut by the end of a block, the second lies inside of one, the third goes over several."""
    wanted = [(MIB - 5, 10), (MIB + 7, 1), (2 * MIB - 1, 3 * MIB - 8)]
    memory = np.full(SIZES[0] + 64, 0xA5, np.uint8)
    expected, places, at = memory.copy(), [], SIZES[0]
    for offset, nbytes in wanted:
        at -= nbytes + 3
        expected[at : at + nbytes] = seed.regions[0][1 + offset : 1 + offset + nbytes]
        places.append([offset, nbytes, memory.ctypes.data + at])
    connection = seed.connect()
    came = connection.fetch(Chunk(0, 1, SIZES[0] - 1), 0, np.array(places, np.uint64), True)
    assert (came.outcome, came.verified) == (Outcome.OK, 1)
    assert np.array_equal(memory, expected)
    connection.close()


def test_epochs(way: str) -> None:
    with running(way, epoch=3) as seed:
        connection = seed.connect()
        assert fetch(connection, Chunk(1, 0, 5), epoch=2)[0] == Outcome.STALE
        seed.served.set_epoch(4, False)
        assert fetch(connection, Chunk(1, 0, 5), epoch=3)[0] == Outcome.STALE
        assert fetch(connection, Chunk(1, 0, 5), epoch=4)[0] == Outcome.CLOSED
        seed.served.set_epoch(4, True)
        assert fetch(connection, Chunk(1, 0, 5), epoch=4)[0] == Outcome.OK
        connection.close()
        assert seed.served.stats()["refused_chunks"] == 3


def test_an_epoch_that_ends_in_the_middle(way: str) -> None:
    """Its second block has to wait for seconds, so that the change comes before it."""
    with running(way, limit=MIB // 2) as seed:
        connection = seed.connect()
        thread, found = fetching(connection, Chunk(0, 0, 2 * MIB))
        until(lambda: seed.served.stats()["sent_bytes"] > 0)
        seed.served.set_epoch(1, True)
        thread.join()
        assert found == [Outcome.STALE]
        assert seed.served.stats()["stale_chunks"] == 1
        connection.close()


@pytest.mark.parametrize("chunk", [Chunk(7, 0, 5), Chunk(1, 99, 2), Chunk(2, 1, 0)])
def test_what_no_manifest_says_ends_the_connection(seed: Seed, chunk: Chunk) -> None:
    connection = seed.connect()
    assert fetch(connection, chunk)[0] == Outcome.RANGE
    with pytest.raises(ConnectionError):
        fetch(connection, Chunk(1, 0, 5))
    connection.close()
    assert seed.served.stats()["bad_requests"] == 1


@pytest.mark.parametrize("way", ["memory", "shm-memfd", "shm-readv"])
def test_what_is_copied_from_elsewhere_is_seen(seed: Seed) -> None:
    connection: Any = seed.connect()
    connection._origins[0].address += 1
    assert fetch(connection, Chunk(0, 0, 2 * MIB))[0] == Outcome.WRONG
    connection._origins[0].address -= 1
    assert fetch(connection, Chunk(0, 0, 2 * MIB))[0] == Outcome.OK
    connection._origins[0].nbytes = 10
    with pytest.raises(ConnectionError, match="the seed has not said where it has these bytes"):
        fetch(connection, Chunk(0, 0, 11))
    connection.close()


@pytest.mark.parametrize(("token", "lease"), [("Secret", LEASE), ("", LEASE), (TOKEN, "b" * 32)])
def test_who_does_not_get_in(seed: Seed, token: str, lease: str) -> None:
    with pytest.raises(ConnectionRefusedError, match="does not take this token or lease"):
        seed.connect(token, lease)
    assert seed.served.stats()["connections"] == 0


def test_a_lease_that_has_lapsed(seed: Seed) -> None:
    seed.leases.clear()
    with pytest.raises(ConnectionRefusedError):
        seed.connect()


def test_a_fork_that_gives_up(way: str) -> None:
    with running(way, limit=1) as seed:
        connection = seed.connect()
        thread, found = fetching(connection, Chunk(0, 0, 3 * MIB))
        until(lambda: seed.served.stats()["sent_bytes"] > 0)
        connection.shutdown()
        thread.join()
        assert isinstance(found[0], ConnectionError)
        connection.close()


def test_a_seed_that_ends_in_the_middle(way: str) -> None:
    with running(way, limit=1) as seed:
        connection = seed.connect()
        thread, found = fetching(connection, Chunk(0, 0, 3 * MIB))
        until(lambda: seed.served.stats()["sent_bytes"] > 0)
        seed.served.close()
        thread.join()
        assert isinstance(found[0], ConnectionError)
        with pytest.raises(ConnectionError, match="0 of 5 bytes came"):
            fetch(connection, Chunk(1, 0, 5))
        connection.close()
        with pytest.raises(OSError):
            seed.connect()


def test_a_limit_holds_for_all_connections_together(way: str) -> None:
    """No clock: the first part of a block goes on credit, and at 1 byte a second nobody sees it paid back."""
    with running(way, limit=1) as seed:
        connections = [seed.connect() for _ in range(3)]
        runs = [fetching(one, Chunk(0, 0, 3 * MIB)) for one in connections]
        until(lambda: seed.served.stats()["sent_bytes"] > 0)
        time.sleep(0.1)  # in which they would go on
        assert seed.served.stats()["sent_bytes"] == 1024
        for one in connections:
            one.shutdown()
        for thread, _ in runs:
            thread.join()
        for one in connections:
            one.close()


def test_connections_at_once(seed: Seed) -> None:
    connections = [seed.connect() for _ in range(4)]
    runs = [fetching(one, Chunk(0, k, SIZES[0] - k)) for k, one in enumerate(connections)]
    for thread, _ in runs:
        thread.join()
    assert [found for _, found in runs] == [[Outcome.OK]] * 4
    for one in connections:
        one.close()


def main() -> None:
    """A seed in a process of its own, until its standard input ends: way."""
    seed = Seed(sys.argv[1])
    print("\n" + json.dumps([(offer.kind, offer.address) for offer in seed.served.offers]), flush=True)
    sys.stdin.read()
    seed.close()


@contextlib.contextmanager
def apart(way: str) -> Iterator[tuple[subprocess.Popen[str], Connected]]:
    """A seed that is a child, so that this process may read its memory; and a connection."""
    path = ":".join(sys.path)
    child = subprocess.Popen(
        [sys.executable, str(Path(__file__)), way], env={"PYTHONPATH": path},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert child.stdout is not None
        offers = [Offer(*pair) for pair in json.loads(one_sided.said(child))]
        found = connect(offers, TOKEN, LEASE, PATIENCE, [kind_of(way)], one_sided.OVER_TCP)
        yield child, found
        found.connection.close()
    finally:
        child.communicate()


@pytest.mark.parametrize("way", WAYS[1:])
def test_a_seed_in_another_process_which_is_killed(way: str) -> None:
    one_sided.need(way)
    with apart(way) as (child, found):
        assert found.transport == HOW[way]
        assert fetch(found.connection, Chunk(0, 0, SIZES[0])) == (Outcome.OK, contents()[0].tobytes())
        child.send_signal(signal.SIGSTOP)
        thread, came = fetching(found.connection, Chunk(0, 0, SIZES[0]))
        child.kill()
        thread.join()
        assert isinstance(came[0], ConnectionError)


if __name__ == "__main__":
    main()
