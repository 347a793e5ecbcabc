"""Files for tests on a device."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.checkpoints import Row, Written, random_checkpoint, random_row, write_safetensors

MIB = 1 << 20


@pytest.fixture
def checkpoint(tmp_path: Path) -> Written:
    """Every dtype, odd shapes, several files."""
    return random_checkpoint(tmp_path / "checkpoint", shards=3, tensors=60, seed=5, elements=60_000)


@pytest.fixture
def rows() -> dict[str, Row]:
    """24 tensors of 1 MiB."""
    return {f"t{k}": random_row("U8", [MIB], k) for k in range(24)}


@pytest.fixture
def file(tmp_path: Path, rows: dict[str, Row]) -> Path:
    """All of ``rows``."""
    return write_safetensors(tmp_path / "big.safetensors", rows)
