"""Chunks: the parts of a tensor that are digested one by one, and the pieces that bring them.

tensor   | 1 MiB | 1 MiB | rest |      counted from the tensor's first byte, wherever it lies in its file
pieces   |   0   |   1   |  2   |      each with the flag DIGEST
digest   XXH3-128 of (digest 0, digest 1, digest 2), so that threads share the work
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorlift.plan.parts import Spread
from tensorlift.plan.pieces import DIGEST, new_pieces

__all__ = ["CHUNK", "Chunks", "chunk_edges", "cut", "digest_pieces"]

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

CHUNK = 1 << 20
"""Bytes of a chunk: part of the meaning of a digest, so never to be changed within one version of it."""


class Chunks(NamedTuple):
    """The chunks of some tensors, in turn: arrays of one element a chunk."""

    owners: Ints
    """Which tensor."""
    offsets: Ints
    """From its first byte."""
    nbytes: Ints


def chunk_edges(sizes: Ints, digested: Flags | None = None) -> Ints:
    """Chunks of tensor i are those from ``edges[i]`` up to ``edges[i + 1]``; without bytes it has none.

    One that is not to be ``digested`` (None: all are) is one chunk, whatever its size.
    """
    counts = -(-sizes // CHUNK)
    if digested is not None:
        counts = np.where(digested, counts, np.minimum(counts, 1))
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))


def cut(sizes: Ints, digested: Flags | None = None) -> Chunks:
    """Cuts tensors of so many bytes into chunks."""
    edges = chunk_edges(sizes, digested)
    owners = np.repeat(np.arange(len(sizes)), np.diff(edges))
    offsets = (np.arange(edges[-1]) - edges[owners]) * CHUNK
    nbytes = np.minimum(sizes[owners] - offsets, CHUNK)
    if digested is not None:
        nbytes = np.where(digested[owners], nbytes, sizes[owners])
    return Chunks(owners, offsets, nbytes)


def digest_pieces(
    files: npt.NDArray[np.int32],
    starts: Ints,
    sizes: Ints,
    addresses: npt.NDArray[np.uint64],
    digested: Flags | None = None,
    spread: Spread | None = None,
) -> npt.NDArray[Any]:
    """One piece a chunk, for tensors that go to ``addresses``; an array of pieces.PIECE.

    All are to be digested, or those that ``digested`` says; ``spread``: how the bytes of the others lie.
    """
    owners, offsets, nbytes = cut(sizes, digested)
    places = addresses[owners] + offsets.astype(np.uint64)
    rows = () if spread is None else spread.take(owners)
    pieces = new_pieces(files[owners], starts[owners] + offsets, nbytes, places, *rows)
    pieces["flags"] = DIGEST if digested is None else np.where(digested[owners], DIGEST, 0)
    return pieces
