"""Servers of real engines, on a CPU, that fork from each other: while the seed serves, and when it dies."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from support import engines, sglang_runs, vllm_runs
from support.ports import free_port

ENGINES = {"sglang": sglang_runs, "vllm": vllm_runs}
pytestmark = pytest.mark.timeout(2400)
# A fork takes seconds, so that half way exists.
LIMIT = "25kB/s"
TOKEN = "known-to-these-tests"


@pytest.fixture(params=list(ENGINES))
def engine(request: pytest.FixtureRequest) -> Any:
    module = ENGINES[request.param]
    if not module.PYTHON:
        pytest.skip(f"TENSORLIFT_TEST_{request.param.upper()} names no Python with it (make engines)")
    return module


def extra(**settings: Any) -> list[str]:
    return ["--load-format", "tensorlift", "--model-loader-extra-config", json.dumps(settings)]


def ours(server: Any) -> str:
    """What the library said."""
    return "\n".join(line for line in server.text().splitlines() if "tensorlift: rank" in line)


class Asking:
    """Asks a server until the end, and remembers each answer."""

    def __init__(self, server: Any) -> None:
        self.answers: list[Any] = []
        self._server, self._ending = server, threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def _ask(self) -> None:
        while not self._ending.is_set():
            self.answers.append(self._server.generate())
            self._ending.wait(0.5)  # two servers start and serve on few CPUs

    def __enter__(self) -> Asking:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join(120)
        assert not self._thread.is_alive()


def asked(port: int, path: str) -> str:
    """What a seed answers."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(answer.read().decode())


def readers(port: int) -> int:
    """Forks that read from a seed now."""
    lines = asked(port, "/metrics").splitlines()
    (value,) = [line.split()[-1] for line in lines if line.startswith("tensorlift_seed_readers")]
    return int(float(value))


def kill_half_way(server: Any, port: int, fork: Any) -> None:
    end = time.monotonic() + 600
    while not readers(port):
        assert time.monotonic() < end, fork.text()[-6000:]
        assert fork.child.poll() is None, fork.text()[-6000:]
        time.sleep(0.1)
    time.sleep(1)
    os.killpg(server.child.pid, signal.SIGKILL)


def test_servers_fork_from_each_other(engine: Any, tmp_path: Path) -> None:
    model = engines.tiny(engine.PYTHON, tmp_path) / "llama"
    port = free_port()
    seed = {"seed": f"http://127.0.0.1:{port}", "token": TOKEN}
    publish = extra(publish={"port": port}, limit=LIMIT, token=TOKEN)
    with contextlib.ExitStack() as ending:
        first = ending.enter_context(engine.Server(model, tmp_path / "first.log", *publish))
        first.wait(600)
        expected = first.generate()
        assert f" at http://127.0.0.1:{port}" in ours(first)
        forking = extra(publish=True, **seed)
        with Asking(first) as asking, engine.Server(model, tmp_path / "second.log", *forking) as second:
            second.wait(600)
            assert second.generate() == expected
        assert f"from http://127.0.0.1:{port} (" in ours(second)
        assert "tensors from" not in ours(second)
        assert len(asking.answers) > 1
        assert all(answer == expected for answer in asking.answers)
        if engine is sglang_runs:
            # What is read afterwards is of another epoch. Without success weights are updated, but a request
            # that was answered is still being put away.
            updates = 1
            while not first.reload(model)["success"]:
                updates += 1
                assert updates < 10, first.text()[-6000:]
                time.sleep(1)
            assert json.loads(asked(port, "/v1/state"))["epoch"] == updates
        third = ending.enter_context(engine.Server(model, tmp_path / "third.log", *extra(**seed)))
        kill_half_way(first, port, third)
        third.wait(600)
        assert third.generate() == expected
        assert "loading from files" in ours(third)
        assert f" {engines.data_bytes(model)} bytes " in ours(third)
        assert TOKEN not in ours(first) + ours(second) + ours(third)
