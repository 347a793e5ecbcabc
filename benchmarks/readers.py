"""Every reader on one checkpoint, warm and cold: the figures of docs/reading.md.

    python benchmarks/readers.py PATH [--repeats 5] [--bytes 1GB]

All readers take turns, so that what drifts on the machine meets all of them; the first round does not count.
Warm is cached before, and cold is dropped from the page cache and proven to come from storage. What is cached
afterwards is asked too. A trace is measured beside: "AUTO" with and without one. The file goes to
benchmarks/results.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from tensorlift.bench import machine
from tensorlift.bench.ceilings import Ceilings
from tensorlift.bench.report import make_record, write_record
from tensorlift.bench.trials import Trials
from tensorlift.bench.tuning import Choice
from tensorlift.options import HOST_BACKENDS, parse_size

RESULTS = Path(__file__).resolve().parent / "results"
TRACED = "AUTO, with a trace"


def measured(trials: Trials, ceilings: Ceilings, state: str, repeats: int) -> list[dict[str, Any]]:
    """One row a reader: seconds of each round but the first, and what was cached afterwards."""
    rows: list[dict[str, Any]] = [
        {"reader": name, "state": state, "seconds": [], "cached_after": [], "fetched": []}
        for name in (*HOST_BACKENDS, TRACED)
    ]
    with tempfile.TemporaryDirectory() as folder:
        for number in range(repeats + 1):
            # From another one on each time: what a load leaves behind meets the next one.
            for row in rows[number % len(rows) :] + rows[: number % len(rows)]:
                traced = row["reader"] == TRACED
                os.environ["TENSORLIFT_TRACE"] = f"{folder}/trace.json" if traced else ""
                seconds = trials.measure(state, Choice(backend="AUTO" if traced else row["reader"]))
                if number:
                    row["seconds"].append(seconds)
                    row["cached_after"].append(ceilings.cached_share(trials.files))
                    if state == "cold":
                        row["fetched"].append(trials.fetched[-1])
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("path")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bytes", default="1GB", help="measure the first tensors of about this many bytes")
    given = parser.parse_args()
    trials = Trials([given.path], "cpu")
    trials.take(parse_size(given.bytes, "--bytes"))
    facts = machine.facts(Path(given.path))
    load_before = os.getloadavg()
    rows: list[dict[str, Any]] = []
    with Ceilings() as ceilings:
        for state in ("warm", "cold"):
            rows += measured(trials, ceilings, state, given.repeats)
    print(
        f"{trials.bytes / 1e9:.3f} GB; load average {load_before[0]:.1f} before, {os.getloadavg()[0]:.1f} now"
    )
    for row in rows:
        row["median_seconds"] = statistics.median(row["seconds"])
        row["rate"] = trials.bytes / row["median_seconds"]
        spread = f"{min(row['seconds']):.3f} to {max(row['seconds']):.3f}"
        cached = statistics.median(row["cached_after"])
        print(
            f"{row['state']}  {row['reader']:<20} {row['median_seconds']:.3f} s ({spread})  "
            f"{row['rate'] / 1e9:.2f} GB/s  cached afterwards {cached:.0%}"
        )
    settings = {
        "command": sys.argv,
        "load_average": {"before": load_before, "after": os.getloadavg()},
        "bytes": trials.bytes,
        "cold_is_proven": trials.cold_is_proven,
    }
    print(write_record(RESULTS, make_record("readers", facts, settings, rows=rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
