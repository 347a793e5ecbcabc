"""One run on a CUDA machine: bytes first, then load() and load_into() against the pinned copy rate.

    python benchmarks/h200.py [--layers 24] [--shards 16] [--folder /dev/shm/tensorlift]

Checkpoints are made in a tmpfs: Qwen3-30B-A3B's geometry, of which 24 layers are 31 GB, then NVFP4 experts,
of which 30,000 groups are 26.5 GB in 120,000 tensors. The link is the higher of two rates of a pinned 1 GiB
copy, measured in this process before and after the loads; both are printed. The clock of a load starts with
the CUDA context there and no ring, and ends synchronised, all tensors held; the first load is kept in the
file and does not count. The file goes to $OUT if that is set, else to benchmarks/results.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tensorlift.bench import machine
from tensorlift.bench.cases import Case, nvfp4_moe, qwen3_moe
from tensorlift.bench.parity import compare_bytes
from tensorlift.bench.pinned import COPY_BYTES, pinned_copy_rate
from tensorlift.bench.report import Row, Series, show_rows, write_report
from tensorlift.loading import load, load_into

# Device memory that was just given back to the driver is cleared in the background, and copies run at half
# the rate meanwhile: for 55 ms after 16 GB and for 80 ms after 26 GB (one H200). A load in a new process does
# not meet that, nor may one here meet it for the load before it.
SETTLE_SECONDS = 0.5


def sample(series: Series, device: torch.device, work: Callable[[], Any]) -> None:
    """One timed load, with what its statistics say; its tensors are gone afterwards."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize(device)
    time.sleep(SETTLE_SECONDS)
    start = time.perf_counter()
    result = work()
    torch.cuda.synchronize(device)
    series.seconds.append(time.perf_counter() - start)
    stats = getattr(result, "stats", result)
    series.notes.append(stats.to_dict() if hasattr(stats, "to_dict") else {})
    print(f"{series.name}: {series.seconds[-1]:.3f} s", file=sys.stderr, flush=True)


def check_bytes(case: Case, device: torch.device) -> int:
    """Compares every tensor with the plain safetensors loader on the same device."""
    state = load(case.folder, device=str(device))
    count = compare_bytes(state, case.files, str(device))
    print(
        f"{case.folder}: {count} tensors, {case.nbytes / 1e9:.2f} GB, right bytes",
        file=sys.stderr,
        flush=True,
    )
    return count


def measure_load(case: Case, device: torch.device, runs: int) -> Series:
    """load() again and again."""
    series = Series(f"load, {case.tensors} tensors", case.nbytes)
    for _ in range(runs):
        sample(series, device, lambda: load(case.folder, device=str(device)))
    return series


def measure_into(case: Case, device: torch.device, runs: int) -> Series:
    """load_into() the tensors of one load."""
    series = Series("load_into", case.nbytes)
    state = dict(load(case.folder, device=str(device)))
    for _ in range(runs):
        sample(series, device, lambda: load_into(state, case.folder))
    return series


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/tensorlift"))
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--groups", type=int, default=30000, help="of small tensors; 4 tensors each")
    parser.add_argument("--loads", type=int, default=7, help="the first does not count")
    parser.add_argument("--intos", type=int, default=5, help="the first does not count")
    parser.add_argument("--device", default="cuda:0")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    device = torch.device(options.device)
    torch.cuda.set_device(device)
    torch.cuda.synchronize(device)
    shutil.rmtree(options.folder, ignore_errors=True)
    try:
        checked = [
            check_bytes(qwen3_moe(options.folder / "one-layer", 1, 2), device),
            check_bytes(nvfp4_moe(options.folder / "small", 5000, 2), device),
        ]
        shutil.rmtree(options.folder)
        case = qwen3_moe(options.folder / "large", options.layers, options.shards)
        checked.append(check_bytes(case, device))
        gc.collect()
        torch.cuda.empty_cache()
        before = pinned_copy_rate(str(device))
        loaded = measure_load(case, device, options.loads)
        into = measure_into(case, device, options.intos)
        shutil.rmtree(options.folder)
        many = nvfp4_moe(options.folder / "many", options.groups, options.shards)
        checked.append(check_bytes(many, device))
        small = measure_load(many, device, options.loads)
        after = pinned_copy_rate(str(device))
    finally:
        shutil.rmtree(options.folder, ignore_errors=True)

    link = max(before, after)
    what = "of the pinned copy rate"
    rows = [
        Row("load, tmpfs", what, loaded.rate / link, 0.90, True, [loaded]),
        Row("load_into, tmpfs", what, into.rate / link, 0.90, True, [into]),
        Row(f"load, tmpfs, {many.tensors} tensors", what, small.rate / link, 0.75, True, [small]),
    ]
    facts = machine.facts(options.folder.parent) | {
        "gpu": torch.cuda.get_device_name(device),
        "cuda": torch.version.cuda,
    }
    settings = {key: str(value) for key, value in vars(options).items()}
    link_record = {"before": before, "after": after, "bytes": COPY_BYTES}
    path = write_report(
        Path(os.environ.get("OUT") or "benchmarks/results"),
        "load",
        facts,
        settings,
        rows,
        link_bytes_per_second=link_record,
        tensors_compared=checked,
    )
    show_rows(rows)
    print(f"link: {before / 1e9:.2f} GB/s before, {after / 1e9:.2f} GB/s after; written: {path}")
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
