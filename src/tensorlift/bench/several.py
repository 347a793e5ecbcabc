"""``python -m tensorlift.bench.several``: loads by several ranks, on all devices of a host.

For W of 8, 4 and 2 as far as there are devices (1 where there is one), W processes that are started once:

    ceilings      links, one alone and all at once; all-gathers by size; a bare loop over the page cache
    tmpfs         load by a gather, by a gather through a group for the load, and by each rank alone, in turn
                  with safetensors, fastsafetensors, Run:ai (each rank alone, distributed) and InstantTensor
    slices        what tensor parallelism asks for: bytes against 1/W and the prediction, times
    communicator  what the group for a load takes: seconds, device memory then and afterwards
    death         a rank is killed in the middle of a gather: when the others raise PeerError
    fork          weights from the first device to the second while the first decodes, in turn with broadcasts
    cold, warm    the loads of tmpfs, from a disk of which nothing is cached, and all

Bytes come first: in its first load each rank compares every tensor with what the plain library reads. In its
second, memory is watched. Then samples count: all ranks begin at one time, and the seconds are those until
the last has all; rates are unique bytes (those of the checkpoint) a second. The file with every sample is
written again after each row, to $OUT if that is set, else to --results. What there is no time for in --budget
is dropped from the end, and said so; a loader that fails or hangs costs its own rows.

--device cpu --small tries the command where there is no device, with gloo: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorlift.bench import machine
from tensorlift.bench.cases import Case, Spec, in_shards, qwen3_moe, write_shards
from tensorlift.bench.ceilings import Ceilings
from tensorlift.bench.report import Row, show_rows, write_report
from tensorlift.bench.samples import say
from tensorlift.bench.several_bench import SeveralBench
from tensorlift.bench.several_forks import DEATHS, Decoding, death_rows, fork_rows
from tensorlift.bench.several_rows import (
    ceiling_rows,
    cold_rows,
    communicator_rows,
    memory_rows,
    slice_rows,
    warm_rows,
)
from tensorlift.errors import MachineError
from tensorlift.outputs import check_folder

Measure = Callable[[SeveralBench, int], list[Row]]

# For all W: what measures it, and which share of the budget it may take.
_FIRST: dict[str, tuple[Measure, float]] = {
    "ceilings": (ceiling_rows, 0.2),
    "tmpfs": (memory_rows, 0.5),
    "slices": (slice_rows, 0.25),
    "communicator": (communicator_rows, 0.1),
}
_LAST: dict[str, tuple[Measure, float]] = {"cold": (cold_rows, 0.4), "warm": (warm_rows, 0.4)}
_ONCE = {"death": 0.2, "fork": 0.35}
ROWS = (*_FIRST, *_ONCE, *_LAST)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tensorlift.bench.several",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", default="all", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--budget", type=float, default=540, help="seconds for everything")
    parser.add_argument("--ranks", default="8,4,2", help="W; those that there are devices for")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/tensorlift-several"), help="in a tmpfs")
    parser.add_argument("--disk", type=Path, default=Path("build/several"), help="a folder on a disk")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--layers", type=int, default=12, help="in the tmpfs; 12 make 15.9 GB")
    parser.add_argument("--disk-layers", type=int, default=1, help="on the disk; 1 makes 2.5 GB")
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--runs", type=int, default=5, help="samples that count, of each")
    parser.add_argument("--patience", type=float, default=60, help="seconds for one load by all ranks")
    parser.add_argument(
        "--decode-layers", type=int, default=8, help="of the model that decodes; 8 make 3.8 GB"
    )
    parser.add_argument("--decode-hidden", type=int, help="its hidden size, all else in proportion")
    parser.add_argument("--tokens", type=int, default=500, help="of a round of it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", default="2GB/s", help="of one of the forks")
    parser.add_argument("--small", action="store_true", help="checkpoints of 4 MB")
    parser.add_argument("--ceiling-program", type=Path, help="the bare loops, compiled already")
    parser.add_argument("--commit", help="of the tree, where git is not there to tell")
    options = parser.parse_args(argv)
    wanted = [row.strip() for row in options.rows.split(",") if row.strip()]
    unknown = [row for row in wanted if row not in (*ROWS, "all")]
    if unknown:
        parser.error(f"--rows: no row is called {', '.join(unknown)}; there are {', '.join(ROWS)}")
    options.rows = [row for row in ROWS if row in wanted or "all" in wanted]
    try:
        options.ranks = sorted({int(text) for text in options.ranks.split(",")}, reverse=True)
    except ValueError:
        parser.error(f"--ranks {options.ranks}: expected numbers, such as 4,2")
    return options


def _devices(options: argparse.Namespace) -> list[str]:
    """One for each rank, of the most that are wanted and there."""
    if options.device == "cpu":
        return ["cpu"] * max(options.ranks)
    import torch

    there = torch.cuda.device_count()
    if not there:
        raise MachineError("there is no NVIDIA device here; --device cpu tries the command")
    return [f"cuda:{index}" for index in range(min(there, max(options.ranks)))]


def _small(folder: Path, shards: int) -> Case:
    """Every kind of cut, in tensors of at most 64 KiB."""
    shapes = {"q_proj": (128, 64), "o_proj": (64, 128), "up_proj": (256, 128), "down_proj": (128, 256),
              "norm": (64,)}  # fmt: skip
    specs = [
        Spec(f"layers.{layer}.{kind}.weight", "BF16", shape)
        for layer in range(24)
        for kind, shape in shapes.items()
    ]
    return write_shards(folder, in_shards(specs, shards))


def _makers(options: argparse.Namespace) -> dict[str, Callable[[], Case]]:
    def maker(folder: Path, layers: int) -> Callable[[], Case]:
        if options.small:
            return lambda: _small(folder, options.shards)
        return lambda: qwen3_moe(folder, layers, options.shards)

    return {
        "memory": maker(options.folder / "memory", options.layers),
        "disk": maker(options.disk / "disk", options.disk_layers),
    }


class Report:
    """The file: written again after each row, so that a run that is cut off leaves what it had."""

    def __init__(self, options: argparse.Namespace, bench: SeveralBench) -> None:
        self.rows: list[Row] = []
        self.failed: list[dict[str, str]] = []
        self.path: Path | None = None
        self._bench = bench
        self._folder = Path(os.environ.get("OUT") or options.results)
        rows = [] if options.rows == list(ROWS) else options.rows
        self._theme = "-".join(["several", str(len(bench.devices)), *rows])
        self._settings = {key: str(value) for key, value in vars(options).items()}
        self._machine = machine.facts(options.folder.parent, options.disk, commit=options.commit)

    def write(self) -> None:
        """What there is so far."""
        bench = self._bench
        self.path = write_report(
            self._folder,
            self._theme,
            self._machine | bench.facts,
            self._settings,
            self.rows,
            notes=bench.notes,
            dropped=bench.dropped,
            failed=self.failed,
        )

    def measure(self, name: str, share: float, work: Callable[[], list[Row]]) -> None:
        """One kind of row, in its share of the time that there was at first."""
        bench = self._bench
        left = bench.deadline - time.monotonic()
        if left < _LEAST:
            bench.drop(f"{name}: {max(0.0, left):.0f} s were left")
            return
        begin = time.monotonic()
        bench.until = min(bench.deadline, begin + share)
        say(f"--- {name}")
        try:
            found = work()
            self.rows += found
            show_rows(found)
        except Exception as error:  # noqa: BLE001 - noted, and the other rows are still wanted
            self.failed.append({"row": name, "error": f"{type(error).__name__}: {error}"})
            self.failed[-1]["trace"] = traceback.format_exc()
            say(self.failed[-1]["trace"])
            bench.dismiss()
        say(f"--- {name}: {time.monotonic() - begin:.0f} s")
        self.write()


# Seconds below which no row is begun.
_LEAST = 15


def _measure(options: argparse.Namespace, bench: SeveralBench, report: Report) -> None:
    there = len(bench.devices)
    worlds = [ranks for ranks in options.ranks if ranks <= there] or [there]
    for ranks in options.ranks:
        if ranks > there:
            bench.drop(f"{ranks} ranks: there are {there} devices")

    def each(rows: dict[str, tuple[Measure, float]]) -> None:
        for ranks in worlds:
            for name, (work, share) in rows.items():
                if name in options.rows:
                    seconds = share * options.budget / len(worlds)
                    report.measure(f"{name}, {ranks} ranks", seconds, functools.partial(work, bench, ranks))

    each(_FIRST)
    decoding = Decoding(
        options.decode_layers, options.decode_hidden, options.tokens, options.rounds, options.limit
    )
    once: list[tuple[str, str, Callable[[], list[Row]]]] = [
        ("death", group, functools.partial(death_rows, bench, worlds[0], group)) for group in DEATHS
    ]
    once.append(("fork", "beside decoding", functools.partial(fork_rows, bench, decoding)))
    for name, what, work in once:
        if name in options.rows:
            report.measure(f"{name}, {what}", _ONCE[name] * options.budget, work)
    each(_LAST)


def _show(report: Report, bench: SeveralBench) -> None:
    """All tables, last of all."""
    report.write()
    for where, loads in bench.notes.get("loads", {}).items():
        print(where)
        _show_loads(loads)
    show_rows(report.rows)
    for text in bench.dropped:
        print(f"dropped: {text}")
    for failure in report.failed:
        print(f"FAILED: {failure['row']}: {failure['error']}")
    print(f"written: {report.path}")


def _show_loads(found: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "median s", "unique GB/s", "device beyond", "left", "pinned", "resident", "anonymous"):
        table.add_column(column, overflow="fold")
    for one in found:
        series, memory = one["series"], one["memory"]
        if one["failed"] or not series:
            table.add_row(one["name"], one["failed"] or "no time")
            continue
        worst = {
            key: max((m[key] for m in memory if m.get(key) is not None), default=None) for key in _MEMORY
        }
        beyond = max(
            (m["device_peak"] - m["tensor_bytes"] for m in memory if "device_peak" in m), default=None
        )
        sizes = [beyond, *(worst[key] for key in _MEMORY)]
        table.add_row(
            one["name"],
            f"{series['median_seconds']:.3f}",
            f"{series['rate'] / 1e9:.2f}",
            *("?" if size is None else f"{size / 1e6:.0f} MB" for size in sizes),
        )
    Console(width=130, highlight=False, markup=False).print(table)


_MEMORY = ("device_left", "pinned_peak", "resident_peak", "anonymous_peak")


def main(argv: list[str] | None = None) -> int:
    """Measures, writes the file, prints the tables; 1 where a row failed or a bar is not reached."""
    begin = time.monotonic()
    options = _arguments(argv)
    check_folder(str(options.results), "--results")
    devices = _devices(options)
    options.disk.mkdir(parents=True, exist_ok=True)
    try:
        ceilings = Ceilings(options.ceiling_program)
    except MachineError as error:
        say(f"no bare loops: {error}")
        ceilings = None
    seconds = options.budget - (time.monotonic() - begin)
    with SeveralBench(devices, _makers(options), ceilings, seconds, options.runs, options.patience) as bench:
        report = Report(options, bench)
        report.write()
        try:
            _measure(options, bench, report)
        finally:
            if ceilings is not None:
                ceilings.close()
        _show(report, bench)
    return 0 if not report.failed and all(row.passed for row in report.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
