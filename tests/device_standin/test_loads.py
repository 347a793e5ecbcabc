"""The device's path from files to tensors, over the stand-in driver: bytes, order, bounds, ends."""

from __future__ import annotations

import ctypes
import gc
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support import leaks, standin
from support.checkpoints import Written, random_row, write_safetensors
from support.tree import ROOT
from tensorlift import loading
from tensorlift.engine import abi
from tensorlift.errors import DriverError, FileError, OutOfMemoryError, TensorliftError
from tensorlift.sources import reading
from tensorlift.tensors.transfer import Transfer

KIB, MIB = 1 << 10, 1 << 20
KINDS = {"cuda": abi.DEVICE_CUDA, "hip": abi.DEVICE_HIP}
# Small slots and arenas: many copies and reused memory also for small files.
SMALL = {
    "chunk_size": 64 * KIB, "slot_size": 256 * KIB, "pinned_bytes": MIB, "arena_size": MIB,
    "backend": "PREAD", "buffer_size": 3 * MIB,
}  # fmt: skip
LATE_US = 2000
# A page a slot comes on top, so that direct reads land in place.
PINNED_MOST = SMALL["pinned_bytes"] + SMALL["pinned_bytes"] // SMALL["slot_size"] * 4096
ENTRIES = [
    (kind, name)
    for kind in KINDS
    for name in re.findall(
        rf'"({kind[:2]}\w+)"', (ROOT / f"native/tests/standin/{kind}.cpp").read_text().split("};")[0]
    )
]


@pytest.fixture(params=KINDS)
def device(request: pytest.FixtureRequest) -> Iterator[standin.StandInMemory]:
    with standin.device(KINDS[request.param]) as made:
        yield made
        gc.collect()


def raw(tensor: torch.Tensor) -> bytes:
    if tensor.numel() == 0:
        return b""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_right(tensors: dict[str, torch.Tensor], written: Written) -> None:
    assert set(tensors) == set(written.tensors)
    for name, (_, _, expected) in written.tensors.items():
        assert raw(tensors[name]) == expected, name


@pytest.mark.parametrize("late", [0, LATE_US])
def test_load(device: standin.StandInMemory, checkpoint: Written, late: int) -> None:
    device.driver.set_copy_delay_us(late)
    state = loading.load(checkpoint.path, device="cuda:0", **SMALL)
    assert_right(state, checkpoint)
    assert state.stats.copies == device.driver.counts()[copy_name(device)] > 0
    assert 0 < state.stats.pinned_peak_bytes <= PINNED_MOST
    assert device.driver.registered_bytes() == 0


@pytest.mark.parametrize("late", [0, LATE_US])
def test_open_with_random_delays(device: standin.StandInMemory, checkpoint: Written, late: int) -> None:
    device.driver.set_copy_delay_us(late)
    device.driver.set_copy_jitter_us(1500, 7)
    with loading.open(checkpoint.path, device="cuda:0", **SMALL) as weights:
        for name, tensor in weights:
            assert raw(tensor) == checkpoint.tensors[name][2], name


