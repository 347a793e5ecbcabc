"""Runs a function of a test module in a process of its own, which may be crippled or die.

The function is named by module file and name, and gets and returns plain JSON values.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# The project's exceptions come back as this, under ERROR; any other ends the child.
ERROR = "error"
TESTS = Path(__file__).resolve().parents[1]


def call(
    function: Callable[..., Any], *arguments: Any, environ: Mapping[str, str] | None = None, seconds: float = 60
) -> Any:
    """What ``function(*arguments)`` returns in a new process; AssertionError where it dies.

    A TensorliftError comes back as ``{"error": class name, "message": text, "trace": text}`` from `caught`, and fails
    here.
    """
    answer = caught(function, *arguments, environ=environ, seconds=seconds)
    assert not (isinstance(answer, dict) and ERROR in answer), answer["trace"]
    return answer


def caught(
    function: Callable[..., Any], *arguments: Any, environ: Mapping[str, str] | None = None, seconds: float = 60
) -> Any:
    """As call(), with the project's exceptions as values."""
    request = json.dumps([function.__code__.co_filename, function.__name__, arguments])
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "support.child"],
        input=request,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        env={**os.environ, "PYTHONPATH": paths, **(environ or {})},
    )
    assert done.returncode == 0, f"the child ended with {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def _answer() -> None:
    file, name, arguments = json.loads(sys.stdin.read())
    spec = importlib.util.spec_from_file_location("child_module", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["child_module"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    from tensorlift.errors import TensorliftError

    try:
        answer = getattr(module, name)(*arguments)
    except TensorliftError as error:
        answer = {ERROR: type(error).__name__, "message": str(error), "trace": traceback.format_exc()}
    print(json.dumps(answer))


if __name__ == "__main__":
    _answer()
