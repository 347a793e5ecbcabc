"""Chunks: the parts of a tensor that are digested one by one, and the pieces that bring them.

tensor   | 1 MiB | 1 MiB | rest |      counted from the tensor's first byte, wherever it lies in its file
pieces   |   0   |   1   |  2   |      each with the flag DIGEST
digest   XXH3-128 of (digest 0, digest 1, digest 2), so that threads share the work
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorlift.plan.pieces import DIGEST, new_pieces

__all__ = ["CHUNK", "Chunks", "chunk_edges", "cut", "digest_pieces"]

Ints = npt.NDArray[np.int64]

CHUNK = 1 << 20
"""Bytes of a chunk: part of the meaning of a digest, so never to be changed within one version of it."""


class Chunks(NamedTuple):
    """The chunks of some tensors, in turn: arrays of one element a chunk."""

    owners: Ints
    """Which tensor."""
    offsets: Ints
    """From its first byte."""
    nbytes: Ints


def chunk_edges(sizes: Ints) -> Ints:
    """Chunks of tensor i are those from ``edges[i]`` up to ``edges[i + 1]``; without bytes it has none."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(-(-sizes // CHUNK))))


def cut(sizes: Ints) -> Chunks:
    """Cuts tensors of so many bytes into chunks."""
    edges = chunk_edges(sizes)
    owners = np.repeat(np.arange(len(sizes)), np.diff(edges))
    offsets = (np.arange(edges[-1]) - edges[owners]) * CHUNK
    return Chunks(owners, offsets, np.minimum(sizes[owners] - offsets, CHUNK))


def digest_pieces(
    files: npt.NDArray[np.int32], starts: Ints, sizes: Ints, addresses: npt.NDArray[np.uint64]
) -> npt.NDArray[Any]:
    """One piece a chunk, to be digested, for tensors that go to ``addresses``; an array of pieces.PIECE."""
    owners, offsets, nbytes = cut(sizes)
    places = addresses[owners] + offsets.astype(np.uint64)
    pieces = new_pieces(files[owners], starts[owners] + offsets, nbytes, places)
    pieces["flags"] = DIGEST
    return pieces
