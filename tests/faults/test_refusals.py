"""Machines that refuse a way of reading: filters on system calls, in a process of its own each time."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from support import child, loads, page_cache, seccomp
from support.checkpoints import random_row, write_safetensors
from tensorlift.engine import abi

pytestmark = pytest.mark.skipif(
    seccomp.supported() is not None, reason=f"no filters here: {seccomp.supported()}"
)

BUFFERED, DIRECT, URING, MMAP = "PREAD_BUFFERED", "PREAD_DIRECT", "URING_DIRECT", "MMAP"


class Case:
    """A file, its digest, and loads of it under filters."""

    def __init__(self, folder: Path) -> None:
        rows = {f"t{k}": random_row("U8", [400_000 + 1111 * k], k) for k in range(12)}
        self.path = write_safetensors(folder / "model.safetensors", rows)
        self.small = write_safetensors(folder / "small.safetensors", {"x": random_row("F32", [3])})
        self.nbytes = sum(len(raw) for _, _, raw in rows.values())
        self.digest = loads.digest(load_file(str(self.path)))

    def load(self, rules: list[str], cold: bool = False, **options: Any) -> dict[str, Any]:
        """Loads under a filter; the bytes must be right."""
        if cold:
            kind = page_cache.file_system(self.path.parent)
            if kind not in page_cache.ON_DISK:
                pytest.skip(f"the test's folder is on {kind}, whose cache cannot be dropped")
            page_cache.drop(self.path)
        answer = child.call(loads.filtered_load, str(self.path), str(self.small), rules, options)
        assert answer["digest"] == self.digest
        assert sum(answer["stats"]["readers"].values()) == self.nbytes
        return answer

    def refused(self, rules: list[str], **options: Any) -> dict[str, Any]:
        """A load that ends with an error of the project."""
        answer = child.caught(loads.filtered_load, str(self.path), str(self.small), rules, options)
        assert child.ERROR in answer, answer["stats"]
        return answer


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


@pytest.mark.parametrize("cold", [False, True])
def test_pread_needs_neither_rings_nor_maps(case: Case, cold: bool) -> None:
    answer = case.load(["NO_URING", "NO_FILE_MAP", "NO_VM_READ"], cold, backend="PREAD")
    assert set(answer["stats"]["readers"]) <= {BUFFERED, DIRECT}
    assert answer["stats"]["fallbacks"] == []
    if cold:
        assert answer["stats"]["readers"][DIRECT] > case.nbytes * 0.7


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize(
    ("backend", "rules", "reader"),
    [
        ("URING", ["NO_AIO", "NO_PREAD", "NO_VM_READ"], URING),
        ("URING_BUFFERED", ["NO_AIO", "NO_PREAD", "NO_VM_READ", "NO_DIRECT_OPEN"], "URING_BUFFERED"),
        ("AIO", ["NO_URING", "NO_PREAD", "NO_VM_READ"], "AIO_DIRECT"),
        ("AIO_BUFFERED", ["NO_URING", "NO_PREAD", "NO_VM_READ", "NO_DIRECT_OPEN"], "AIO_BUFFERED"),
        ("BUFFERED", ["NO_URING", "NO_AIO", "NO_VM_READ", "NO_FILE_MAP", "NO_DIRECT_OPEN"], BUFFERED),
    ],
)
def test_a_reader_needs_the_calls_of_no_other(
    case: Case, backend: str, rules: list[str], reader: str, cold: bool
) -> None:
    reason = abi.library().backend_probe(backend, str(case.path))
    if reason is not None:
        pytest.skip(f"this machine refuses {backend}: {reason}")
    answer = case.load(rules, cold, backend=backend)
    assert answer["stats"]["readers"] == {reader: case.nbytes}
    assert answer["stats"]["fallbacks"] == []


@pytest.mark.parametrize("cold", [False, True])
def test_mmap_needs_neither_pread_nor_rings(case: Case, cold: bool) -> None:
    answer = case.load(["NO_PREAD", "NO_URING", "NO_DIRECT_OPEN"], cold, backend="MMAP")
    assert answer["stats"]["readers"] == {MMAP: case.nbytes}
    assert answer["stats"]["fallbacks"] == []


def test_auto_without_rings_reads_directly_with_threads(case: Case) -> None:
    answer = case.load(["NO_URING"], cold=True)
    readers = answer["stats"]["readers"]
    assert set(readers) <= {BUFFERED, DIRECT}
    assert readers[DIRECT] > case.nbytes * 0.7
    told(answer, "io_uring", "Operation not permitted")


def test_auto_without_direct_reads_buffers(case: Case) -> None:
    answer = case.load(["NO_DIRECT_OPEN"], cold=True)
    assert answer["stats"]["readers"] == {BUFFERED: case.nbytes}
    told(answer, "direct I/O", "Invalid argument")


def test_auto_on_a_warm_file_needs_no_ring_and_says_nothing(case: Case) -> None:
    case.path.read_bytes()
    answer = case.load(["NO_URING"])
    assert answer["stats"]["readers"] == {BUFFERED: case.nbytes}
    assert answer["stats"]["fallbacks"] == answer["log"] == []


def test_without_cachestat_mincore_tells(case: Case) -> None:
    answer = case.load(["NO_CACHESTAT"], cold=True)
    assert answer["stats"]["residency"] == {"mincore": 1}
    assert answer["stats"]["readers"].get(BUFFERED, 0) < case.nbytes * 0.2


def test_without_cachestat_and_mincore_all_is_buffered(case: Case) -> None:
    answer = case.load(["NO_CACHESTAT", "NO_MINCORE"], cold=True)
    assert answer["stats"]["residency"] == {"unknown": 1}
    assert answer["stats"]["readers"] == {BUFFERED: case.nbytes}
    told(answer, "cached")


@pytest.mark.parametrize(
    ("backend", "rules", "words"),
    [
        ("URING", ["NO_URING"], ["URING", "Operation not permitted"]),
        ("URING", ["NO_DIRECT_OPEN"], ["URING", "Invalid argument"]),
        ("MMAP", ["NO_FILE_MAP"], ["MMAP", "No such device"]),
        ("MMAP", ["NO_VM_READ"], ["MMAP", "Operation not permitted"]),
        ("PREAD", ["NO_PREAD"], ["PREAD", "Operation not permitted"]),
        (
            ["URING", "MMAP"],
            ["NO_URING", "NO_FILE_MAP"],
            ["URING", "MMAP", "not permitted", "No such device"],
        ),
    ],
)
def test_a_named_back_end_that_is_refused_is_an_error(
    case: Case, backend: str | list[str], rules: list[str], words: list[str]
) -> None:
    answer = case.refused(rules, backend=backend)
    assert answer[child.ERROR] == "BackendError", answer
    assert case.path.name in answer["message"]
    for word in words:
        assert word in answer["message"]


RINGS = [
    *(
        (name, f"io_uring_setup={why}")
        for name in ("URING", "URING_BUFFERED")
        for why in ("ENOMEM", "ENOSYS")
    ),
    *((name, f"io_setup={why}") for name in ("AIO", "AIO_BUFFERED") for why in ("EPERM", "ENOSYS", "EAGAIN")),
    # The set-up is allowed, its use is not.
    *((name, f"io_uring_enter={why}") for name in ("URING", "URING_BUFFERED") for why in ("EPERM", "EAGAIN")),
    *(
        (name, f"io_submit={why}")
        for name in ("AIO", "AIO_BUFFERED")
        for why in ("EPERM", "EAGAIN", "EINVAL")
    ),
    *((name, "io_getevents=EPERM") for name in ("AIO", "AIO_BUFFERED")),
]


@pytest.mark.parametrize(("backend", "rule"), RINGS)
def test_rings_that_are_refused_at_any_moment(case: Case, backend: str, rule: str) -> None:
    reason = os.strerror(getattr(errno, rule.partition("=")[2]))
    answer = case.refused([rule], backend=backend)
    assert answer[child.ERROR] == "BackendError", answer
    assert backend in answer["message"]
    assert reason in answer["message"]
    answer = case.load([rule], backend=[backend, "MMAP"])
    assert answer["stats"]["readers"][MMAP] == case.nbytes
    told(answer, backend, reason)


@pytest.mark.parametrize(
    ("backend", "rules", "reader"),
    [
        (["URING", "MMAP"], ["NO_URING"], MMAP),
        (["AIO", "URING_BUFFERED"], ["NO_DIRECT_OPEN"], "URING_BUFFERED"),
        (["AIO_BUFFERED", "BUFFERED"], ["NO_AIO"], BUFFERED),
        (["MMAP", "PREAD"], ["NO_FILE_MAP"], BUFFERED),
        (["MMAP", "AUTO"], ["NO_VM_READ"], BUFFERED),
    ],
)
def test_an_ordered_list_goes_on_to_the_next(
    case: Case, backend: list[str], rules: list[str], reader: str
) -> None:
    case.path.read_bytes()
    answer = case.load(rules, backend=backend)
    assert answer["stats"]["readers"] == {reader: case.nbytes}
    told(answer, backend[0])


def told(answer: dict[str, Any], *words: str) -> None:
    """A fallback is in the statistics and once in the log."""
    fallbacks = answer["stats"]["fallbacks"]
    assert len(fallbacks) == 1, fallbacks
    assert len(answer["log"]) == 1, answer["log"]
    for text in (fallbacks[0], answer["log"][0]):
        for word in words:
            assert word in text
