"""Whether a seed that decodes notices a fork that reads all of its weights, on one device.

    python benchmarks/fork_device.py                     # a 7 GB model of transformers, one H200
    python benchmarks/fork_device.py --device cpu --layers 2 --hidden 64 --tokens 20   # tries the script

The seed decodes greedily, token by token, in this process; the fork is another process that reads into host
memory over TCP, again and again, under the limit that the table names. Rounds with a fork and rounds without
take turns; each token is timed until the host has it. First the bytes that a fork has read are compared.
Tokens are those of random weights and may differ between rounds, with a fork or without: it says where. Bars:
the median and the 99th percentile of a token's time within 2 % of those without. What is read is the model
that decodes, in device memory; with --seed host a copy of it in host
memory, and with --seed elsewhere that copy in a third process: their cost is the host's, not the device's.

    apart            the same figure of every other round without a fork against the rest of them: what
                     the machine does by itself

Before that, on the device: how long regions of all tensors take to plan, for a checkpoint of --region-layers
layers (48 tensors a layer and more) that tensorlift has loaded; and the rate of a fork without a limit by
number of connections. The file with all samples goes to $OUT if that is set, else to benchmarks/results.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tensorlift import loading
from tensorlift.bench import machine
from tensorlift.bench.cases import qwen3_moe, remove
from tensorlift.bench.decoding import Decoder, hash_of, llama, room_for
from tensorlift.bench.report import Row, Series, show_rows, write_report
from tensorlift.errors import MismatchError
from tensorlift.forking.fork import fork_into
from tensorlift.forking.manifest import ModelKey
from tensorlift.forking.offering import named_tensors, offer
from tensorlift.forking.seed import Seed

RESULTS = Path(__file__).resolve().parent / "results"
KEY = ModelKey(model="benchmark")
WITHIN = 1.02
TCP: dict[str, Any] = {"transports": ["tcp"], "connections": 2}
PLAN_SECONDS = 0.1


def fork_on_demand(orders: Connection, url: str, hashes: bool, device: str) -> None:
    """Another process: for each order (options) one fork, answered with its seconds; None ends it."""
    ours = room_for(url, device)
    fork_into(ours, url, patience=60.0)
    orders.send({name: hash_of(one) for name, one in ours.items()} if hashes else {})
    while (options := orders.recv()) is not None:
        begin = time.perf_counter()
        how = fork_into(ours, url, patience=60.0, **options).transports[url]
        orders.send(time.perf_counter() - begin)
        print(f"{options}: {how}", file=sys.stderr, flush=True)


class Fork:
    """The other process."""

    def __init__(self, url: str, hashes: bool = False, device: str = "cpu") -> None:
        spawn = multiprocessing.get_context("spawn")
        self.orders, theirs = spawn.Pipe()
        self.process = spawn.Process(target=fork_on_demand, args=(theirs, url, hashes, device), daemon=True)
        self.process.start()
        self.hashes: dict[str, int] = self.orders.recv()

    def one(self, **options: Any) -> float:
        """Seconds of a fork."""
        self.orders.send(options)
        return float(self.orders.recv())

    def close(self) -> None:
        """The process ends."""
        self.orders.send(None)
        self.process.join()


def serve_elsewhere(orders: Connection, nbytes: int, limit: str) -> None:
    """Another process that is a seed of so many bytes of host memory, until it is told anything."""
    with Seed({"all": torch.ones(nbytes, dtype=torch.uint8)}, KEY, limit=limit) as seed:
        orders.send(seed.url)
        orders.recv()


@contextlib.contextmanager
def offered(model: Any, options: argparse.Namespace) -> Iterator[str]:
    """The URL of what is read while the model decodes."""
    if options.seed == "elsewhere":
        spawn = multiprocessing.get_context("spawn")
        orders, theirs = spawn.Pipe()
        nbytes = sum(one.nbytes for one in model.state_dict().values())
        process = spawn.Process(target=serve_elsewhere, args=(theirs, nbytes, options.limit), daemon=True)
        process.start()
        yield orders.recv()
        orders.send(None)
        process.join()
        return
    what = model if options.seed == "device" else {k: v.cpu() for k, v in model.state_dict().items()}
    with Seed(what, KEY, limit=options.limit) as seed:
        yield seed.url


def rounds(model: Any, fork: Fork, options: argparse.Namespace) -> dict[str, list[list[float]]]:
    """Seconds of each token by round, with and without a fork in turn."""
    found: dict[str, list[list[float]]] = {"without": [], "with": []}
    decoder = Decoder(model, options.tokens, options.device)
    wanted = decoder.run()[0]
    for number in range(2 * options.rounds):
        way = "without" if number % 2 == 0 else "with"
        if way == "with":
            fork.orders.send(TCP)
            time.sleep(0.05)
        tokens, seconds = decoder.run()
        if way == "with":
            if fork.orders.poll():
                print("the fork was through before the tokens were", file=sys.stderr)
            fork.orders.recv()
        if tokens != wanted:
            at = next(at for at, pair in enumerate(zip(tokens, wanted, strict=True)) if len(set(pair)) > 1)
            print(f"other tokens from number {at} on", file=sys.stderr)
        found[way].append(seconds)
        print(f"{way}: {statistics.median(seconds) * 1e3:.3f} ms", file=sys.stderr, flush=True)
    return found


def percentile(some: list[list[float]], share: float) -> float:
    return float(np.percentile([one for seconds in some for one in seconds], share))


def decode_rows(found: dict[str, list[list[float]]], limit: str) -> list[Row]:
    rows = []
    for name, share in (("median", 50.0), ("99th percentile", 99.0)):
        series = [
            Series(way, 1, [percentile([one], share) for one in found[way]], warm_up=0) for way in found
        ]
        ratio = percentile(found["with"], share) / percentile(found["without"], share)
        apart = percentile(found["without"][::2], share) / percentile(found["without"][1::2], share)
        what = f"time with a fork at {limit}, of without; apart {apart:.3f}"
        rows.append(Row(f"a token, {name}", what, ratio, WITHIN, False, series))
    return rows


def rate_rows(model: Any, options: argparse.Namespace) -> list[Row]:
    """A fork that nothing limits: to host memory by connections, to the same device by transport."""
    nbytes = sum(one.nbytes for one in model.state_dict().values())
    to_host = {f"to the host, tcp, {count}": TCP | {"connections": count} for count in (1, 2, 4)}
    to_device: dict[str, dict[str, Any]] = {
        "to the device, tcp, 4": TCP | {"connections": 4},
        "to the device, shm, 4": {"connections": 4},
        "to the device, shm, 4, no digests": {"connections": 4, "digests": "off"},
    }
    found: dict[str, Series] = {}
    with Seed(model, KEY) as seed:
        for device, ways in (("cpu", to_host), (options.device, to_device)):
            fork = Fork(seed.url, hashes=True, device=device)
            check(model, fork)
            for _ in range(options.runs + 1):
                for name, how in ways.items():
                    series = found.setdefault(name, Series(name, nbytes))
                    series.seconds.append(fork.one(**how))
            fork.close()
    first = next(iter(found.values()))
    what = f"times as fast as {first.name}"
    return [
        Row(f"fork {name}", what, first.median / series.median, None, True, [series])
        for name, series in found.items()
    ]


def check(model: Any, fork: Fork) -> None:
    for tensor in named_tensors(model):
        if hash_of(tensor.tensor) != fork.hashes[tensor.name]:
            raise MismatchError(f"{tensor.name} has other bytes in the fork")


def region_rows(options: argparse.Namespace) -> list[Row]:
    """Planning the regions of a checkpoint that tensorlift has loaded."""
    case = qwen3_moe(options.folder / "regions", options.region_layers, 4)
    try:
        weights = loading.load(case.folder, device=options.device)
    finally:
        remove(case)
        with contextlib.suppress(OSError):  # not empty: it was there before
            options.folder.rmdir()
    named = named_tensors(weights)
    series = Series(f"{len(named)} tensors", sum(one.nbytes for one in weights.values()))
    for _ in range(options.runs + 1):
        begin = time.perf_counter()
        regions = offer(named).regions
        series.seconds.append(time.perf_counter() - begin)
    what = f"seconds; {len(regions)} regions for {series.nbytes / 1e9:.1f} GB"
    return [Row("planning regions", what, series.median, PLAN_SECONDS, False, [series])]


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/tensorlift-fork"))
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, help="another hidden size, with all else in proportion")
    parser.add_argument("--region-layers", type=int, default=24)
    parser.add_argument("--seed", choices=("device", "host", "elsewhere"), default="device")
    parser.add_argument("--only", action="store_true", help="nothing but decoding")
    parser.add_argument("--tokens", type=int, default=250, help="of a round")
    parser.add_argument("--rounds", type=int, default=8, help="with a fork, and as many without")
    parser.add_argument("--runs", type=int, default=5, help="samples that count, of each")
    parser.add_argument("--limit", default="2GB/s")
    parser.add_argument("--commit", help="of the tree, where git is not there to tell")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    facts = machine.facts(options.folder.parent, device=options.device, commit=options.commit)
    rows: list[Row] = []
    if not options.only:
        rows += region_rows(options)
    model = llama(options.layers, options.hidden, options.device)
    if not options.only:
        rows += rate_rows(model, options)
    with offered(model, options) as url:
        fork = Fork(url)
        found = rounds(model, fork, options)
        fork.close()
    rows += decode_rows(found, options.limit)
    settings = {key: str(value) for key, value in vars(options).items()}
    notes = {"token_seconds": found}
    path = write_report(
        Path(os.environ.get("OUT") or RESULTS), f"fork-device-{options.seed}", facts, settings, rows, **notes
    )
    print(f"written: {path}")
    show_rows(rows)
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
