"""System calls of the library and calls of drivers that fail: once at each of their turns, and at random."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from support.native_build import SANITIZERS, sanitized, sanitizer_environ

# A build comes first.
pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("name", ["turns", "turns_forks"])
@pytest.mark.parametrize("sanitizer", ["", *SANITIZERS])
def test_calls_that_fail(sanitizer: str, name: str, tmp_path: Path) -> None:
    folder = sanitized(sanitizer)
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
