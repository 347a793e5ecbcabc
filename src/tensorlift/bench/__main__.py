"""``python -m tensorlift.bench``: the CPU table on this machine. ``make bench`` runs it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

from tensorlift.bench import machine
from tensorlift.bench.cases import Case, nvfp4_moe, qwen3_moe, remove
from tensorlift.bench.ceilings import Ceilings
from tensorlift.bench.parity import compare_bytes
from tensorlift.bench.report import Row, show_rows, write_report
from tensorlift.bench.rows import Bench
from tensorlift.bench.samples import say
from tensorlift.engine.sizing import size_engine
from tensorlift.loading import load
from tensorlift.options import LoadOptions
from tensorlift.outputs import check_folder


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tensorlift.bench", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("build/bench"), help="on the disk to measure")
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm/tensorlift-bench"), help="on a tmpfs")
    parser.add_argument(
        "--results", type=Path, default=Path("benchmarks/results"), help="where the file goes"
    )
    parser.add_argument("--layers", type=int, default=2, help="of the large checkpoint; 2 make 3.7 GB")
    parser.add_argument("--groups", type=int, default=30000, help="of the small tensors; 4 tensors each")
    parser.add_argument("--runs", type=int, default=5, help="samples that count")
    parser.add_argument(
        "--rows", default="tmpfs,into,load,cold,small", help="which parts, separated by commas"
    )
    parser.add_argument(
        "--keep", action="store_true", help="leave the checkpoints there; no later run replaces them"
    )
    return parser.parse_args(argv)


@contextlib.contextmanager
def _checked(case: Case, keep: bool = False) -> Iterator[Case]:
    """The case, once all its bytes have been compared with the plain library's; removed behind it."""
    try:
        count = compare_bytes(load(case.folder, device="cpu"), case.files)
        say(f"{case.folder}: {count} tensors, {case.nbytes / 1e9:.2f} GB, same bytes as safetensors")
        yield case
    finally:
        if not keep:
            remove(case)


def _small_rows(bench: Bench, folder: Path, groups: int, keep: bool) -> list[Row]:
    shapes = {"weight": (8, 1024), "scale": (8, 128)}
    parts = [groups // 4, groups // 2, groups]
    with contextlib.ExitStack() as ends:
        cases = [
            ends.enter_context(_checked(nvfp4_moe(folder / f"small-{part}", part, 1, **shapes), keep))
            for part in parts
        ]
        return [bench.opening_row(cases[-1]), bench.linear_row(cases)]


def _rows(bench: Bench, options: argparse.Namespace, wanted: set[str]) -> list[Row]:
    rows: list[Row] = []
    if "tmpfs" in wanted:
        with _checked(qwen3_moe(options.tmpfs / "large", options.layers, 2)) as case:
            rows.append(bench.load_into_row(case, "load_into, tmpfs"))
    if wanted & {"into", "load", "cold"}:
        with _checked(qwen3_moe(options.folder / "large", options.layers, 2), options.keep) as case:
            if "into" in wanted:
                rows.append(bench.load_into_row(case, "load_into, warm"))
            if wanted & {"load", "cold"}:
                rows += bench.load_row(case)
            if "cold" in wanted:
                rows += bench.cold_rows(case, rows[-1].series[0])
    if "small" in wanted:
        rows += _small_rows(bench, options.folder, options.groups, options.keep)
    return rows


def main(argv: list[str] | None = None) -> int:
    """Measures, writes the file, prints the table; 1 where a bar is not reached."""
    options = _arguments(argv)
    check_folder(str(options.results), "--results")
    size = size_engine(LoadOptions.resolve(), 4 << 30, device=False)
    options.folder.mkdir(parents=True, exist_ok=True)
    facts = machine.facts(options.folder, options.tmpfs.parent)
    try:
        with Ceilings() as ceilings:
            rows = _rows(Bench(ceilings, size, options.runs), options, set(options.rows.split(",")))
    finally:
        for folder in (options.tmpfs, options.folder):
            with contextlib.suppress(OSError):  # not empty: kept, or there before
                folder.rmdir()
    settings = dataclasses.asdict(size) | {
        "runs": options.runs,
        "layers": options.layers,
        "groups": options.groups,
    }
    path = write_report(options.results, "load", facts, settings, rows)
    show_rows(rows)
    print(f"written: {path}")
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
