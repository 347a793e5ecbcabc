"""The table of one CUDA device: loads against its link, its disk, other loaders and themselves.

    python benchmarks/h200.py --rows 1,2,6                 # all of a tmpfs
    python benchmarks/h200.py --rows 3,4,5 --disk /data    # a folder on a disk
    python benchmarks/h200.py --rows all --rival-path FOLDER

    1        load(), 31 GB in 9,435 tensors, tmpfs: of the link, and in turn with InstantTensor, owned tensors
    2        load_into() existing parameters: of the link, and in turn with InstantTensor's views
    3 4 5    load(), 8.7 GB on a disk: warm against tmpfs, cold against a bare direct loop, half cached
             against what both predict
    6        load(), 26.5 GB in 120,000 tensors, tmpfs: of the link
    7        beside a Python thread that never rests: what is compared is told in bench/busy_rows.py
    8        load(), 4 KiB: against load_file of safetensors
    9        load(), all 48 layers, 61 GB, tmpfs, as row 1: wants that much of tmpfs and of device memory
    arena    row 1 by arena_size, and what each size holds back
    threads  rows 1 and 3 with 4 and with 2 threads, and what so many threads can do at best
    verify   row 1 with verify=True against without

Checkpoints have the geometry of Qwen3-30B-A3B, row 6 that of NVFP4 experts. Bytes come first: each checkpoint
is compared with the plain library. Everything takes turns with what it is compared with; medians, the first
sample does not count; half a second before each sample the memory of the one before was given back. The link
is the higher of two rates of a pinned 1 GiB copy, before and after the samples of a row. A row that fails
does not stop the others, and the file is written after each: to $OUT if that is set, else to
benchmarks/results. The bare loops want a C compiler, or --ceiling-program, compiled elsewhere:
cc -std=c11 -O2 -pthread -static -o ceiling src/tensorlift/bench/ceiling.c

--device cpu tries the script where there is no device: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tensorlift.bench import instanttensor, machine
from tensorlift.bench.busy_rows import busy_rows
from tensorlift.bench.cases import Case, Spec, nvfp4_moe, qwen3_moe, write_shards
from tensorlift.bench.ceilings import Ceilings
from tensorlift.bench.device_bench import Cases, DeviceBench
from tensorlift.bench.device_rows import (
    into_rows,
    load_rows,
    many_rows,
    sweep_rows,
    thread_rows,
    tiny_rows,
    verify_rows,
)
from tensorlift.bench.disk_rows import cached_before, cold_rows, half_rows, warm_rows
from tensorlift.bench.held_back import HeldBack, show_held_back
from tensorlift.bench.pinned import COPY_BYTES
from tensorlift.bench.report import Row, show_rows, write_report
from tensorlift.bench.samples import Sampler, say
from tensorlift.errors import MachineError
from tensorlift.tensors.devices import parse_device

RESULTS = Path(__file__).resolve().parent / "results"
# Loads of twice the bytes: fewer samples tell as much.
WHOLE_RUNS = 3

Measure = Callable[[DeviceBench], list[Row]]


def all_thread_rows(bench: DeviceBench) -> list[Row]:
    rows: list[Row] = []
    for threads in (4, 2):
        rows += thread_rows(bench, "large", threads)
    for threads in (4, 2):
        rows += thread_rows(bench, "disk", threads, cached_before(bench, bench.cases.get("disk"), 1.0))
    return rows


ROWS: dict[str, tuple[Measure, tuple[str, ...]]] = {
    "1": (lambda bench: load_rows(bench, "large"), ("large",)),
    "2": (into_rows, ("large",)),
    "7": (busy_rows, ("large",)),
    "arena": (sweep_rows, ("large",)),
    "verify": (verify_rows, ("large",)),
    "threads": (all_thread_rows, ("large", "disk")),
    "3": (warm_rows, ("disk", "memory")),
    "4": (cold_rows, ("disk",)),
    "5": (half_rows, ("disk", "memory")),
    "6": (many_rows, ("many",)),
    "8": (tiny_rows, ("tiny",)),
    "9": (lambda bench: load_rows(bench, "whole", WHOLE_RUNS), ("whole",)),
}
"""What measures each row, and the checkpoints that it wants; in the order in which they are measured."""


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="1,2,6", help=f"of {', '.join(ROWS)}; or all")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/tensorlift"), help="in a tmpfs")
    parser.add_argument(
        "--disk", type=Path, default=Path("build/h200"), help="a folder on the disk to measure"
    )
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--runs", type=int, default=6, help="samples that count, of each")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--groups", type=int, default=30000, help="of small tensors; 4 tensors each")
    parser.add_argument("--disk-layers", type=int, default=6)
    parser.add_argument("--disk-shards", type=int, default=4)
    parser.add_argument("--whole-layers", type=int, default=48)
    parser.add_argument("--without-rival", action="store_true", help="leave InstantTensor out")
    parser.add_argument("--rival-path", type=Path, help="a folder to find instanttensor in")
    parser.add_argument("--ceiling-program", type=Path, help="the bare loops, compiled already")
    parser.add_argument("--commit", help="of the tree, where git is not there to tell")
    options = parser.parse_args(argv)
    wanted = [row.strip() for row in options.rows.split(",") if row.strip()]
    unknown = [row for row in wanted if row not in ROWS and row != "all"]
    if unknown:
        parser.error(f"--rows: no row is called {', '.join(unknown)}; there are {', '.join(ROWS)}")
    options.rows = [row for row in ROWS if row in wanted or "all" in wanted]
    return options


def makers(options: argparse.Namespace) -> dict[str, Callable[[], Case]]:
    folder, disk = options.folder, options.disk
    halves = [Spec(f"{name}.weight", "BF16", (32, 32)) for name in ("a", "b")]
    return {
        "large": lambda: qwen3_moe(folder / "large", options.layers, options.shards),
        "whole": lambda: qwen3_moe(folder / "whole", options.whole_layers, options.shards),
        "many": lambda: nvfp4_moe(folder / "many", options.groups, options.shards),
        "disk": lambda: qwen3_moe(disk / "disk", options.disk_layers, options.disk_shards),
        "memory": lambda: qwen3_moe(folder / "memory", options.disk_layers, options.disk_shards),
        "tiny": lambda: write_shards(folder / "tiny", [halves]),
    }


class Report:
    """The file: written again after each row, so that a run that is cut off leaves what it had."""

    def __init__(self, options: argparse.Namespace, bench: DeviceBench) -> None:
        self.rows: list[Row] = []
        self.failed: list[dict[str, str]] = []
        self.bench = bench
        self.path: Path | None = None
        self._theme = f"rows-{'-'.join(options.rows)}"
        self._settings = {key: str(value) for key, value in vars(options).items()}
        self._machine = machine.facts(
            options.folder.parent, options.disk, device=options.device, commit=options.commit
        )

    def write(self) -> None:
        """What there is so far."""
        bench = self.bench
        links = {
            name: {"before": link.before, "after": link.after, "bytes": COPY_BYTES}
            for name, link in bench.links.items()
        }
        self.path = write_report(
            Path(os.environ.get("OUT") or RESULTS),
            self._theme,
            self._machine,
            self._settings,
            self.rows,
            link_bytes_per_second=links,
            tensors_compared=bench.cases.compared,
            instanttensor=bench.rival or "there",
            ceilings="there" if bench.ceilings is not None else "no compiler",
            notes=bench.notes,
            failed=self.failed,
        )


def measure(options: argparse.Namespace, bench: DeviceBench) -> Report:
    """All rows that were asked for, each by itself."""
    report = Report(options, bench)
    for number, row in enumerate(options.rows):
        later = options.rows[number:]
        bench.cases.keep_only([case for name in later for case in ROWS[name][1]])
        say(f"--- row {row}")
        begin = time.perf_counter()
        try:
            found = ROWS[row][0](bench)
            report.rows += found
            show_rows(found)
        except Exception as error:  # noqa: BLE001 - noted, and the other rows are still wanted
            report.failed.append({"row": row, "error": f"{type(error).__name__}: {error}"})
            report.failed[-1]["trace"] = traceback.format_exc()
            say(report.failed[-1]["trace"])
            # Its frames may hold what was loaded.
            traceback.clear_frames(error.__traceback__)
        say(f"--- row {row}: {time.perf_counter() - begin:.0f} s")
        report.write()
    return report


def loops(program: Path | None) -> Ceilings | None:
    try:
        return Ceilings(program)
    except MachineError as error:
        say(f"no bare loops: {error}")
        return None


def show(report: Report) -> None:
    """All tables, last of all."""
    notes: dict[str, Any] = report.bench.notes
    if "held_back" in notes:
        fields = HeldBack.__dataclass_fields__
        show_held_back([HeldBack(**{key: one[key] for key in fields}) for one in notes["held_back"]])
    if "tiny" in notes:
        print(f"4 KiB, the second load of a process: {notes['tiny']}")
    show_rows(report.rows)
    for name, link in report.bench.links.items():
        print(f"link, {name}: {link.before / 1e9:.2f} GB/s before, {link.after / 1e9:.2f} GB/s after")
    if report.bench.rival is not None:
        print(f"not compared: {report.bench.rival}")
    for failure in report.failed:
        print(f"FAILED: row {failure['row']}: {failure['error']}")
    print(f"written: {report.path}")


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    parse_device(options.device)  # says why where it is not there
    sampler = Sampler(options.device, options.runs)
    rival: str | None = "InstantTensor loads to CUDA only"
    if sampler.is_cuda:
        torch.cuda.set_device(torch.device(options.device))
        torch.cuda.synchronize()
        rival = "left out" if options.without_rival else instanttensor.obstacle(options.rival_path)
    if rival is not None:
        say(f"not compared: {rival}")
    options.disk.mkdir(parents=True, exist_ok=True)
    cases = Cases(makers(options), options.device)
    ceilings = loops(options.ceiling_program)
    try:
        report = measure(options, DeviceBench(sampler, cases, ceilings, rival))
    finally:
        cases.keep_only([])
        for folder in (options.folder, options.disk):
            for empty in (*folder.glob("*"), folder):
                with contextlib.suppress(OSError):  # not empty: it was there before
                    empty.rmdir()
        if ceilings is not None:
            ceilings.close()
    show(report)
    return 0 if not report.failed and all(row.passed for row in report.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
