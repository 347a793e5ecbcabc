"""What a model has to offer: its tensors, each where it lies, and the regions of memory that hold them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tensorlift.engine import abi
from tensorlift.engine.abi_fork import Memory
from tensorlift.errors import RequestError
from tensorlift.forking.manifest import (
    ITEM_BYTES,
    LONGEST_NAME,
    NOWHERE,
    Kind,
    Region,
    Tensor,
    is_sendable,
    span_bytes,
)
from tensorlift.forking.regions import Blocks, Placed, Regions, regions_by_block, regions_by_storage
from tensorlift.format.quoting import quote, shown
from tensorlift.plan.extents import Extents
from tensorlift.tensors.devices import driver_of
from tensorlift.tensors.memory import pci_address
from tensorlift.tensors.usable import beyond_storage
from tensorlift.tensors.writable import first_read_only, read_only

__all__ = [
    "CACHES",
    "Named",
    "Offering",
    "blocks_of",
    "check_writable",
    "gpu_of",
    "named_tensors",
    "native_device",
    "offer",
    "places",
    "settle",
]

CACHES = re.compile(r"cache", re.IGNORECASE)
"""Names of attributes with what was computed for requests, not weights: an engine's KV cache, above all."""
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor of a model."""

    name: str
    tensor: torch.Tensor
    kind: Kind


@dataclass(frozen=True, slots=True)
class Offering:
    """Tensors as a manifest has them, regions, and where those lie in this process."""

    tensors: tuple[Tensor, ...]
    regions: tuple[Region, ...]
    memories: tuple[Memory, ...]
    """What each region is in this process."""


def named_tensors(model: object) -> list[Named]:
    """Parameters, buffers (those that are not saved too) and derived tensors of a module; those of a mapping.

    Derived is what lies in a plain attribute of a module, as engines put it there behind a load; attributes
    that are caches by their name are left out. In the order of the model. Raises RequestError for what has no
    tensors.
    """
    if isinstance(model, torch.nn.Module):
        found = [
            *(
                Named(name, tensor, "parameter")
                for name, tensor in model.named_parameters(remove_duplicate=False)
            ),
            *(Named(name, tensor, "buffer") for name, tensor in model.named_buffers(remove_duplicate=False)),
            *_derived(model),
        ]
    elif isinstance(model, Mapping):
        for name, value in model.items():
            if not isinstance(name, str) or not isinstance(value, torch.Tensor):
                raise RequestError(
                    "seed and fork take a torch.nn.Module or a dict of names and tensors; under "
                    f"{shown(name)} is a {type(value).__name__}"
                )
        found = [Named(name, tensor, "parameter") for name, tensor in model.items()]
    else:
        raise RequestError(
            f"seed and fork take a torch.nn.Module or a dict of tensors, not a {type(model).__name__}"
        )
    if not found:
        raise RequestError("the model has no tensors")
    return found


def _derived(model: torch.nn.Module) -> Iterator[Named]:
    for path, module in model.named_modules(remove_duplicate=False):
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor) and not CACHES.search(attribute):
                yield Named(f"{path}.{attribute}" if path else attribute, value, "derived")


def offer(tensors: Sequence[Named]) -> Offering:
    """Where all of them lie. Raises RequestError that names a tensor whose memory cannot be offered."""
    for named in tensors:
        if not is_sendable(named.name):
            raise RequestError(
                f"{quote(named.name, 300)} is no name that can be sent; expected at most {LONGEST_NAME:,} "
                "characters of Unicode"
            )
        if problem := _problem(named.tensor):
            raise RequestError(f"{quote(named.name)} {problem}")
    places: dict[int, tuple[int, int]] = {}
    regions: list[Region] = []
    memories: list[Memory] = []
    for device in dict.fromkeys(named.tensor.device for named in tensors):
        here = [
            at for at, named in enumerate(tensors) if named.tensor.device == device and _nbytes(named.tensor)
        ]
        found = _regions([tensors[at] for at in here], device)
        first = len(regions)
        starts, stops = (part.tolist() for part in found.extents)
        kind, index = native_device(device)
        for start, stop in zip(starts, stops, strict=True):
            regions.append(Region(stop - start, str(device)))
            memories.append(Memory(start, stop - start, kind, index))
        pairs = zip(found.region_of.tolist(), found.offsets.tolist(), strict=True)
        places.update(
            {at: (first + region, offset) for at, (region, offset) in zip(here, pairs, strict=True)}
        )
    return Offering(tuple(_entries(tensors, places)), tuple(regions), tuple(memories))


def native_device(device: torch.device) -> tuple[int, int]:
    """A device as the library numbers it: its kind, and its index."""
    if device.type == "cpu":
        return abi.DEVICE_CPU, 0
    return abi.DEVICE_HIP if torch.version.hip else abi.DEVICE_CUDA, _index(device)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def check_writable(tensors: Iterable[Named]) -> None:
    """Raises RequestError for a tensor that nothing can be written into: the kernel's refusal would be taken
    for a seed's failure.
    """
    here = [one for one in tensors if one.tensor.device.type == "cpu"]
    addresses = np.array([one.tensor.data_ptr() for one in here], np.uint64)
    at = first_read_only(addresses, np.array([_nbytes(one.tensor) for one in here], np.int64))
    if at is not None:
        raise RequestError(f"{read_only(here[at].name)} Fork into a copy (clone) of it")


def gpu_of(tensors: Iterable[Named]) -> str | None:
    """Where the first GPU that holds some is plugged in; None for host memory, or if torch does not say."""
    device = next((named.tensor.device for named in tensors if named.tensor.device.type == "cuda"), None)
    return None if device is None else pci_address(_index(device))


def settle(tensors: Iterable[Named]) -> None:
    """Waits for what is under way on their devices: the library's copies know no stream of torch's."""
    for device in dict.fromkeys(named.tensor.device for named in tensors):
        if device.type == "cuda":
            with driver_of(device):
                torch.cuda.synchronize(device)


def places(tensors: Iterable[Named]) -> list[tuple[int, int, int]]:
    """The address of each, and the one and the bytes of its storage: equal for as long as none got other
    memory.
    """
    return [_place(one.tensor) for one in tensors]


def _place(tensor: torch.Tensor) -> tuple[int, int, int]:
    try:
        storage = tensor.untyped_storage()
        return tensor.data_ptr(), storage.data_ptr(), storage.nbytes()
    except (NotImplementedError, RuntimeError, ValueError):  # sparse, or a parameter without memory yet
        return 0, 0, 0


def _regions(tensors: Sequence[Named], device: torch.device) -> Regions:
    placed = _placed(tensors)
    # Other allocators than torch's native one tell of no blocks.
    if device.type == "cpu" or torch.cuda.get_allocator_backend() != "native":
        return regions_by_storage(placed)
    with driver_of(device):
        snapshot = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    return regions_by_block(placed, blocks_of(snapshot, _index(device)))


def blocks_of(snapshot: Iterable[Mapping[str, Any]], device: int) -> Blocks:
    """The active blocks of one device, out of ``torch.cuda.memory_snapshot()``."""
    starts, sizes, segments = [], [], []
    for segment in sorted(snapshot, key=lambda one: int(one["address"])):
        if segment["device"] != device:
            continue
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                starts.append(int(block["address"]))
                sizes.append(int(block["size"]))
                segments.append(int(segment["address"]))
    begin = np.array(starts, np.int64)
    return Blocks(Extents(begin, begin + np.array(sizes, np.int64)), np.array(segments, np.int64))


def _problem(tensor: torch.Tensor) -> str | None:
    """Why its memory cannot be read by others as it is."""
    if type(tensor) not in _PLAIN:
        return f"is a {type(tensor).__name__}, whose bytes are known to it alone; offer the tensors inside"
    if tensor.is_meta:
        return (
            "is on the meta device and has no memory; load the weights first, or, to fork into it, "
            "to_empty(device=...)"
        )
    if tensor.device.type not in ("cpu", "cuda"):
        return f"is on {tensor.device}, which is not supported; move it to the CPU or to a CUDA device"
    if tensor.is_nested:
        return "is nested; only strided tensors can be offered"
    if tensor.layout is not torch.strided:
        return f"has layout {tensor.layout}; only strided tensors can be offered"
    if _dtype(tensor) not in ITEM_BYTES:
        return f"has dtype {tensor.dtype}, whose bytes do not say all; offer what it is made of"
    if tensor.is_neg() or tensor.is_conj():
        return (
            "is negated or conjugated by a flag, which its bytes do not show; offer what resolve_neg() and "
            "resolve_conj() give"
        )
    if problem := beyond_storage(tensor, _nbytes(tensor)):
        return f"{problem} first"
    return None


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _nbytes(tensor: torch.Tensor) -> int:
    return span_bytes(_dtype(tensor), tensor.shape, tensor.stride())


def _placed(named: Sequence[Named]) -> Placed:
    starts = np.array([one.tensor.data_ptr() for one in named], np.int64)
    sizes = np.array([_nbytes(one.tensor) for one in named], np.int64)
    storages = np.array([one.tensor.untyped_storage().data_ptr() for one in named], np.int64)
    return Placed([one.name for one in named], Extents(starts, starts + sizes), storages)


def _entries(tensors: Sequence[Named], places: Mapping[int, tuple[int, int]]) -> Iterator[Tensor]:
    first: dict[object, str] = {}
    for at, named in enumerate(tensors):
        region, offset = places.get(at, (NOWHERE, 0))
        shape, stride = tuple(named.tensor.shape), tuple(named.tensor.stride())
        dtype = _dtype(named.tensor)
        alias = None
        if region != NOWHERE:
            known = first.setdefault((region, offset, dtype, shape, stride), named.name)
            alias = None if known == named.name else known
        yield Tensor(named.name, dtype, shape, stride, region, offset, named.kind, alias)
