"""Results: every sample, medians and ratios, in a JSON file and as a table."""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tensorlift.errors import MachineError
from tensorlift.outputs import Kind, check_folder, check_output, write_output

__all__ = ["Row", "Series", "make_record", "show_rows", "write_record", "write_report"]

_RESULTS = Kind("a results file", b"{", b'"theme"')


@dataclass(slots=True)
class Series:
    """Seconds of one thing that was measured again and again; the first ``warm_up`` samples do not count."""

    name: str
    nbytes: int
    seconds: list[float] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)
    """What was seen around each sample, such as the share of cached bytes before it."""
    warm_up: int = 1

    @property
    def median(self) -> float:
        """Median of the samples that count."""
        return statistics.median(self.seconds[self.warm_up :])

    @property
    def rate(self) -> float:
        """Bytes per second by the median."""
        return self.nbytes / self.median

    def record(self) -> dict[str, Any]:
        """Plain values for the file."""
        return dataclasses.asdict(self) | {"median_seconds": self.median, "rate": self.rate}


@dataclass(slots=True)
class Row:
    """One line of the table: ours against something, and the bar that the ratio has to reach."""

    name: str
    what: str
    """What the ratio says, such as ``rate, of the bare loop``."""
    ratio: float
    bar: float | None
    """None: the row only tells."""
    at_least: bool
    """The ratio has to be at least the bar; else at most."""
    series: list[Series]

    @property
    def passed(self) -> bool:
        """The bar is reached, or there is none."""
        if self.bar is None:
            return True
        return self.ratio >= self.bar if self.at_least else self.ratio <= self.bar

    def record(self) -> dict[str, Any]:
        """Plain values for the file."""
        return {
            "name": self.name,
            "what": self.what,
            "ratio": self.ratio,
            "bar": self.bar,
            "at_least": self.at_least,
            "passed": self.passed,
            "series": [series.record() for series in self.series],
        }


def write_report(
    folder: Path, theme: str, machine: dict[str, Any], settings: dict[str, Any], rows: list[Row], **more: Any
) -> Path:
    """Writes ``<theme>-<hardware>-<date>.json``: machine, settings, then every sample; gives its path."""
    return write_record(
        folder, make_record(theme, machine, settings, **more, rows=[r.record() for r in rows])
    )


def make_record(theme: str, machine: dict[str, Any], settings: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What a run has to tell, in the order in which it is to be read: machine and settings first."""
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    # CPUs come as a set, which JSON does not have.
    plain = {key: sorted(v) if isinstance(v, frozenset) else v for key, v in settings.items()}
    return {"theme": theme, "date": date, "machine": machine, "settings": plain, **more}


def write_record(folder: Path, record: dict[str, Any]) -> Path:
    """Writes the record as ``<theme>-<hardware>-<date>.json``; gives its path."""
    machine = record["machine"]
    words = [machine.get("gpu") or machine["processor"], f"{machine['cpus']}cpu"]
    hardware = re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")
    check_folder(str(folder), "--results")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MachineError(f"{folder}: cannot be made: {error.strerror}") from error
    path = folder / f"{record['theme']}-{hardware}-{record['date'][:10]}.json"
    check_output(str(path), _RESULTS, "the results file")
    with write_output(str(path), "the results file") as file:
        file.write(json.dumps(record, indent=1).encode() + b"\n")
    return path


def show_rows(rows: list[Row]) -> None:
    """Prints the table on stdout."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("row")
    for column in ("median s (GB/s)", "ratio", "bar", ""):
        table.add_column(column, justify="left", overflow="fold")
    for row in rows:
        medians = "\n".join(
            f"{series.name}: {series.median:.3f}" + (f" ({series.rate / 1e9:.2f})" if series.nbytes else "")
            for series in row.series
        )
        bar = "-" if row.bar is None else f"{'>=' if row.at_least else '<='} {row.bar:g}"
        passed = "" if row.bar is None else "ok" if row.passed else "NOT"
        table.add_row(f"{row.name}\n({row.what})", medians, f"{row.ratio:.3f}", bar, passed)
    Console(width=130, highlight=False, markup=False).print(table)
