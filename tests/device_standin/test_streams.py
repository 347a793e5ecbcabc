"""Tensors that are used on other streams than the one they were made for."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tensorlift
from support import standin
from support.checkpoints import random_row, write_safetensors
from support.tensors import raw
from tensorlift import loading
from tensorlift.engine import abi
from tensorlift.errors import OutOfMemoryError
from tensorlift.tensors import memory

MIB = 1 << 20


@pytest.fixture(params=[abi.DEVICE_CUDA, abi.DEVICE_HIP])
def device(request: pytest.FixtureRequest) -> Iterator[standin.StandInMemory]:
    with standin.device(request.param) as made:
        yield made
        gc.collect()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    rows = {f"t{k}": random_row("U8", [MIB], k) for k in range(4)}
    return write_safetensors(tmp_path / "m.safetensors", rows)


class Side:
    """A stream whose copy of a tensor has not begun yet; a context manager."""

    def __init__(self, device: standin.StandInMemory, tensor: torch.Tensor) -> None:
        self._driver, self.stream = device.driver, device.driver.stream()
        self._gate = self._driver.hold(self.stream)
        self._copied = ctypes.create_string_buffer(tensor.nbytes)
        self._driver.copy(self.stream, ctypes.addressof(self._copied), tensor.data_ptr(), tensor.nbytes)

    def finish(self) -> bytes:
        """What the copy finds, now that it may begin."""
        self._driver.release(self._gate)
        self._driver.stream_sync(self.stream)
        self._driver.stream_free(self.stream)
        return self._copied.raw


@pytest.mark.parametrize("recorded", [True, False])
def test_memory_waits_for_a_recorded_stream(
    device: standin.StandInMemory, path: Path, recorded: bool
) -> None:
    state = loading.load(path, device="cuda", arena_size=MIB)
    tensor = state.pop("t0")
    expected = raw(tensor)
    side = Side(device, tensor)
    if recorded:
        assert abi.library().arena_record_stream(tensor.data_ptr() + 5, side.stream)
        assert abi.library().arena_record_stream(tensor.data_ptr(), side.stream)
    del tensor
    gc.collect()
    # Given back, the block is poisoned in the order of the consumer's stream.
    if not recorded:
        device.driver.stream_sync(device.consumer)
    assert (side.finish() == expected) == recorded


def test_another_stream_at_the_hand_out_is_recorded(device: standin.StandInMemory, path: Path) -> None:
    first = device.consumer
    with loading.open(path, device="cuda", arena_size=MIB, buffer_size=2 * MIB) as weights:
        tensors = iter(weights)
        next(tensors)
        # Their arenas were allocated when the first was asked for, on the first stream.
        device.consumer = device.driver.stream()
        _, tensor = next(tensors)
        device.driver.stream_sync(device.consumer)
        expected = raw(tensor)
        gate = device.driver.hold(device.consumer)
        copied = ctypes.create_string_buffer(MIB)
        device.driver.copy(device.consumer, ctypes.addressof(copied), tensor.data_ptr(), MIB)
        second, device.consumer = device.consumer, first
        del tensor
        gc.collect()
        device.driver.release(gate)
        device.driver.stream_sync(second)
        assert copied.raw == expected
    device.driver.stream_free(second)


def test_another_stream_amid_an_arena_waits_for_the_copies(
    device: standin.StandInMemory, tmp_path: Path
) -> None:
    driver, first = device.driver, device.consumer
    # Little enough that the ring holds all of it: nothing waits for a copy on the host.
    size = 100 << 10
    rows = {f"t{k}": random_row("U8", [size], k) for k in range(4)}
    taken = [ctypes.create_string_buffer(size) for _ in rows]
    streams = [first, driver.stream(), driver.stream()]
    device.waits_in_ready = False
    # All four lie in one arena, whose copies come behind what the first stream holds.
    gate = driver.hold(first)
    with loading.open(write_safetensors(tmp_path / "small.safetensors", rows), device="cuda") as weights:
        for number, (_, tensor) in enumerate(weights):
            driver.copy(device.consumer, ctypes.addressof(taken[number]), tensor.data_ptr(), size)
            del tensor
            device.consumer = streams[(number + 1) % len(streams)]
            if number == 2:
                driver.settle()  # what does not wait has run by now
                driver.release(gate)
    device.consumer = first
    for stream in streams:
        driver.stream_sync(stream)
    for stream in streams[1:]:
        driver.stream_free(stream)
    assert [copy.raw for copy in taken] == [data for _, _, data in rows.values()]


def test_a_failing_driver_waits_on_the_host(device: standin.StandInMemory, path: Path) -> None:
    state = loading.load(path, device="cuda", arena_size=MIB)
    tensor = state.pop("t0")
    expected = raw(tensor)
    side = device.driver.stream()
    copied = ctypes.create_string_buffer(MIB)
    device.driver.copy(side, ctypes.addressof(copied), tensor.data_ptr(), MIB)
    assert abi.library().arena_record_stream(tensor.data_ptr(), side)
    name = "cuEventCreate" if device.native_kind == abi.DEVICE_CUDA else "hipEventCreateWithFlags"
    device.driver.fail(name.encode(), 1, 2)
    del tensor
    gc.collect()
    device.driver.stream_sync(side)
    assert copied.raw == expected
    device.driver.stream_free(side)


def test_other_tensors_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[object] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: passed.append(stream))

    class Stream:
        cuda_stream = 7

    stream, tensor = Stream(), torch.zeros(3)
    assert tensorlift.record_stream is memory.record_stream
    tensorlift.record_stream(tensor, stream)  # type: ignore[arg-type]
    assert passed == [stream]


def test_a_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(tensorlift.RequestError, match="captured into a CUDA graph"):
        memory.check_no_capture()


def test_a_stream_that_cannot_be_kept_in_mind(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch, which does not know this memory, would take the call and do nothing.
    monkeypatch.setitem(abi.library().call, "tl_arena_record_stream", lambda *_: abi.Status.MEMORY)
    with pytest.raises(OutOfMemoryError, match="a stream could not be recorded"):
        abi.library().arena_record_stream(4096, 1)
