"""Whether a tensor can be loaded into at all: its memory, device and layout."""

from __future__ import annotations

import contextlib

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from tensorlift.errors import DeviceError, RequestError
from tensorlift.plan.extents import overlaps_itself
from tensorlift.tensors.devices import check_kind

__all__ = ["beyond_storage", "check_usable"]


def beyond_storage(tensor: torch.Tensor, wanted: int) -> str:
    """What is wrong with a tensor that spans so many bytes, more than its storage has: "" where nothing is.

    One whose storage was freed or resized, as sharding does, keeps its shape, and what lies behind the
    storage's end is somebody else's memory, or none.
    """
    there = tensor.untyped_storage().nbytes()
    if not wanted or tensor.storage_offset() * tensor.element_size() + wanted <= there:
        return ""
    return (
        f"has shape {list(tensor.shape)}, which takes {wanted:,} bytes, and its storage has {there:,}: it "
        "was freed or resized; give the tensor its memory back"
    )


def check_usable(name: str, tensor: torch.Tensor) -> None:
    """Raises RequestError, DeviceError for a tensor that cannot be loaded into, whatever is loaded."""
    if isinstance(tensor, UninitializedTensorMixin):
        raise RequestError(
            f"{name!r} has no shape yet; run the model once (or give it shapes) before load_into"
        )
    if tensor.is_meta:
        raise RequestError(
            f"{name!r} is on the meta device and has no memory to load into; make it real first with "
            "model.to_empty(device=...), or give what load() returns to model.load_state_dict(assign=True)"
        )
    try:
        check_kind(tensor.device)
    except DeviceError as error:
        raise DeviceError(f"{name!r}: {error}") from None
    if tensor.is_nested or tensor.layout is not torch.strided:
        raise RequestError(f"{name!r} {_kind(tensor)}; load_into fills strided tensors only")
    if _overlaps_itself(tensor):
        raise RequestError(
            f"{name!r} has shape {list(tensor.shape)} and strides {list(tensor.stride())}, with which "
            "several of its elements share one place (expand() and as_strided() make such); give load_into "
            "memory of its own: clone() it"
        )


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether several elements share one place. Of one that is larger than its storage nothing is said: it is
    refused as such, and to look at it would take any amount of memory.
    """
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    there = tensor.numel()  # where a subclass has no storage to ask
    with contextlib.suppress(RuntimeError, NotImplementedError):
        there = tensor.untyped_storage().nbytes() // tensor.element_size() - int(tensor.storage_offset())
    return last < there and overlaps_itself(tensor.shape, tensor.stride())


def _kind(tensor: torch.Tensor) -> str:
    return "is nested" if tensor.is_nested else f"has layout {tensor.layout}"
