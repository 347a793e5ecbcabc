"""A roll-out: instances as processes that fork from one seed and are seeds then, and arithmetic for more.

    python benchmarks/fleet.py --instances 15 --results benchmarks/results

Each process sends what ``--link`` says, over TCP, as an instance's network would let it. What was measured is
compared with the arithmetic of fleet/rollout.py for the same figures; the table of 100 and 1,000 instances is
that arithmetic alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import tensorlift
from tensorlift.bench import machine
from tensorlift.bench.report import make_record, write_record
from tensorlift.fleet.rollout import from_one, from_storage, from_tree
from tensorlift.fleet.server import RegistryServer
from tensorlift.fleet.store import Store
from tensorlift.fleet.table import Table
from tensorlift.options import parse_rate, parse_size

__all__ = ["measured", "predicted"]

KEY, TENSORS, CHUNK = "roll-out", 16, "1MiB"
# What an instance would take of 125 GB through 100 Gbit/s; and storage that gives ten times that.
_NBYTES, _LINK, _STORAGE = 125e9, 12.5e9, 125e9


def weights(nbytes: int, value: int = 1) -> dict[str, torch.Tensor]:
    """So many bytes, in equal parts."""
    return {f"t{at}": torch.full((nbytes // TENSORS // 8,), value) for at in range(TENSORS)}


def instance(registry: str, nbytes: int, link: str, readers: int, is_seed: bool) -> None:
    """One process: forks when it is told to, says in how many seconds, and is a seed to its end."""
    into = weights(nbytes, 0)
    print(json.dumps("ready"), flush=True)
    sys.stdin.readline()
    begin = time.monotonic()
    came = tensorlift.fork(
        registry=registry, key=KEY, into=into, transports=["tcp"], chunk_bytes=CHUNK, wait=3600
    )
    seconds = time.monotonic() - begin
    assert all(torch.equal(into[name], tensor) for name, tensor in weights(nbytes).items())
    with contextlib.ExitStack() as stack:
        if is_seed:
            more = {"limit": link, "readers": readers, "transports": ["tcp"], "registry": registry}
            stack.enter_context(tensorlift.seed(into, key=came.key, weights=came.weights, **more))
        print(json.dumps([seconds, list(came.by_source)]), flush=True)
        sys.stdin.readline()


def measured(instances: int, nbytes: int, link: str, readers: int, is_tree: bool) -> dict[str, Any]:
    """When each of so many processes had all, from the moment at which all were told to begin."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(RegistryServer(Table(Store(None))))
        first = stack.enter_context(
            tensorlift.seed(
                weights(nbytes), key=KEY, limit=link, readers=readers if is_tree else instances,
                transports=["tcp"], registry=server.url,
            )
        )  # fmt: skip
        command = [
            sys.executable,
            __file__,
            "--instance",
            server.url,
            str(nbytes),
            link,
            str(readers),
            str(is_tree),
        ]
        started = [
            stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            for _ in range(instances)
        ]
        stack.callback(lambda: [one.kill() for one in started])
        for one in started:
            assert _said(one) == "ready"
        for one in started:
            _tell(one)
        told = [_said(one) for one in started]
        for one in started:
            _tell(one)
        ends = sorted(seconds for seconds, _ in told)
        return {
            "instances": instances, "readers": readers if is_tree else instances, "tree": is_tree,
            "all_seconds": ends[-1], "seconds": ends,
            "from_the_first": sum(first.url in by for _, by in told),
        }  # fmt: skip


def _said(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"an instance ended with {process.wait()}"
    return json.loads(line)


def _tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def predicted(between: float) -> list[dict[str, Any]]:
    """Arithmetic: a fleet's seconds, with so many between a fork's end and its first reader."""
    rows = []
    for instances in (100, 1000):
        trees = {
            f"tree, readers={readers}": from_tree(instances, _NBYTES, _LINK, readers, between=between)[-1]
            for readers in (1, 2, 8)
        }
        one, storage = from_one(instances, _NBYTES, _LINK), from_storage(instances, _NBYTES, _LINK, _STORAGE)
        rows.append({"instances": instances, "one seed": one, "storage": storage, **trees})
    return rows


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=15)
    parser.add_argument("--bytes", default="40MB", help="of each instance's weights")
    parser.add_argument("--link", default="10MB/s", help="what each instance sends at most")
    parser.add_argument("--between", type=float, default=1.0, help="seconds, for the arithmetic")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--instance", nargs=5, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.instance:
        url, nbytes, link, readers, is_tree = asked.instance
        instance(url, int(nbytes), link, int(readers), is_tree == "True")
        return
    nbytes, link = parse_size(asked.bytes, "--bytes"), parse_rate(asked.link, "--link")
    rows = []
    for readers, is_tree in ((1, True), (2, True), (1, False)):
        found = measured(asked.instances, nbytes, asked.link, readers, is_tree)
        by_arithmetic = (
            from_tree(asked.instances, nbytes, link, readers, between=asked.between)[-1]
            if is_tree
            else from_one(asked.instances, nbytes, link)
        )
        rows.append({"name": "tree" if is_tree else "one seed", **found, "arithmetic_seconds": by_arithmetic})
        print(json.dumps({name: value for name, value in rows[-1].items() if name != "seconds"}), flush=True)
    table = predicted(asked.between)
    for row in table:
        print(json.dumps({"arithmetic": row}))
    if asked.results:
        settings = {"bytes": nbytes, "link": link, "between": asked.between}
        fleet = {"bytes": _NBYTES, "link": _LINK, "storage": _STORAGE, "rows": table}
        record = make_record("fleet", machine.facts(), settings, rows=rows, arithmetic=fleet)
        print(write_record(asked.results, record))


if __name__ == "__main__":
    main()
