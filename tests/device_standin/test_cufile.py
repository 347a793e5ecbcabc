"""GPUDirect Storage over the stand-ins for libcuda and libcufile: bytes, order, refusals, ends."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support import child, leaks, standin
from support.checkpoints import Written, random_row
from support.digests import digests_of
from tensorlift import loading
from tensorlift.engine import abi
from tensorlift.errors import BackendError, TruncatedError

KIB, MIB = 1 << 10, 1 << 20
SMALL: dict[str, Any] = {
    "chunk_size": 64 * KIB, "slot_size": 256 * KIB, "pinned_bytes": MIB, "arena_size": MIB,
    "buffer_size": 3 * MIB,
}  # fmt: skip
LATE_US = 2000
NOT_SUPPORTED, NVFS_ERROR, EIO = 5008, 5010, 5


@pytest.fixture
def device() -> Iterator[standin.StandInMemory]:
    with standin.device() as made:
        yield made
        gc.collect()


@pytest.fixture
def cufile(device: standin.StandInMemory) -> Iterator[standin.Cufile]:
    found = standin.cufile()
    yield found
    gc.collect()
    found.assert_clean()
    found.reset()


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def assert_right(tensors: dict[str, torch.Tensor], written: Written) -> None:
    assert {name: raw(tensor) for name, tensor in tensors.items()} == {
        name: expected for name, (_, _, expected) in written.tensors.items()
    }


def nbytes(written: Written) -> int:
    return sum(len(data) for _, _, data in written.tensors.values())


@pytest.mark.parametrize(("late", "most"), [(0, 0), (LATE_US, 0), (0, 30_011)])
def test_load(cufile: standin.Cufile, checkpoint: Written, late: int, most: int) -> None:
    cufile.set_copy_delay_us(late)
    cufile.set_most(most)
    state = loading.load(checkpoint.path, device="cuda:0", backend="CUFILE", **SMALL)
    assert_right(state, checkpoint)
    assert state.stats.readers == {"CUFILE": nbytes(checkpoint)}
    assert state.stats.reads["CUFILE"] == cufile.calls(b"cuFileRead")
    assert (state.stats.copies, state.stats.pinned_peak_bytes) == (0, 0)
    if not os.path.exists("/proc/driver/nvidia-fs"):
        assert any("compatibility mode" in text for text in state.stats.fallbacks)


def test_load_with_default_settings(cufile: standin.Cufile, checkpoint: Written) -> None:
    state = loading.load(checkpoint.path, device="cuda:0", backend="CUFILE")
    assert_right(state, checkpoint)
    assert state.stats.readers == {"CUFILE": nbytes(checkpoint)}


def test_open(cufile: standin.Cufile, checkpoint: Written) -> None:
    cufile.set_copy_delay_us(LATE_US)
    with loading.open(checkpoint.path, device="cuda:0", backend="CUFILE", **SMALL) as weights:
        assert_right(dict(weights), checkpoint)


def test_load_into(checkpoint: Written) -> None:
    with standin.device(cpu_too=True):
        cufile = standin.cufile()
        state = {k: torch.zeros_like(t) for k, t in loading.load(checkpoint.path, device="cuda:0").items()}
        stats = loading.load_into(state, checkpoint.path, backend="CUFILE", **SMALL).stats
        assert_right(state, checkpoint)
        assert set(stats.readers) == {"CUFILE"}
        cufile.assert_clean()


def test_the_automatic_choice_is_another(cufile: standin.Cufile, checkpoint: Written) -> None:
    assert_right(loading.load(checkpoint.path, device="cuda:0", **SMALL), checkpoint)
    assert cufile.calls(b"cuFileHandleRegister") == 0


def test_memory_that_a_lagging_consumer_reads_is_not_written(
    device: standin.StandInMemory, cufile: standin.Cufile, big: Path
) -> None:
    driver = device.driver
    device.waits_in_ready = False
    taken = {f"t{k}": ctypes.create_string_buffer(MIB) for k in range(16)}
    gate = driver.hold(device.consumer)
    opener = threading.Timer(0.05, driver.release, [gate])
    opener.start()
    with loading.open(big, device="cuda:0", backend="CUFILE", **SMALL) as weights:
        for name, tensor in weights:
            driver.copy(device.consumer, ctypes.addressof(taken[name]), tensor.data_ptr(), MIB)
            del tensor
    driver.stream_sync(device.consumer)
    opener.join()
    assert device.reused >= 8
    for k in range(16):
        assert taken[f"t{k}"].raw == random_row("U8", [MIB], k)[2], k


@pytest.mark.parametrize("code", [NOT_SUPPORTED, EIO])
@pytest.mark.parametrize("turn", [1, 5, -1, -30])
def test_reads_that_are_refused_come_another_way(
    cufile: standin.Cufile, checkpoint: Written, turn: int, code: int
) -> None:
    cufile.fail(b"cuFileRead", turn, code)
    state = loading.load(checkpoint.path, device="cuda:0", backend=["CUFILE", "PREAD"], **SMALL)
    assert_right(state, checkpoint)
    assert sum(state.stats.readers.values()) == nbytes(checkpoint)
    assert any("CUFILE: cuFile refused: cuFileRead answered" in text for text in state.stats.fallbacks)
    assert state.stats.copies > 0


@pytest.mark.parametrize(
    ("code", "text"), [(NOT_SUPPORTED, "CU_FILE_IO_NOT_SUPPORTED (5008)"), (EIO, "-1: Input/output error")]
)
def test_reads_that_are_refused_without_another_way(
    cufile: standin.Cufile, big: Path, code: int, text: str
) -> None:
    cufile.fail(b"cuFileRead", 20, code)
    with leaks.nothing_left(), pytest.raises(BackendError) as caught:
        loading.load(big, device="cuda:0", backend="CUFILE", **SMALL)
    said = str(caught.value)
    assert f"cuFileRead answered {text}" in said
    assert re.search(r"wanted \d+ bytes at offset \d+ \(tensor 't\d+'\), got 0", said), said
    assert str(big) in said


def test_a_file_that_libcufile_does_not_take(cufile: standin.Cufile, checkpoint: Written) -> None:
    cufile.fail(b"cuFileHandleRegister", -1, 5018)
    with pytest.raises(BackendError, match=r"CU_FILE_INVALID_FILE_TYPE \(5018\)"):
        loading.load(checkpoint.path, device="cuda:0", backend="CUFILE", **SMALL)
    state = loading.load(checkpoint.path, device="cuda:0", backend=["CUFILE", "BUFFERED"], **SMALL)
    assert_right(state, checkpoint)
    assert state.stats.readers == {"PREAD_BUFFERED": nbytes(checkpoint)}


def test_other_devices(checkpoint: Written) -> None:
    with pytest.raises(BackendError, match="CUDA devices alone"):
        loading.load(checkpoint.path, device="cpu", backend="CUFILE")
    state = loading.load(checkpoint.path, device="cpu", backend=["CUFILE", "PREAD"])
    assert_right(state, checkpoint)
    with standin.device(abi.DEVICE_HIP), pytest.raises(BackendError, match="CUDA devices alone"):
        loading.load(checkpoint.path, device="cuda:0", backend="CUFILE", **SMALL)


def test_a_file_that_is_cut_short_meanwhile(cufile: standin.Cufile, big: Path) -> None:
    seen = 0

    def consume() -> None:
        nonlocal seen
        with loading.open(big, device="cuda:0", backend=["CUFILE", "PREAD"], **SMALL) as weights:
            for _ in weights:
                seen += 1
                os.truncate(big, 12 * MIB)

    with pytest.raises(TruncatedError, match=r"wanted \d+ bytes at offset \d+ \(tensor 't1\d'\)"):
        consume()
    assert 0 < seen <= 12


def test_what_is_compared_with_digests_goes_through_host_memory(
    cufile: standin.Cufile, checkpoint: Written
) -> None:
    options = {"device": "cuda:0", "backend": "CUFILE", "arena_size": MIB}
    by_name = digests_of(checkpoint.tensors)
    state = loading.load(checkpoint.path, verify=by_name, **options)
    assert_right(state, checkpoint)
    assert state.stats.readers == {"PREAD_BUFFERED": nbytes(checkpoint)}
    assert len([text for text in state.stats.fallbacks if "digests are made in host memory" in text]) == 1
    # Digests of some tensors: only what shares a slot with them takes that way.
    some = dict(list(by_name.items())[:3])
    state = loading.load(checkpoint.path, verify=some, **options)
    assert_right(state, checkpoint)


def test_nothing_is_left_behind(cufile: standin.Cufile, big: Path) -> None:
    loading.load(big, device="cuda:0", backend="CUFILE", **SMALL)
    with leaks.nothing_left():
        loading.load(big, device="cuda:0", backend="CUFILE", **SMALL)
        weights = loading.open(big, device="cuda:0", backend="CUFILE", **SMALL)
        next(iter(weights))
        weights.close()
        del weights


def refused_driver(path: str) -> list[object]:
    with standin.device():
        cufile = standin.cufile()
        cufile.fail(b"cuFileDriverOpen", -1, NVFS_ERROR)
        try:
            loading.load(path, device="cuda:0", backend="CUFILE", **SMALL)
        except BackendError as error:
            said = str(error)
        state = loading.load(path, device="cuda:0", backend=["CUFILE", "PREAD"], **SMALL)
        right = all(raw(state[f"t{k}"]) == random_row("U8", [MIB], k)[2] for k in range(16))
        cufile.assert_clean()
        del state
        return [said, right]


def test_a_driver_that_does_not_open(big: Path) -> None:
    # In a process of its own, as those below: the driver opens once a process.
    said, right = child.call(refused_driver, str(big))
    assert "cuFileDriverOpen answered CU_FILE_NVFS_DRIVER_ERROR (5010)" in said
    assert right is True


def without_library(path: str) -> str:
    with standin.device():
        try:
            loading.load(path, device="cuda:0", backend="CUFILE", **SMALL)
        except BackendError as error:
            return str(error)
    return ""


def test_without_libcufile(big: Path) -> None:
    standin.driver(abi.DEVICE_CUDA)
    assert "libcufile.so.0" in child.call(without_library, str(big))


def with_stdin_closed(path: str) -> list[object]:
    with standin.device():
        cufile = standin.cufile()
        os.close(0)
        state = loading.load(path, device="cuda:0", backend="CUFILE", **SMALL)
        taken = os.path.exists("/proc/self/fd/0")
        cufile.assert_clean()
        found = dict(state.stats.readers)
        del state
        return [found, taken]


def test_a_closed_stdin_stays_closed(big: Path) -> None:
    standin.driver(abi.DEVICE_CUDA)
    assert child.call(with_stdin_closed, str(big)) == [{"CUFILE": 16 * MIB}, False]


def doctors_row(path: str, code: int) -> Any:
    from tensorlift.cli.doctor import examine

    standin.cufile().fail(b"cuFileDriverOpen", -1 if code else 0, code)
    return next(row for row in examine(path)["backends"] if row["name"] == "CUFILE")


def test_doctor_tries_it(big: Path) -> None:
    standin.driver(abi.DEVICE_CUDA)
    assert child.call(doctors_row, str(big), 0) == {"name": "CUFILE", "works": True, "reason": None}
    assert "5010" in child.call(doctors_row, str(big), NVFS_ERROR)["reason"]
