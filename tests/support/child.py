"""Runs a function of a test module in a process of its own, which may be crippled or die.

The function is named by module file and name, and gets and returns plain JSON values. One helper process
imports torch and the package once and forks for each call: no thread of the package runs in it, and a call
costs no new imports.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The project's exceptions come back under this key; any other ends the child.
ERROR = "error"
TESTS = Path(__file__).resolve().parents[1]


def call(function: Callable[..., Any], *arguments: Any, seconds: float = 60) -> Any:
    """What ``function(*arguments)`` returns in a new process; AssertionError where it raises or dies."""
    answer = caught(function, *arguments, seconds=seconds)
    assert not (isinstance(answer, dict) and ERROR in answer), answer["trace"]
    return answer


def caught(function: Callable[..., Any], *arguments: Any, seconds: float = 60) -> Any:
    """As call(), but a TensorliftError comes back: ``{"error": name, "message": text, "trace": text}``."""
    with tempfile.TemporaryDirectory() as folder:
        answer, output = Path(folder, "answer"), Path(folder, "output")
        request = [function.__code__.co_filename, function.__name__, arguments, str(answer), str(output)]
        status = _helper().run(json.dumps(request), seconds)
        said = output.read_text() if output.exists() else ""
        assert status == 0, (
            f"the child ended with {status} (-9: it took longer than {seconds} s)\n{said[-6000:]}"
        )
        return json.loads(answer.read_text())


class _Helper:
    """The process that forks."""

    def __init__(self) -> None:
        paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "support.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": paths},
        )
        assert self._line(60) == "ready"

    def run(self, request: str, seconds: float) -> int:
        """Exit status of a fork that serves the request; it is killed after so many seconds."""
        assert self.process.stdin is not None
        self.process.stdin.write(request + "\n")
        self.process.stdin.flush()
        pid = int(self._line(60))
        try:
            return int(self._line(seconds))
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            return int(self._line(60))

    def end(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def _line(self, seconds: float) -> str:
        # Never more than one line is on its way, so nothing lies in the buffer when this waits.
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            raise TimeoutError
        return self.process.stdout.readline().strip()


_helpers: list[_Helper] = []


def _helper() -> _Helper:
    if not _helpers:
        _helpers.append(_Helper())
        atexit.register(_helpers[0].end)
    return _helpers[0]


def _serve() -> None:
    import tensorlift.loading  # noqa: F401 - for all calls to come

    # Libraries of numpy and torch may have threads, which Python 3.12 warns of; none of ours runs here.
    warnings.filterwarnings("ignore", message=".*multi-threaded.*", category=DeprecationWarning)
    print("ready", flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _answer(*json.loads(line))
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _answer(file: str, name: str, arguments: list[Any], answer: str, output: str) -> None:
    """In the fork; does not return."""
    from tensorlift.errors import TensorliftError

    status = 1
    try:
        fd = os.open(output, os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        result = open(answer, "w")  # noqa: SIM115 - open before the function takes away rights
        spec = importlib.util.spec_from_file_location("child_module", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["child_module"] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
        try:
            value = getattr(module, name)(*arguments)
        except TensorliftError as error:
            value = {ERROR: type(error).__name__, "message": str(error), "trace": traceback.format_exc()}
        json.dump(value, result)
        result.close()
        status = 0
    except BaseException:  # noqa: BLE001 - told to the test by the output and the status
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve()
