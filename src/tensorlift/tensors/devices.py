"""Devices as callers name them."""

from __future__ import annotations

import torch

from tensorlift.errors import DeviceError

__all__ = ["check_kind", "parse_device"]

_SUPPORTED = 'supported are "cpu" and "cuda" (CUDA or ROCm), with or without an index'


def check_kind(device: object) -> torch.device:
    """The torch.device that ``device`` names; DeviceError where it is not of a kind that is supported.

    Touches no driver. An int is the index of a CUDA device, as in torch.
    """
    if isinstance(device, bool) or not isinstance(device, (str, int, torch.device)):
        raise DeviceError(f"device is {device!r}; expected a str, an index or a torch.device; {_SUPPORTED}")
    try:
        parsed = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except RuntimeError as error:
        raise DeviceError(f"device {device!r} is not one that torch knows; {_SUPPORTED}") from error
    if parsed.type not in ("cpu", "cuda"):
        raise DeviceError(
            f"device {device!r} is not supported; {_SUPPORTED}; load to the CPU and move from there"
        )
    return parsed


def parse_device(device: object) -> torch.device:
    """The device, with an index if it is CUDA: "cuda" means the current one.

    Raises DeviceError where it is not supported or not there. No context is made for a device that is not
    there.
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
            f"device {device!r}: there is no CUDA device ({why}); run `tensorlift doctor`{then}"
        )
    index = torch.cuda.current_device() if parsed.index is None else parsed.index
    if index >= count:
        raise DeviceError(
            f"device {device!r}: no device of index {index}; there are {count}, from 0 to {count - 1}"
        )
    return torch.device("cuda", index)
