"""Rows of a device's table that read a disk: warm, cold, half cached, each from a page cache that is proven.

With a compiler the state is asked of mincore before each sample. In any case a sample notes the share of its
bytes that the kernel says this process had storage fetch, and a row whose samples do not agree with its name
says so. Without a compiler there is no bare loop to compare with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensorlift.bench.cases import Case
from tensorlift.bench.ceilings import drop_cache, fill_cache
from tensorlift.bench.device_bench import DeviceBench
from tensorlift.bench.device_rows import loading
from tensorlift.bench.report import Row
from tensorlift.bench.samples import Contender
from tensorlift.bench.worker import disk_bytes

__all__ = ["cached_before", "cold_rows", "half_rows", "warm_rows"]

# Pages that are read ahead or shared with a neighbour make the count differ from the bytes asked for.
_TOLERANCE = 0.05


def cached_before(bench: DeviceBench, case: Case, share: float) -> Callable[[], dict[str, Any]]:
    """Brings the first share of each file into the cache and the rest out of it; what was seen."""

    def bring() -> dict[str, Any]:
        if bench.ceilings is not None:
            return {"cached_before": bench.ceilings.keep(case.files, share)}
        if share < 1:
            drop_cache(case.files)
        fill_cache(case.files, share)
        if 0 < share < 1:
            drop_cache(case.files, share)
        return {"cached_before": None}

    return bring


def warm_rows(bench: DeviceBench) -> list[Row]:
    """load() from a disk, all of it cached, in turn with the same from a tmpfs."""
    ours = _sampled(bench, "warm", 1.0)
    tmpfs = bench.made["tmpfs"]
    ratio = ours.series.median / tmpfs.series.median
    return [Row("load, disk, warm", "time, of tmpfs", ratio, 1.05, False, [ours.series, tmpfs.series])]


def cold_rows(bench: DeviceBench) -> list[Row]:
    """load() from a disk, nothing of it cached, in turn with a bare direct loop of our depth and chunk."""
    ours = _sampled(bench, "cold", 0.0)
    loop = bench.made.get("direct")
    if loop is None:
        what = "GB/s; no compiler here, so no bare loop to compare with"
        return [Row("load, disk, cold", what, ours.series.rate / 1e9, None, True, [ours.series])]
    ratio = ours.series.rate / loop.series.rate
    return [
        Row(
            "load, disk, cold", "rate, of the bare direct loop", ratio, 0.97, True, [ours.series, loop.series]
        )
    ]


def half_rows(bench: DeviceBench) -> list[Row]:
    """load() from a disk, half of each file cached, against what the rates of both halves predict."""
    half, warm, cold = (
        _sampled(bench, state, share) for state, share in (("half", 0.5), ("warm", 1.0), ("cold", 0.0))
    )
    seen = [note["cached_before"] for note in half.series.notes if note["cached_before"] is not None]
    share = sum(seen) / len(seen) if seen else 0.5
    predicted = share * warm.series.median + (1 - share) * cold.series.median
    return [
        Row(
            "load, disk, half cached",
            f"time, of the {predicted:.3f} s predicted",
            half.series.median / predicted,
            1.10,
            False,
            [half.series],
        )
    ]


def _sampled(bench: DeviceBench, state: str, share: float) -> Contender:
    """Samples of load() in one state of the cache; measured once, whichever row asks first."""
    if state in bench.made:
        return bench.made[state]
    case = bench.cases.get("disk")
    ours = _counted(bench, case, state, share)
    turns = [ours]
    if state == "warm":
        bench.made["tmpfs"] = loading(bench, bench.cases.get("memory"), "load, the same in tmpfs")
        turns.append(bench.made["tmpfs"])
    elif state == "cold":
        depth = bench.size(case).io_depth
        loops = bench.loop(
            case,
            f"direct loop, {depth} in flight",
            memory="ring",
            how="direct",
            threads=depth,
            before=cached_before(bench, case, share),
        )
        turns += loops
        bench.made.update(zip(["direct"], loops, strict=False))
    bench.sampler.take_turns(*turns)
    bench.made[state] = ours
    if any(abs(note["fetched"] - (1 - share)) > _TOLERANCE for note in ours.series.notes):
        fetched = ", ".join(f"{note['fetched']:.2f}" for note in ours.series.notes)
        ours.series.name += f" (NOT PROVEN: storage fetched {fetched} of the bytes)"
    return ours


def _counted(bench: DeviceBench, case: Case, state: str, share: float) -> Contender:
    """load() as a contender that notes what storage fetched for it."""
    ours = loading(bench, case, f"load, disk, {state}")
    load, bring = ours.work, cached_before(bench, case, share)
    note: dict[str, Any] = {}

    def before() -> dict[str, Any]:
        nonlocal note
        # Filled in while the sample runs: what it is called with is what is kept.
        note = bring()
        note["fetched"] = 0.0
        return note

    def work() -> object:
        start = disk_bytes()
        result = load()
        note["fetched"] = (disk_bytes() - start) / case.file_bytes
        return result

    ours.work, ours.before = work, before
    return ours
