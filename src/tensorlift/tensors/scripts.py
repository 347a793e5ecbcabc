"""Loops over many tensors in one call: most functions of torch give the GIL away, and with a busy thread
beside each call may wait 5 ms to get it back.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

__all__ = ["empties"]

_SOURCE = """
def empties(sizes: List[int], device: Device) -> List[Tensor]:
    made: List[Tensor] = []
    for nbytes in sizes:
        made.append(torch.empty([nbytes], dtype=torch.uint8, device=device))
    return made
"""


@functools.cache
def _unit() -> torch.jit.CompilationUnit:
    return torch.jit.CompilationUnit(_SOURCE)


def empties(sizes: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    """Fresh blocks of so many bytes; RuntimeError where one cannot be had, whatever its kind was."""
    # Not optimised: that would take 50 ms at the first call.
    with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
        made: list[torch.Tensor] = _unit().empties(list(sizes), device)
        return made
