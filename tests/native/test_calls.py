"""System calls of the library and calls of drivers that fail: once at each of their turns, and at random."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from support.native_build import VARIABLE, sanitized, sanitizer_environ

# A build comes first.
pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("name", ["turns", "turns_forks"])
def test_calls_that_fail(name: str, tmp_path: Path) -> None:
    # Under a sanitizer where TENSORLIFT_TEST_SANITIZER names one.
    folder = sanitized(os.environ.get(VARIABLE, ""))
    done = subprocess.run(
        [str(folder / "native" / "tests" / "calls" / f"test_{name}")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
        env={**os.environ, **sanitizer_environ(tmp_path)},
    )
    print(done.stdout)
    if done.returncode:
        pytest.fail(f"exit {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}", pytrace=False)
