"""Rows of a device's table that read a tmpfs: against the link, in turn with InstantTensor, by setting."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from tensorlift.bench import instanttensor
from tensorlift.bench.cases import Case
from tensorlift.bench.device_bench import DeviceBench, link_row, medians_row, pairs_row
from tensorlift.bench.held_back import ARENA_SIZES, held_back
from tensorlift.bench.parity import compare_bytes
from tensorlift.bench.report import Row, Series
from tensorlift.bench.samples import Contender
from tensorlift.engine.digesting import digest_checkpoint
from tensorlift.errors import MachineError
from tensorlift.format.digests import describe
from tensorlift.options import LoadOptions
from tensorlift.sources import find, read_headers
from tensorlift.sources.sidecars import sidecar_to_write, write_sidecar

__all__ = ["into_rows", "load_rows", "many_rows", "sweep_rows", "thread_rows", "tiny_rows", "verify_rows"]

MIB = 1 << 20
LIMIT = 4 << 30
"""Of a bare loop that has a place for every byte: enough to tell the rate."""


def loading(bench: DeviceBench, case: Case, name: str, **options: Any) -> Contender:
    """load() of a case as a contender."""
    from tensorlift.loading import load

    return Contender(Series(name, case.nbytes), lambda: load(case.folder, bench.device, **options))


def load_rows(bench: DeviceBench, key: str, runs: int | None = None) -> list[Row]:
    """load(), all tensors kept, against the link and in turn with InstantTensor's owned tensors."""
    case = bench.cases.get(key)
    ours = loading(bench, case, f"load, {case.tensors} tensors")
    theirs = bench.rival_contender(
        "InstantTensor, owned", case.nbytes, lambda: instanttensor.owned(case.files, bench.device)
    )
    name = f"load, tmpfs, {case.nbytes / 1e9:.1f} GB"
    with bench.link(name) as link:
        bench.sampler.take_turns(ours, *theirs, runs=runs)
    return [link_row(name, ours, link, 0.90), *pairs_row(f"{name}, against InstantTensor", ours, theirs)]


def into_rows(bench: DeviceBench) -> list[Row]:
    """load_into() existing parameters, in turn with InstantTensor's views: dropped, and copied into the same
    parameters.
    """
    from tensorlift.loading import load, load_into

    case = bench.cases.get("large")
    state: dict[str, Any] = dict(load(case.folder, bench.device))
    for tensor in state.values():
        tensor.zero_()
    load_into(state, case.folder)
    bench.cases.compared["load_into"] = compare_bytes(state, case.files, bench.device)
    ours = Contender(Series("load_into", case.nbytes), lambda: load_into(state, case.folder))
    views = bench.rival_contender(
        "InstantTensor, views dropped", case.nbytes, lambda: instanttensor.viewed(case.files, bench.device)
    )
    copies = bench.rival_contender(
        "InstantTensor, views copied into parameters",
        case.nbytes,
        lambda: instanttensor.copied_into(case.files, bench.device, state),
    )
    with bench.link("load_into, tmpfs") as link:
        bench.sampler.take_turns(ours, *views, *copies)
    return [
        link_row("load_into, tmpfs", ours, link, 0.90),
        *medians_row("load_into, against views", ours, views, 1.1),
        *medians_row("load_into, against views copied into parameters", ours, copies, 1.1),
    ]


def many_rows(bench: DeviceBench) -> list[Row]:
    """load() of very many small tensors against the link."""
    case = bench.cases.get("many")
    ours = loading(bench, case, f"load, {case.tensors} tensors")
    name = f"load, tmpfs, {case.tensors} tensors"
    with bench.link(name) as link:
        bench.sampler.take_turns(ours)
    return [link_row(name, ours, link, 0.75)]


def sweep_rows(bench: DeviceBench) -> list[Row]:
    """load() by arena_size, in turn; what each size holds back goes to the notes."""
    case = bench.cases.get("large")
    sizes = ARENA_SIZES[:-1]
    ours = [loading(bench, case, f"load, arena_size {size // MIB} MiB", arena_size=size) for size in sizes]
    ours.append(loading(bench, case, "load, arena_size automatic"))
    with bench.link("arena_size") as link:
        bench.sampler.take_turns(*ours)
    bench.notes["held_back"] = [held_back(case.folder, size).record() for size in ARENA_SIZES]
    return [link_row(one.series.name, one, link, None) for one in ours]


