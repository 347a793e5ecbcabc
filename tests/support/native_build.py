"""Builds of the native sources for tests, each in its own folder below build/tests and kept up to date."""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILDS = ROOT / "build" / "tests"


def _tool(name: str) -> str:
    found = shutil.which(
        name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    )
    if found is None:
        pytest.skip(f"{name} is not installed: the native sources cannot be built here")
    return found


@functools.cache
def build(name: str, *settings: str, target: str = "all") -> Path:
    """Folder of a build with native tests and stand-in, after making ``target``; settings: ``KEY=value``."""
    folder = BUILDS / name
    folder.mkdir(parents=True, exist_ok=True)
    cmake, ninja = _tool("cmake"), _tool("ninja")
    with open(folder / ".lock", "w") as lock:
        # Several test processes may want the same build.
        fcntl.flock(lock, fcntl.LOCK_EX)
        defines = [
            f"-D{setting}" for setting in ("TENSORLIFT_TESTS=ON", f"CMAKE_MAKE_PROGRAM={ninja}", *settings)
        ]
        _run([cmake, "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", *defines])
        _run([cmake, "--build", str(folder), "--target", target])
    return folder


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(f"{' '.join(command)} failed:\n{done.stdout[-6000:]}{done.stderr[-3000:]}", pytrace=False)


def program(folder: Path, name: str) -> Path:
    """A native test program of a build."""
    return folder / "native" / "tests" / f"test_{name}"


def standin_library(name: str) -> Path:
    """The stand-in driver ("libcuda.so.1" or "libamdhip64.so"), built if it has to be."""
    return build("plain", target=name) / "native" / "tests" / "standin" / name
