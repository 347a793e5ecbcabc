"""What is cached is read from the cache, what is not comes directly, and nothing is read twice."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import child, page_cache
from support.checkpoints import random_row, write_safetensors

MIB = 1 << 20
SIZE = 48 * MIB


@pytest.fixture
def path(tmp_path: Path) -> Path:
    kind = page_cache.file_system(tmp_path)
    if kind not in page_cache.ON_DISK:
        pytest.skip(f"the test's folder is on {kind}, not on one of {sorted(page_cache.ON_DISK)}")
    rows = {f"t{k}": random_row("U8", [SIZE // 16], k) for k in range(16)}
    made = write_safetensors(tmp_path / "model.safetensors", rows)
    page_cache.drop(made)
    if page_cache.resident(made).mean() > 0.01:
        pytest.skip("the kernel does not let the file's cache be dropped here")
    return made


def read(name: str, backend: str) -> dict[str, Any]:
    """In a child: opens, asks mincore, reads all; bytes from storage are those of this process alone."""
    from support.loads import digest
    from tensorlift import loading

    path = Path(name)
    before = page_cache.disk_bytes_read()
    with loading.open(path, backend=backend) as weights:
        end = path.stat().st_size
        missing = page_cache.missing_bytes(path, end - sum(weights._checkpoint.sizes.tolist()), end)
        tensors = dict(weights)
        stats = weights.stats
    read_bytes = page_cache.disk_bytes_read() - before
    return {"missing": missing, "disk": read_bytes, "digest": digest(tensors), "stats": stats.to_dict()}


def halves() -> list[tuple[int, int]]:
    return [(at, at + MIB) for at in range(0, SIZE // 2, MIB)]


def holes() -> list[tuple[int, int]]:
    chosen = random.Random(5).sample(range(SIZE // 65536), SIZE // 65536 // 2)
    return [(65536 * k, 65536 * (k + 1)) for k in chosen]


@pytest.mark.parametrize("backend", ["AUTO", "PREAD"])
@pytest.mark.parametrize("cached", [list, halves, holes])
def test_bytes_by_path_agree_with_mincore(path: Path, backend: str, cached: Any) -> None:
    page_cache.bring(path, cached())
    cold = page_cache.missing_bytes(path, 0, path.stat().st_size)
    answer = child.call(read, str(path), backend)
    readers = answer["stats"]["readers"]
    # A page or two of the cache may go between the look and the read, where memory is short.
    assert readers.get("PREAD_BUFFERED", 0) == pytest.approx(SIZE - answer["missing"], abs=4 * 4096)
    assert sum(readers.values()) == SIZE
    # One page of slack for each piece that does not begin at a page, and what reading the header reads ahead.
    assert answer["disk"] <= 1.02 * cold + 256 * 1024
    assert answer["stats"]["direct_bytes"] <= 1.02 * answer["missing"]
    assert answer["digest"] == child.call(read, str(path), "MMAP")["digest"]


def test_direct_reads_leave_the_cache_as_it_was(path: Path) -> None:
    answer = child.call(read, str(path), "AUTO")
    assert answer["missing"] > SIZE * 0.98
    assert page_cache.resident(path).mean() < 0.02


def test_a_file_in_memory_is_buffered() -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir() or page_cache.file_system(shm) != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs here")
    with tempfile.TemporaryDirectory(dir=shm) as folder:
        rows = {"t": random_row("U8", [3 * MIB])}
        path = write_safetensors(Path(folder) / "model.safetensors", rows)
        for backend in ("AUTO", "PREAD"):
            answer = child.call(read, str(path), backend)
            assert answer["stats"]["readers"] == {"PREAD_BUFFERED": 3 * MIB}
            assert answer["stats"]["residency"] == {"memory": 1}
            assert answer["stats"]["fallbacks"] == []


def read_as_nobody(name: str, memlock: int) -> dict[str, Any]:
    """In a child that becomes an ordinary user without rights to the file but reading."""
    import os
    import resource

    from support.loads import digest
    from tensorlift import loading
    from tensorlift.engine import abi
    from tensorlift.errors import MachineError

    abi.library()
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (memlock, memlock))
    os.setresgid(65534, 65534, 65534)
    os.setgroups([]) if os.geteuid() == 0 else None
    os.setresuid(65534, 65534, 65534)
    state = loading.load(name)
    uring: dict[str, Any]
    try:
        uring = {"digest": digest(loading.load(name, backend="URING"))}
    except MachineError as error:
        uring = {"error": type(error).__name__, "message": str(error)}
    return {"digest": digest(state), "stats": state.stats.to_dict(), "uring": uring}


@pytest.fixture
def public_path() -> Iterator[Path]:
    import os

    if os.geteuid() != 0:
        pytest.skip("only root can make a file of somebody else")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        kind = page_cache.file_system(Path(folder))
        if kind not in page_cache.ON_DISK:
            pytest.skip(f"temporary files are on {kind}, not on one of {sorted(page_cache.ON_DISK)}")
        yield write_safetensors(Path(folder) / "model.safetensors", {"t": random_row("U8", [4 * MIB])})


def test_somebody_elses_file_is_buffered_and_rings_need_no_locked_memory(public_path: Path) -> None:
    # cachestat answers EPERM and mincore says that all is there: neither may be believed.
    page_cache.drop(public_path)
    answer = child.call(read_as_nobody, str(public_path), 0)
    assert answer["stats"]["residency"] == {"unknown": 1}
    assert answer["stats"]["readers"] == {"PREAD_BUFFERED": 4 * MIB}
    assert len(answer["stats"]["fallbacks"]) == 1
    uring = answer["uring"]
    assert uring.get("digest") == answer["digest"] or uring.get("error") == "BackendError", uring
