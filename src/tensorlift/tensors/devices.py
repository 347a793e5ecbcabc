"""Devices as callers name them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from tensorlift.errors import DeviceError, DriverError
from tensorlift.format.quoting import shown

__all__ = ["check_kind", "driver_of", "parse_device"]

_SUPPORTED = 'supported are "cpu" and "cuda" (CUDA or ROCm), with or without an index'


def check_kind(device: object) -> torch.device:
    """The torch.device that ``device`` names; DeviceError where it is not of a kind that is supported.

    Touches no driver. An int is the index of a CUDA device, as in torch.
    """
    if isinstance(device, bool) or not isinstance(device, (str, int, torch.device)):
        raise DeviceError(
            f"device is {shown(device)}; expected a str, an index or a torch.device; {_SUPPORTED}"
        )
    try:
        parsed = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, ValueError, OverflowError) as error:
        raise DeviceError(f"device {shown(device)} is not one that torch knows; {_SUPPORTED}") from error
    if parsed.type not in ("cpu", "cuda"):
        raise DeviceError(
            f"device {shown(device)} is not supported; {_SUPPORTED}; load to the CPU and move from there"
        )
    return parsed


@contextlib.contextmanager
def driver_of(device: object) -> Iterator[None]:
    """What torch's own calls say of a driver that fails comes as DriverError.

    As after an assertion that failed on the device, which ends all that a process can do there, or in the
    child of a fork, where CUDA does not work.
    """
    try:
        yield
    except RuntimeError as error:
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        raise DriverError(
            f"{device} cannot be used in this process: {said}; where a kernel failed before, or the process "
            "is the fork of one that had the device, a new process can (multiprocessing: 'spawn')"
        ) from error


def parse_device(device: object) -> torch.device:
    """The device, with an index if it is CUDA: "cuda" means the current one.

    Raises DeviceError where it is not supported or not there, DriverError where it does not work. No context
    is made for a device that is not there.
    """
    parsed = check_kind(device)
    if parsed.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        if torch.version.cuda or torch.version.hip:
            why, then = "a driver or a GPU is missing", ""
        else:
            why = f"torch {torch.__version__} is built without CUDA and ROCm"
            then = "; where there is a GPU, install a torch for it (pytorch.org/get-started)"
        raise DeviceError(
            f"device {shown(device)}: there is no CUDA device ({why}); run `tensorlift doctor`{then}"
        )
    with driver_of(parsed):
        index = torch.cuda.current_device() if parsed.index is None else parsed.index
    if index >= count:
        raise DeviceError(
            f"device {shown(device)}: no device of index {index}; there are {count}, from 0 to {count - 1}"
        )
    return torch.device("cuda", index)