def test_reading_begins_before_all_headers_are_read(
    device: standin.StandInMemory, checkpoint: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    submit, parsed = Transfer.submit, reading._parsed
    monkeypatch.setattr(Transfer, "submit", lambda *given: (done.append("submit"), submit(*given))[1])
    monkeypatch.setattr(reading, "_parsed", lambda *given: (done.append("header"), parsed(*given))[1])
    assert_right(loading.load(checkpoint.path, device="cuda:0"), checkpoint)
    assert done.count("header") == len(checkpoint.files) > 1
    first = done.index("header")
    assert "submit" in done[first : len(done) - done[::-1].index("header")]


def test_a_bad_header_behind_good_ones_ends_all(device: standin.StandInMemory, checkpoint: Written) -> None:
    device.driver.set_copy_delay_us(LATE_US)
    with open(checkpoint.files[-1], "r+b") as file:
        file.truncate(20)
    with leaks.nothing_left(), pytest.raises(FileError, match=re.escape(str(checkpoint.files[-1]))):
        loading.load(checkpoint.path, device="cuda:0", **SMALL)
    device.driver.assert_clean()


def test_load_with_default_settings(device: standin.StandInMemory, checkpoint: Written) -> None:
    assert_right(loading.load(checkpoint.path, device="cuda:0"), checkpoint)


@pytest.mark.parametrize("kind", KINDS)
def test_load_into(kind: str, checkpoint: Written) -> None:
    with standin.device(KINDS[kind], cpu_too=True) as device:
        device.driver.set_copy_delay_us(LATE_US)
        state = {
            name: torch.zeros_like(t) for name, t in loading.load(checkpoint.path, device="cuda:0").items()
        }
        before = device.driver.counts()[copy_name(device)]
        loading.load_into(state, checkpoint.path, **SMALL)
        assert_right(state, checkpoint)
        assert device.driver.counts()[copy_name(device)] > before


def test_load_into_has_one_ring_at_a_time(checkpoint: Written) -> None:
    with standin.device(cpu_too=True) as device:
        state = dict(loading.load(checkpoint.path, device="cuda:0", **SMALL))
        for name in list(state)[::2]:
            state[name] = torch.zeros(state[name].shape, dtype=torch.complex128)
        before = device.driver.counts()[copy_name(device)]
        stats = loading.load_into(state, checkpoint.path, **SMALL).stats
        assert device.driver.counts()[copy_name(device)] - before == stats.copies
        assert device.driver.registered_peak_bytes() <= PINNED_MOST


def test_tensors_of_16_bytes_and_more_are_aligned_to_16(
    device: standin.StandInMemory, tmp_path: Path
) -> None:
    # An odd scalar at the front shifts all that follows in the file.
    rows = {"odd": random_row("U8", [1])}
    for k in range(40):
        code = ["BF16", "F32", "U8", "F64", "F8_E4M3"][k % 5]
        rows[f"t{k}"] = random_row(code, [3 + 7 * k], k)
    path = write_safetensors(tmp_path / "odd.safetensors", rows, align=1)
    state = loading.load(path, device="cuda:0", **SMALL)
    for name, tensor in state.items():
        wanted = 16 if tensor.nbytes >= 16 else tensor.element_size()
        assert tensor.data_ptr() % wanted == 0, name
        assert raw(tensor) == rows[name][2]


def test_memory_that_a_lagging_consumer_reads_is_not_written(
    device: standin.StandInMemory, big: Path
) -> None:
    # The consumer only queues its work: each tensor is copied away on its stream some time later, when the
    # tensor has long been dropped and its arena been given out again.
    driver = device.driver
    device.waits_in_ready = False
    driver.set_copy_delay_us(LATE_US)
    taken = {f"t{k}": ctypes.create_string_buffer(MIB) for k in range(16)}
    gate = driver.hold(device.consumer)
    opener = threading.Timer(0.05, driver.release, [gate])
    opener.start()
    with loading.open(big, device="cuda:0", **SMALL) as weights:
        for name, tensor in weights:
            driver.copy(device.consumer, ctypes.addressof(taken[name]), tensor.data_ptr(), MIB)
            del tensor
    driver.stream_sync(device.consumer)
    opener.join()
    assert device.reused >= 8
    for k in range(16):
        assert taken[f"t{k}"].raw == random_row("U8", [MIB], k)[2], k


def test_buffer_size_bounds_the_devices_memory(device: standin.StandInMemory, big: Path) -> None:
    with loading.open(big, device="cuda:0", **SMALL) as weights:
        for _, tensor in weights:
            del tensor
            assert device.allocated <= SMALL["buffer_size"]
    assert device.peak <= SMALL["buffer_size"]
    assert device.allocated == 0


@pytest.mark.parametrize("late", [0, LATE_US])
@pytest.mark.parametrize("after", [0, 1, 5])
def test_leaving_early_writes_nothing_afterwards(
    device: standin.StandInMemory, big: Path, after: int, late: int
) -> None:
    device.driver.set_copy_delay_us(late)
    kept = []
    weights = loading.open(big, device="cuda:0", **SMALL)
    for number, (name, tensor) in enumerate(weights):
        kept.append((name, tensor))
        if number == after:
            break
    weights.close()
    device.driver.drain()
    # An arena has some room before its first tensor.
    assert (after + 1) * MIB <= device.allocated < (after + 2) * MIB
    assert device.driver.registered_bytes() == device.driver.live_streams() == 0
    for k, (name, tensor) in enumerate(kept):
        assert name == f"t{k}"
        assert raw(tensor) == random_row("U8", [MIB], k)[2]
    kept.clear()
    del tensor
    assert device.allocated == 0
    # What was given back is poison from there on: no copy came later.
    device.driver.stream_sync(device.consumer)
    assert all(block.map[:] == bytes([standin.POISON]) * block.nbytes for block in device._blocks)


def test_an_exception_of_the_consumer_comes_out_unchanged(device: standin.StandInMemory, big: Path) -> None:
    device.driver.set_copy_delay_us(LATE_US)
    mine = RuntimeError("mine")

    def consume() -> None:
        with loading.open(big, device="cuda:0", **SMALL) as weights:
            for name, _ in weights:
                if name == "t3":
                    raise mine

    with pytest.raises(RuntimeError) as caught:
        consume()
    assert caught.value is mine
    assert device.driver.registered_bytes() == 0


def test_dropping_the_iterator_gives_all_back(device: standin.StandInMemory, big: Path) -> None:
    live = abi.library().arena_live()
    tensors = iter(loading.open(big, device="cuda:0", **SMALL))
    next(tensors)
    del tensors
    gc.collect()
    assert abi.library().arena_live() == live
    assert device.driver.registered_bytes() == 0


@pytest.mark.parametrize(("kind", "name"), ENTRIES)
def test_a_failing_driver_is_an_ordinary_error(kind: str, name: str, big: Path) -> None:
    with standin.device(KINDS[kind]) as device:
        fail_in_turn(device, name, big)


def fail_in_turn(device: standin.StandInMemory, name: str, big: Path) -> None:
    driver = device.driver
    assert name in driver.entries()
    live = abi.library().arena_live()
    for turn in (1, 2, 3, -1):
        driver.reset()
        driver.ready()
        device.consumer = driver.stream()
        driver.fail(name.encode(), turn, 999)
        try:
            state = loading.load(big, device="cuda:0", **SMALL)
        except DriverError as error:
            said = str(error)
            assert "999" in said
        else:
            assert all(raw(state[f"t{k}"]) == random_row("U8", [MIB], k)[2] for k in range(16))
            del state
        driver.fail(name.encode(), 0, 0)
        driver.drain()
        assert driver.registered_bytes() == driver.live_streams() == driver.live_events() == 0
        assert driver.retained_contexts() == 0
        assert abi.library().arena_live() == live
    # Copies from memory that could not be pinned are right, but slow: only a refused pinning leads to them.
    assert driver.unpinned_copies() == 0 or "HostRegister" in name
    driver.reset()
    driver.ready()
    device.consumer = driver.stream()


def test_too_little_device_memory_is_an_ordinary_error(big: Path) -> None:
    live = abi.library().arena_live()
    with standin.device(capacity=4 * MIB):
        with pytest.raises(OutOfMemoryError):
            loading.load(big, device="cuda:0", **SMALL)
        assert abi.library().arena_live() == live
        # A stream of tensors gets by with it.
        with loading.open(big, device="cuda:0", **SMALL) as weights:
            assert len([name for name, _ in weights]) == 16


def test_a_device_that_the_driver_does_not_have(big: Path) -> None:
    with standin.device(index=5), pytest.raises(TensorliftError, match=r"5|device"):
        loading.load(big, device="cuda:0", **SMALL)


def copy_name(device: standin.StandInMemory) -> str:
    return "cuMemcpyHtoDAsync_v2" if device.native_kind == abi.DEVICE_CUDA else "hipMemcpyHtoDAsync"
