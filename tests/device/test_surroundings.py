"""A device that is broken, missing or shared out, and other allocators: an error of ours, or right bytes."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from pathlib import Path

import pytest
import torch

from support.checkpoints import Row, Written
from support.device import NO_DEVICE, SMALL, assert_right, call, said_by, said_by_load
from support.tensors import crc
from tensorlift import loading
from tensorlift.forking.client import SeedClient
from tensorlift.forking.fork import fork_into
from tensorlift.forking.manifest import ModelKey
from tensorlift.forking.seed import Seed

if not torch.cuda.is_available():
    pytest.skip(NO_DEVICE, allow_module_level=True)

KEY = ModelKey(model="org/model")


def on_a_broken_device(path: str) -> list[list[str]]:
    """Behind an assertion that failed on the device, which ends all that a process can do there."""
    model = {"t0": torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")}
    torch.zeros(1, device="cuda")[torch.tensor([5], device="cuda")]
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize()
    return [
        said_by(loading.load, path, device="cuda"),
        said_by(loading.load_into, model, path, names="t0"),
        said_by(Seed, model, KEY),
        said_by(fork_into, model, "http://127.0.0.1:9", patience=1.0),
    ]


def test_a_device_on_which_an_assertion_failed(file: Path) -> None:
    for name, message in call(on_a_broken_device, str(file)):
        assert name == "DriverError"
        assert "device-side assert" in message


def test_no_device_is_to_be_seen(file: Path) -> None:
    name, message = call(said_by_load, str(file), CUDA_VISIBLE_DEVICES="")
    assert name == "DeviceError"
    assert message.startswith("device 'cuda': there is no CUDA device (a driver or a GPU is missing)")


def in_a_forked_child(path: str) -> list[str]:
    """Of a process that has a device already, where CUDA works no more."""
    torch.zeros(1, device="cuda")
    here, there = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads and fork
        child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.write(there, json.dumps(said_by_load(path)).encode())
        os._exit(0)
    os.close(there)
    os.waitpid(child, 0)
    answer = os.read(here, 1 << 16)
    return list(json.loads(answer)) if answer else ["nothing", ""]


def test_a_forked_child(file: Path) -> None:
    name, message = call(in_a_forked_child, str(file))
    assert name == "DriverError"
    assert "in this process: Cannot re-initialize CUDA in forked subprocess" in message


def loads_and_offers(path: str) -> list[object]:
    """Sums of what was loaded and of what a fork got of it, how that came, and what is held behind it all."""
    state = loading.load(path, device="cuda")
    sums = {name: crc(one) for name, one in state.items()}
    with Seed(state, KEY) as seed:
        how, found = call(forks, seed.url)
    del state
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return [sums, found, how, torch.cuda.memory_allocated()]


def forks(url: str) -> tuple[str, dict[str, int]]:
    ours = {
        one.name: torch.empty(one.shape, dtype=getattr(torch, one.dtype), device="cuda")
        for one in SeedClient(url).manifest().tensors
    }
    result = fork_into(ours, url, patience=60.0)
    return result.transports[url], {name: crc(one) for name, one in ours.items()}


@pytest.mark.parametrize(
    ("variable", "value", "transport"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync", "shm (socket"),
        ("CUDA_LAUNCH_BLOCKING", "1", "shm (CUDA IPC)"),
    ],
)
def test_right_bytes_whatever_allocates(
    file: Path, rows: dict[str, Row], variable: str, value: str, transport: str
) -> None:
    wanted = {name: crc(one) for name, one in loading.load(file).items()}
    sums, found, how, held = call(loads_and_offers, str(file), **{variable: value})
    assert sums == found == wanted
    assert how.startswith(transport)
    assert held == 0


def without_a_cache(path: str) -> list[list[str]]:
    """Of torch's allocator, which then knows no blocks."""
    state = loading.load(path, device="cuda")
    assert {name: crc(one) for name, one in state.items()} == {
        name: crc(one) for name, one in loading.load(path).items()
    }
    return [said_by(Seed, state, KEY)]


def test_an_allocator_that_keeps_nothing(file: Path) -> None:
    ((name, message),) = call(without_a_cache, str(file), PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    assert name == "RequestError"
    assert "lies in no block of torch's allocator" in message


def within_a_share(path: str) -> list[str]:
    """Of the device's memory: what does not fit is an error, and leaves nothing."""
    torch.cuda.set_per_process_memory_fraction(1e-4)
    said = said_by_load(path)
    assert torch.cuda.memory_allocated() == 0
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert said_by_load(path) == ["", ""]
    return said


def test_a_share_of_the_device(file: Path) -> None:
    name, message = call(within_a_share, str(file))
    assert name == "OutOfMemoryError"
    assert "could not be had" in message


def test_a_stop_amid_a_load_and_another_load(checkpoint: Written) -> None:
    """What the consumer raises comes through, and the next load is right."""

    def stop() -> None:
        with loading.open(checkpoint.path, device="cuda", **SMALL) as weights:
            for at, _ in enumerate(weights):
                if at == 20:
                    raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop()
    assert_right(loading.load(checkpoint.path, device="cuda", **SMALL), checkpoint.tensors)
