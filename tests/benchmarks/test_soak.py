"""The program that loads and forks for long: a short run, and one that leaks."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.tree import ROOT


@pytest.mark.timeout(330)
def test_a_short_run() -> None:
    counts = ["--device", "standin", "--loads", "160", "--forks", "10", "--starts", "2"]
    command = [
        sys.executable,
        "-W",
        "error",
        str(ROOT / "benchmarks/soak.py"),
        "--device",
        "standin",
        *counts,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    table = done.stdout.splitlines()
    assert sum(line.endswith("  flat") for line in table) == 25
    assert not [line for line in table if line.endswith("  GREW")]


def test_what_grows_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    program, kept = importlib.import_module("soak"), list[int]()
    monkeypatch.setattr(program, "keep_apart", lambda: None)
    monkeypatch.setattr(
        program, "kinds_of_loads", lambda bench: [lambda: kept.append(os.open(os.devnull, os.O_RDONLY))]
    )
    assert program.main(["--loads", "5", "--forks", "0", "--starts", "0", "--folder", str(tmp_path)]) == 1
    grown = [line for line in capsys.readouterr().out.splitlines() if line.endswith("GREW")]
    assert [line.split()[:2] for line in grown] == [["loads:", "descriptors"]]
    for descriptor in kept:
        os.close(descriptor)
