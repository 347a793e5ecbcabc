"""Tests that fail and leave a thread."""

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
FAILS = """
import threading

def test_it():
    threading.Thread(target=threading.Event().wait, name="for ever").start()
    assert False
"""


def test_a_failed_test_that_leaves_a_thread_does_not_keep_the_run_from_ending(tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(FAILS)
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "--rootdir", str(tmp_path), str(file)]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed" in done.stdout
    assert "Threads that tests have left: for ever" in done.stdout
