"""Medians, bars and the file of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tensorlift.bench import report


def series(*seconds: float) -> report.Series:
    return report.Series("ours", 10_000, list(seconds))


def test_first_sample_does_not_count() -> None:
    assert series(100, 1, 3, 2).median == 2
    assert series(100, 1, 3, 2).rate == 5000


@pytest.mark.parametrize(
    ("ratio", "bar", "at_least", "passed"),
    [(0.9, 0.9, True, True), (0.89, 0.9, True, False), (1.1, 1.1, False, True), (1.2, 1.1, False, False)],
)
def test_bar(ratio: float, bar: float, at_least: bool, passed: bool) -> None:
    assert report.Row("row", "what", ratio, bar, at_least, []).passed is passed


def test_file_has_machine_first_and_every_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [report.Row("load, warm", "of the loop", 0.95, 0.9, True, [series(9, 1, 2, 3)])]
    path = report.write_report(
        tmp_path, "load", {"processor": "AMD EPYC (x)", "cpus": 2}, {"on": frozenset({1, 0})}, rows
    )
    assert path.name.startswith("load-amd-epyc-x-2cpu-")
    record = json.loads(path.read_text())
    assert list(record)[:4] == ["theme", "date", "machine", "settings"]
    assert record["settings"] == {"on": [0, 1]}
    assert record["rows"][0]["series"][0]["seconds"] == [9, 1, 2, 3]
    assert record["rows"][0]["passed"] is True
    report.show_rows(rows)
    assert "0.950" in capsys.readouterr().out
