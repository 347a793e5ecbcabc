"""Runs a function of a test module in a process of its own, which may be crippled or die.

The function is named by module file and name, gets and returns plain JSON values, and its exceptions come back as
``{"error": class name, "bases": [...], "message": text}``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]


def call(
    function: Callable[..., Any], *arguments: Any, environ: Mapping[str, str] | None = None, seconds: float = 60
) -> Any:
    """What ``function(*arguments)`` returns in a new process; AssertionError where it dies or takes too long."""
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
    try:
        answer = getattr(module, name)(*arguments)
    except Exception as error:
        answer = {
            "error": type(error).__name__,
            "bases": [base.__name__ for base in type(error).__mro__],
            "message": str(error),
        }
    print(json.dumps(answer))


if __name__ == "__main__":
    _answer()
