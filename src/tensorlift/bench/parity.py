"""Bytes first: a loaded checkpoint against what the plain safetensors library reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tensorlift.errors import MismatchError

__all__ = ["compare_bytes", "same_bytes"]


def same_bytes(ours: Any, theirs: Any) -> bool:
    """Whether two tensors have the same dtype, shape and bytes; NaN and signed zeros count as bytes."""
    import torch

    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (ours, theirs)]
    return torch.equal(flat[0], flat[1])


def compare_bytes(state: Mapping[str, Any], files: Iterable[Path], device: str = "cpu") -> int:
    """Compares each tensor of the files with ``state``: their number, or MismatchError at a difference."""
    import safetensors

    seen = 0
    for file in files:
        with safetensors.safe_open(str(file), framework="pt", device=device) as reader:
            for name in reader.keys():  # noqa: SIM118 - not a mapping
                if not same_bytes(state[name], reader.get_tensor(name)):
                    raise MismatchError(f"{file}: tensor {name!r} has other bytes than safetensors reads")
                seen += 1
    if seen != len(state):
        raise MismatchError(f"{len(state)} tensors were loaded, the files have {seen}")
    return seen
