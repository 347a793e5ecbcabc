"""keep_pinned over the stand-in driver: one registration of the ring for several loads, until it is freed."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import tensorlift
from support import child, standin
from support.checkpoints import Written
from support.tensors import raw
from tensorlift import compat, loading
from tensorlift.engine import abi, report
from tensorlift.errors import DriverError, OptionError

KIB, MIB = 1 << 10, 1 << 20
KINDS = {"cuda": abi.DEVICE_CUDA, "hip": abi.DEVICE_HIP}
SMALL: dict[str, Any] = {
    "chunk_size": 64 * KIB, "slot_size": 256 * KIB, "pinned_bytes": MIB, "arena_size": MIB,
    "backend": "PREAD", "buffer_size": 3 * MIB,
}  # fmt: skip
SLOTS, STRIDE = 4, 256 * KIB + 4096
KEPT: dict[str, Any] = {**SMALL, "keep_pinned": True}


@pytest.fixture(params=KINDS)
def device(request: pytest.FixtureRequest) -> Iterator[standin.StandInMemory]:
    with standin.device(KINDS[request.param]) as made:
        try:
            yield made
        finally:
            # Before the driver forgets what is registered.
            tensorlift.release_pinned()


def registrations(device: standin.StandInMemory) -> int:
    cuda = device.native_kind == abi.DEVICE_CUDA
    return device.driver.counts()["cuMemHostRegister_v2" if cuda else "hipHostRegister"]


def assert_as_safetensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    expected = safetensors.torch.load_file(path)
    assert set(tensors) == set(expected)
    assert all(raw(tensors[name]) == raw(tensor) for name, tensor in expected.items())


def test_two_loads_with_it_register_each_slot_once(device: standin.StandInMemory, big: Path) -> None:
    device.driver.set_copy_delay_us(1000)
    first = loading.load(big, device="cuda:0", **KEPT)
    made = registrations(device)
    assert 0 < made <= SLOTS
    assert first.stats.pinned_reused_bytes == 0
    second = loading.load(big, device="cuda:0", **KEPT)
    assert registrations(device) <= SLOTS
    assert made * STRIDE <= second.stats.pinned_reused_bytes <= second.stats.pinned_peak_bytes
    assert second.stats.pinned_peak_bytes == device.driver.registered_bytes() <= SLOTS * STRIDE
    assert "MiB from before" in second.stats.summary()
    for state in (first, second):
        assert_as_safetensors(state, big)
    assert tensorlift.release_pinned() == registrations(device) * STRIDE
    device.driver.assert_clean()
    assert tensorlift.release_pinned() == 0


def test_two_loads_without_it_register_twice(device: standin.StandInMemory, big: Path) -> None:
    for load in (1, 2):
        assert loading.load(big, device="cuda:0", **SMALL).stats.pinned_reused_bytes == 0
        assert device.driver.registered_bytes() == 0
        assert load <= registrations(device) <= load * SLOTS
    device.driver.assert_clean()


def test_every_way_of_loading_takes_and_leaves_it(big: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORLIFT_KEEP_PINNED", "1")
    with standin.device(cpu_too=True) as device:
        try:
            state = dict(loading.load(big, device="cuda:0", **SMALL))
            assert device.driver.registered_bytes() > 0
            into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
            assert loading.load_into(into, big, **SMALL).stats.pinned_reused_bytes > 0
            assert_as_safetensors(into, big)
            with loading.open(big, device="cuda:0", **SMALL) as weights:
                assert_as_safetensors(dict(weights), big)
            assert weights.stats.pinned_reused_bytes > 0
            with compat.safe_open(str(big), "pt", device="cuda:0", **SMALL) as file:
                assert raw(file.get_tensor("t3")) == raw(state["t3"])
            # Told otherwise, a load still uses what is there, and leaves it.
            kept = device.driver.registered_bytes()
            again = loading.load(big, device="cuda:0", **{**KEPT, "keep_pinned": False})
            assert again.stats.pinned_reused_bytes == kept
            assert registrations(device) <= SLOTS
            assert tensorlift.release_pinned() == kept
        finally:
            tensorlift.release_pinned()


def test_draft_and_target(device: standin.StandInMemory, checkpoint: Written, big: Path) -> None:
    small = {"pinned_bytes": "256KiB", "slot_size": "64KiB", "chunk_size": "64KiB"}
    loading.load(checkpoint.path, device="cuda:0", keep_pinned=True, **small)
    assert device.driver.registered_bytes() > 0
    # Larger slots: what the smaller one left goes first.
    assert loading.load(big, device="cuda:0", **KEPT).stats.pinned_reused_bytes == 0
    assert device.driver.registered_peak_bytes() <= SLOTS * STRIDE
    draft = loading.load(checkpoint.path, device="cuda:0", **small)
    assert draft.stats.pinned_reused_bytes > 0
    for name, (_, _, expected) in checkpoint.tensors.items():
        assert raw(draft[name]) == expected


def test_threads_that_load_at_once(device: standin.StandInMemory, big: Path) -> None:
    device.driver.set_copy_jitter_us(500, 3)
    with ThreadPoolExecutor(3) as pool:
        states = list(pool.map(lambda _: loading.load(big, device="cuda:0", **KEPT), range(9)))
    for state in states:
        assert_as_safetensors(state, big)
    assert 0 < device.driver.registered_bytes() <= SLOTS * STRIDE
    assert tensorlift.release_pinned() > 0
    device.driver.assert_clean()


@pytest.mark.parametrize("turn", [1, 2, -1])
def test_a_refused_pinning_is_told_of_and_not_kept(
    device: standin.StandInMemory,
    big: Path,
    turn: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(report, "_logged", set())
    cuda = device.native_kind == abi.DEVICE_CUDA
    call = b"cuMemHostRegister_v2" if cuda else b"hipHostRegister"
    device.driver.fail(call, turn, 2)
    # All slots are in use while the copies come late.
    device.driver.set_copy_delay_us(20_000)
    with caplog.at_level(logging.WARNING):
        state = loading.load(big, device="cuda:0", **KEPT)
    assert_as_safetensors(state, big)
    assert [record.message for record in caplog.records if "could not be pinned" in record.message]
    assert len(state.stats.fallbacks) == 1
    assert device.driver.registered_bytes() == 0
    device.driver.fail(call, 0, 0)
    device.driver.set_copy_delay_us(0)
    again = loading.load(big, device="cuda:0", **KEPT)
    assert_as_safetensors(again, big)
    assert (again.stats.fallbacks, again.stats.pinned_reused_bytes) == ((), 0)
    assert device.driver.registered_bytes() > 0
    tensorlift.release_pinned()
    # Copies from pageable memory were the first load's.
    device.driver.reset()
    device.driver.ready()
    device.consumer = device.driver.stream()


def test_a_ring_of_a_driver_that_failed_is_not_kept(device: standin.StandInMemory, big: Path) -> None:
    loading.load(big, device="cuda:0", **KEPT)
    cuda = device.native_kind == abi.DEVICE_CUDA
    call = b"cuMemcpyHtoDAsync_v2" if cuda else b"hipMemcpyHtoDAsync"
    device.driver.fail(call, 3, 700)
    with pytest.raises(DriverError, match="700"):
        loading.load(big, device="cuda:0", **KEPT)
    assert device.driver.registered_bytes() == 0
    assert tensorlift.release_pinned() == 0
    assert_as_safetensors(loading.load(big, device="cuda:0", **KEPT), big)


def test_leaving_early_keeps_it(device: standin.StandInMemory, big: Path) -> None:
    device.driver.set_copy_delay_us(1000)
    with loading.open(big, device="cuda:0", **KEPT) as weights:
        next(iter(weights))
    assert device.driver.registered_bytes() > 0
    assert_as_safetensors(loading.load(big, device="cuda:0", **KEPT), big)


def keep_and_fork(path: str) -> dict[str, Any]:
    """What a child finds of its parent's ring, and the parent afterwards."""
    with standin.device() as device:
        try:
            loading.load(path, device="cuda:0", **KEPT)
            device.driver.drain()
            kept = device.driver.registered_bytes()
            with warnings.catch_warnings():
                # Python 3.12 warns of forks with threads, such as the stand-in's.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                right = False
                try:
                    right = tensorlift.release_pinned() == 0 and device.driver.registered_bytes() == kept
                    # The parent's streams have no thread here.
                    device.consumer = device.driver.stream()
                    own = loading.load(path, device="cuda:0", **SMALL)
                    assert_as_safetensors(own, Path(path))
                    right = right and own.stats.pinned_reused_bytes == 0
                finally:
                    os._exit(0 if right else 1)
            status = os.waitpid(pid, 0)[1]
            again = loading.load(path, device="cuda:0", **KEPT)
            reused = again.stats.pinned_reused_bytes
            assert_as_safetensors(again, Path(path))
            return {"status": status, "same": reused == kept > 0}
        finally:
            tensorlift.release_pinned()


def test_a_forked_child_leaves_it_alone(big: Path) -> None:
    standin.driver(abi.DEVICE_CUDA)  # where there is a real device the test is skipped
    assert child.call(keep_and_fork, str(big)) == {"status": 0, "same": True}


@pytest.mark.parametrize("value", ["maybe", 2, "", "4MiB"])
def test_it_is_a_switch(value: object) -> None:
    with pytest.raises(OptionError, match=r"keep_pinned is .*; expected true or false"):
        tensorlift.LoadOptions.resolve({}, keep_pinned=value)
