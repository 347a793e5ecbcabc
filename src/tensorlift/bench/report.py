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

__all__ = ["Row", "Series", "show_rows", "write_report"]


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
    bar: float
    at_least: bool
    """The ratio has to be at least the bar; else at most."""
    series: list[Series]

    @property
    def passed(self) -> bool:
        """The bar is reached."""
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
    now = time.time()
    words = [machine.get("gpu") or machine["processor"], f"{machine['cpus']}cpu"]
    hardware = re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{theme}-{hardware}-{time.strftime('%Y-%m-%d', time.gmtime(now))}.json"
    record = {
        "theme": theme,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now)),
        "machine": machine,
        "settings": settings,
        **more,
        "rows": [row.record() for row in rows],
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
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
        bar = f"{'>=' if row.at_least else '<='} {row.bar:g}"
        table.add_row(
            f"{row.name}\n({row.what})", medians, f"{row.ratio:.3f}", bar, "ok" if row.passed else "NOT"
        )
    Console(width=130, highlight=False, markup=False).print(table)
