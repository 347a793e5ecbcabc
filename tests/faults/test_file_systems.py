"""Network and stacked file systems, as they can be made here: right bytes, or an error with its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from support import child, file_systems, loads, page_cache, seccomp
from support.checkpoints import random_row, write_safetensors
from tensorlift import sources
from tensorlift.engine import abi
from tensorlift.engine.engine import Engine
from tensorlift.engine.sizing import EngineSize
from tensorlift.options import HOST_BACKENDS
from tensorlift.plan.pieces import new_pieces

MIB = 1 << 20
NBYTES = 12 * MIB + 12 * 4321
DIRECT_PATHS = {"PREAD": "PREAD_DIRECT", "URING": "URING_DIRECT", "AIO": "AIO_DIRECT"}
BUFFERED_PATHS = {
    "BUFFERED": "PREAD_BUFFERED",
    "URING_BUFFERED": "URING_BUFFERED",
    "AIO_BUFFERED": "AIO_BUFFERED",
    "MMAP": "MMAP",
}

# The server of the file system is compiled first.
pytestmark = pytest.mark.timeout(600)


class Case:
    """A file in a folder of its own, and its digest."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.point, self.name = folder / "data", folder / "mounted", "model.safetensors"
        rows = {f"t{k}": random_row("U8", [MIB + 4321], k) for k in range(12)}
        path = write_safetensors(self.folder / self.name, rows)
        self.digest = loads.digest(load_file(str(path)))

    def mirror(self, **options: object) -> Any:
        return file_systems.mirror(self.folder, self.point, **options)

    def load(self, folder: Path, **options: Any) -> dict[str, Any]:
        """Loads in a child; the bytes must be right and come from the file once each."""
        answer = child.call(plain_load, str(folder / self.name), options)
        assert answer["digest"] == self.digest
        assert sum(answer["stats"]["readers"].values()) == NBYTES
        return dict(answer["stats"])


def plain_load(path: str, options: dict[str, Any]) -> dict[str, Any]:
    from tensorlift import loading

    state = loading.load(path, **options)
    return {"digest": loads.digest(state), "stats": state.stats.to_dict()}


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def usable(backend: str, path: Path) -> str:
    reason = abi.library().backend_probe(backend, str(path))
    if reason is not None:
        pytest.skip(f"{backend} cannot be used here: {reason}")
    return backend


@pytest.mark.parametrize("direct", ["open", "read", "late"])
def test_direct_reads_that_are_refused_lead_to_buffered_ones(case: Case, direct: str) -> None:
    with case.mirror(direct=direct) as mounted:
        stats = case.load(mounted.folder)
        assert stats["readers"] == {"PREAD_BUFFERED": NBYTES}
        assert any("direct" in text and "Invalid argument" in text for text in stats["fallbacks"])


@pytest.mark.parametrize("backend", ["URING", "AIO"])
@pytest.mark.parametrize("direct", ["open", "read", "late"])
def test_a_direct_reader_that_is_refused_at_the_read(case: Case, direct: str, backend: str) -> None:
    usable(backend, case.folder / case.name)
    with case.mirror(direct=direct) as mounted:
        answer = child.caught(plain_load, str(mounted.folder / case.name), {"backend": backend})
        assert answer[child.ERROR] == "BackendError", answer
        assert backend in answer["message"]
        assert "Invalid argument" in answer["message"]
        stats = case.load(mounted.folder, backend=[backend, "BUFFERED"])
        assert stats["readers"]["PREAD_BUFFERED"] > NBYTES // 2
        assert len(stats["fallbacks"]) == 1


@pytest.mark.parametrize("backend", DIRECT_PATHS)
@pytest.mark.parametrize("block", [8192, 65536])
def test_the_block_of_direct_reads_is_found(case: Case, backend: str, block: int) -> None:
    usable(backend, case.folder / case.name)
    with case.mirror(block=block) as mounted:
        stats = case.load(mounted.folder, backend=backend)
        assert stats["readers"][DIRECT_PATHS[backend]] > NBYTES * 0.9
        assert stats["fallbacks"] == []


def test_a_block_that_is_too_large_is_no_way_of_reading(case: Case) -> None:
    with case.mirror(block=131072) as mounted:
        assert case.load(mounted.folder)["readers"] == {"PREAD_BUFFERED": NBYTES}


@pytest.mark.parametrize("backend", ["AUTO", "PREAD", "BUFFERED", "URING", "URING_BUFFERED"])
def test_slow_storage_gets_many_large_reads_at_once(case: Case, backend: str) -> None:
    usable(backend, case.folder / case.name)
    with case.mirror(delay_us=20_000) as mounted:
        usable(backend, mounted.folder / case.name)
        mounted.counts()
        stats = case.load(mounted.folder, backend=backend, threads=1, io_depth=8, chunk_size="256KiB")
        counts = mounted.counts()
        assert counts["most_at_once"] >= 4, counts
        assert counts["bytes_of_large_reads"] >= 0.9 * counts["bytes"], counts
        assert counts["bytes"] <= 1.02 * NBYTES + MIB, counts
        assert stats["threads"] <= 1 + 8


