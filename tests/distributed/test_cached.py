"""What share of a checkpoint is in the page cache, as exchange="auto" asks before it decides."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from support import page_cache
from support.checkpoints import random_row, write_safetensors
from tensorlift import sources
from tensorlift.distributed.policy import cached
from tensorlift.engine import abi

MIB = 1 << 20


def share(*files: Path) -> float:
    return cached(sources.read_headers(sources.find([str(file) for file in files])))


def test_cold_warm_and_half(tmp_path: Path) -> None:
    if page_cache.file_system(tmp_path) not in page_cache.ON_DISK:
        pytest.skip(f"what is cached can be told on {sorted(page_cache.ON_DISK)}")
    files = [tmp_path / f"{k}.safetensors" for k in range(2)]
    for k, file in enumerate(files):
        write_safetensors(file, {f"t{k}": random_row("U8", [64 * MIB], k)})
    assert share(*files) == 1
    page_cache.drop(files[1])
    if page_cache.resident(files[1]).mean() > 0.01:
        pytest.skip("the kernel does not let the file's cache be dropped here")
    assert abs(share(*files) - 0.5) < 0.02
    page_cache.drop(files[0])
    assert share(*files) < 0.02
    with open(files[0], "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        file.read(32 * MIB)
    assert abs(share(files[0]) - 0.5) < 0.1


def test_memory_counts_as_cached_and_what_is_not_there_is_unknown(tmp_path: Path) -> None:
    shm = Path("/dev/shm")
    if shm.is_dir() and page_cache.file_system(shm) == "tmpfs":
        with tempfile.TemporaryDirectory(dir=shm) as folder:
            assert share(write_safetensors(Path(folder) / "a.safetensors", {"a": random_row("U8", [5])})) == 1
    for nothing in (tmp_path / "gone", tmp_path):
        assert abi.library().cached_share(os.fsencode(nothing)) == -1
    (tmp_path / "empty").touch()
    assert abi.library().cached_share(os.fsencode(tmp_path / "empty")) == -1
