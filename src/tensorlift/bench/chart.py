"""A bar chart of loaders against the ceiling. Needs matplotlib: the extra ``plot``."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from tensorlift.bench.race import Entry
from tensorlift.errors import RequestError
from tensorlift.outputs import Kind, check_output, write_output

__all__ = ["check_plot", "draw"]

_PROGRAM = "tensorlift"
# How such a file begins, and under which name it tells who made it.
_FORMATS = {".png": (b"\x89PNG", "Software"), ".svg": (b"<?xml", "Creator"), ".pdf": (b"%PDF", "Creator")}


def check_plot(path: Path) -> None:
    """RequestError where the chart could not be written at the end: asked before anything is measured."""
    if importlib.util.find_spec("matplotlib") is None:
        raise RequestError(
            "a chart needs matplotlib: pip install 'tensorlift[plot]' (or pip install matplotlib)"
        )
    if path.suffix.lower() not in _FORMATS:
        raise RequestError(f"{path}: a chart's name has to end in .png, .svg or .pdf")
    begins, _ = _FORMATS[path.suffix.lower()]
    check_output(str(path), Kind("a chart", begins, _PROGRAM.encode()), "--plot")


def draw(path: Path, title: str, entries: Sequence[Entry], ceiling: float) -> None:
    """One bar a loader: the median, every sample as a dot, the ceiling as a line.

    Args:
        path: ``.png``, ``.svg`` or ``.pdf``.
        title: above the chart.
        entries: from top to bottom; those without a rate have their status instead of a bar.
        ceiling: bytes per second; 0 where none is known.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.2 + 0.5 * len(entries)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for place, entry in enumerate(entries):
        if not entry.ok:
            axes.text(0, place, f" {entry.status}", va="center", color="gray")
            continue
        rate = entry.series.rate / 1e9
        axes.barh(place, rate, height=0.6, color="tab:blue" if place == 0 else "silver")
        samples = [entry.series.nbytes / s / 1e9 for s in entry.series.seconds[entry.series.warm_up :]]
        axes.plot(samples, [place] * len(samples), ".", color="black", markersize=4)
        axes.text(1.01 * max(samples), place, f"{rate:.2f}", va="center")
    if ceiling:
        axes.axvline(ceiling / 1e9, color="tab:red", linestyle="--", label=f"ceiling {ceiling / 1e9:.2f}")
        figure.legend(loc="outside lower right", frameon=False)
    axes.set_yticks(range(len(entries)), [entry.rival.name for entry in entries])
    axes.set_ylim(len(entries) - 0.5, -0.5)
    axes.set_xlim(0, 1.15 * axes.get_xlim()[1])
    axes.set_xlabel("GB/s, median; dots are samples")
    axes.set_title(title, fontsize="medium")
    _, creator = _FORMATS[path.suffix.lower()]
    with write_output(str(path), "the chart") as file:
        figure.savefig(file, format=path.suffix[1:].lower(), dpi=150, metadata={creator: _PROGRAM})
