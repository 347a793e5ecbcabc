"""load_into on a device, with the stand-in: bytes through slots and copies, whatever comes late."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from support import standin
from support.checkpoints import Row, random_row, write_safetensors
from tensorlift import loading
from tensorlift.errors import RequestError, TensorliftError
from tensorlift.tensors import memory as memory_module

MIB = 1 << 20


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[standin.StandInMemory]:
    """Every tensor of the test lives on the stand-in, whose copies come late."""
    with standin.device() as memory:
        monkeypatch.setattr(memory_module, "for_device", lambda wanted: memory)
        memory.driver.set_copy_delay_us(2000)
        yield memory
        monkeypatch.undo()


@pytest.fixture
def rows() -> dict[str, Row]:
    return {f"t{k}": random_row("F32", [300, 1000 + k], k) for k in range(6)}


def wanted(row: Row) -> torch.Tensor:
    return torch.frombuffer(bytearray(row[2]), dtype=torch.float32).reshape(tuple(row[1]))


def same(one: torch.Tensor, other: torch.Tensor) -> None:
    # Any bytes are a float, and some are no number.
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("slot", ["64KiB", "1MiB", None])
def test_bytes_come_through_slots(
    device: standin.StandInMemory, rows: dict[str, Row], tmp_path: Path, slot: str | None
) -> None:
    into = {name: torch.zeros(tuple(row[1])) for name, row in rows.items()}
    path = write_safetensors(tmp_path / "m.safetensors", rows)
    stats = loading.load_into(into, path, slot_size=slot, chunk_size="64KiB").stats
    for name, row in rows.items():
        assert into[name].numpy().tobytes() == row[2], name
    assert stats.copies > 0
    assert 0 < stats.pinned_peak_bytes <= 24 * MIB
    assert device.allocated == 0


def test_conversions_and_overlaps(
    device: standin.StandInMemory, rows: dict[str, Row], tmp_path: Path
) -> None:
    whole = torch.zeros(300 * 1005)
    into = {
        "t0": torch.zeros(300, 1000, dtype=torch.float64),
        "t1": torch.zeros(1001, 300).T,
        "t2": torch.zeros(300, 1002),
        "t3": torch.zeros(300, 1003, dtype=torch.bfloat16),
        # The second covers all of the first, and comes later in the model.
        "t4": whole[: 300 * 1004].view(300, 1004),
        "t5": whole.view(300, 1005),
    }
    path = write_safetensors(tmp_path / "m.safetensors", rows)
    loading.load_into(into, path, arena_size="2MiB", chunk_size="64KiB")
    for name in ("t0", "t1", "t2", "t3"):
        same(into[name], wanted(rows[name]).to(into[name].dtype))
    same(into["t5"], wanted(rows["t5"]))
    assert device.allocated == 0


def test_a_copy_that_fails_leaves_nothing(
    device: standin.StandInMemory, rows: dict[str, Row], tmp_path: Path
) -> None:
    into = {name: torch.zeros(tuple(row[1])) for name, row in rows.items()}
    path = write_safetensors(tmp_path / "m.safetensors", rows)
    device.driver.fail(b"cuMemcpyHtoDAsync_v2", 2, 700)
    with pytest.raises(TensorliftError, match="700"):
        loading.load_into(into, path, slot_size="64KiB", chunk_size="64KiB")


def test_a_read_only_map_of_another_dtype_is_refused(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "m.safetensors", {"t": random_row("I8", [100_000])})
    (tmp_path / "there").write_bytes(bytes(100_000))
    array = np.memmap(tmp_path / "there", np.uint8, "r")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it should not be written to
        state = {"t": torch.from_numpy(array)}
    with pytest.raises(RequestError, match="the memory of 't' cannot be written"):
        loading.load_into(state, path)
