"""Slices of columns where reading goes wrong in the middle: refused, short, interrupted, broken."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from support import child, file_systems, loads, seccomp
from support.checkpoints import Row, random_row, write_safetensors
from support.parts import Part, expected
from tensorlift.engine import abi
from tensorlift.options import HOST_BACKENDS

MIB = 1 << 20
NAME = "model.safetensors"
# Columns with gaps that are read (of 100 bytes) and with gaps that are not (of 9 KB), and rows.
ROWS: dict[str, Row] = {
    "close": random_row("U8", [2000, 1100], 1),
    "apart": random_row("U8", [300, 10_000], 2),
    "rows": random_row("U8", [1000, 1000], 3),
}
PARTS: dict[str, Part] = {"close": (1, 50, 1050), "apart": (1, 3000, 4000), "rows": (0, 10, 900)}
NBYTES = sum(len(expected(ROWS[name], part)) for name, part in PARTS.items())
PACKED = 256 << 10
"""Bytes of one read of rows that lie close together."""

# The server of the file system is compiled first.
pytestmark = pytest.mark.timeout(600)


def sliced_load(path: str, options: dict[str, Any], refused: list[int]) -> dict[str, Any]:
    """In a child: buffered reads of these sizes are refused, whatever the file."""
    from tensorlift import loading

    if refused:
        tests = [(seccomp.Test(2, "equal", size),) for size in refused]
        seccomp.install([seccomp.Rule("pread64", errno.EINVAL, test) for test in tests])
    state = loading.load(path, slices=PARTS, **options)
    return {"digest": loads.digest(state), "stats": state.stats.to_dict()}


def right_digest() -> str:
    made = {name: bytearray(expected(ROWS[name], part)) for name, part in PARTS.items()}
    return loads.digest({name: torch.frombuffer(raw, dtype=torch.uint8) for name, raw in made.items()})


class Case:
    def __init__(self, folder: Path) -> None:
        self.folder, self.point = folder / "data", folder / "mounted"
        self.path = write_safetensors(self.folder / NAME, ROWS)

    def mirror(self, **options: object) -> Any:
        return file_systems.mirror(self.folder, self.point, **options)

    def load(self, folder: Path, refused: tuple[int, ...] = (), **options: Any) -> dict[str, Any]:
        answer = child.call(sliced_load, str(folder / NAME), options, list(refused))
        assert answer["digest"] == right_digest()
        assert sum(answer["stats"]["readers"].values()) == NBYTES
        return dict(answer["stats"])


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def usable(backend: str, path: Path) -> None:
    reason = abi.library().backend_probe(backend, str(path))
    if reason is not None:
        pytest.skip(f"{backend} cannot be used here: {reason}")


@pytest.mark.skipif(seccomp.supported() is not None, reason=f"no filters here: {seccomp.supported()}")
@pytest.mark.parametrize("others", ["URING_BUFFERED", "AIO", "MMAP"])
@pytest.mark.parametrize("size", [PACKED, 1000])
def test_refused_in_the_middle(case: Case, size: int, others: str) -> None:
    usable(others, case.path)
    case.path.read_bytes()
    stats = case.load(case.folder, (size,), backend=["BUFFERED", others])
    assert stats["readers"].get("PREAD_BUFFERED", 0) < NBYTES
    assert len(stats["fallbacks"]) == 1
    assert "Invalid argument" in stats["fallbacks"][0]


@pytest.mark.parametrize("direct", ["read", "late"])
@pytest.mark.parametrize("backend", ["URING", "AIO"])
def test_direct_reads_that_are_refused(case: Case, direct: str, backend: str) -> None:
    usable(backend, case.path)
    with case.mirror(direct=direct) as mounted:
        stats = case.load(mounted.folder, backend=[backend, "BUFFERED"])
        assert stats["readers"]["PREAD_BUFFERED"] > 0
        assert len(stats["fallbacks"]) == 1


@pytest.mark.parametrize("backend", ["PREAD", "URING", "AIO"])
@pytest.mark.parametrize("block", [8192, 65536])
def test_larger_blocks(case: Case, backend: str, block: int) -> None:
    usable(backend, case.path)
    with case.mirror(block=block) as mounted:
        stats = case.load(mounted.folder, backend=backend)
        # Rows that may share a block are read together.
        assert stats["direct_bytes"] < 1.2 * case.path.stat().st_size


@pytest.mark.parametrize("backend", [name for name in HOST_BACKENDS if name != "MMAP"])
def test_short_and_interrupted_reads_go_on(case: Case, backend: str) -> None:
    usable(backend, case.path)
    with case.mirror(uncached=1, short=30_000, interrupt=5) as mounted:
        case.load(mounted.folder, backend=backend)


@pytest.mark.parametrize("backend", [name for name in HOST_BACKENDS if name != "MMAP"])
def test_a_read_that_fails_names_its_place(case: Case, backend: str) -> None:
    usable(backend, case.path)
    data = case.path.stat().st_size - sum(len(raw) for _, _, raw in ROWS.values())
    row = data + len(ROWS["close"][2]) + 200 * 10_000
    with case.mirror(fail_at=row + 3500) as mounted:
        answer = child.caught(sliced_load, str(mounted.folder / NAME), {"backend": backend}, [])
        assert answer[child.ERROR] == "ReadError", answer
        assert "Input/output error" in answer["message"]
        assert "tensor 'apart'" in answer["message"]


@pytest.mark.parametrize("backend", ["PREAD", "URING", "AIO"])
def test_what_lies_between_rows_is_not_asked_for(case: Case, backend: str) -> None:
    usable(backend, case.path)
    data = case.path.stat().st_size - sum(len(raw) for _, _, raw in ROWS.values())
    with case.mirror(fail_at=data + len(ROWS["close"][2]) + 200 * 10_000 + 8500) as mounted:
        case.load(mounted.folder, backend=backend)
