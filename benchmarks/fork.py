"""A fork's transports against what they are made of, seed and fork in two processes on this machine.

    python benchmarks/fork.py [--bytes 1GB] [--runs 5]

    tcp   at 1, 2, 4 connections: a bare socket loop (sendall, recv_into) with as many connections, in which
          both sides digest each chunk as ours do
    shm   with 1 and 2 threads: a copy of memory inside one process, with as many threads and no digest; the
          seed's weights in a file of memory (memfd), then in memory of its own (process_vm_readv), as
          tensorlift loads them (huge pages advised) and as torch allocates it (pages of 4 KiB, which the
          kernel looks up one by one: no bar)
    limit tcp by 2 connections to a seed with limit="400MB/s": how near to 1 the rate is of it

All take turns, so that what drifts on the machine meets all of them; the first round does not count. After
each sample every byte is compared. The file goes to benchmarks/results.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tensorlift.bench import machine
from tensorlift.bench.report import Row, Series, show_rows, write_report
from tensorlift.engine.abi_fork import Memory, Outcome, tensor_digest
from tensorlift.errors import MismatchError
from tensorlift.forking.chunks import Chunk
from tensorlift.forking.manifest import Layout, Offer
from tensorlift.forking.shared_memory import shared_tensors
from tensorlift.forking.transports import Served, connect
from tensorlift.options import parse_size
from tensorlift.tensors.memory import HostMemory
from tensorlift.tensors.views import bytes_of

RESULTS = Path(__file__).resolve().parent / "results"
CHUNK = 16 << 20
LEASE, PATIENCE = "a" * 32, 60.0
TCP_BAR, MEMFD_BAR, READV_BAR = 0.85, 0.7, 0.55
LIMIT, LIMIT_BAR = 400_000_000, 0.95
# What a bare fork asks for: the first byte of a chunk. Its bytes and their digest come.
ASKED = struct.Struct("<Q")
DIGEST_BYTES = 16

Array = npt.NDArray[np.uint8]
Work = Callable[[Chunk], object]


def weights(nbytes: int) -> Array:
    """What the seed has: the same in each process."""
    words = np.random.default_rng(7).integers(0, 2**63, nbytes // 8, np.uint64)
    return words.view(np.uint8)


def private(nbytes: int) -> Array:
    """Memory as torch allocates it, which is what tensors have."""
    found: Array = torch.empty(nbytes, dtype=torch.uint8).numpy()
    found[:] = 0
    return found


def loaded(nbytes: int) -> Array:
    """Memory as load() leaves it."""
    memory = HostMemory()
    found: Array = bytes_of(memory.allocate([nbytes])[0], memory, nbytes).numpy()
    found[:] = 0
    return found


def seed(nbytes: int) -> None:
    """A process: offers weights in memory of both kinds, and through a bare loop, until its input ends."""
    given = weights(nbytes)
    shared = shared_tensors([Layout("weights", "uint8", (nbytes,), (1,))])["weights"].numpy()
    own, huge = private(nbytes), loaded(nbytes)
    shared[:] = own[:] = huge[:] = given
    with contextlib.ExitStack() as ends:
        found: dict[str, Any] = {}
        for name, memory in (("memfd", shared), ("readv", huge), ("small pages", own), ("limited", own)):
            limit = LIMIT if name == "limited" else None
            served = Served([Memory(memory.ctypes.data, nbytes)], lambda lease: True, limit=limit)
            ends.callback(served.close)
            found[name] = [(offer.kind, offer.address) for offer in served.offers]
        listening = ends.enter_context(socket.create_server(("127.0.0.1", 0)))
        found["bare"] = listening.getsockname()
        threading.Thread(target=accept, args=[listening, own], daemon=True).start()
        print(json.dumps(found), flush=True)
        sys.stdin.read()


def accept(listening: socket.socket, memory: Array) -> None:
    while True:
        peer, _ = listening.accept()
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=serve, args=[peer, memory], daemon=True).start()


def serve(peer: socket.socket, memory: Array) -> None:
    """The bare loop's seed."""
    with peer:
        while asked := peer.recv(ASKED.size, socket.MSG_WAITALL):
            (at,) = ASKED.unpack(asked)
            part = memory[at : at + CHUNK]
            peer.sendall(part.data)
            peer.sendall(tensor_digest(part.ctypes.data, part.nbytes))


class Bare:
    """The bare loop's fork: a connection."""

    def __init__(self, address: list[Any], to: Array) -> None:
        self._to = to
        self._socket = socket.create_connection((address[0], address[1]))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def bring(self, chunk: Chunk) -> None:
        """One chunk, into its place."""
        self._socket.sendall(ASKED.pack(chunk.offset))
        part = self._to[chunk.offset : chunk.offset + chunk.nbytes]
        left = memoryview(part.data)
        while left:
            left = left[self._socket.recv_into(left) :]
        if self._socket.recv(DIGEST_BYTES, socket.MSG_WAITALL) != tensor_digest(
            part.ctypes.data, part.nbytes
        ):
            raise MismatchError(f"{chunk}: the bytes do not have their digest")

    def close(self) -> None:
        """Its end."""
        self._socket.close()


