"""The generator itself: what it writes is what its book says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from corpus.oracle import expected, payload
from support import seccomp

TESTS = Path(__file__).resolve().parents[1]


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "corpus.make_cases", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_every_outcome_is_there(cases):
    assert {case["outcome"] for case in cases.values()} == {"load", "error", "action"}
    assert len(cases) == 29


def test_the_files_hold_what_the_oracle_says(corpus, cases):
    case = cases["a_misaligned_inside"]
    (file,) = case["files"]
    content = (corpus / file).read_bytes()
    data = content[8 + int.from_bytes(content[:8], "little") :]
    assert data == b"".join(raw for *_, raw in expected(case, file))


def test_payload():
    assert payload(0, 3) == bytes([5, 136, 11])
    assert payload(1, 4, "BOOL") == bytes([1, 0, 1, 0])


@pytest.mark.skipif(seccomp.supported() is not None, reason=str(seccomp.supported()))
def test_without():
    probe = "import os; os.open('/proc/self/exe', os.O_RDONLY | os.O_DIRECT)"
    done = run("without", "o_direct,io_uring", "--", sys.executable, "-c", probe)
    assert done.returncode == 1
    assert "Invalid argument" in done.stderr


def test_without_something_unknown():
    done = run("without", "gravity", "--", "true")
    assert done.returncode == 1
    assert "unknown: gravity; known: io_uring, o_direct, shared_mmap" in done.stderr
