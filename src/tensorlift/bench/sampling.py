"""Which bytes of a checkpoint are compared, and their checksum: the same rule for files and for tensors."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tensorlift.format.checkpoint import Checkpoint

__all__ = ["checksum", "digest_of_names", "file_checksums", "sample_names", "tensor_facts"]

_TENSORS = 64
_POINTS = 1 << 16
_ENDS = 4096


def sample_names(names: Sequence[str]) -> list[str]:
    """At most 64 names, spread evenly, the first and the last among them."""
    places = np.linspace(0, len(names) - 1, min(_TENSORS, len(names))).astype(int)
    return [names[i] for i in places]


def digest_of_names(names: Iterable[str]) -> str:
    """One value for a set of names."""
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()


def checksum(flat: Any) -> int:
    """CRC-32 of both ends and of 65,536 or more bytes spread over an array or a tensor of bytes."""
    # An odd step meets every byte of the elements in turn.
    step = max(1, len(flat) // _POINTS - 1) | 1
    value = 0
    for part in (flat[:_ENDS], flat[::step], flat[-_ENDS:]):
        value = zlib.crc32((part.cpu().numpy() if hasattr(part, "cpu") else part).tobytes(), value)
    return value


def file_checksums(checkpoint: Checkpoint, names: Iterable[str]) -> dict[str, int]:
    """The checksums of tensors, from their files by plain reads."""
    found = {}
    for name in names:
        row = checkpoint.index(name)
        path = checkpoint.shards[int(checkpoint.shard_of[row])].absolute
        with open(path, "rb", buffering=0) as file:
            file.seek(int(checkpoint.starts[row]))
            raw = bytearray(int(checkpoint.sizes[row]))
            left = memoryview(raw)
            while left and (got := file.readinto(left)):
                left = left[got:]
        found[name] = checksum(np.frombuffer(raw, np.uint8))
    return found


def tensor_facts(state: Mapping[str, Any], names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Dtype, shape and checksum of those of the tensors that are there."""
    import torch

    facts = {}
    for name in names:
        if name in state:
            tensor = state[name]
            flat = tensor.contiguous().reshape(-1).view(torch.uint8)
            facts[name] = {
                "dtype": str(tensor.dtype),
                "shape": list(tensor.shape),
                "checksum": checksum(flat),
            }
    return facts
