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

from support.native_build import SANITIZERS, VARIABLE, sanitized, sanitizer_environ  # type: ignore[import-not-found]  # noqa: E402

RUNTIMES = {"address,undefined": ("libasan.so", "libubsan.so"), "thread": ("libtsan.so",)}
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
# All in which the library works. Not: what counts calls by a library that is loaded first itself, what makes
# the library's own calls fail, which tests/native does under sanitizers, what asks for more memory than there
# is, which a sanitizer reports, and machines with little memory, of which a sanitizer takes most.
WHOLE = (
    "tests/device_standin", "tests/engine", "tests/faults", "tests/test_loading.py",
    "tests/test_load_into.py", "tests/test_slices_of_loads.py", "tests/forking/test_fork.py",
    "tests/forking/test_seed.py",
    "tests/forking/test_seed_updates.py", "tests/forking/test_sender.py", "tests/forking/test_tcp.py",
    "tests/forking/test_shm.py", "tests/forking/test_shared_memory.py", "tests/forking/test_remote.py",
    "--ignore=tests/device_standin/test_giveaways.py", "--ignore=tests/faults/test_calls.py",
    "--ignore=tests/faults/test_machines.py",
    "--deselect=tests/forking/test_remote.py::test_tensors_larger_than_any",
)  # fmt: skip
# Gloo, which is not built so, copies what the library's threads have read, and that it was told when is not
# seen.
NOT_FOR = {
    "thread": (
        "--ignore-glob=tests/faults/test_ranks*",
        "--ignore=tests/faults/test_hosts.py",
        "--ignore=tests/device_standin/test_ranks.py",
        # It has no threads in the child of a process that had some ("dup thread with used id").
        "--deselect=tests/faults/test_lifetimes.py::test_forks_after_loads_and_amid_loads_of_threads",
    )
}


def run(sanitizer: str, command: list[str]) -> int:
    """Runs a command of Python's; its exit status: 0 where it ended with 0 and nothing was reported."""
    for target in ("tensorlift", "libcuda.so.1", "libamdhip64.so", "libcufile.so.0"):
        folder = sanitized(sanitizer, target=target)
    with tempfile.TemporaryDirectory() as reports:
        log = f"log_path={reports}/report"
        options = sanitizer_environ(Path(reports))
        environ = {
            **os.environ,
            VARIABLE: sanitizer,
            "TENSORLIFT_LIBRARY": str(folder / "libtensorlift.so"),
            "LD_PRELOAD": " ".join(preloaded(sanitizer)),
            # Python keeps much until its end: the native tests look for leaks.
            "ASAN_OPTIONS": f"{options['ASAN_OPTIONS']}:detect_leaks=0:{log}",
            "UBSAN_OPTIONS": f"{options['UBSAN_OPTIONS']}:{log}",
            "TSAN_OPTIONS": f"{options['TSAN_OPTIONS']}:die_after_fork=0:{log}",
        }
        done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environ, check=False)
        found = sorted(Path(reports).glob("report*"))
        for path in found:
            print(f"--- {path.name}\n{path.read_text(errors='replace')[:20_000]}")
        print(f"{sanitizer}: it ended with {done.returncode}, {len(found)} reports", flush=True)
        return 1 if done.returncode or found else 0


def preloaded(sanitizer: str) -> list[str]:
    """Paths of what is loaded before Python; FileNotFoundError where the compiler has no such sanitizer."""
    found = []
    for name in (*RUNTIMES[sanitizer], "libstdc++.so.6"):
        command = ["g++", f"-print-file-name={name}"]
        found.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
        if not os.path.isabs(found[-1]):
            raise FileNotFoundError(f"g++ has no {name}: install its sanitizers")
    return found


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in SANITIZERS:
        sys.exit(f"{sys.argv[0]} {'|'.join(SANITIZERS)} [what pytest takes]")
    whole = (*WHOLE, *NOT_FOR.get(sys.argv[1], ()))
    sys.exit(run(sys.argv[1], [*PYTEST, *(sys.argv[2:] or whole)]))
