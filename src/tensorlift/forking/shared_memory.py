"""Tensors in memory that other processes of this host can be given, and copy without rights over this one."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tensorlift.engine import abi_fork
from tensorlift.engine.abi_types import RefusedError
from tensorlift.errors import MachineError
from tensorlift.forking.manifest import Layout, span_bytes
from tensorlift.format.quoting import plural

__all__ = ["SharedFile", "shared_at", "shared_tensors"]

# Of each tensor: what a cache line and torch's own allocator have.
_ALIGNMENT = 64


class SharedFile(NamedTuple):
    """Memory that is in a file."""

    descriptor: int
    address: int
    nbytes: int


# By address; those whose tensors are still there.
_files: dict[int, SharedFile] = {}


def shared_tensors(layouts: Sequence[Layout]) -> dict[str, torch.Tensor]:
    """Zeroed tensors on the CPU by name, all in one file of memory, which goes when the last of them does.

    A seed of them is copied by forks on the same host without rights over its process, and faster than other
    memory. The file is sealed: no process can shorten it, none but this one can write to it. Raises
    MachineError where there is no memory, or no such file.
    """
    offsets, total = [], 0
    for one in layouts:
        offsets.append(total)
        total += -(-span_bytes(one.dtype, one.shape, one.stride) // _ALIGNMENT) * _ALIGNMENT
    whole = _allocated(total) if total else torch.empty(0, dtype=torch.uint8)
    made = {}
    for one, at in zip(layouts, offsets, strict=True):
        dtype = getattr(torch, one.dtype)
        nbytes = span_bytes(one.dtype, one.shape, one.stride)
        part = whole[at : at + nbytes].view(dtype) if nbytes else torch.empty(0, dtype=dtype)
        made[one.name] = part.as_strided(one.shape, one.stride)
    return made


def shared_at(address: int, nbytes: int) -> SharedFile | None:
    """The file that holds all of these bytes, where they are in one that was made here."""
    for file in list(_files.values()):
        if file.address <= address and address + nbytes <= file.address + file.nbytes:
            return file
    return None


def _allocated(nbytes: int) -> torch.Tensor:
    try:
        descriptor, memory = abi_fork.shared_create(nbytes)
    except RefusedError as refused:
        raise MachineError(f"{plural(nbytes, 'byte')} of shared memory: {refused.error.text}") from None
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    file = SharedFile(descriptor, whole.data_ptr(), nbytes)
    _files[file.address] = file
    # torch holds the buffer for as long as a tensor of it is there.
    weakref.finalize(memory, _free, file).atexit = False
    return whole


def _free(file: SharedFile) -> None:
    del _files[file.address]
    abi_fork.shared_release(*file)
