"""Tensors against the bytes that were written for them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch

from support.checkpoints import Row
from tensorlift.format.dtypes import BY_CODE


def crc(tensor: torch.Tensor) -> int:
    """Of a tensor's bytes, on any device."""
    return zlib.crc32(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a contiguous CPU tensor."""
    if tensor.numel() == 0:
        return b""
    return bytes(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def assert_tensor(tensor: torch.Tensor, row: Row, name: str = "") -> None:
    """dtype, shape, layout, ownership and bytes are right."""
    code, shape, content = row
    dtype = BY_CODE[code]
    if dtype.elements > 1:
        shape = (*shape[:-1], shape[-1] // dtype.elements)
    assert tensor.dtype is getattr(torch, dtype.torch_name or ""), name
    assert tuple(tensor.shape) == tuple(shape), name
    assert tensor.is_contiguous(), name
    assert not tensor.is_inference(), name
    assert not tensor.requires_grad, name
    assert tensor.data_ptr() % dtype.alignment == 0, name
    assert tensor.untyped_storage().nbytes() == len(content), name
    assert raw(tensor) == content, name


def assert_state(state: Mapping[str, torch.Tensor], rows: Mapping[str, Row], *, ordered: bool = True) -> None:
    """Names (in order) and every tensor are right."""
    assert (list(state) if ordered else sorted(state)) == (list(rows) if ordered else sorted(rows))
    for name, row in rows.items():
        assert_tensor(state[name], row, name)
