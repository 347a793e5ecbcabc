"""Registries that run: in this process, as a process, and Debian's redis-server."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.ports import free_port
from support.waiting import SECONDS
from tensorlift.fleet.contract import Announcement, Load, Near
from tensorlift.fleet.server import RegistryServer
from tensorlift.fleet.store import Store
from tensorlift.fleet.table import Table
from tensorlift.forking.manifest import ModelKey

KEY = ModelKey(model="org/model")


def announced(number: int, key: ModelKey = KEY, **more: Any) -> Announcement:
    """A seed that nobody runs; the n-th has port n + 1."""
    load = Load(more.pop("readers", 0), more.pop("sent_bytes", 0), more.pop("rate", 0.0))
    near = Near(more.pop("at", ""), more.pop("place", ""))
    given = {"most_readers": 8, "url": f"http://127.0.0.1:{number + 1}"} | more
    return Announcement(instance=f"{number:032x}", key=key, near=near, load=load, **given)


@contextlib.contextmanager
def serving(path: Path | str | None = None, **more: Any) -> Iterator[RegistryServer]:
    """One in this process."""
    lease = {"lease": more.pop("lease")} if "lease" in more else {}
    table = Table(Store(None if path is None else str(path)), **lease)
    with contextlib.closing(table), RegistryServer(table, **more) as server:
        yield server


@contextlib.contextmanager
def redis_server(folder: Path, password: str = "", *more: object) -> Iterator[str]:
    """Its URL, with ``more`` options; skips where Debian's package is not installed."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed (Debian: redis-server)")
    port = free_port()
    options = ["--port", port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", folder]
    options += ["--requirepass", password] if password else []
    options += [*more]
    with subprocess.Popen([program, *map(str, options)], stdout=subprocess.DEVNULL) as child:
        try:
            end = time.monotonic() + SECONDS
            while True:
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                assert child.poll() is None
                assert time.monotonic() < end
                time.sleep(0.01)
            yield f"redis://:{password}@127.0.0.1:{port}/0" if password else f"redis://127.0.0.1:{port}/0"
        finally:
            child.kill()