def verify_rows(bench: DeviceBench) -> list[Row]:
    """load() with and without verify=True, in turn; the digests are written first."""
    case = bench.cases.get("large")
    checkpoint = read_headers(find(str(case.folder)))
    made = describe(checkpoint, digest_checkpoint(checkpoint, LoadOptions.resolve()))
    write_sidecar(sidecar_to_write(checkpoint), made)
    plain, checked = (
        loading(bench, case, f"load{text}", verify=verify)
        for text, verify in (("", False), (", verify=True", True))
    )
    bench.sampler.take_turns(plain, checked)
    found = {note.get("verified") for note in checked.series.notes}
    if found != {case.tensors}:
        raise MachineError(f"{case.tensors} tensors were to be verified, the statistics say {found}")
    ratio = checked.series.median / plain.series.median
    return [
        Row("verify=True", "time, of the load without", ratio, 1.1, False, [plain.series, checked.series])
    ]


def thread_rows(
    bench: DeviceBench, key: str, threads: int, before: Callable[[], Mapping[str, Any]] | None = None
) -> list[Row]:
    """load(threads=N) beside what N threads can do at best: read the page cache, into a ring that stays in
    the processor's caches and into memory that has a place for every byte. Neither exceeds the link.
    """
    case = bench.cases.get(key)
    name = f"load, {key}, {threads} threads"

    def prepared() -> dict[str, Any]:
        return dict(before()) if before is not None else {}

    ours = loading(bench, case, name, threads=threads)
    ours.before = prepared
    into_ring = bench.loop(
        case, "bare loop into a ring", memory="ring", how="buffered", threads=threads, before=prepared
    )
    into_memory = bench.loop(
        case,
        "bare loop into prepared memory",
        memory="prepared",
        how="buffered",
        threads=threads,
        limit_bytes=LIMIT,
        before=prepared,
    )
    with bench.link(name) as link:
        bench.sampler.take_turns(ours, *into_ring, *into_memory)
    rows = [link_row(name, ours, link, None)]
    for loop in [*into_ring, *into_memory]:
        best = min(loop.series.rate, link.rate)
        what = f"rate, of the lower of the {loop.series.name} and the link: {best / 1e9:.2f} GB/s"
        rows.append(Row(name, what, ours.series.rate / best, None, True, [ours.series, loop.series]))
    return rows


# After one load of the same file, so that what a process makes once is there.
_RESIDENT = """
import json, sys
from tensorlift.bench.worker import reset_peak, status_bytes
from tensorlift.loading import load
kept = load(sys.argv[1], sys.argv[2])
reset_peak()
before = status_bytes()
again = load(sys.argv[1], sys.argv[2])
after = status_bytes()
print(json.dumps({
    "pinned_peak_bytes": again.stats.pinned_peak_bytes,
    "resident_growth_bytes": after["VmHWM"] - before["VmRSS"],
    "locked_bytes": max(after.get("VmPin", 0), after.get("VmLck", 0)),
}))
"""


def tiny_rows(bench: DeviceBench) -> list[Row]:
    """A model of 4 KiB against safetensors' load_file, in turn; what memory it takes goes to the notes."""
    from safetensors.torch import load_file

    case = bench.cases.get("tiny")
    file = str(case.files[0])
    ours = loading(bench, case, "load, 4 KiB")
    plain = Contender(
        Series("safetensors load_file", case.nbytes), lambda: load_file(file, device=bench.device)
    )
    bench.sampler.take_turns(ours, plain, runs=20, settle=0.05)
    command = [sys.executable, "-c", _RESIDENT, file, bench.device]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        bench.notes["tiny"] = {"error": done.stderr[-2000:]}
    else:
        bench.notes["tiny"] = json.loads(done.stdout.splitlines()[-1])
    more = (ours.series.median - plain.series.median) * 1e3
    return [
        Row("load, 4 KiB", "milliseconds more than load_file", more, 5.0, False, [ours.series, plain.series])
    ]
