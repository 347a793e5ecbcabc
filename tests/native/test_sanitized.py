"""Python tests over a library that is built under a sanitizer: a few; `make sanitize` runs all."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from support.native_build import ROOT, SANITIZERS

# Loads to the stand-in device by way of Python's threads, and weights that pass over TCP and by copying.
CHOSEN = [
    "tests/device_standin/test_loads.py",
    "tests/device_standin/test_forks.py",
    "tests/engine/test_small.py",
]


@pytest.mark.timeout(900)  # a build comes first
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_python_under_a_sanitizer(sanitizer: str) -> None:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed: there is no sanitizer's runtime")
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools/sanitize.py"), sanitizer, *CHOSEN],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
        env={name: value for name, value in os.environ.items() if name != "TENSORLIFT_LIBRARY"},
    )
    assert done.returncode == 0, f"{done.stdout[-20_000:]}\n{done.stderr[-4000:]}"