def test_what_is_cached_is_not_read_again(case: Case) -> None:
    with case.mirror(delay_us=1000) as mounted:
        case.load(mounted.folder, backend="BUFFERED")
        mounted.counts()

        def reads() -> tuple[int, int]:
            stats = case.load(mounted.folder, backend="BUFFERED", threads=1, io_depth=16)
            return int(mounted.counts()["reads"]), stats["threads"]

        # Where memory is short the kernel lets go of pages by itself, and threads wait for those.
        assert (0, 1) in (reads() for _ in range(3))


def read_all(path: str, size: dict[str, Any]) -> dict[str, Any]:
    """In a child that is not told what is cached: reads a whole file into memory that has its pages."""
    shard = sources.read_headers(sources.find(path)).shards[0]
    memory = np.full(shard.nbytes, 1, np.uint8)
    for name in ("NO_CACHESTAT", "NO_MINCORE"):
        seccomp.install(seccomp.named(name))
    with Engine(EngineSize(**size)) as engine:
        pieces = new_pieces([engine.add_file(shard)], [0], [shard.nbytes], [memory.ctypes.data])
        engine.wait(engine.submit(pieces))
        residency = bytes(engine.file_info(0).residency).decode()
        return {"threads": engine.stats().threads, "residency": residency}


def test_a_cache_that_is_not_told_gets_no_threads_for_waiting(case: Case) -> None:
    if seccomp.supported() is not None:
        pytest.skip(f"no filters here: {seccomp.supported()}")
    sizes = {"chunk_size": 1 << 16, "slot_size": 1 << 16, "pinned_bytes": 1 << 17, "threads": 2}
    sizes |= {"io_depth": 32, "backends": ["BUFFERED"]}
    (case.folder / case.name).read_bytes()
    warm = child.call(read_all, str(case.folder / case.name), sizes)
    assert warm["residency"] == "unknown"
    assert warm["threads"] <= 2 + 2
    with case.mirror(delay_us=5000) as mounted:
        slow = child.call(read_all, str(mounted.folder / case.name), sizes)
    assert slow["residency"] == "unknown"
    assert slow["threads"] > 2 + 8


@pytest.mark.parametrize("backend", HOST_BACKENDS)
def test_a_read_that_fails_names_its_place(case: Case, backend: str) -> None:
    usable(backend, case.folder / case.name)
    if backend == "MMAP":
        pytest.skip("the kernel answers EFAULT for a page that cannot be brought, and the reason is lost")
    with case.mirror(fail_at=7 * MIB) as mounted:
        answer = child.caught(plain_load, str(mounted.folder / case.name), {"backend": backend})
        assert answer[child.ERROR] == "ReadError", answer
        assert "Input/output error" in answer["message"]
        assert case.name in answer["message"]
        assert "tensor 't6'" in answer["message"]


@pytest.mark.parametrize("backend", ["AUTO", *DIRECT_PATHS, *BUFFERED_PATHS])
def test_short_and_interrupted_reads_go_on(case: Case, backend: str) -> None:
    usable(backend, case.folder / case.name)
    if backend == "MMAP":
        pytest.skip("a file system without a page cache has no shared maps")
    with case.mirror(uncached=1, short=100_000, interrupt=5) as mounted:
        case.load(mounted.folder, backend=backend)
        assert mounted.counts()["reads"] > NBYTES / 100_000


@pytest.mark.parametrize("backend", ["AUTO", "PREAD", "AIO", "BUFFERED", "URING_BUFFERED", "AIO_BUFFERED"])
def test_interrupted_without_end_is_an_error(case: Case, backend: str) -> None:
    usable(backend, case.folder / case.name)
    # The header's read is not the one.
    with case.mirror(uncached=1, interrupted_from=MIB) as mounted:
        answer = child.caught(plain_load, str(mounted.folder / case.name), {"backend": backend})
        assert answer[child.ERROR] == "ReadError", answer
        assert "Interrupted system call" in answer["message"]


@pytest.mark.parametrize("backend", HOST_BACKENDS)
@pytest.mark.parametrize("cold", [False, True])
def test_overlay(tmp_path: Path, backend: str, cold: bool) -> None:
    with file_systems.overlay(tmp_path) as (lower, upper, merged):
        for layer, name in ((lower, "below"), (upper, "above")):
            case = Case(layer / name)
            seen = merged / name / "data"
            usable(backend, seen / case.name)
            if cold:
                page_cache.drop(seen / case.name)
                page_cache.drop(case.folder / case.name)
            stats = case.load(seen, backend=backend)
            if backend in BUFFERED_PATHS:
                assert stats["readers"] == {BUFFERED_PATHS[backend]: NBYTES}
            elif cold and page_cache.file_system(tmp_path) in page_cache.ON_DISK:
                direct = sum(stats["readers"].get(path, 0) for path in DIRECT_PATHS.values())
                assert direct > NBYTES * 0.9, stats


@pytest.mark.parametrize("backend", HOST_BACKENDS)
def test_bindfs(case: Case, backend: str) -> None:
    with file_systems.bindfs(case.folder, case.point) as folder:
        usable(backend, folder / case.name)
        for _ in ("cold", "warm"):
            case.load(folder, backend=backend)
