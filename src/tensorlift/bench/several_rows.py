"""Rows of the table of several devices: what they can do at best, loads, slices, the communicator."""

from __future__ import annotations

import statistics
import time
from typing import Any

from tensorlift.bench import member_links
from tensorlift.bench.cases import Case
from tensorlift.bench.member_loads import (
    COLUMNS,
    GATHER,
    INSTANT,
    LOADERS,
    NONE,
    PLAIN,
    ROWS,
    SLICES,
    TEMPORARY,
)
from tensorlift.bench.report import Row, Series
from tensorlift.bench.several_bench import Loads, SeveralBench
from tensorlift.engine.machine import usable_cpus
from tensorlift.errors import MachineError
from tensorlift.plan.tensor_parallel import tensor_parallel_portion
from tensorlift.sources import find, read_headers

__all__ = ["ceiling_rows", "cold_rows", "communicator_rows", "memory_rows", "slice_rows", "warm_rows"]

MIB = 1 << 20
# Of a bare loop: enough to tell the rate.
_LIMIT = 8 << 30
# As public figures of InstantTensor are for.
_MOST = 8


def ceiling_rows(bench: SeveralBench, ranks: int) -> list[Row]:
    """Links, one alone and all at once; all-gathers by size; a bare loop over the tmpfs."""
    crew = bench.crew(ranks)
    copies = 30 if bench.is_cuda else 1
    # The pinned memory that it takes is there afterwards.
    crew.ask(member_links.link, bench.patience(), at=0, copies=1)
    alone = _links(bench, ranks, [0], copies)[0]
    together = _links(bench, ranks, list(range(ranks)), copies)
    sizes = [8, 64, 256] if bench.is_cuda else [1, 4]
    gathers = {}
    for size in sizes:
        times = 20 if bench.is_cuda else 2
        found = crew.ask(member_links.all_gather, bench.patience(), nbytes=size * MIB, times=times)
        gathers[size] = [max(seconds) for seconds in zip(*found, strict=True)]
    notes: dict[str, Any] = {"link_alone": alone, "links_together": together, "all_gather_seconds": gathers}
    best = max(size * MIB / statistics.median(seconds) for size, seconds in gathers.items())
    loop = _loop_rate(bench, bench.case("memory"))
    # Each byte passes one link and most pass the ranks' connection; the page cache is read once.
    rates = {"links": sum(together), "all-gather": best, "page cache": loop or float("inf")}
    notes |= {"page_cache_rate": loop, "gather_rate": min(rates.values())}
    bench.notes[f"ceilings, {ranks} ranks"] = notes
    what = f"rate of the slowest link with all at once, of one alone: {alone / 1e9:.2f} GB/s"
    rows = [Row(f"links, {ranks} ranks", what, min(together) / alone, None, True, [])]
    for size, seconds in gathers.items():
        series = Series(f"all-gather, {size} MiB", size * MIB, seconds, warm_up=0)
        what = "rate of the whole result, of one link"
        rows.append(Row(f"{series.name}, {ranks} ranks", what, series.rate / alone, None, True, [series]))
    return rows


def _links(bench: SeveralBench, ranks: int, which: list[int], copies: int) -> list[float]:
    crew = bench.crew(ranks)
    at = time.monotonic() + 1.5  # behind the pause in which devices settle
    for rank in which:
        crew.send(rank, member_links.link, at=at, copies=copies)
    outcomes = crew.receive(which, bench.patience())
    for one in outcomes:
        if one.error:
            bench.dismiss()
            raise MachineError(one.error)
    return [one.value for one in outcomes]


def _loop_rate(bench: SeveralBench, case: Case) -> float | None:
    if bench.ceilings is None:
        return None
    limit = min(_LIMIT, case.file_bytes)
    seconds = [
        bench.ceilings.read_seconds(
            case.files,
            memory="ring",
            how="buffered",
            threads=usable_cpus(),
            chunk_bytes=MIB,
            limit_bytes=limit,
        )
        for _ in range(2)
    ]
    return limit / min(seconds)


def memory_rows(bench: SeveralBench, ranks: int) -> list[Row]:
    """Whole checkpoints out of a tmpfs: ours with a gather against everybody."""
    return _load_rows(bench, ranks, "memory", "tmpfs", None)


def cold_rows(bench: SeveralBench, ranks: int) -> list[Row]:
    """The same of a disk of which nothing is cached."""
    return _load_rows(bench, ranks, "disk", "disk, cold", 0.0)


def warm_rows(bench: SeveralBench, ranks: int) -> list[Row]:
    """The same of a disk of which all is cached."""
    return _load_rows(bench, ranks, "disk", "disk, warm", 1.0)


