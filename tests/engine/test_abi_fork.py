"""Chunks over sockets: the bytes and epochs of one moment, refusals, ends, and what a stranger sends."""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import xxhash

from support import leaks
from tensorlift.engine import abi_fork
from tensorlift.engine.abi_fork import Chunk, Origin, OriginKind, Outcome
from tensorlift.engine.abi_types import Handle, RefusedError, Status

MIB, BLOCK = 1 << 20, 256 << 10
SIZES = (5 * MIB + 17, 0, 3)


class Seed:
    """A sender of arrays, and connections to it."""

    def __init__(self, rate: int = 0, burst: int = MIB, idle: int = 60_000) -> None:
        random = np.random.default_rng(3)
        self.regions = [random.integers(0, 256, size, np.uint8) for size in SIZES]
        self.handle = Handle()
        places = [abi_fork.Memory(array.ctypes.data, array.nbytes) for array in self.regions]
        abi_fork.sender_create(places, rate, burst, idle, self.handle)
        self.sockets: list[socket.socket] = []

    def connect(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        abi_fork.sender_serve(self.handle, theirs.detach())
        self.sockets.append(ours)
        return ours

    def stats(self) -> dict[str, int]:
        found = abi_fork.sender_stats(self.handle)
        return {name: getattr(found, name) for name, _ in found._fields_ if name != "struct_size"}

    def close(self) -> None:
        abi_fork.sender_destroy(self.handle)
        for one in self.sockets:
            one.close()


@pytest.fixture
def seed() -> Iterator[Seed]:
    with leaks.nothing_left():
        made = Seed()
        yield made
        made.close()


def fetch(to: socket.socket, region: int, offset: int, nbytes: int, **more: Any) -> tuple[Chunk, bytes]:
    wanted = {"epoch": 0, "digest": 1, "milliseconds": 60_000, **more}
    chunk = Chunk(region=region, offset=offset, nbytes=nbytes, **wanted)
    memory = np.full(nbytes + 16, 0xA5, np.uint8)
    places = np.array([[0, nbytes, memory.ctypes.data]], np.uint64)
    abi_fork.fetch_chunk(to.fileno(), chunk, places)
    assert memory[nbytes:].tobytes() == b"\xa5" * 16
    return chunk, memory[:nbytes].tobytes()


@pytest.mark.parametrize("digest", [0, 1])
@pytest.mark.parametrize(
    ("region", "offset", "nbytes"),
    [(0, 0, SIZES[0]), (0, 1, MIB), (0, MIB - 1, 2 * MIB), (0, SIZES[0], 0), (1, 0, 0), (2, 1, 2)],
)
def test_bytes(seed: Seed, region: int, offset: int, nbytes: int, digest: int) -> None:
    to = seed.connect()
    for _ in range(2):
        chunk, got = fetch(to, region, offset, nbytes, digest=digest)
        assert (chunk.outcome, chunk.verified, chunk.seed_epoch) == (Outcome.OK, digest, 0)
        assert got == seed.regions[region][offset : offset + nbytes].tobytes()
    assert seed.stats() == {
        "connections": 1, "sent_bytes": 2 * nbytes, "sent_chunks": 2, "refused_chunks": 0, "stale_chunks": 0,
        "bad_requests": 0,
    }  # fmt: skip


@pytest.mark.parametrize("seed_of_places", range(6))
def test_bytes_go_to_their_places(seed: Seed, seed_of_places: int) -> None:
    random = np.random.default_rng(seed_of_places)
    count = int(random.integers(0, 40))
    ends = np.sort(random.choice(SIZES[0], 2 * count, replace=False)).reshape(-1, 2)
    if seed_of_places == 0:
        ends = np.array([[0, MIB], [MIB, 2 * MIB - 1], [2 * MIB - 1, 2 * MIB - 1], [2 * MIB, 5 * MIB + 17]])
    memory = np.full(SIZES[0] + 8, 0xA5, np.uint8)
    expected = memory.copy()
    # In reverse, so that no two of them are one.
    places, at = [], SIZES[0]
    for begin, end in ends.tolist():
        at -= end - begin
        expected[at : at + end - begin] = seed.regions[0][begin:end]
        places.append([begin, end - begin, memory.ctypes.data + at])
    chunk = Chunk(region=0, offset=0, nbytes=SIZES[0], epoch=0, digest=1, milliseconds=60_000)
    abi_fork.fetch_chunk(seed.connect().fileno(), chunk, np.array(places, np.uint64).reshape(-1, 3))
    assert (chunk.outcome, chunk.verified) == (Outcome.OK, 1)
    assert np.array_equal(memory, expected)


@pytest.mark.parametrize("places", [[[0, 11, 0]], [[11, 0, 0]], [[5, 2, 0], [6, 1, 0]], [[2**64 - 1, 2, 0]]])
def test_places_outside_of_the_chunk(seed: Seed, places: list[list[int]]) -> None:
    chunk = Chunk(region=0, offset=0, nbytes=10, epoch=0, digest=1, milliseconds=60_000)
    with pytest.raises(RefusedError, match=r"place \d is not in the chunk, or not in order"):
        abi_fork.fetch_chunk(seed.connect().fileno(), chunk, np.array(places, np.uint64))


def test_connections_at_once(seed: Seed) -> None:
    found: list[bool] = []

    def read() -> None:
        to = seed.connect()
        for _ in range(5):
            found.append(fetch(to, 0, 7, SIZES[0] - 7)[1] == seed.regions[0][7:].tobytes())

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 20


def blocks(data: bytes, size: int) -> bytes:
    return b"".join(xxhash.xxh3_128_digest(data[at : at + size]) for at in range(0, len(data), size))


def test_the_digest_of_a_tensor_is_that_of_files() -> None:
    data = np.random.default_rng(1).integers(0, 256, 2 * MIB + 5, np.uint8)
    assert abi_fork.tensor_digest(data.ctypes.data, data.nbytes) == xxhash.xxh3_128_digest(
        blocks(data.tobytes(), MIB)
    )
    assert abi_fork.tensor_digest(0, 0) == xxhash.xxh3_128_digest(b"")


def test_another_epoch_is_refused(seed: Seed) -> None:
    to = seed.connect()
    abi_fork.sender_set_epoch(seed.handle, 3, True)
    chunk, _ = fetch(to, 0, 0, 100)
    assert (chunk.outcome, chunk.seed_epoch) == (Outcome.STALE, 3)
    abi_fork.sender_set_epoch(seed.handle, 3, False)
    assert fetch(to, 0, 0, 100, epoch=3)[0].outcome == Outcome.CLOSED
    abi_fork.sender_set_epoch(seed.handle, 3, True)
    assert fetch(to, 0, 0, 100, epoch=3)[0].outcome == Outcome.OK
    assert seed.stats()["refused_chunks"] == 2


def test_an_epoch_that_ends_while_a_chunk_is_sent_shows_at_its_end(seed: Seed) -> None:
    to = seed.connect()
    request = struct.pack("<4sIQQQII", b"TLRQ", 0, 0, SIZES[0], 0, 1, 0)
    to.sendall(request)
    assert to.recv(16, socket.MSG_WAITALL) == struct.pack("<4siQ", b"TLAN", Outcome.OK, 0)
    # The socket holds less than the chunk, so the seed is in the middle of it.
    abi_fork.sender_set_epoch(seed.handle, 1, True)
    bytes_ = to.recv(SIZES[0], socket.MSG_WAITALL)
    assert bytes_ == seed.regions[0].tobytes()
    magic, has_digest, epoch, digest = struct.unpack("<4sIQ16s", to.recv(32, socket.MSG_WAITALL))
    assert (magic, has_digest, epoch) == (b"TLTR", 1, 1)
    assert digest == xxhash.xxh3_128_digest(blocks(bytes_, BLOCK))
    assert seed.stats()["stale_chunks"] == 1


def test_a_fork_that_copies_gets_digests_and_at_its_word_the_epoch(seed: Seed) -> None:
    to = seed.connect()
    to.sendall(struct.pack("<4sIQQQII", b"TLRQ", 0, 3, 2 * MIB + 5, 0, 1, 1))
    assert to.recv(16, socket.MSG_WAITALL) == struct.pack("<4siQ", b"TLAN", Outcome.OK, 0)
    region = seed.regions[0][3 : 2 * MIB + 8].tobytes()
    digests = blocks(region, BLOCK)
    assert to.recv(9 * 16, socket.MSG_WAITALL) == digests
    # However fast the seed was: the epoch is read behind the copy.
    assert select.select([to], [], [], 0.1)[0] == []
    abi_fork.sender_set_epoch(seed.handle, 1, True)
    to.sendall(b"TLCP")
    whole = xxhash.xxh3_128_digest(digests)
    assert to.recv(32, socket.MSG_WAITALL) == struct.pack("<4sIQ16s", b"TLTR", 1, 1, whole)
    assert seed.stats()["stale_chunks"] == 1
    assert seed.stats()["sent_bytes"] == 2 * MIB + 5


def test_a_fork_that_copies_without_digests_is_paced_all_the_same(seed: Seed) -> None:
    to = seed.connect()
    to.sendall(struct.pack("<4sIQQQII", b"TLRQ", 0, 0, 2 * MIB, 0, 0, 1))
    assert to.recv(16 + 8 * 16, socket.MSG_WAITALL)[16:] == bytes(8 * 16)
    to.sendall(b"TLCP")
    assert to.recv(32, socket.MSG_WAITALL)[:8] == struct.pack("<4sI", b"TLTR", 0)


def test_a_fork_that_says_something_else_than_that_it_has_copied(seed: Seed) -> None:
    to = seed.connect()
    to.sendall(struct.pack("<4sIQQQII", b"TLRQ", 2, 0, 3, 0, 1, 1) + b"TLRQ")
    assert len(to.recv(32, socket.MSG_WAITALL)) == 32
    assert to.recv(1) == b""
    assert seed.stats()["bad_requests"] == 1


@pytest.mark.parametrize("how", [OriginKind.HERE, OriginKind.PROCESS])
def test_what_is_copied_is_compared(seed: Seed, how: int) -> None:
    to, memory = seed.connect(), np.zeros(SIZES[0], np.uint8)
    places = np.array([[0, SIZES[0] - 1, memory.ctypes.data]], np.uint64)
    origin = Origin(how, os.getpid(), seed.regions[0].ctypes.data, SIZES[0])
    for offset, outcome in ((0, Outcome.OK), (1, Outcome.WRONG), (0, Outcome.OK)):
        origin.address = seed.regions[0].ctypes.data + offset
        origin.nbytes = SIZES[0] - offset
        chunk = Chunk(region=0, offset=0, nbytes=SIZES[0] - 1, epoch=0, digest=1, milliseconds=60_000)
        abi_fork.fetch_chunk(to.fileno(), chunk, places, origin=origin)
        assert (chunk.outcome, chunk.verified) == (outcome, 1)
    assert np.array_equal(memory[:-1], seed.regions[0][:-1])


def test_an_origin_that_cannot_be_read(seed: Seed) -> None:
    memory = np.zeros(10, np.uint8)
    for origin, says in (
        (Origin(OriginKind.PROCESS, os.getpid(), 16, 10), "cannot read the seed's memory: Bad address"),
        (Origin(OriginKind.PROCESS, 2**22 + 1, 16, 10), "cannot read the seed's memory: No such process"),
        (Origin(OriginKind.HERE, 0, memory.ctypes.data, 9), "the seed has not said where it has these bytes"),
        (Origin(7, 0, 0, 10), "no kind of origin: 7"),
    ):
        with pytest.raises(RefusedError) as caught:
            abi_fork.copy_from(origin, 0, memory)
        assert caught.value.error.text.startswith(says)
        chunk = Chunk(region=0, offset=0, nbytes=10, epoch=0, digest=1, milliseconds=60_000)
        with pytest.raises(RefusedError, match=says.split(":")[0]):
            abi_fork.fetch_chunk(seed.connect().fileno(), chunk, np.zeros((0, 3), np.uint64), origin=origin)


@pytest.mark.parametrize(
    ("region", "offset", "nbytes"),
    [(3, 0, 1), (2**32 - 1, 0, 0), (0, 0, SIZES[0] + 1), (0, SIZES[0] + 1, 0), (2, 2, 2), (0, 2**64 - 1, 2)],
)
def test_what_is_not_there_is_refused(seed: Seed, region: int, offset: int, nbytes: int) -> None:
    to = seed.connect()
    to.sendall(struct.pack("<4sIQQQII", b"TLRQ", region, offset, nbytes, 0, 1, 0))
    assert struct.unpack("<4siQ", to.recv(16, socket.MSG_WAITALL)) == (b"TLAN", Outcome.RANGE, 0)
    assert to.recv(1) == b""
    assert seed.stats()["bad_requests"] == 1
    assert seed.stats()["sent_bytes"] == 0


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n" + b" " * 40, b"\xff" * 40, b"TLRQ"])
def test_strangers(seed: Seed, sent: bytes) -> None:
    to = seed.connect()
    to.sendall(sent)
    to.shutdown(socket.SHUT_WR)
    to.settimeout(60)
    answer = b""
    while part := to.recv(100):
        answer += part
    assert len(answer) in (0, 16)
    end = time.monotonic() + 60
    while seed.stats()["connections"] and time.monotonic() < end:
        time.sleep(0.01)
    assert seed.stats()["connections"] == 0


def answering(*parts: bytes, close: bool = False) -> socket.socket:
    """What a fork is connected to, where a seed should be."""
    ours, theirs = socket.socketpair()
    theirs.sendall(b"".join(parts))
    if close:
        theirs.shutdown(socket.SHUT_WR)
    ours_to_close.extend((ours, theirs))
    return ours


ours_to_close: list[socket.socket] = []


@pytest.fixture
def peers() -> Iterator[None]:
    yield
    for one in ours_to_close:
        one.close()
    ours_to_close.clear()


GOOD = struct.pack("<4siQ", b"TLAN", 0, 0)


@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize(
    ("parts", "close", "says", "got"),
    [
        ([], True, "closed the connection", 0),
        ([b"HTTP/1.1 400 Bad"], False, "no answer of a seed", 0),
        ([struct.pack("<4siQ", b"TLAN", 9, 0)], False, "no answer of a seed", 0),
        ([GOOD, b"x" * 50], True, "closed the connection", 50),
        ([GOOD, b"x" * 50], False, "does nothing: Connection timed out", 50),
        ([GOOD, b"x" * 100, b"y" * 32], False, "no end of a chunk", 0),
    ],
)
def test_a_seed_that_is_none(parts: list[bytes], close: bool, says: str, got: int) -> None:
    to = answering(*parts, close=close)
    with pytest.raises(RefusedError) as caught:
        fetch(to, 0, 0, 100, milliseconds=300)
    assert caught.value.status == Status.READ
    assert says in caught.value.error.text
    assert caught.value.error.got == got


@pytest.mark.usefixtures("peers")
def test_bytes_that_are_not_those_of_their_digest() -> None:
    trailer = struct.pack("<4sIQ16s", b"TLTR", 1, 0, b"d" * 16)
    to = answering(GOOD, b"x" * 100, trailer, GOOD, b"x" * 100, trailer)
    chunk, _ = fetch(to, 0, 0, 100)
    assert (chunk.outcome, chunk.verified) == (Outcome.WRONG, 1)
    assert fetch(to, 0, 0, 100, digest=0)[0].outcome == Outcome.OK


@pytest.mark.usefixtures("peers")
def test_a_seed_without_digests_is_told_of() -> None:
    to = answering(GOOD, b"x" * 100, struct.pack("<4sIQ16s", b"TLTR", 0, 0, b""))
    chunk, _ = fetch(to, 0, 0, 100)
    assert (chunk.outcome, chunk.verified) == (Outcome.OK, 0)


def test_a_peer_that_takes_nothing_is_dropped() -> None:
    seed = Seed(idle=200)
    to = seed.connect()
    to.sendall(struct.pack("<4sIQQQII", b"TLRQ", 0, 0, SIZES[0], 0, 0, 0))
    end = time.monotonic() + 60
    while seed.stats()["connections"] and time.monotonic() < end:
        time.sleep(0.02)
    assert seed.stats()["connections"] == 0
    seed.close()


@pytest.mark.parametrize("state", ["idle", "sending", "limited"])
def test_the_end_of_a_sender_ends_its_connections(state: str) -> None:
    with leaks.nothing_left():
        seed = Seed(rate=1000 if state == "limited" else 0, burst=0, idle=600_000)
        to = seed.connect()
        if state != "idle":
            to.sendall(struct.pack("<4sIQQQII", b"TLRQ", 0, 0, SIZES[0], 0, 0, 0) * 2)
            assert len(to.recv(16, socket.MSG_WAITALL)) == 16
        begin = time.monotonic()
        abi_fork.sender_destroy(seed.handle)
        assert time.monotonic() - begin < 60
        abi_fork.sender_destroy(seed.handle)
        with pytest.raises(RefusedError, match="no sender"):
            abi_fork.sender_stats(seed.handle)
        seed.close()


def test_a_limit_holds_for_all_connections_together() -> None:
    """No clock: the bucket of 1 byte a second lets one burst go, then nothing while this takes."""
    seed = Seed(rate=1, burst=MIB)
    first, second = seed.connect(), seed.connect()
    for to in (first, second):
        to.sendall(struct.pack("<4sIQQQII", b"TLRQ", 0, 0, 3 * MIB, 0, 0, 0))
    # Two answers, the burst, and one part of a block on credit, which the next has to pay back.
    came, wanted, patience = 0, 32 + MIB + 1024, 60.0
    while ready := select.select([first, second], [], [], patience)[0]:
        came += sum(len(to.recv(MIB)) for to in ready)
        patience = 60.0 if came < wanted else 0.2
    assert came == wanted
    seed.close()


def test_a_child_of_a_seed_does_not_serve(seed: Seed) -> None:
    seed.connect()
    child = os.fork()
    if not child:
        try:
            abi_fork.sender_stats(seed.handle)
        except RefusedError as error:
            abi_fork.sender_destroy(seed.handle)
            os._exit(7 if error.status == Status.FORKED else 1)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert fetch(seed.connect(), 0, 0, 10)[0].outcome == Outcome.OK


def test_no_regions() -> None:
    handle = Handle()
    abi_fork.sender_create([], 0, 0, 1000, handle)
    abi_fork.sender_destroy(handle)
    with pytest.raises(RefusedError, match="idle_milliseconds is 0"):
        abi_fork.sender_create([], 0, 0, 0, handle)
