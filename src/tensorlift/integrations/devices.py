"""Which devices a load format serves: checked when arguments are, and once more where loading begins."""

from __future__ import annotations

import torch

from tensorlift.errors import DeviceError
from tensorlift.integrations.settings import LOAD_FORMAT

__all__ = ["check_device", "current_device", "describe_device"]


def check_device(device: object, engine: str) -> torch.device:
    """The kind of device that an engine runs on, refused where tensorlift does not load to it.

    ``device`` is what the engine calls it ("cuda", "cuda:1", "cpu", "xpu"). Looks at the name alone: neither
    a driver nor the native library is touched, so that it can be asked while arguments are checked, before
    worker processes are forked. ROCm calls itself "cuda" in torch.
    """
    kind = str(device).partition(":")[0].lower()
    if kind not in ("cuda", "cpu"):
        raise DeviceError(
            f"{engine} runs on device {str(device)!r}, and load format {LOAD_FORMAT!r} loads to CUDA and "
            "ROCm devices and to the CPU only; leave --load-format out here (other formats work as before)"
        )
    return torch.device(kind)


def current_device(kind: torch.device) -> torch.device:
    """The device of this worker: the current one, which need not have the number of its global rank."""
    return torch.device("cuda", torch.cuda.current_device()) if kind.type == "cuda" else kind


def describe_device(device: object) -> str:
    """Kind and capability of this worker's device, which decide what an engine makes of weights.

    ``device``: as for check_device().
    """
    if not str(device).startswith("cuda"):
        return f"cpu {torch.backends.cpu.get_cpu_capability()}"
    if torch.version.hip:
        return f"hip {torch.cuda.get_device_properties(torch.cuda.current_device()).gcnArchName}"
    return "cuda {}.{}".format(*torch.cuda.get_device_capability())
