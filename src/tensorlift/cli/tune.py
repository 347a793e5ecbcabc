"""``tensorlift tune``: which settings are the fastest on this machine for this file."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from tensorlift.cli.console import MOST_SECONDS, data_console, guarded, number
from tensorlift.cli.interrupts import at_once
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
        metavar="PATH", help="A file, files, a folder or a Hub id in the cache."
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
    with at_once():
        import tensorlift.loading  # noqa: F401 - numpy and torch only when needed
        from tensorlift.bench.trials import Trials

    trials = Trials(paths, device)
    states = STATES if state == "both" else (state,)
    searched = {each: _tuned(trials, each, seconds / len(states)) for each in states}
    facts = {
        "paths": paths,
        "device": device,
        "bytes": trials.total_bytes,
        "already_set": _already_set(),
        "states": {each: told for each, (_, told) in searched.items()},
        "verdict": _verdict(trials, searched),
    }
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        _print(facts)


def _already_set() -> list[str]:
    """Variables that give settings here: what is called automatic is automatic beside them."""
    variables = (LoadOptions.variable(field.name) for field in dataclasses.fields(LoadOptions))
    return [variable for variable in variables if os.environ.get(variable)]


def _verdict(trials: Trials, searched: dict[str, tuple[Found, dict[str, Any]]]) -> dict[str, Any]:
    """Facts of what to set whatever the state; for one state alone, that is its own advice."""
    from tensorlift.bench.tuning import RULE, compare, verdict

    def check(state: str, choice: Choice) -> Found:
        trials.take(searched[state][1]["sample_bytes"])
        return compare(choice, lambda each: trials.measure(state, each))

    choice, checked = verdict({state: found for state, (found, _) in searched.items()}, check)
    return {
        **_to_set(choice),
        "rule": RULE,
        "checked": {
            state: [
                row
                for found in by_choice.values()
                for row in _rows(found, searched[state][1]["sample_bytes"])
            ]
            for state, by_choice in checked.items()
        },
    }


def _to_set(choice: Choice) -> dict[str, Any]:
    return {
        "set": choice.options(),
        "environment": choice.environment(),
        "command_line": _command_line(choice),
    }


def _tuned(trials: Trials, state: str, seconds: float) -> tuple[Found, dict[str, Any]]:
    """One search, and its facts."""
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
        "apart": found.apart,
        **_to_set(found.advice),
    }
    if state == "cold":
        facts["fetched_share_least"] = min(trials.fetched, default=None)
        facts["cold_is_proven"] = trials.cold_is_proven
    return found, facts


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
        console.print(f"{state}: {_outcome(found)}")
        console.print()
    for line in _conclusion(facts["states"], facts["verdict"]):
        console.print(line)


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


def _outcome(found: dict[str, Any]) -> str:
    """What the final of one state says."""
    rows = [row for row in found["trials"] if row["final"]]
    if rows[0]["choice"] == "automatic":
        return "the automatic choice is the best of the final"
    gap = (
        f"the automatic choice takes {found['gap']:.1%} longer than the best, {rows[0]['choice']}, which was "
        f"faster in {found['won']:.0%} of {len(rows[0]['samples'])} rounds"
    )
    if found["set"]:
        return gap
    if not found["steady"]:
        busy = "samples of one choice differ too much to compare them: the machine is busy"
        return f"{busy}; measure again when it is quieter"
    return f"{gap}: that is within what samples differ by" if not found["apart"] else f"{gap}: that is noise"


def _conclusion(states: dict[str, dict[str, Any]], verdict: dict[str, Any]) -> Iterator[str]:
    """What to set, whatever is cached; else what would be right for files that are always in one state."""
    only = f" if your files are always {next(iter(states))}" if len(states) == 1 else ""
    if verdict["set"]:
        yield f"set{only}:"
        yield from _settings(verdict)
    else:
        yield f"set nothing{only}"
        for state, found in states.items():
            if found["set"]:
                yield f"if your files are always {state}:"
                yield from _settings(found)
    for state, rows in verdict["checked"].items():
        for row in rows:
            told = f"refused: {row['refused']}" if row["refused"] else f"{row['seconds'] or 0:.4f} s"
            if row["refused"] or row["final"]:
                yield f"tried when {state} too: {row['choice']}: {told}"
    yield f"the rule: {verdict['rule']}"


def _settings(facts: dict[str, Any]) -> Iterator[str]:
    yield f"  {facts['command_line']}"
    yield from (f"  {name}={value}" for name, value in facts["environment"].items())
