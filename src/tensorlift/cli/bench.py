"""``tensorlift bench``: this machine's ceilings, then ours and other loaders against them."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from tensorlift.cli.console import EXIT_MACHINE, MOST_SECONDS, MOST_TIMES, data_console, guarded, number
from tensorlift.cli.interrupts import at_once
from tensorlift.cli.options import a_path
from tensorlift.errors import RequestError
from tensorlift.format.quoting import plural
from tensorlift.outputs import check_folder
from tensorlift.stats import human_bytes

if TYPE_CHECKING:
    from tensorlift.bench.race import Entry
    from tensorlift.bench.rates import Rate
    from tensorlift.bench.rivals import Rival

__all__ = ["command"]

# The same as bench.race.SHARES and bench.rivals.DEFAULT, which would import numpy before --help.
_CACHES = "warm, cold, half or as-is"
_DEFAULT = "safetensors,fastsafetensors,runai,instanttensor"

_NOTES = (
    "a ceiling is the best of its samples, what a loader has is the median of those that count",
    "safetensors is its load_file; to a CPU each tensor is cloned too, for it would lie in a map of the file",
)


@guarded
def command(
    path: str = typer.Argument(metavar="PATH", help="A file, a folder or a Hub id in the local cache."),
    rivals: str = typer.Option(
        _DEFAULT,
        help="Other loaders, separated by commas; '' for none. Also safetensors-rc, fastsafetensors-parallel,"
        " instanttensor-buffered.",
    ),
    rival_path: list[str] = typer.Option(
        [], metavar="NAME=FOLDER", help="Where a rival's packages are, if not where ours are; repeatable."
    ),
    device: str = typer.Option("cpu", help="Where to: cpu, cuda, cuda:1."),
    cache: str = typer.Option(
        "warm",
        help=f"What is in the page cache before each sample: {_CACHES} (as the one before left it).",
    ),
    runs: int = typer.Option(
        5, min=1, max=MOST_TIMES, help="Samples of each loader that count; one more comes first."
    ),
    timeout: float = typer.Option(
        600.0, min=1.0, max=MOST_SECONDS, callback=number, help="Seconds after which a load counts as hung."
    ),
    plot: Path | None = typer.Option(
        None, parser=a_path, metavar="PATH", help="Write a bar chart: .png, .svg or .pdf; needs matplotlib."
    ),
    results: Path | None = typer.Option(
        None, parser=a_path, metavar="PATH", help="A folder to write the results file to."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> int:
    """Measure this machine's ceilings, then ours and other loaders in turn, each in its own process."""
    with at_once():
        from tensorlift.bench import chart
        from tensorlift.bench.race import SHARES
        from tensorlift.bench.rivals import chosen
        from tensorlift.tensors.devices import parse_device

    if cache not in SHARES:
        raise RequestError(f"--cache {cache!r} is unknown; there are {_CACHES}")
    wanted = chosen(rivals, rival_path)
    if plot is not None:
        chart.check_plot(plot)
    if results is not None:
        check_folder(str(results), "--results")
    where = str(parse_device(device))
    record, rates, entries, ceiling = _measure(path, where, wanted, cache, runs, timeout)
    if as_json:
        print(json.dumps(record, indent=2))
    else:
        _print(rates, entries, ceiling)
    if plot is not None:
        size = human_bytes(entries[0].series.nbytes)
        title = f"{size}, {plural(record['settings']['tensors'], 'tensor')} to {where}, {cache}"
        chart.draw(plot, title, entries, ceiling)
        _say(f"written: {plot}")
    if results is not None:
        from tensorlift.bench.report import write_record

        _say(f"written: {write_record(results, record)}")
    return 0 if entries[0].ok else EXIT_MACHINE


def _measure(
    path: str, device: str, rivals: list[Rival], cache: str, runs: int, timeout: float
) -> tuple[dict[str, Any], list[Rate], list[Entry], float]:
    from tensorlift import sources
    from tensorlift.bench import machine, rates
    from tensorlift.bench.ceilings import Ceilings
    from tensorlift.bench.race import SHARES, Race, link_rate
    from tensorlift.bench.report import make_record
    from tensorlift.engine.sizing import size_engine
    from tensorlift.options import LoadOptions

    checkpoint = sources.read_headers(sources.find(path))
    on_device = device != "cpu"
    size = size_engine(LoadOptions.resolve(), int(checkpoint.sizes.sum()), device=on_device)
    with Ceilings() as ceilings:
        race = Race(checkpoint, device, ceilings, timeout)
        _say(f"{human_bytes(race.nbytes)} in {plural(len(race.files), 'file')}; measuring the ceilings")
        link = (lambda: link_rate(device)) if on_device else None
        heights = rates.measure(ceilings, race.files, size, link)
        entries = race.run(rivals, SHARES[cache], runs, _say)
    ceiling = rates.ceiling_for(heights, entries[0].cached)
    settings = {
        "path": path,
        "device": device,
        "cache": cache,
        "runs": runs,
        "tensors": len(checkpoint.names),
        "bytes": race.nbytes,
        "files": len(race.files),
        **dataclasses.asdict(size),
    }
    facts = machine.facts(race.files[0].parent)
    record = make_record(
        f"rivals-{cache}-{device.partition(':')[0]}",
        facts,
        settings,
        ceilings=[rate.record() for rate in heights],
        ceiling=ceiling,
        notes=list(_NOTES),
        loaders=[entry.record() for entry in entries],
    )
    return record, heights, entries, ceiling


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _print(rates: list[Rate], entries: list[Entry], ceiling: float) -> None:
    console = data_console()
    table = _table("ceiling", "GB/s, best", "all")
    for rate in rates:
        every = ", ".join(f"{sample / 1e9:.2f}" for sample in rate.samples) or f"refused: {rate.refused}"
        table.add_row(rate.name, f"{rate.rate / 1e9:.2f}" if rate.samples else "-", every)
    console.print(table)
    console.print()
    table = _table(
        "loader", "GB/s, median", "of ceiling", "median s", "samples", "resident", "pinned", "device"
    )
    for entry in entries:
        if not entry.ok:
            before = ", ".join(f"{seconds:.3f}" for seconds in entry.series.seconds)
            reason = entry.reason + (f" (samples before it, s: {before})" if before else "")
            table.add_row(entry.rival.name, entry.status, "", "", reason)
            continue
        series = entry.series
        memory = [entry.peak(f"{kind}_peak_bytes") for kind in ("resident", "pinned", "device")]
        table.add_row(
            entry.rival.name,
            f"{series.rate / 1e9:.2f}",
            f"{100 * series.rate / ceiling:.0f} %" if ceiling else "-",
            f"{series.median:.3f}",
            ", ".join(f"{seconds:.3f}" for seconds in series.seconds[series.warm_up :]),
            *("-" if nbytes is None else human_bytes(nbytes) for nbytes in memory),
        )
    console.print(table)
    console.print(
        f"cached before each sample: {entries[0].cached:.3f}; ceiling for that: {ceiling / 1e9:.2f} GB/s"
    )
    for note in _NOTES:
        console.print(note)


def _table(first: str, *rest: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, overflow="fold")
    for name in rest:
        table.add_column(name, justify="left", overflow="fold")
    return table
