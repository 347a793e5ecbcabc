"""The trace of a load through slots: copies and waits for a slot, without a device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import standin
from support.checkpoints import random_row, write_safetensors
from tensorlift import loading
from tensorlift.engine import abi

MIB = 1 << 20
SLOT = 256 << 10


@pytest.fixture
def device() -> Iterator[standin.StandInMemory]:
    with standin.device(abi.DEVICE_CUDA) as made:
        yield made


def test_copies_and_waits_are_there(device: standin.StandInMemory, tmp_path: Path) -> None:
    device.driver.set_copy_delay_us(2000)
    file = write_safetensors(tmp_path / "a.safetensors", {"a": random_row("U8", [4 * MIB])})
    out = tmp_path / "out.json"
    # Two slots and late copies: readers have to wait for a slot.
    state = loading.load(
        file, "cuda:0", trace=out, chunk_size=64 << 10, slot_size=SLOT, pinned_bytes=2 * SLOT, threads=2
    )
    events: list[dict[str, Any]] = json.loads(out.read_text())["traceEvents"]
    copies = [event for event in events if event["name"] == "copy"]
    # Each slot goes with one copy, since the tensor is one piece; its begin may cut one more.
    assert len(copies) == state.stats.copies >= 4 * MIB // SLOT
    assert all(event["dur"] >= 2000 for event in copies)
    assert sum(event["args"]["bytes"] for event in copies) == 4 * MIB
    # The intervals of the statistics; an event ends a moment later than what is counted.
    waited = sum(event["dur"] for event in events if event["name"] == "wait_slot") / 1e6
    assert waited >= state.stats.slot_wait_seconds - 1e-6 > 0
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {tracks[event["tid"]].split(",")[0] for event in copies} == {"copies to the device"}
