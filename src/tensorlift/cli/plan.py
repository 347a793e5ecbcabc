"""``tensorlift plan``: what several ranks would read, receive, hold and take, from headers alone."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from tensorlift.cli.console import MOST_TIMES, data_console, guarded, named, number
from tensorlift.format.quoting import plural
from tensorlift.options import parse_rate
from tensorlift.plan.prediction import DEFAULT_RATES, Prediction, Rates, Work, best, predict
from tensorlift.stats import human_bytes

if TYPE_CHECKING:
    from tensorlift.format.checkpoint import Checkpoint

__all__ = ["command"]

_RANKS_OF_A_HOST = 8


def _rate_option(name: str, what: str) -> Any:
    default = human_bytes(DEFAULT_RATES[name])
    return typer.Option(None, f"--{name}", metavar="RATE", help=f"{what}, such as 50GB/s; else {default}/s.")


@guarded
def command(
    paths: list[str] = typer.Argument(metavar="PATH", help="A file, files, a folder or a Hub id."),
    ranks: int = typer.Option(
        ..., "--ranks", min=1, max=MOST_TIMES, metavar="NUMBER", help="How many load it together."
    ),
    ranks_per_host: int | None = typer.Option(
        None,
        "--ranks-per-host",
        min=1,
        max=MOST_TIMES,
        metavar="NUMBER",
        help="Ranks of one host; else at most 8.",
    ),
    group: int | None = typer.Option(
        None, "--group", min=1, max=MOST_TIMES, metavar="NUMBER", help="Ranks that gather together; else all."
    ),
    storage: str | None = _rate_option("storage", "Storage, for all ranks together"),
    host: str | None = _rate_option("host", "A host's page cache, for its ranks together"),
    link: str | None = _rate_option("link", "The link to one device"),
    peer: str | None = _rate_option("peer", "What a rank receives in an all-gather"),
    network: str | None = _rate_option("network", "Into a host from others, for each of its ranks"),
    cached: float = typer.Option(
        0.0, min=0, max=1, callback=number, metavar="FRACTION", help="Share in the page cache, 0 to 1."
    ),
    tp: bool = typer.Option(
        False,
        "--tp",
        help="Each rank keeps its part as tensor parallelism has it: rows of q, k, v, gate, up, embeddings "
        "and head, columns of o and down, all else whole.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Predict how several ranks load a checkpoint best; reads headers only."""
    given = {"storage": storage, "host": host, "link": link, "peer": peer, "network": network}
    rates = Rates(**{name: parse_rate(text, "--" + name) for name, text in given.items() if text is not None})
    from tensorlift import sources  # numpy and msgspec only when needed

    checkpoint = sources.read_headers(sources.find(named(paths), download=False))
    work = _work(checkpoint, ranks, tp)
    on_host = min(ranks, _RANKS_OF_A_HOST) if ranks_per_host is None else ranks_per_host
    work = dataclasses.replace(work, ranks_per_host=on_host, group=group, cached=cached)
    facts = _facts(work, rates)
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        _print(facts, len(checkpoint))


def _work(checkpoint: Checkpoint, ranks: int, tp: bool) -> Work:
    nbytes = int(checkpoint.sizes.sum())
    if not tp:
        return Work(nbytes, ranks)
    from tensorlift.plan.tensor_parallel import tensor_parallel_portion  # numpy only now

    portion = tensor_parallel_portion(checkpoint, ranks)
    return Work(nbytes, ranks, own=portion.own, own_read=portion.read)


def _facts(work: Work, rates: Rates) -> dict[str, Any]:
    predictions = predict(work, rates)
    return {
        "work": dataclasses.asdict(work),
        "rates": rates.taken(),
        "assumed": list(rates.assumed()),
        "ways": [
            {**dataclasses.asdict(one), "exchange": "gather" if name == "gather" else "none"}
            for name, one in predictions.items()
        ],
        "best": best(predictions).way,
        "why": _why(predictions, work),
    }


_LIMITS = {
    "storage": "storage",
    "host": "reading the page cache",
    "link": "the link to the device",
    "peer": "the gathers",
    "network": "the network",
    "start": "what every load costs at its start",
    "communicator": "making and destroying a communicator",
    "first arena": "the way of the first arena",
}


def _why(predictions: dict[str, Prediction], work: Work) -> str:
    """One sentence for people: what limits the best way, and what the others would take."""
    chosen = best(predictions)
    others = [
        f"{name} {_seconds(one.seconds)} ({_LIMITS[one.limit]})"
        for name, one in predictions.items()
        if name != chosen.way
    ]
    if work.ranks == 1:
        return f"one rank has nobody to share with; the limit is {_LIMITS[chosen.limit]}"
    return f"{_seconds(chosen.seconds)}, limited by {_LIMITS[chosen.limit]}; {', '.join(others)}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:,.1f} s"


def _print(facts: dict[str, Any], tensors: int) -> None:
    console = data_console()
    work = facts["work"]
    console.print(
        f"{plural(tensors, 'tensor')}, {human_bytes(work['nbytes'])}, {plural(work['ranks'], 'rank')}, "
        f"{work['ranks_per_host']} a host, {100 * work['cached']:g} % cached"
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("way")
    for title in ("a rank reads", "receives", "holds", "storage gives", "seconds"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("limited by")
    for way in facts["ways"]:
        sizes = (human_bytes(way[key]) for key in ("read", "received", "held", "from_storage"))
        table.add_row(way["way"], *sizes, _seconds(way["seconds"]), _LIMITS[way["limit"]])
    console.print(table)
    console.print(f"best: {facts['best']}: {facts['why']}", soft_wrap=True)
    rates = facts["rates"]
    for title, wanted in (("given", False), ("assumed", True)):
        named = [f"{k} {human_bytes(v)}/s" for k, v in rates.items() if (k in facts["assumed"]) is wanted]
        if named:
            console.print(f"{title}: {', '.join(named)}", soft_wrap=True)
