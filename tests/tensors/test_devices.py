"""Devices as callers name them, with a driver that is only pretended."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tensorlift.errors import DeviceError, DriverError
from tensorlift.tensors.devices import check_kind, parse_device
from tensorlift.tensors.memory import for_device


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu")])
def test_the_cpu(device: Any) -> None:
    assert parse_device(device) == torch.device("cpu")


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize(
    ("device", "index"),
    [("cuda", 1), ("cuda:0", 0), (0, 0), (1, 1), (torch.device("cuda"), 1), (torch.device("cuda:1"), 1)],
)
def test_cuda_has_an_index(device: Any, index: int) -> None:
    assert parse_device(device) == torch.device("cuda", index)


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize("device", ["cuda:2", 2, torch.device("cuda:7")])
def test_an_index_that_is_not_there(device: Any) -> None:
    with pytest.raises(DeviceError, match=r"no device of index [27]; there are 2, from 0 to 1"):
        parse_device(device)


@pytest.mark.usefixtures("two_devices")
def test_one_that_is_there_and_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise RuntimeError("CUDA error: device-side assert triggered\nFor debugging consider")

    monkeypatch.setattr(torch.cuda, "current_device", fail)
    with pytest.raises(DriverError, match=r"^cuda cannot .*: device-side assert triggered; .*'spawn'"):
        parse_device("cuda")
    # As it is when a load begins, too.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", fail)
    with pytest.raises(DriverError, match=r"^cuda:1 cannot be used in this process: CUDA error: "):
        for_device("cuda:1")


@pytest.mark.parametrize(
    "device", ["mps", "xpu", "meta", "hip", "cuda:x", "", -1, True, None, 1.0, ["cpu"], b"cpu"]
)
def test_what_is_not_supported(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def touched() -> bool:
        raise AssertionError("the driver was asked")

    monkeypatch.setattr(torch.cuda, "is_available", touched)
    for parse in (check_kind, parse_device):
        with pytest.raises(DeviceError, match='supported are "cpu" and "cuda"'):
            parse(device)


def test_a_torch_for_cpus_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(DeviceError, match=r"is built without CUDA and ROCm.*install a torch for it"):
        parse_device("cuda")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(DeviceError, match=r"a driver or a GPU is missing\); run `tensorlift doctor`$"):
        parse_device("cuda")
