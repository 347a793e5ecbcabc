"""``tensorlift load``: loads a checkpoint and says what that took."""

from __future__ import annotations

import dataclasses
import inspect
import json
import statistics
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import typer

from tensorlift.cli.console import MOST_TIMES, guarded, matching, named, told
from tensorlift.cli.interrupts import at_once
from tensorlift.options import BACKENDS, LoadOptions
from tensorlift.stats import human_bytes

if TYPE_CHECKING:
    from tensorlift.stats import LoadStats

__all__ = ["command"]


def _load(
    paths: list[str],
    device: str,
    names: list[str] | None,
    repeat: int,
    progress: bool | None,
    as_json: bool,
    **settings: Any,
) -> int | None:
    """Load a checkpoint, keep every tensor, and report sizes, times and how the bytes came."""
    given = {name: value for name, value in settings.items() if value is not None and value != []}
    # Checked before torch is imported, which takes seconds.
    LoadOptions.resolve(**given)
    runs = []
    for number in range(repeat):
        stats = _once(paths, device, names, progress, given)
        runs.append(stats)
        if not as_json:
            if repeat > 1:
                print(f"run {number + 1} of {repeat}")
            print(stats.summary(), flush=True)
    if runs[-1].verified and not as_json:
        print(matching(runs[-1].verified, _digests(paths, given)))
    _finish(paths, device, runs, as_json)
    return None


def _digests(paths: list[str], given: dict[str, Any]) -> str:
    """The file of digests that a load compared with."""
    from tensorlift import sources
    from tensorlift.sources.sidecars import find_sidecar

    verify = LoadOptions.resolve(**given).verify
    if isinstance(verify, str):
        return verify
    return find_sidecar(sources.read_headers(sources.find(named(paths))))


def _once(
    paths: list[str], device: str, names: list[str] | None, progress: bool | None, given: dict[str, Any]
) -> LoadStats:
    with at_once():
        from tensorlift.loading import load  # torch only now

    with told(progress) as report:
        state = load(named(paths), device=device, names=names, progress=report, **given)
        return state.stats


def _finish(paths: list[str], device: str, runs: list[LoadStats], as_json: bool) -> None:
    seconds = [run.seconds.get("total", 0.0) for run in runs]
    median = statistics.median(seconds)
    if as_json:
        record = {
            "paths": paths,
            "device": device,
            "median_seconds": median,
            "runs": [run.to_dict() for run in runs],
        }
        print(json.dumps(record, indent=2))
    elif len(runs) > 1:
        rate = human_bytes(runs[-1].bytes / median) if median else "-"
        print(
            f"median of {len(runs)}: {median:.3f} s, {rate}/s; all: {', '.join(f'{s:.3f}' for s in seconds)}"
        )


def _parameters() -> Iterator[tuple[str, Any, Any]]:
    """(name, type, default) of every parameter: the verb's own, then those of LoadOptions for one process."""
    yield "paths", list[str], typer.Argument(metavar="PATH", help="A file, files, a folder or a Hub id.")
    # Names are written out: typer 0.27 makes one of the metavar where they are not.
    where = typer.Option("cpu", "--device", metavar="DEVICE", help="Where to: cpu, cuda, cuda:1.")
    yield "device", str, where
    yield (
        "names",
        list[str] | None,
        typer.Option(None, "--name", metavar="NAME", help="Only tensors of this name or glob; repeatable."),
    )
    yield (
        "repeat",
        int,
        typer.Option(1, "--repeat", min=1, max=MOST_TIMES, metavar="NUMBER", help="Load this many times."),
    )
    bar = typer.Option(
        None, "--progress/--no-progress", help="A bar on stderr; without either, on a terminal only."
    )
    yield "progress", bool | None, bar
    yield "as_json", bool, typer.Option(False, "--json", help="Print JSON.")
    for field in dataclasses.fields(LoadOptions):
        meta = field.metadata
        if field.name == "progress" or not meta["cli"]:
            continue
        unit = "Bytes, or text such as 64MiB; automatic" if meta["unit"] == "bytes" else "Automatic"
        text = f"{meta['doc']} {unit}: {meta['automatic']}. [{LoadOptions.variable(field.name)}]"
        option = "--" + field.name.replace("_", "-")
        if field.name == "backend":
            text = f"{text} Repeatable, or separated by commas. Known: {', '.join(BACKENDS)}."
            yield field.name, list[str] | None, typer.Option(None, option, metavar="NAME", help=text)
        else:
            yield (
                field.name,
                str | None,
                typer.Option(None, option, metavar=_metavar(field.name, meta["unit"]), help=text),
            )


def _metavar(name: str, unit: str) -> str:
    special = {"trace": "FILE", "verify": "true|FILE", "keep_pinned": "true|false", "own": "arena|tensor"}
    return special.get(name) or ("SIZE" if unit == "bytes" else "NUMBER")


def _build() -> Callable[..., None]:
    """The verb as typer reads it: from a signature, which is made from the options instead of written out."""
    verb = guarded(_load)
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, kind, default in _parameters()
    ]
    verb.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    verb.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del verb.__wrapped__  # type: ignore[attr-defined]
    return verb


command = _build()
