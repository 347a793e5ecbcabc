"""Files for tests over the stand-in driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.checkpoints import Written, random_checkpoint, random_row, write_safetensors

MIB = 1 << 20


@pytest.fixture
def checkpoint(tmp_path: Path) -> Written:
    """Every dtype, odd shapes, several files."""
    return random_checkpoint(tmp_path / "checkpoint", shards=3, tensors=25, seed=1, elements=60_000)


@pytest.fixture
def big(tmp_path: Path) -> Path:
    """16 tensors of 1 MiB: one arena each where an arena has 1 MiB."""
    rows = {f"t{k}": random_row("U8", [MIB], k) for k in range(16)}
    return write_safetensors(tmp_path / "big.safetensors", rows)
