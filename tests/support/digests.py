"""Digests of tensors made independently of the package: by the xxhash package, in plain Python."""

from __future__ import annotations

from pathlib import Path

import xxhash

from support.checkpoints import Row
from tensorlift import sources
from tensorlift.format.checkpoint import Checkpoint

# Written down here again: it is part of what a digest means.
CHUNK = 1 << 20


def digest_of(raw: bytes) -> str:
    """Hexadecimal digits of a tensor's digest."""
    chunks = (raw[at : at + CHUNK] for at in range(0, len(raw), CHUNK))
    return xxhash.xxh3_128_hexdigest(b"".join(map(xxhash.xxh3_128_digest, chunks)))


def digests_of(tensors: dict[str, Row]) -> dict[str, str]:
    """Digests by name."""
    return {name: digest_of(raw) for name, (_, _, raw) in tensors.items()}


def headers(path: Path | list[Path]) -> Checkpoint:
    """The checkpoint at a path."""
    return sources.read_headers(sources.find(path))


def flip(path: Path, at: int) -> None:
    """Changes one bit of a file, ``at`` bytes from its start (or, below 0, from its end)."""
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)
