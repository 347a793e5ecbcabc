"""Small reads on the caller's thread: the same errors as the engine's."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from support.checkpoints import random_row, write_safetensors
from tensorlift import sources
from tensorlift.engine import abi, small
from tensorlift.errors import CheckpointNotFoundError, FileError, ReadError, TruncatedError
from tensorlift.format.checkpoint import Shard


@pytest.fixture
def shard(tmp_path: Path) -> Shard:
    path = write_safetensors(tmp_path / "m.safetensors", {"t": random_row("U8", [5000], 1)})
    return sources.read_headers(sources.find(path)).shards[0]


def read(reads: small.SmallReads, shard: Shard, offset: int, nbytes: int) -> bytes:
    to = np.zeros(nbytes, np.uint8)
    reads.read(0, shard, offset, nbytes, to.ctypes.data)
    return to.tobytes()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_bytes_and_descriptors(shard: Shard) -> None:
    before = descriptors()
    reads = small.SmallReads()
    with open(shard.absolute, "rb") as file:
        content = file.read()
    assert read(reads, shard, 3, 4000) == content[3:4003]
    assert read(reads, shard, 0, 1) == content[:1]
    assert descriptors() == before + 1
    reads.close()
    assert descriptors() == before


def test_short_reads_go_on(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    pread, calls = abi.pread, []

    def slow(descriptor: int, address: int, nbytes: int, offset: int) -> int:
        calls.append(offset)
        if len(calls) % 3 == 2:
            raise InterruptedError
        return pread(descriptor, address, min(nbytes, 100), offset)

    monkeypatch.setattr(abi, "pread", slow)
    with open(shard.absolute, "rb") as file:
        assert read(small.SmallReads(), shard, 0, 450) == file.read(450)
    assert len(calls) == 7


def test_the_end_of_the_file(shard: Shard) -> None:
    reads = small.SmallReads()
    read(reads, shard, 0, 1)
    os.truncate(shard.absolute, 1000)
    with pytest.raises(TruncatedError, match=r"wanted 500 bytes at offset 900.*found 100"):
        read(reads, shard, 900, 500)


def test_replaced_gone_and_failing(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = small.SmallReads()
    read(reads, shard, 0, 1)

    def fails(*_: int) -> int:
        raise OSError(5, "no")

    monkeypatch.setattr(abi, "pread", fails)
    with pytest.raises(ReadError, match="Input/output error"):
        read(reads, shard, 0, 1)
    os.truncate(shard.absolute, 5)
    with pytest.raises(TruncatedError, match=f"wanted {shard.nbytes} bytes at offset 0, found 5"):
        read(small.SmallReads(), shard, 0, 1)
    os.truncate(shard.absolute, shard.nbytes + 1)
    grown = f"it was {shard.nbytes} bytes long, now {shard.nbytes + 1}"
    with pytest.raises(FileError, match=f"replaced or changed.*{grown}"):
        read(small.SmallReads(), shard, 0, 1)
    os.unlink(shard.absolute)
    os.mkfifo(shard.absolute)
    with pytest.raises(FileError, match="replaced or changed"):
        read(small.SmallReads(), shard, 0, 1)
    os.unlink(shard.absolute)
    with pytest.raises(CheckpointNotFoundError, match="gone"):
        read(small.SmallReads(), shard, 0, 1)


def test_closing_waits_for_no_reader_and_takes_no_number_from_it(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, go = threading.Event(), threading.Event()
    pread, alive = abi.pread, []

    def held(descriptor: int, address: int, nbytes: int, offset: int) -> int:
        inside.set()
        go.wait(10)
        alive.append(os.path.exists(f"/proc/self/fd/{descriptor}"))
        return pread(descriptor, address, nbytes, offset)

    monkeypatch.setattr(abi, "pread", held)
    reads = small.SmallReads()
    thread = threading.Thread(target=read, args=(reads, shard, 0, 10))
    thread.start()
    assert inside.wait(10)
    reads.close()
    go.set()
    thread.join(10)
    assert alive == [True]
