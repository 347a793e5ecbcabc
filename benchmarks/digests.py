"""What checking digests costs: load with and without verify, warm and cold, in turn, on a CPU.

    python benchmarks/digests.py PATH [--runs 9]

Needs PATH's digests ("tensorlift digest PATH"). Each sample has the seconds of the wall clock, those of all
CPUs (which say what the digest costs also where other programs use the machine), and what was cached before.
The file goes to benchmarks/results.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from pathlib import Path

from tensorlift import sources
from tensorlift.bench import machine
from tensorlift.bench.ceilings import Ceilings
from tensorlift.bench.report import Row, Series, show_rows, write_report
from tensorlift.loading import load

RESULTS = Path(__file__).resolve().parent / "results"
# The bar: checking takes at most a tenth more.
BAR = 1.1


def sample(
    path: str, files: list[Path], share: float, verify: bool, series: Series, ceilings: Ceilings
) -> None:
    ceilings.bring(files, share)
    # Uncounted, so that fresh memory is there and not with the host: docs/benchmarks.md.
    load(path, verify=verify)
    gc.collect()
    seen = ceilings.keep(files, share)
    cpu, begin = time.process_time(), time.perf_counter()
    state = load(path, verify=verify)
    series.seconds.append(time.perf_counter() - begin)
    series.notes.append(
        {"cpu_seconds": time.process_time() - cpu, "cached_before": seen, "verified": state.stats.verified}
    )


def rows_of(
    path: str, files: list[Path], state: str, share: float, runs: int, ceilings: Ceilings
) -> list[Row]:
    nbytes = sum(file.stat().st_size for file in files)
    plain, checked = (Series(f"load, {state}{text}", nbytes) for text in ("", ", verify=True"))
    for number in range(runs + 1):
        # By turns first, so that what one leaves behind meets both.
        for series in (plain, checked) if number % 2 else (checked, plain):
            sample(path, files, share, series is checked, series, ceilings)
    cpu = [statistics.median(n["cpu_seconds"] for n in one.notes[one.warm_up :]) for one in (plain, checked)]
    least = [min(n["cpu_seconds"] for n in one.notes[one.warm_up :]) for one in (plain, checked)]
    print(
        f"{state}: CPU seconds {cpu[0]:.3f} and {cpu[1]:.3f} (medians), "
        f"{least[0]:.3f} and {least[1]:.3f} (least)"
    )
    both = [plain, checked]
    ratio = checked.median / plain.median
    return [
        Row(f"verify, {state}", "time, of the load without", ratio, BAR, False, both),
        Row(
            f"verify, {state}, least of all",
            "time",
            min(checked.seconds) / min(plain.seconds),
            BAR,
            False,
            both,
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("path")
    parser.add_argument("--runs", type=int, default=9, help="samples that count, of each")
    given = parser.parse_args()
    files = [Path(source.path) for source in sources.find(given.path).files]
    before = os.getloadavg()
    with Ceilings() as ceilings:
        rows = rows_of(given.path, files, "warm", 1.0, given.runs, ceilings)
        rows += rows_of(given.path, files, "cold", 0.0, given.runs, ceilings)
    settings = {"command": sys.argv, "load_average": {"before": before, "after": os.getloadavg()}}
    show_rows(rows)
    print(write_report(RESULTS, "digests", machine.facts(files[0]), settings, rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
