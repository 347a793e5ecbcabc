"""The chart is a picture, and what it needs is asked for before anything is measured."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tensorlift.bench import chart
from tensorlift.bench.race import Entry
from tensorlift.bench.report import Series
from tensorlift.bench.rivals import OURS, RIVALS
from tensorlift.errors import RequestError


def test_without_matplotlib_the_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"pip install 'tensorlift\[plot\]'"):
        chart.check_plot(tmp_path / "out.png")


def test_place_and_ending_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(RequestError, match="there is no folder"):
        chart.check_plot(tmp_path / "gone" / "out.png")
    with pytest.raises(RequestError, match=r"has to end in \.png"):
        chart.check_plot(tmp_path / "out.txt")
    chart.check_plot(tmp_path / "out.svg")
    (tmp_path / "photo.png").write_bytes(b"\x89PNG somebody's")
    with pytest.raises(RequestError, match="not a chart that tensorlift wrote"):
        chart.check_plot(tmp_path / "photo.png")


def test_chart_names_loaders_ceiling_and_failures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'tensorlift[plot]'")
    missing = Entry(RIVALS["runai"], Series("runai", 10))
    missing.fail("missing", "not installed")
    path = tmp_path / "out.svg"
    chart.draw(path, "a title", [Entry(OURS, Series("tensorlift", 10**9, [9, 1, 2, 3])), missing], 2e9)
    # A text is drawn as outlines, with a comment that says it.
    said = {text.strip() for text in re.findall("<!--(.*?)-->", path.read_text())}
    assert {"tensorlift", "runai", "missing", "0.50", "ceiling 2.00", "a title"} <= said
    chart.draw(tmp_path / "out.png", "", [missing], 0.0)
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"
    chart.draw(tmp_path / "out.pdf", "", [missing], 0.0)
    for ending in ("svg", "png", "pdf"):  # its own may be replaced
        chart.check_plot(tmp_path / f"out.{ending}")
