"""Loads to a device that end at odd moments: nothing is left of them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from support import standin
from support.checkpoints import random_row, write_safetensors
from tensorlift import loading
from tensorlift.engine import abi
from tensorlift.errors import DriverError, RequestError
from tensorlift.tensors import running
from tensorlift.tensors.memory import Arena

MIB = 1 << 20


@pytest.fixture
def device() -> Iterator[standin.StandInMemory]:
    with standin.device() as made:
        yield made
        gc.collect()


def in_another_thread(close: Callable[[], None]) -> None:
    thread = threading.Thread(target=close)
    thread.start()
    thread.join()


@pytest.mark.parametrize("call", [in_another_thread, lambda close: close()], ids=["thread", "handler"])
def test_close_while_arenas_are_allocated(
    device: standin.StandInMemory,
    big: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: Callable[[Callable[[], None]], None],
) -> None:
    live = abi.library().arena_live()
    weights = loading.open(big, device="cuda", arena_size=MIB, buffer_size=3 * MIB)
    tensors = iter(weights)
    next(tensors)
    allocate = device.allocate

    def interrupted(sizes: Sequence[int]) -> list[Arena]:
        arenas = allocate(sizes)
        call(weights.close)
        return arenas

    monkeypatch.setattr(device, "allocate", interrupted)
    with pytest.raises(RequestError, match="closed"):
        list(tensors)
    assert abi.library().arena_live() == live
    assert device.allocated == 0


def test_an_iterator_that_is_dropped_before_its_first_step(
    device: standin.StandInMemory, big: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "_WORTH_WARMING", 1)
    weights = loading.open(big, device="cuda")
    tensors = iter(weights)
    assert device.driver.retained_contexts() == 1
    del tensors
    gc.collect()
    # The checkpoint is open still, but cannot be iterated over again.
    assert len(weights) == 16
    device.driver.assert_clean()


@pytest.mark.parametrize("name", ["cuStreamSynchronize", "cuEventSynchronize"])
@pytest.mark.parametrize("how", ["load", "open", "load_into"])
def test_copies_that_fail_after_they_were_issued(tmp_path: Path, name: str, how: str) -> None:
    path = write_safetensors(tmp_path / "small.safetensors", {"t": random_row("U8", [MIB])})
    live = abi.library().arena_live()
    with standin.device(cpu_too=True) as device:
        device.waits_in_ready = False
        # Copies count as landed when they are issued, and this is long before they are over.
        gate = device.driver.hold(device.consumer)
        opener = threading.Timer(0.2, device.driver.release, [gate])
        device.driver.fail(name.encode(), -1, 700)
        opener.start()
        with pytest.raises(DriverError, match="700"):
            run(how, path)
        opener.join()
        gc.collect()
        assert abi.library().arena_live() == live


def run(how: str, path: Path) -> None:
    if how == "load":
        loading.load(path, device="cuda")
    elif how == "open":
        for _, tensor in loading.open(path, device="cuda"):
            assert len(tensor) == MIB
            # Here: the stand-in's blocks are given back by Python, which must not run amid a raise.
            del tensor
    elif how == "load_into":
        loading.load_into({"t": torch.empty(MIB, dtype=torch.uint8)}, path)
