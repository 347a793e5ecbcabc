"""Forks by Mooncake and NIXL over TCP against bare loops of their own reads, in two processes here.

    python benchmarks/one_sided.py [--bytes 512MiB] [--runs 5]

    waiting  Mooncake's batch_transfer_sync_read, which waits by itself, straight to the destination
    polled   the read that a fork makes (asked for its state, with naps in between), straight to the
             destination

Both with as many threads as the fork has connections, and with chunks as large. The fork also copies each
chunk out of the memory that the engine has read it to, has the seed say the epoch, and compares it with the
seed's digest or does not. All take turns; the first round does not count. After each sample every byte is
compared. CPU seconds are those of both processes: where both cores are at work in the bare loop, no fork can
be faster than it by more than the bytes that both get out of a CPU second.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fork as beside
import numpy as np

from tensorlift.bench import machine
from tensorlift.bench.report import Row, show_rows, write_report
from tensorlift.engine.abi_fork import Memory, Outcome
from tensorlift.errors import MismatchError
from tensorlift.forking.chunks import Chunk
from tensorlift.forking.fabrics import Fabric, Part, Shared, Wiring
from tensorlift.forking.manifest import Offer
from tensorlift.forking.mooncake import Mooncake
from tensorlift.forking.nixl import Nixl
from tensorlift.forking.transports import Served, connect
from tensorlift.options import parse_size

BAR, CONNECTIONS, HOST, OVER_TCP = 0.9, 2, "127.0.0.1", Wiring("tcp")
MAKERS: dict[str, Any] = {"mooncake": Mooncake, "nixl": Nixl}


def seed(kind: str, nbytes: int) -> None:
    """A process: offers weights by an engine, until its input ends."""
    own = beside.private(nbytes)
    own[:] = beside.weights(nbytes)
    regions = [Memory(own.ctypes.data, nbytes)]
    served = Served(regions, lambda lease: True, transports=[kind], wiring=OVER_TCP)
    (shared,) = Shared._known.values()
    served._one_sided[kind].registration.wait_for_all(60)
    found = {
        "offers": [(offer.kind, offer.address) for offer in served.offers],
        "session": shared.fabric.session(),
        "address": own.ctypes.data,
    }
    print("[]" + json.dumps(found), flush=True)
    sys.stdin.read()
    served.close()


class Bare:
    """Reads straight to the destination."""

    def __init__(self, fabric: Fabric, found: dict[str, Any], to: beside.Array, waits: bool) -> None:
        self._fabric, self._found, self._to, self._waits = fabric, found, to, waits

    def bring(self, chunk: Chunk) -> None:
        """One chunk, into its place."""
        there, here = self._found["address"] + chunk.offset, self._to.ctypes.data + chunk.offset
        session = self._found["session"]
        if not self._waits:
            self._fabric.read(session, [Part(there, here, chunk.nbytes)], lambda: None)
            return
        engine: Any = self._fabric._engine  # type: ignore[attr-defined]
        if engine.batch_transfer_sync_read(session.partition("/")[0], [here], [there], [chunk.nbytes]) != 0:
            raise MismatchError(f"{chunk}: the engine does not bring it")

    def close(self) -> None:
        """Nothing."""


class Ours(beside.Ours):
    """A connection of a fork."""

    def __init__(self, kind: str, offers: list[list[str]], to: beside.Array, digests: bool) -> None:
        self._to, self._digests = to, digests
        found = connect(
            [Offer(*pair) for pair in offers], "", beside.LEASE, beside.PATIENCE, [kind], OVER_TCP
        )
        self.transport, self._connection = found.transport, found.connection

    def bring(self, chunk: Chunk) -> None:
        """One chunk, into its place."""
        places = np.array([[0, chunk.nbytes, self._to.ctypes.data + chunk.offset]], np.uint64)
        came = self._connection.fetch(chunk, 0, places, digest=self._digests)
        if came.outcome != Outcome.OK or came.verified != self._digests:
            raise MismatchError(f"{chunk}: outcome {came.outcome}, verified {came.verified}")


@contextlib.contextmanager
def seed_apart(kind: str, nbytes: int) -> Iterator[dict[str, Any]]:
    """What the seed offers, and its process."""
    command = [sys.executable, __file__, "--seed", kind, "--bytes", str(nbytes)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        line = next(line for line in child.stdout if line.startswith("[]"))
        yield json.loads(line[2:]) | {"process": child.pid}
    finally:
        child.communicate()


def measured(kind: str, nbytes: int, runs: int) -> list[Row]:
    """Every sample of all of them in turn, as rows."""
    given, to = beside.weights(nbytes), beside.private(nbytes)
    with contextlib.ExitStack() as ends:
        found = ends.enter_context(seed_apart(kind, nbytes))
        shared = Shared.borrow(MAKERS[kind], OVER_TCP, HOST)
        ends.callback(shared.give_back)
        shared.fabric.register([Memory(to.ctypes.data, nbytes)])
        shared.fabric.meet(found["session"])
        ends.callback(shared.fabric.unregister, [Memory(to.ctypes.data, nbytes)])
        forks = {}
        for name, digests in (("digests", True), ("no digests", False)):
            made = [Ours(kind, found["offers"], to, digests) for _ in range(CONNECTIONS)]
            forks[name] = beside.Contender(f"fork, {kind}, {name}", nbytes, made, found["process"])
            ends.callback(forks[name].close)
        bare = {"polled": False, **({"waiting": True} if kind == "mooncake" else {})}
        bare_loops = {}
        for name, waits in bare.items():
            loop: list[Any] = [Bare(shared.fabric, found, to, waits)] * CONNECTIONS
            bare_loops[name] = beside.Contender(f"{kind}, {name}", nbytes, loop, found["process"])
        contenders = [*forks.values(), *bare_loops.values()]
        for number in range(runs + 1):
            for one in contenders[number % len(contenders) :] + contenders[: number % len(contenders)]:
                to[:] = 0
                one.sample()
                if not np.array_equal(to, given):
                    raise MismatchError(f"{one.series.name}: other bytes have come")
        transport = f"{made[0].transport}, {CONNECTIONS} connections"
        rows = []
        for name, fork in forks.items():
            title = f"{transport}, {name}"
            for how, bare_loop in bare_loops.items():
                for what, bar, ours, theirs in (
                    ("rate", BAR, fork.series, bare_loop.series),
                    ("bytes a CPU second", None, fork.cpu, bare_loop.cpu),
                ):
                    ratio = ours.rate / theirs.rate
                    rows.append(
                        Row(title, f"{what}, of a bare loop, {how}", ratio, bar, True, [theirs, ours])
                    )
        for one in contenders:
            cores, what = one.cpu.median / one.series.median, f"cores of {os.cpu_count()} at work"
            rows.append(Row(one.series.name, what, cores, None, True, [one.cpu]))
        return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--bytes", default="512MiB", help="of the weights")
    parser.add_argument("--runs", type=int, default=5, help="samples that count, of each")
    parser.add_argument("--results", type=Path, default=beside.RESULTS)
    parser.add_argument("--seed", choices=list(MAKERS), help=argparse.SUPPRESS)
    given = parser.parse_args()
    nbytes = -(-parse_size(given.bytes, "--bytes") // beside.CHUNK) * beside.CHUNK
    if given.seed:
        seed(given.seed, nbytes)
        return 0
    before = os.getloadavg()
    rows = [row for kind in MAKERS for row in measured(kind, nbytes, given.runs)]
    load = {"before": before, "after": os.getloadavg()}
    settings = {"command": sys.argv, "chunk_bytes": beside.CHUNK, "load_average": load}
    show_rows(rows)
    print(write_report(given.results, "one-sided", machine.facts(), settings, rows))
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
