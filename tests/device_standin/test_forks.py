"""Weights from device to device over TCP, with the stand-in: its copies come late, and its calls fail."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from msgspec import structs

from support import leaks, standin
from tensorlift import loading
from tensorlift.engine import abi
from tensorlift.errors import DeviceError, ForkError, RequestError
from tensorlift.forking import offering, shm
from tensorlift.forking.fork import fork_into
from tensorlift.forking.manifest import ModelKey
from tensorlift.forking.remote import url_of
from tensorlift.forking.seed import Seed

KEY = ModelKey(model="org/model")


def weights(seed: int) -> dict[str, torch.Tensor]:
    """Of several blocks, of small ones side by side in one storage, with holes, empty."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.rand(4000, generator=generator)
    small = {f"small{k}": whole[k * 100 : k * 100 + 37] for k in range(40)}
    large = {f"large{k}": torch.rand(900 + k, 701, generator=generator) for k in range(3)}
    return {**large, **small, "steps": torch.rand(50, 60, generator=generator)[:, ::7], "empty": whole[:0]}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], tensor) for name, tensor in other.items())


@pytest.fixture(params=[abi.DEVICE_CUDA, abi.DEVICE_HIP])
def driver(request: pytest.FixtureRequest) -> Iterator[standin.Driver]:
    found = standin.driver(request.param)
    found.reset()
    found.ready()
    yield found
    found.assert_clean()
    found.reset()


