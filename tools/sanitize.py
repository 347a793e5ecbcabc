"""Runs Python tests over a library that is built under a sanitizer: ``sanitize.py thread tests/engine -x``.

The interpreter and torch are as they are; the runtime of the sanitizer is loaded before them. What it
reports, in whichever process of the tests, is shown at the end, and ends this program with 1. Without
arguments behind the sanitizer's name all tests run in which the library has something to do.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.native_build import SANITIZERS, VARIABLE, sanitized  # type: ignore[import-not-found]  # noqa: E402

RUNTIMES = {"address,undefined": ("libasan.so", "libubsan.so"), "thread": ("libtsan.so",)}
# All in which the library works. Not: what counts calls by a library that is loaded first itself, and what
# makes the library's own calls fail, which tests/native does under sanitizers.
WHOLE = (
    "tests/device_standin", "tests/engine", "tests/faults", "tests/test_loading.py",
    "tests/test_load_into.py", "tests/test_slices_of_loads.py", "tests/forking/test_fork.py",
    "tests/forking/test_seed.py",
    "tests/forking/test_seed_updates.py", "tests/forking/test_sender.py", "tests/forking/test_tcp.py",
    "tests/forking/test_shm.py", "tests/forking/test_shared_memory.py", "tests/forking/test_remote.py",
    "--ignore=tests/device_standin/test_giveaways.py", "--ignore=tests/faults/test_calls.py",
)  # fmt: skip


def run(sanitizer: str, arguments: list[str]) -> int:
    """Exit status: 0 where the tests passed and nothing was reported."""
    for target in ("tensorlift", "libcuda.so.1", "libamdhip64.so", "libcufile.so.0"):
        folder = sanitized(sanitizer, target=target)
    with tempfile.TemporaryDirectory() as reports:
        log = f"{reports}/report"
        suppressions = Path(reports, "suppressions")
        # See support.native_build; the others are not built under the sanitizer, so it does not see how
        # they synchronise.
        suppressions.write_text("race:io_uring\ncalled_from_lib:libtorch\ncalled_from_lib:libgomp\n")
        environ = {
            **os.environ,
            VARIABLE: sanitizer,
            "TENSORLIFT_LIBRARY": str(folder / "libtensorlift.so"),
            "LD_PRELOAD": " ".join(_found(name) for name in (*RUNTIMES[sanitizer], "libstdc++.so.6")),
            # Python keeps much until its end: the native tests look for leaks.
            "ASAN_OPTIONS": f"detect_leaks=0:allocator_may_return_null=1:log_path={log}",
            "UBSAN_OPTIONS": f"halt_on_error=1:print_stacktrace=1:log_path={log}",
            "TSAN_OPTIONS": f"halt_on_error=1:die_after_fork=0:ignore_noninstrumented_modules=1:"
            f"suppressions={suppressions}:log_path={log}",
        }
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(arguments or WHOLE)],
            cwd=ROOT,
            env=environ,
            check=False,
        )
        found = sorted(path for path in Path(reports).iterdir() if path.name.startswith("report"))
        for path in found:
            print(f"--- {path.name}\n{path.read_text(errors='replace')[:20_000]}")
        print(f"{sanitizer}: pytest ended with {done.returncode}, {len(found)} reports")
        return 1 if done.returncode or found else 0


def _found(name: str) -> str:
    """Path of a runtime library of the compiler."""
    path = subprocess.run(
        ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not os.path.isabs(path):
        sys.exit(f"g++ has no {name}: install its sanitizers")
    return path


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in SANITIZERS:
        sys.exit(f"{sys.argv[0]} {'|'.join(SANITIZERS)} [what pytest takes]")
    sys.exit(run(sys.argv[1], sys.argv[2:]))
