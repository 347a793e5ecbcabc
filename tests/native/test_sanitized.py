"""Python over a library that is built under a sanitizer: a few tests, and faults that have to be reported.

``make sanitize`` runs many more.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import pytest

import sanitize
from support.checkpoints import random_row, write_safetensors
from support.native_build import SANITIZERS
from tensorlift import sources
from tensorlift.engine.engine import Engine
from tensorlift.engine.sizing import EngineSize
from tensorlift.plan.pieces import new_pieces

# Threads that wait, work and end; a device; both ends of chunks.
FEW = (
    "tests/engine/test_engine.py",
    "tests/device_standin/test_keep_pinned.py::test_threads_that_load_at_once",
    "tests/forking/test_sender.py",
)
NBYTES = 20_000_000

# A build comes first.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(params=SANITIZERS)
def sanitizer(request: pytest.FixtureRequest) -> str:
    try:
        sanitize.preloaded(request.param)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    return str(request.param)


def test_a_few_tests(sanitizer: str, capfd: pytest.CaptureFixture[str]) -> None:
    status = sanitize.run(sanitizer, [*sanitize.PYTEST, *FEW])
    said = capfd.readouterr().out
    assert status == 0, said
    assert " passed" in said
    assert "it ended with 0, 0 reports" in said


def test_what_is_wrong_is_reported(
    sanitizer: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_safetensors(tmp_path / "m.safetensors", {"t": random_row("U8", [NBYTES], 1)})
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    what, report = {
        "address,undefined": ("beyond", "heap-buffer-overflow"),
        "thread": ("at_once", "ThreadSanitizer: data race"),
    }[sanitizer]
    assert sanitize.run(sanitizer, [__file__, what, str(path)]) == 1
    assert report in capfd.readouterr().out


def beyond(path: str) -> None:
    """A load that writes behind the memory that it was given."""
    _load(path, [_allocated(NBYTES // 2)])


def at_once(path: str) -> None:
    """Two that write to the same memory, neither of which waits for the other."""
    _load(path, [_allocated(NBYTES)] * 2)


def _allocated(nbytes: int) -> int:
    allocate = ctypes.CDLL(None).malloc
    allocate.restype, allocate.argtypes = ctypes.c_size_t, [ctypes.c_size_t]
    return int(allocate(nbytes))


def _load(path: str, addresses: list[int]) -> None:
    shard = sources.read_headers(sources.find(path)).shards[0]
    engines = [Engine(EngineSize(1 << 16, 1 << 18, 1 << 20, 2, 4, ("PREAD",))) for _ in addresses]
    files = [engine.add_file(shard) for engine in engines]
    tickets = [
        engine.submit(new_pieces([file], [0], [NBYTES], [address]))
        for engine, file, address in zip(engines, files, addresses, strict=True)
    ]
    for engine, ticket in zip(engines, tickets, strict=True):
        engine.wait(ticket)
        engine.close()


if __name__ == "__main__":
    {"beyond": beyond, "at_once": at_once}[sys.argv[1]](sys.argv[2])
