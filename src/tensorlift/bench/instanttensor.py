"""InstantTensor in this process, for pairs of samples: owned tensors, views, and into existing parameters."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["copied_into", "obstacle", "owned", "viewed"]


def obstacle(folder: Path | None = None) -> str | None:
    """Why it cannot be used here; ``folder`` is searched for it too, after all others."""
    if folder is not None:
        sys.path.append(str(folder.resolve()))
        importlib.invalidate_caches()
    try:
        importlib.import_module("instanttensor")
    except Exception as error:  # noqa: BLE001 - what its libraries raise is up to them
        return f"InstantTensor cannot be imported ({type(error).__name__}: {error})"
    return None


def owned(files: Sequence[Path], device: str) -> dict[str, Any]:
    """All tensors, each a clone that owns its memory: what it gives by default."""
    from instanttensor import safe_open

    with safe_open(list(map(str, files)), framework="pt", device=device) as reader:
        return dict(reader.tensors())


def viewed(files: Sequence[Path], device: str) -> int:
    """Views of its ring, none of them kept: how many there were."""
    return sum(1 for _ in _views(files, device))


def copied_into(files: Sequence[Path], device: str, state: Mapping[str, Any]) -> int:
    """Views of its ring, each copied into the tensor of its name: how many there were."""
    count = 0
    for name, tensor in _views(files, device):
        state[name].copy_(tensor)
        count += 1
    return count


def _views(files: Sequence[Path], device: str) -> Any:
    from instanttensor import safe_open

    with warnings.catch_warnings():
        # That views are overwritten, which is what is wanted here.
        warnings.simplefilter("ignore")
        with safe_open(list(map(str, files)), framework="pt", device=device, copy=False) as reader:
            yield from reader.tensors()