@pytest.fixture
def on(driver: standin.Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """On which devices the next tensors that are offered are said to be, one entry a call; then the CPU."""
    wanted: list[tuple[int, int]] = []
    monkeypatch.setattr(
        offering, "native_device", lambda device: wanted.pop(0) if wanted else (abi.DEVICE_CPU, 0)
    )
    same(weights(1), weights(1))  # torch starts threads of its own once
    with leaks.nothing_left():
        yield wanted
        driver.drain()


@pytest.mark.parametrize("ways", ["there and here", "there", "here"])
def test_right_bytes(driver: standin.Driver, on: list[tuple[int, int]], ways: str) -> None:
    driver.set_copy_delay_us(500)
    theirs, ours = weights(1), weights(2)
    on.append((driver.kind if "there" in ways else abi.DEVICE_CPU, 0))
    with Seed(theirs, KEY) as seed:
        on.append((driver.kind if "here" in ways else abi.DEVICE_CPU, 1))
        result = fork_into(ours, seed.url, patience=60.0, chunk_bytes=3 << 20)
    assert same(ours, theirs)
    assert result.by_source == {seed.url: result.bytes}
    assert result.transports[seed.url] == ("shm (socket)" if "there" in ways else "shm (process_vm_readv)")
    # Two connections, each with two slots of 4 MiB and a page on either side.
    assert driver.registered_peak_bytes() <= (2 + 2) * 2 * ((4 << 20) + 4096)


def test_a_seed_as_the_source_of_a_load(driver: standin.Driver, on: list[tuple[int, int]]) -> None:
    """A part at a time, and what is on a device is written by the fork itself."""
    driver.set_copy_delay_us(500)
    theirs = weights(1)
    with Seed(theirs, ModelKey(model="org/model", processed=False)) as seed:
        url = url_of(seed.url, "org/model")
        on += [(driver.kind, 1)] * 3
        with loading.open(url, names="large*", buffer_size="2MiB") as opened:
            ours = dict(opened)
    assert on == []
    assert same(theirs, ours)
    assert list(ours) == ["large0", "large1", "large2"]
    assert driver.registered_peak_bytes() > 0


@pytest.mark.parametrize("digests", ["full", "off"])
def test_from_one_process_to_another(driver: standin.Driver, on: list[tuple[int, int]], digests: str) -> None:
    """As CUDA IPC: handles of allocations, copied from device to device where nothing is digested."""
    driver.set_copy_delay_us(500)
    driver.set_allocation_bytes(1 << 47)  # all of a process's memory
    theirs, ours = weights(1), weights(2)
    on.append((driver.kind, 0))
    with Seed(theirs, KEY) as seed:
        on.append((driver.kind, 1))
        # One chunk of two connections': what has brought nothing says nothing.
        result = fork_into(ours, seed.url, patience=60.0, chunk_bytes=64 << 20, digests=digests)
    assert same(ours, theirs)
    assert result.transports == {seed.url: "shm (CUDA IPC)"}
    to_host = "cuMemcpyDtoHAsync_v2" if driver.kind == abi.DEVICE_CUDA else "hipMemcpyDtoHAsync"
    assert (driver.counts()[to_host] > 0) == (digests == "full")


def test_a_driver_that_maps_nothing(driver: standin.Driver, on: list[tuple[int, int]]) -> None:
    driver.set_allocation_bytes(1 << 47)
    driver.fail(
        b"cuIpcOpenMemHandle_v2" if driver.kind == abi.DEVICE_CUDA else b"hipIpcOpenMemHandle", -1, 217
    )
    theirs, ours = weights(1), weights(2)
    on.append((driver.kind, 0))
    with Seed(theirs, KEY) as seed:
        on.append((driver.kind, 1))
        result = fork_into(ours, seed.url, patience=60.0)
    assert same(ours, theirs)
    assert result.transports[seed.url].startswith("shm (socket, not CUDA IPC: ")


def test_an_allocation_that_is_shorter_than_its_seed_says(
    driver: standin.Driver, on: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """How much there is the driver says: behind its end lies memory of somebody else, or none."""
    driver.set_allocation_bytes(1 << 47)
    told = shm._on_a_device
    monkeypatch.setattr(
        shm,
        "_on_a_device",
        lambda region: structs.replace(told(region), address=(1 << 47) - region.nbytes + 1),
    )
    on.append((driver.kind, 0))
    with Seed(weights(1), KEY) as seed:
        on.append((driver.kind, 1))
        with pytest.raises(ForkError, match="a region is in an allocation that is shorter"):
            fork_into(weights(2), seed.url, patience=60.0)


def test_an_allocation_whose_size_nobody_knows(driver: standin.Driver, on: list[tuple[int, int]]) -> None:
    """It is unmapped again, and the bytes come over the socket."""
    driver.set_allocation_bytes(1 << 47)
    asked = "cuMemGetAddressRange_v2" if driver.kind == abi.DEVICE_CUDA else "hipMemGetAddressRange"
    theirs, ours = {"one": weights(1)["large0"]}, {"one": weights(2)["large0"]}
    on.append((driver.kind, 0))
    with Seed(theirs, KEY) as seed:
        on.append((driver.kind, 1))
        driver.fail(asked.encode(), 2, 1)  # the first is the seed's own
        result = fork_into(ours, seed.url, patience=60.0, connections=1)
    assert same(ours, theirs)
    assert result.transports[seed.url].startswith("shm (socket, not CUDA IPC: ")
    opened, closed = ("cuIpcOpenMemHandle_v2", "cuIpcCloseMemHandle")
    if driver.kind != abi.DEVICE_CUDA:
        opened, closed = ("hipIpcOpenMemHandle", "hipIpcCloseMemHandle")
    assert driver.counts()[opened] == driver.counts()[closed] == 1


def test_a_seed_whose_device_cannot_be_read(driver: standin.Driver, on: list[tuple[int, int]]) -> None:
    on.append((driver.kind, 7))
    with pytest.raises(RequestError, match=r"these weights cannot be read: .* answered"):
        Seed(weights(1), KEY)


def test_a_fork_whose_device_cannot_be_written(driver: standin.Driver, on: list[tuple[int, int]]) -> None:
    with Seed(weights(1), KEY) as seed:
        on.append((driver.kind, 7))
        with pytest.raises(DeviceError, match=r"bytes cannot be written to the device: .* answered"):
            fork_into(weights(2), seed.url, patience=60.0)
