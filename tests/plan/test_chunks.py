"""Chunks tile their tensors, and their pieces lie where the tensors lie."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tensorlift.plan.chunks import CHUNK, chunk_edges, cut, digest_pieces
from tensorlift.plan.parts import Spread
from tensorlift.plan.pieces import DIGEST

SIZES = st.lists(
    st.one_of(st.integers(0, 3), st.integers(CHUNK - 2, CHUNK + 2), st.integers(0, 5 * CHUNK)), max_size=12
)


@given(SIZES)
def test_chunks_tile_every_tensor(given_sizes: list[int]) -> None:
    sizes = np.array(given_sizes, np.int64)
    edges = chunk_edges(sizes).tolist()
    owners, offsets, nbytes = (column.tolist() for column in cut(sizes))
    assert edges[-1] == len(owners)
    for tensor, size in enumerate(given_sizes):
        mine = range(edges[tensor], edges[tensor + 1])
        assert {owners[i] for i in mine} <= {tensor}
        assert [(offsets[i], nbytes[i]) for i in mine] == [
            (at, min(CHUNK, size - at)) for at in range(0, size, CHUNK)
        ]


def test_pieces_follow_their_tensors() -> None:
    files = np.array([1, 0], np.int32)
    starts, sizes = np.array([100, 8]), np.array([CHUNK + 5, 7])
    pieces = digest_pieces(files, starts, sizes, np.array([1 << 40, 64], np.uint64))
    assert pieces.tolist() == [
        (100, CHUNK, 1 << 40, 1, DIGEST, 0, 0),
        (100 + CHUNK, 5, (1 << 40) + CHUNK, 1, DIGEST, 0, 0),
        (8, 7, 64, 0, DIGEST, 0, 0),
    ]


def test_what_is_not_digested_is_one_piece() -> None:
    files = np.zeros(4, np.int32)
    starts, sizes = np.array([0, 9, 40, 70]), np.array([2 * CHUNK, CHUNK + 5, 7, 0])
    digested = np.array([False, True, False, False])
    spread = Spread(np.array([4, 0, 0, 0]), np.array([CHUNK, 0, 0, 0]))
    addresses = np.array([1 << 40, 1 << 41, 1 << 42, 1 << 43], np.uint64)
    pieces = digest_pieces(files, starts, sizes, addresses, digested, spread)
    assert pieces.tolist() == [
        (0, 2 * CHUNK, 1 << 40, 0, 0, 4, CHUNK),
        (9, CHUNK, 1 << 41, 0, DIGEST, 0, 0),
        (9 + CHUNK, 5, (1 << 41) + CHUNK, 0, DIGEST, 0, 0),
        (40, 7, 1 << 42, 0, 0, 0, 0),
    ]
    assert chunk_edges(sizes, digested).tolist() == [0, 1, 3, 4, 4]
