"""Weights that change under forks that read them, some of which are stopped past their lease: none is torn.

    python benchmarks/fork_updates.py --updates 1000 --readers 3

Prints one line of JSON: forks that came to an end, those that began again or gave up, reads that the seed
refused, by kind, and torn ones, of which there must be none.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from support.seeds import KEY, Process, running, weights
from tensorlift.forking.seed import Seed

__all__ = ["run"]

LEASE = 0.3
CHUNK = 40_000


def run(updates: int, readers: int, seconds_between: float = 0.05) -> dict[str, int]:
    """Counters, of all readers together."""
    offered = weights(0)
    totals = {"updates": updates, "stopped": 0}
    chance = random.Random(1)
    with contextlib.ExitStack() as stack:
        seed = stack.enter_context(Seed(offered, KEY, readers=2 * readers, weights="0"))
        forks = [
            stack.enter_context(
                running("fork", urls=[seed.url], lease=LEASE, chunk_bytes=CHUNK, patience=20.0, connections=1)
            )
            for _ in range(readers)
        ]
        for fork in forks:
            assert fork.said() == "ready"
        for version in range(1, updates + 1):
            time.sleep(seconds_between)
            stopped = forks[version % readers] if version % 10 == 0 else None
            if stopped is not None:
                _stop_while_it_reads(stopped, seed)
                totals["stopped"] += 1
                time.sleep(LEASE * chance.uniform(1.0, 1.5))
            with seed.updating(timeout=chance.choice([0, 0.002, 1.0]), weights=str(version)):
                for name, tensor in weights(version).items():
                    offered[name].copy_(tensor)
            if stopped is not None:
                stopped.signal(signal.SIGCONT)
        for fork in forks:
            fork.signal(signal.SIGTERM)
        for fork in forks:
            for name, count in fork.said().items():
                if isinstance(count, int):
                    totals[name] = totals.get(name, 0) + count
        return totals | seed.stats()


def _stop_while_it_reads(fork: Process, seed: Seed) -> None:
    """Between two chunks that the seed sends, and so in the middle of somebody's read."""
    before, end = seed.stats()["sent_chunks"], time.monotonic() + 10
    while seed.stats()["sent_chunks"] == before and time.monotonic() < end:
        time.sleep(0.0005)
    fork.signal(signal.SIGSTOP)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--readers", type=int, default=3)
    asked = parser.parse_args()
    found = run(asked.updates, asked.readers)
    print(json.dumps(found))
    if found["torn"]:
        sys.exit("torn reads were accepted")


if __name__ == "__main__":
    main()
