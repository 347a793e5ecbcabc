"""Pieces: copies from a file to contiguous memory, as the engine takes them (tl_piece)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["DIGEST", "JOIN", "PIECE", "merge_pieces", "new_pieces"]

PIECE = np.dtype(
    [
        ("file_offset", "u8"),
        ("nbytes", "u8"),
        ("destination", "u8"),
        ("file", "i4"),
        ("flags", "u4"),
        ("rows", "u8"),
        ("stride", "u8"),
    ]
)
"""``rows`` 0: a range of the file. Else ``nbytes`` in so many rows, which begin ``stride`` apart there."""

# TL_PIECE_JOIN: what lies between the piece before and this one is padding of one arena, and may be
# overwritten.
JOIN = 1
# TL_PIECE_DIGEST: compute the piece's digest before it lands; it may not be larger than a slot.
DIGEST = 2


def new_pieces(
    file: npt.ArrayLike,
    file_offset: npt.ArrayLike,
    nbytes: npt.ArrayLike,
    destination: npt.ArrayLike,
    rows: npt.ArrayLike = 0,
    stride: npt.ArrayLike = 0,
) -> npt.NDArray[Any]:
    """An array of PIECE, one element for each of the given, without flags. All but ``rows`` in bytes."""
    offsets = np.asarray(file_offset)
    pieces = np.zeros(len(offsets), PIECE)
    pieces["file"], pieces["file_offset"] = file, offsets
    pieces["nbytes"], pieces["destination"] = nbytes, destination
    pieces["rows"], pieces["stride"] = rows, stride
    return pieces


def merge_pieces(pieces: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same copies in fewer pieces: neighbours in the array that follow each other in file and memory
    become one.

    Pieces of no bytes are dropped, those of rows stay as they are. Flags must not be set.
    """
    pieces = pieces[pieces["nbytes"] > 0]
    if len(pieces) < 2:
        return pieces
    before, after = pieces[:-1], pieces[1:]
    follows = (
        (before["file"] == after["file"])
        & (before["file_offset"] + before["nbytes"] == after["file_offset"])
        & (before["destination"] + before["nbytes"] == after["destination"])
        & (before["rows"] == 0)
        & (after["rows"] == 0)
    )
    first = np.flatnonzero(np.concatenate(([True], ~follows)))
    merged: npt.NDArray[Any] = pieces[first].copy()
    merged["nbytes"] = np.add.reduceat(pieces["nbytes"], first)
    return merged
