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

from support.tree import ROOT

BUILDS = ROOT / "build" / "tests"
# What is built for each, and under which name.
SANITIZERS = {"address,undefined": "asan", "thread": "tsan"}
# Names one of them where Python itself runs under it: then libraries of tests are those of its build.
VARIABLE = "TENSORLIFT_TEST_SANITIZER"


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
    # Where Python runs under a sanitizer the compiler need not.
    environ = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    if done.returncode:
        pytest.fail(f"{' '.join(command)} failed:\n{done.stdout[-6000:]}{done.stderr[-3000:]}", pytrace=False)


def program(folder: Path, name: str) -> Path:
    """A native test program of a build."""
    return folder / "native" / "tests" / f"test_{name}"


def standin_library(name: str) -> Path:
    """The stand-in driver ("libcuda.so.1" or "libamdhip64.so"), built if it has to be."""
    return sanitized(os.environ.get(VARIABLE, ""), target=name) / "native" / "tests" / "standin" / name


def sanitized(sanitizer: str, target: str = "all") -> Path:
    """Folder of the build under a sanitizer, or without one."""
    if not sanitizer:
        return build("plain", target=target)
    return build(SANITIZERS[sanitizer], f"TENSORLIFT_SANITIZE={sanitizer}", target=target)


def sanitizer_environ(folder: Path) -> dict[str, str]:
    """How programs of such a build run; a file of suppressions is written to the folder."""
    # liburing maps its rings by system calls of its own, which the sanitizer does not see: where such a map
    # takes the place of an older one, unmapped long ago, it reports a race with the making of that one.
    suppressions = folder / "suppressions"
    suppressions.write_text("race:io_uring\n")
    return {
        # A huge allocation is refused as without the sanitizer; leaks are looked for at the end.
        "ASAN_OPTIONS": "detect_leaks=1:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "TSAN_OPTIONS": f"halt_on_error=1:second_deadlock_stack=1:suppressions={suppressions}",
    }
