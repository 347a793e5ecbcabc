"""The script for a device, tried on a CPU with tiny checkpoints and a rival that is made up."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from safetensors import safe_open

from support.programs import program_of
from tensorlift.bench.cases import nvfp4_moe
from tensorlift.bench.ceilings import Ceilings
from tensorlift.bench.device_bench import Cases, DeviceBench
from tensorlift.bench.samples import Sampler


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return program_of("benchmarks/h200.py")


class Rival:
    """As much of InstantTensor as is used."""

    def __init__(self, files: list[str], framework: str, device: str, copy: bool = True) -> None:
        self.readers = [safe_open(file, framework=framework, device=device) for file in files]

    def __enter__(self) -> Rival:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def tensors(self) -> Iterator[tuple[str, Any]]:
        for reader in self.readers:
            for name in reader.keys():  # noqa: SIM118 - not a mapping
                yield name, reader.get_tensor(name)


def bench_of(
    script: ModuleType, options: argparse.Namespace, ceilings: Ceilings | None, rival: str | None
) -> DeviceBench:
    makers = script.makers(options)
    for number, name in enumerate(["large", "whole", "many", "disk", "memory"]):
        base = options.disk if name == "disk" else options.folder
        makers[name] = lambda folder=base / name, seed=number: nvfp4_moe(
            folder, 8 + seed, 2, (8, 512), (8, 64)
        )
    return DeviceBench(Sampler("cpu", 1), Cases(makers, "cpu"), ceilings, rival)


def test_all_rows_but_those_of_the_disk(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setitem(sys.modules, "instanttensor", SimpleNamespace(safe_open=Rival))  # type: ignore[arg-type]
    rows = "1,2,6,7,8,9,arena,verify,threads"
    arguments = ["--device", "cpu", "--rows", rows, "--folder", str(tmp_path), "--disk", str(tmp_path / "d")]
    options = script.arguments([*arguments, "--commit", "abc"])
    with Ceilings() as ceilings:
        report = script.measure(options, bench_of(script, options, ceilings, None))
    assert report.failed == []
    script.show(report)
    printed = capsys.readouterr().out
    assert "held beyond" in printed
    assert "resident_growth_bytes" in printed
    record = json.loads(report.path.read_text())
    names = " ".join(row["name"] for row in record["rows"])
    for name in (
        "against InstantTensor",
        "against views copied",
        "busy thread",
        "verify",
        "2 threads",
        "4 KiB",
    ):
        assert name in names
    assert record["machine"]["commit"] == "abc"
    assert record["tensors_compared"]["large"] == 32
    assert record["link_bytes_per_second"]
    assert all(len(series["seconds"]) > 1 for row in record["rows"] for series in row["series"])


def test_rows_of_the_disk_without_a_compiler(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    arguments = [
        "--rows",
        "3,4,5",
        "--folder",
        str(tmp_path),
        "--disk",
        str(tmp_path / "d"),
        "--device",
        "cpu",
    ]
    options = script.arguments(arguments)
    report = script.measure(options, bench_of(script, options, None, "not here"))
    assert report.failed == []
    assert [row.name for row in report.rows] == [
        "load, disk, warm",
        "load, disk, cold",
        "load, disk, half cached",
    ]


def test_a_row_that_fails_does_not_stop_the_others(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    arguments = ["--device", "cpu", "--rows", "all", "--folder", str(tmp_path), "--disk", str(tmp_path / "d")]
    options = script.arguments(arguments)
    assert options.rows == list(script.ROWS)
    options.rows = ["1", "6"]
    bench = bench_of(script, options, None, "not here")
    monkeypatch.setitem(script.ROWS, "1", (lambda bench: 1 / 0, ("large",)))
    report = script.measure(options, bench)
    script.show(report)
    assert "FAILED: row 1: ZeroDivisionError" in capsys.readouterr().out
    assert len(report.rows) == 1
    assert json.loads(report.path.read_text())["failed"][0]["row"] == "1"


def test_unknown_rows_are_refused(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.arguments(["--rows", "1,13"])
    assert "no row is called 13" in capsys.readouterr().err
