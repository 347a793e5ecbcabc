"""Loaded tensors against the oracle, and what a load may leave behind."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from corpus.oracle import MARK_BYTES, expected
from support import leaks
from support.checkpoints import nbytes_of
from tensorlift.format.dtypes import BY_CODE


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, without a copy where it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def check_tensor(tensor: torch.Tensor, dtype: str, shape: Any, raw: bytes | list[tuple[int, bytes]]) -> None:
    """Dtype, shape and every byte."""
    entry = BY_CODE[dtype]
    wanted = list(shape)
    if entry.elements > 1:
        wanted[-1] //= entry.elements
    assert tensor.dtype == getattr(torch, entry.torch_name or "")
    assert list(tensor.shape) == wanted
    found = raw_bytes(tensor)
    assert found.numel() == nbytes_of(dtype, shape)
    if isinstance(raw, bytes):
        assert found.numpy().tobytes() == raw
        return
    left = int(torch.count_nonzero(found))
    for offset, mark in raw:
        part = found[offset : offset + MARK_BYTES]
        assert part.numpy().tobytes() == mark
        left -= int(torch.count_nonzero(part))
    assert left == 0  # everything else is zero


def check_file(tensors: Mapping[str, torch.Tensor], case: dict[str, Any], file: str) -> None:
    """All tensors of one file of a case, and no others."""
    rows = list(expected(case, file))
    assert set(tensors) == {name for name, *_ in rows}
    for name, dtype, shape, raw in rows:
        check_tensor(tensors[name], dtype, shape, raw)


def check_case(tensors: Mapping[str, torch.Tensor], case: dict[str, Any]) -> None:
    """All tensors of all files of a case, and no others."""
    rows = [row for file in case["tensors"] for row in expected(case, file)]
    assert set(tensors) == {name for name, *_ in rows}
    for name, dtype, shape, raw in rows:
        check_tensor(tensors[name], dtype, shape, raw)


def empty_state(case: dict[str, Any], file: str, fill: int = 0xA5) -> dict[str, torch.Tensor]:
    """Tensors for load_into to fill, each byte `fill` before."""
    state = {}
    for name, dtype, shape, _ in expected(case, file):
        entry = BY_CODE[dtype]
        wanted = list(shape)
        if entry.elements > 1:
            wanted[-1] //= entry.elements
        tensor = torch.empty(wanted, dtype=getattr(torch, entry.torch_name or ""))
        raw_bytes(tensor).fill_(1 if dtype == "BOOL" else fill)
        state[name] = tensor
    return state


def sentinel(names: list[str]) -> dict[str, torch.Tensor]:
    """A state that a refused load must not touch."""
    return {name: torch.full((8,), 7, dtype=torch.uint8) for name in names or ["w"]}


def threads() -> int:
    """Threads of this process, those of native code included."""
    return len(os.listdir("/proc/self/task"))


def resident_bytes() -> int:
    """Memory of this process that is in RAM, page cache of maps excluded."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")


@contextmanager
def nothing_left() -> Iterator[None]:
    """No descriptor and no thread more after the block than before it."""
    torch.count_nonzero(
        torch.zeros(1 << 22)
    )  # torch's own threads, which stay, start with the first large tensor
    with leaks.nothing_left(arenas=False):
        yield


__all__ = [
    "check_case",
    "check_file",
    "check_tensor",
    "empty_state",
    "nothing_left",
    "raw_bytes",
    "resident_bytes",
    "sentinel",
    "threads",
]
