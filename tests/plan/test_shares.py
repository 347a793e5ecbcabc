"""Shares of arenas: every byte that is exchanged is read by one rank, each within its part of the grid."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tensorlift.plan.arenas import PAGE, Layout, Rules, Wanted, lay_out
from tensorlift.plan.shares import Share, share_nbytes, take_share

TENSORS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 40_000), st.sampled_from([1, 2, 4, 8]), st.booleans()),
    min_size=1,
    max_size=60,
)


def wanted(tensors: list[tuple[int, int, int, bool]]) -> Wanted:
    """Tensors that follow each other in their files."""
    ordered = sorted(tensors, key=lambda tensor: tensor[0])
    starts, at, before = [], 0, -1
    for file, size, alignment, _ in ordered:
        at = at if file == before else 8
        at += -at % alignment
        starts.append(at)
        at, before = at + size, file
    columns = np.array([(file, size, alignment) for file, size, alignment, _ in ordered], np.int64).T
    return Wanted(columns[0].astype(np.int32), np.array(starts, np.int64), columns[1], columns[2])


def bytes_of(layout: Layout) -> list[tuple[int, int, int, int]]:
    """(file, offset in it, arena, offset in it) of every byte that is read."""
    found = []
    runs = (layout.run_file, layout.run_start, layout.run_nbytes, layout.run_arena, layout.run_offset)
    for file, start, nbytes, arena, offset in zip(*(run.tolist() for run in runs), strict=True):
        found += [(file, start + k, arena, offset + k) for k in range(0, nbytes, 97)]
        found.append((file, start + nbytes - 1, arena, offset + nbytes - 1))
    return found


@given(TENSORS, st.integers(1, 9), st.integers(1 << 12, 1 << 18), st.booleans())
def test_shares_of_all_ranks_are_the_whole(
    tensors: list[tuple[int, int, int, bool]], ranks: int, capacity: int, device: bool
) -> None:
    given_tensors = wanted(tensors)
    exchanged = np.array([flag for *_, flag in sorted(tensors, key=lambda tensor: tensor[0])])
    grid = Share(0, ranks).grid
    layout = lay_out(given_tensors, Rules(capacity, device, grid=grid), exchanged)
    assert (layout.arena_nbytes[layout.arena_exchanged] % grid == 0).all()
    # An arena holds either what is exchanged or what is not.
    for arena, flag, size in zip(
        layout.arenas.tolist(), exchanged.tolist(), given_tensors.sizes, strict=True
    ):
        assert size == 0 or bool(layout.arena_exchanged[arena]) == flag
    parts = [take_share(layout, Share(rank, ranks)) for rank in range(ranks)]
    together = layout.arena_exchanged[layout.run_arena]
    assert sum(int(part.run_nbytes.sum()) for part in parts) == int(
        layout.run_nbytes[together].sum() + ranks * layout.run_nbytes[~together].sum()
    )
    where = {}
    for rank, part in enumerate(parts):
        assert (np.diff(part.run_batch) >= 0).all()
        for file, offset, arena, at in bytes_of(part):
            where[arena, at] = (file, offset)
            if layout.arena_exchanged[arena]:
                width = share_nbytes(int(layout.arena_used[arena]), ranks)
                assert width % PAGE == 0
                assert rank * width <= at < (rank + 1) * width
                assert width * ranks <= layout.arena_nbytes[arena]
                # Read in one go, with the batch that needs it first.
                first = layout.run_batch[layout.run_arena == arena].min()
                assert (part.run_batch[part.run_arena == arena] == first).all()
    for file, offset, arena, at in bytes_of(layout):
        assert where.get((arena, at), (file, offset)) == (file, offset)


@given(TENSORS, TENSORS, TENSORS, st.integers(1 << 12, 1 << 18))
def test_what_others_do_not_want_does_not_move_what_all_want(
    common: list[tuple[int, int, int, bool]],
    mine: list[tuple[int, int, int, bool]],
    yours: list[tuple[int, int, int, bool]],
    capacity: int,
) -> None:
    rules = Rules(capacity, grid=Share(0, 3).grid)
    found = []
    for extra in (mine, yours):
        every = wanted([(file, size, alignment, True) for file, size, alignment, _ in common])
        own = wanted([(7, size, alignment, False) for _, size, alignment, _ in extra])
        both = Wanted(*(np.concatenate((a, b)) for a, b in zip(every[:4], own[:4], strict=True)))
        flags = np.arange(len(both.starts)) < len(common)
        layout = lay_out(both, rules, flags)
        arenas = np.flatnonzero(layout.arena_exchanged)
        rank_of = {arena: number for number, arena in enumerate(arenas.tolist())}
        found.append(
            (
                [rank_of.get(arena) for arena in layout.arenas[flags].tolist()],
                layout.offsets[flags].tolist(),
                layout.arena_nbytes[arenas].tolist(),
                layout.arena_used[arenas].tolist(),
            )
        )
    assert found[0] == found[1]
