"""``tensorlift tune``: which settings are the fastest on this machine for this file."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import time
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from tensorlift.cli.console import MOST_SECONDS, data_console, guarded, number
from tensorlift.errors import OptionError
from tensorlift.options import LoadOptions
from tensorlift.stats import human_bytes

if TYPE_CHECKING:
    from tensorlift.bench.trials import Trials
    from tensorlift.bench.tuning import Choice, Found

__all__ = ["command"]

STATES = ("warm", "cold")
# A survey of about 25 choices and a final of many rounds of four: short loads, since more of those fit
# between what else the machine does.
_LOADS = 120


@guarded
def command(
    paths: list[str] = typer.Argument(
        metavar="PATH...", help="A file, files, a folder or a Hub id in the cache."
    ),
    device: str = typer.Option("cpu", help="Where to: cpu, cuda, cuda:1."),
    seconds: float = typer.Option(
        45.0,
        min=1.0,
        max=MOST_SECONDS,
        callback=number,
        help="About how long to measure, all states together.",
    ),
    state: str = typer.Option("both", help="What is cached while measuring: warm, cold or both."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Measure readers, threads, chunk, depth and slot on a file, and say what to set.

    Changes nothing. Cold loads drop what the page cache holds of these files, and of no other.
    """
    if state not in (*STATES, "both"):
        raise OptionError(f"--state is {state!r}; expected warm, cold or both")
    from tensorlift.bench.trials import Trials  # numpy only when needed

    trials = Trials(paths, device)
    states = STATES if state == "both" else (state,)
    found = {each: _tuned(trials, each, seconds / len(states)) for each in states}
    facts = {
        "paths": paths,
        "device": device,
        "bytes": trials.total_bytes,
        "already_set": _already_set(),
        "states": found,
    }
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        _print(facts)


def _already_set() -> list[str]:
    """Variables that give settings here: what is called automatic is automatic beside them."""
    variables = (LoadOptions.variable(field.name) for field in dataclasses.fields(LoadOptions))
    return [variable for variable in variables if os.environ.get(variable)]


def _tuned(trials: Trials, state: str, seconds: float) -> dict[str, Any]:
    """Facts of one search."""
    from tensorlift.bench.tuning import axes, search
    from tensorlift.engine.sizing import facts_of_this_machine

    trials.fit(state, seconds / _LOADS)
    trials.fetched.clear()
    size = trials.size()
    values = axes(
        size, cold=state == "cold", device=trials.device != "cpu", cpus=facts_of_this_machine().cpus
    )
    found = search(values, lambda choice: trials.measure(state, choice), time.monotonic, seconds)
    facts = {
        "sample_bytes": trials.bytes,
        "automatic": {
            "backend": ",".join(size.backends),
            "threads": size.threads,
            "chunk_size": size.chunk_size,
            "io_depth": size.io_depth,
            "slot_size": size.slot_size,
            "pinned_bytes": size.pinned_bytes,
        },
        "complete": found.complete,
        "trials": _rows(found, trials.bytes),
        "gap": found.gap,
        "won": found.won,
        "steady": found.steady,
        "set": found.advice.options(),
        "environment": found.advice.environment(),
        "command_line": _command_line(found.advice),
    }
    if state == "cold":
        facts["fetched_share_least"] = min(trials.fetched, default=None)
        facts["cold_is_proven"] = trials.cold_is_proven
    return facts


def _rows(found: Found, nbytes: int) -> list[dict[str, Any]]:
    """One row a choice: those of the final first, each part the fastest first."""
    rows = []
    for trial in found.trials:
        seconds = trial.seconds
        rows.append(
            {
                "choice": str(trial.choice),
                "set": trial.choice.options(),
                "final": bool(trial.final),
                "seconds": seconds,
                "samples": list(trial.final) or [s for s in (trial.survey,) if s is not None],
                "rate": nbytes / seconds if seconds else None,
                "refused": trial.refused,
            }
        )
    return sorted(rows, key=lambda row: (not row["final"], row["seconds"] or float("inf")))


def _command_line(choice: Choice) -> str:
    return " ".join(f"--{n.replace('_', '-')} {shlex.quote(t)}" for n, t in choice.texts().items())


def _print(facts: dict[str, Any]) -> None:
    console = data_console()
    if facts["already_set"]:
        console.print(f"set in the environment, and so in every load here: {', '.join(facts['already_set'])}")
    for state, found in facts["states"].items():
        console.print(f"{state}: loads of {human_bytes(found['sample_bytes'])} to {facts['device']}")
        if state == "cold":
            console.print(_proof(found))
        automatic = ", ".join(f"{name} {value}" for name, value in found["automatic"].items())
        console.print(f"the automatic choice is: {automatic}")
        console.print(_table(found))
        if not found["complete"]:
            console.print("the time was over before every choice was tried; --seconds gives more")
        console.print(_advice(state, found))
        console.print()


def _proof(found: dict[str, Any]) -> str:
    share = found["fetched_share_least"]
    if found["cold_is_proven"]:
        dropped = "what was cached of these files, and of no others, was dropped before each load"
        return f"{dropped}; at least {share:.0%} came from storage"
    counted = "which the kernel does not count here" if share is None else f"in one load only {share:.0%}"
    return f"not proven to be cold: what came from storage, {counted} (memory file systems are always warm)"


def _table(found: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("choice", overflow="fold")
    for name in ("samples", "median s", "least", "most", "rate"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found["trials"]:
        if row["refused"] is not None:
            table.add_row(row["choice"], "0", "refused", "", "", "")
            continue
        samples = row["samples"]
        numbers = [f"{value:.4f}" for value in (row["seconds"], min(samples), max(samples))]
        table.add_row(row["choice"], str(len(samples)), *numbers, f"{human_bytes(row['rate'])}/s")
    return table


def _advice(state: str, found: dict[str, Any]) -> str:
    rows = [row for row in found["trials"] if row["final"]]
    gap = f"the automatic choice takes {found['gap']:.1%} longer than the best, {rows[0]['choice']}"
    if not found["set"] and rows[0]["choice"] == "automatic":
        return f"{state}: set nothing: the automatic choice is the best of the final"
    if not found["steady"]:
        busy = "samples of one choice differ too much to compare them: the machine is busy"
        return f"{state}: set nothing: {busy}; measure again when it is quieter"
    gap += f", which was faster in {found['won']:.0%} of {len(rows[0]['samples'])} rounds"
    if not found["set"]:
        return f"{state}: set nothing: {gap}: that is noise"
    lines = [f"{state}: {gap}; to set the best:", f"  {found['command_line']}"]
    lines += [f"  {name}={value}" for name, value in found["environment"].items()]
    return "\n".join(lines)