def _load_rows(bench: SeveralBench, ranks: int, key: str, name: str, share: float | None) -> list[Row]:
    if share is not None and bench.ceilings is None:
        bench.drop(f"{name}, {ranks} ranks: the state of the page cache is proven by the bare loops' program")
        return []
    where = f"{name}, {ranks} ranks"
    names = [name for name, loader in LOADERS.items() if loader.ways is None]
    racing = bench.race(where, ranks, names, bench.case(key), share)
    ours = _needed(racing, GATHER)
    rows = [_against(where, ours, one, 2.0 if (one.name, ranks, key) == (INSTANT, _MOST, "memory") else None)
            for one in racing.values() if one.ok and one is not ours]  # fmt: skip
    ceiling = bench.notes.get(f"ceilings, {ranks} ranks", {}).get("gather_rate")
    if ceiling and key == "memory":
        what = f"rate, of the lowest of links, all-gather and page cache: {ceiling / 1e9:.1f} GB/s"
        rows.append(Row(f"gather, {where}", what, ours.series.rate / ceiling, None, True, [ours.series]))
    return rows + _cost_rows(where, racing)


def _needed(racing: dict[str, Loads], name: str) -> Loads:
    loads = racing[name]
    if not loads.ok:
        raise MachineError(f"{name}: {loads.failed or 'no time for it'}")
    return loads


def _against(where: str, ours: Loads, theirs: Loads, bar: float | None) -> Row:
    pairs = [b / a for a, b in zip(ours.series.seconds, theirs.series.seconds, strict=False)]
    what = f"times as fast, in unique bytes; {min(pairs):.3f} in the least of {len(pairs)} pairs"
    ratio = theirs.series.median / ours.series.median
    name = f"{ours.name}, {where}, against {theirs.name}"
    return Row(name, what, ratio, bar, True, [ours.series, theirs.series])


def _cost_rows(where: str, racing: dict[str, Loads]) -> list[Row]:
    """CPUs, and memory beyond the tensors, of ours against the plain library."""
    plain = racing[PLAIN]
    rows = []
    for name in (GATHER, TEMPORARY, NONE):
        ours = racing[name]
        if not (ours.ok and plain.ok):
            continue
        what = f"CPU seconds of the host a load, {ours.cpu_seconds:.2f}, of {plain.name}'s"
        ratio = ours.cpu_seconds / max(plain.cpu_seconds, 0.01)
        rows.append(Row(f"CPUs, {name}, {where}", what, ratio, None, False, []))
        if ours.memory and plain.memory and "device_peak" in ours.memory[0]:
            mine, other = _beyond(ours), _beyond(plain)
            what = f"MiB beyond the tensors at the peak, of the worst rank; {plain.name} {other:.0f}"
            rows.append(Row(f"device memory, {name}, {where}", what, mine, None, False, []))
    return rows


def _beyond(loads: Loads) -> float:
    return max(float(one["device_peak"] - one["tensor_bytes"]) for one in loads.memory) / MIB


def slice_rows(bench: SeveralBench, ranks: int) -> list[Row]:
    """What each rank of tensor parallelism keeps, out of a tmpfs: bytes by prediction, and times."""
    case, where = bench.case("memory"), f"tmpfs, {ranks} ranks, slices"
    names = [name for name, loader in LOADERS.items() if loader.ways is not None]
    racing = bench.race(where, ranks, names, case)
    checkpoint = read_headers(find([str(file) for file in case.files]))
    rows = []
    wanted = {ROWS: "rows", COLUMNS: "columns"}
    for name, way in wanted.items():
        loads = racing[name]
        if not loads.ok:
            continue
        if ranks == 1:
            bench.drop(f"{name}: one rank keeps everything")
            continue
        portion = tensor_parallel_portion(checkpoint, ranks, (way,))
        predicted_bytes = portion.own if way == "rows" else portion.read
        what = "bytes read by the rank that reads most, of "
        what += f"1/{ranks}: {predicted_bytes:,}" if way == "rows" else f"the predicted {predicted_bytes:,}"
        ratio = loads.read_bytes / max(1, predicted_bytes)
        rows.append(Row(f"{name}, {ranks} ranks", what, ratio, 1.1, False, [loads.series]))
    ours = racing[SLICES]
    rows += [_against(where, ours, one, None) for name, one in racing.items()
             if ours.ok and one.ok and name not in (SLICES, *wanted)]  # fmt: skip
    return rows


def communicator_rows(bench: SeveralBench, ranks: int) -> list[Row]:
    """What the group that is made for one load takes: seconds, device memory while it is there and after."""
    nbytes = 256 * MIB if bench.is_cuda else MIB
    found = bench.crew(ranks).ask(member_links.communicator, bench.patience(), times=4, nbytes=nbytes)
    bench.notes[f"communicator, {ranks} ranks"] = found
    rows = []
    for key, text in (("make_seconds", "made"), ("end_seconds", "ended")):
        seconds = [max(one[key] for one in times) for times in zip(*found, strict=True)]
        series = Series(f"a group, {text}", 0, seconds)
        rows.append(Row(f"{series.name}, {ranks} ranks", "seconds", series.median, None, False, [series]))
    for key, text in (
        ("used_bytes", "in use"),
        ("left_bytes", "after its end"),
    ):
        if key in found[0][0]:
            later = max(one[key] for times in found for one in times[1:]) / MIB
            first = max(times[0][key] for times in found) / MIB
            what = f"MiB of device memory on the worst rank; the first of a process: {first:.0f}"
            rows.append(Row(f"a group for a load, {text}, {ranks} ranks", what, later, None, False, []))
    return rows
