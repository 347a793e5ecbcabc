"""The real libcufile, with nvidia-fs or in compatibility mode: bytes, and descriptors 0 to 2 untouched."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from support import device
from support.checkpoints import Row
from support.device import NO_DEVICE, SMALL

if not torch.cuda.is_available():
    pytest.skip(NO_DEVICE, allow_module_level=True)


def streams() -> list[tuple[int, int]]:
    """What descriptors 0 to 2 refer to."""
    return [(found.st_dev, found.st_ino) for found in map(os.fstat, range(3))]


def load(file: str, backend: list[str]) -> dict[str, Any]:
    from tensorlift import loading

    before = streams()
    state = loading.load(file, "cuda", backend=backend, **SMALL)
    sums = {name: tensor.cpu().long().sum().item() for name, tensor in state.items()}
    stats = state.stats
    return {
        "sums": sums,
        "readers": dict(stats.readers),
        "fallbacks": list(stats.fallbacks),
        "streams_kept": streams() == before,
    }


def test_bytes_come_by_cufile_or_it_says_why_not(file: Path, rows: dict[str, Row]) -> None:
    found = device.call(load, str(file), ["CUFILE", "AUTO"])
    print(found["readers"], found["fallbacks"])
    assert found["sums"] == {name: sum(data) for name, (_, _, data) in rows.items()}
    assert found["streams_kept"]
    assert sum(found["readers"].values()) == sum(len(data) for _, _, data in rows.values())
    if "CUFILE" not in found["readers"]:
        assert any("CUFILE" in text for text in found["fallbacks"])