class Ours:
    """A connection of a transport."""

    def __init__(self, kind: str, offers: list[list[str]], to: Array) -> None:
        self._to = to
        found = connect([Offer(*pair) for pair in offers], "", LEASE, PATIENCE, [kind])
        self.transport, self._connection = found.transport, found.connection

    def bring(self, chunk: Chunk) -> None:
        """One chunk, into its place."""
        places = np.array([[0, chunk.nbytes, self._to.ctypes.data + chunk.offset]], np.uint64)
        came = self._connection.fetch(chunk, 0, places, digest=True)
        if came.outcome != Outcome.OK or not came.verified:
            raise MismatchError(f"{chunk}: outcome {came.outcome}, verified {came.verified}")

    def close(self) -> None:
        """Its end."""
        self._connection.close()


class Copy:
    """What no transport is faster than: memory to memory, here."""

    def __init__(self, source: Array, to: Array) -> None:
        self._source, self._to = source, to

    def bring(self, chunk: Chunk) -> None:
        """One chunk, into its place."""
        part = slice(chunk.offset, chunk.offset + chunk.nbytes)
        np.copyto(self._to[part], self._source[part])

    def close(self) -> None:
        """Nothing."""


def cpu_seconds(process: int | None) -> float:
    """That this process and, where there is one, another have used so far, all their threads together."""
    if process is None:
        return time.process_time()
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return time.process_time() + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Contender:
    """One way with some threads, each with what it brings chunks by. ``seed``: the process that it reads."""

    def __init__(self, name: str, nbytes: int, workers: list[Any], seed: int | None = None) -> None:
        self.series, self.cpu = Series(name, nbytes), Series(f"{name}, CPU seconds", nbytes)
        self._workers, self._seed = workers, seed

    def sample(self) -> None:
        """Brings all chunks once, each thread as many as it can."""
        chunks = iter([Chunk(0, at, CHUNK) for at in range(0, self.series.nbytes, CHUNK)])
        lock, failed = threading.Lock(), list[BaseException]()

        def pull(bring: Work) -> None:
            try:
                while True:
                    with lock:
                        chunk = next(chunks, None)
                    if chunk is None:
                        return
                    bring(chunk)
            except BaseException as error:  # noqa: BLE001 - for the thread that waits
                failed.append(error)

        threads = [threading.Thread(target=pull, args=[worker.bring]) for worker in self._workers]
        used, begin = cpu_seconds(self._seed), time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.series.seconds.append(time.perf_counter() - begin)
        self.cpu.seconds.append(cpu_seconds(self._seed) - used)
        if failed:
            raise failed[0]

    def close(self) -> None:
        """Its end."""
        for worker in self._workers:
            worker.close()


@contextlib.contextmanager
def seed_apart(nbytes: int) -> Iterator[dict[str, Any]]:
    """The seed's process, and what it offers."""
    command = [sys.executable, __file__, "--seed", "--bytes", str(nbytes)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        yield json.loads(child.stdout.readline())
    finally:
        child.communicate()


def measured(offers: dict[str, Any], nbytes: int, runs: int) -> list[Row]:
    """Every sample of all of them in turn, as rows."""
    given, to = weights(nbytes), private(nbytes)
    source = private(nbytes)
    source[:] = given
    rows: list[tuple[str, str, float | None, Contender, Contender]] = []
    with contextlib.ExitStack() as ends:

        def contender(name: str, count: int, make: Callable[[], object]) -> Contender:
            made = Contender(name, nbytes, [make() for _ in range(count)])
            ends.callback(made.close)
            return made

        for count in (1, 2, 4):
            bare = contender("bare loop", count, lambda: Bare(offers["bare"], to))
            ours = contender("tcp", count, lambda: Ours("tcp", offers["readv"], to))
            rows.append((f"tcp, {count} connections", "bare loop", TCP_BAR, bare, ours))
        for count in (1, 2):
            copy = contender("memcpy", count, lambda: Copy(source, to))
            for name, bar in (("memfd", MEMFD_BAR), ("readv", READV_BAR), ("small pages", None)):
                ours = contender(f"shm, {name}", count, lambda name=name: Ours("shm", offers[name], to))  # type: ignore[misc]
                rows.append((f"shm, {name}, {count} threads", "memcpy", bar, copy, ours))
        limited = contender("tcp, limited", 2, lambda: Ours("tcp", offers["limited"], to))
        contenders = [*dict.fromkeys(one for row in rows for one in row[3:]), limited]
        for number in range(runs + 1):
            for one in contenders[number % len(contenders) :] + contenders[: number % len(contenders)]:
                to[:] = 0
                one.sample()
                if not np.array_equal(to, given):
                    raise MismatchError(f"{one.series.name}: other bytes have come")
    near = 1 - abs(limited.series.rate / LIMIT - 1)
    what = f"1 less how far the rate is from {LIMIT // 10**6} MB/s"
    limit_row = Row("tcp, limited", what, near, LIMIT_BAR, True, [limited.series])
    return [limit_row] + [
        Row(
            name,
            f"rate, of {what}",
            ours.series.rate / least.series.rate,
            bar,
            True,
            [least.series, ours.series],
        )
        for name, what, bar, least, ours in rows
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--bytes", default="1GB", help="of the weights")
    parser.add_argument("--runs", type=int, default=5, help="samples that count, of each")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--seed", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    nbytes = -(-parse_size(given.bytes, "--bytes") // CHUNK) * CHUNK
    if given.seed:
        seed(nbytes)
        return 0
    before = os.getloadavg()
    with seed_apart(nbytes) as offers:
        rows = measured(offers, nbytes, given.runs)
    load = {"before": before, "after": os.getloadavg()}
    settings = {"command": sys.argv, "chunk_bytes": CHUNK, "load_average": load}
    show_rows(rows)
    print(write_report(given.results, "fork", machine.facts(), settings, rows))
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
