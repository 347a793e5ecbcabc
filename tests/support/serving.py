"""Commands that serve until they are told to end, as processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

from support.waiting import SECONDS


@contextlib.contextmanager
def command(*words: object, **environment: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """``tensorlift`` with these words and --json, and what it said of itself; killed at the end."""
    line = [sys.executable, "-W", "error", "-m", "tensorlift", *map(str, words), "--json"]
    # Children get SIGINT also where this run was started in the background, where shells have it ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    ) as child:
        signal.signal(signal.SIGINT, before)
        watch = threading.Timer(SECONDS, child.kill)
        watch.start()
        try:
            assert child.stdout is not None
            assert child.stderr is not None
            said = ""
            while not said.endswith("}\n"):
                came = child.stdout.readline()
                assert came, child.stderr.read()
                said += came
            yield child, json.loads(said)
        finally:
            child.kill()
            watch.cancel()


def ended(child: subprocess.Popen[str], number: signal.Signals) -> tuple[int, str]:
    """Its exit code behind a signal, and what it has said on stderr."""
    child.send_signal(number)
    assert child.stderr is not None
    return child.wait(SECONDS), child.stderr.read()
