"""Pieces: the layout that the engine reads, and merging."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tensorlift.plan.pieces import PIECE, merge_pieces, new_pieces


def test_the_layout_is_that_of_tl_piece() -> None:
    assert PIECE.itemsize == 48
    assert {name: PIECE.fields[name][1] for name in PIECE.names or ()} == {  # type: ignore[index]
        "file_offset": 0,
        "nbytes": 8,
        "destination": 16,
        "file": 24,
        "flags": 28,
        "rows": 32,
        "stride": 40,
    }


def test_new_pieces() -> None:
    pieces = new_pieces([0, 1], np.array([8, 16]), [4, 5], np.array([1 << 63, 7], np.uint64))
    assert pieces.dtype == PIECE
    assert pieces.tolist() == [(8, 4, 1 << 63, 0, 0, 0, 0), (16, 5, 7, 1, 0, 0, 0)]


def test_rows_are_not_merged() -> None:
    pieces = new_pieces([0] * 3, [0, 8, 16], [8, 8, 8], [0, 8, 16], [0, 2, 0], [0, 4, 0])
    assert merge_pieces(pieces).tolist() == pieces.tolist()


STEPS = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 9), st.sampled_from([0, 0, 3]), st.sampled_from([0, 0, 5]))
)


@given(STEPS)
def test_merging_moves_the_same_bytes(steps: list[tuple[int, int, int, int]]) -> None:
    at, to, rows = 100, 1000, []
    for file, size, skip, jump in steps:
        at, to = at + skip, to + jump
        rows.append((file, at, size, to))
        at, to = at + size, to + size
    columns = np.array(rows, np.int64).reshape(-1, 4).T
    pieces = new_pieces(*columns)
    merged = merge_pieces(pieces)

    def moves(pieces: np.ndarray) -> set[tuple[int, int, int]]:  # type: ignore[type-arg]
        return {
            (file, offset + byte, destination + byte)
            for offset, nbytes, destination, file, *_ in pieces.tolist()
            for byte in range(nbytes)
        }

    assert moves(merged) == moves(pieces)
    assert (merged["nbytes"] > 0).all()
    for one, other in pairwise(merged):
        follows = (
            one["file"] == other["file"]
            and one["file_offset"] + one["nbytes"] == other["file_offset"]
            and one["destination"] + one["nbytes"] == other["destination"]
        )
        assert not follows
