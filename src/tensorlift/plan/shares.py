"""Which part of each arena a rank reads, where several load together.

An arena that is exchanged is cut into as many equal *shares* as there are ranks, each of whole pages; the
last ones may reach beyond what is used of it, and be empty. The grid lies in the arena, not in the files, so
that one all-gather in place completes it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from tensorlift.plan.arenas import PAGE, Ints, Layout

__all__ = ["Share", "share_nbytes", "take_share"]

_Bytes = TypeVar("_Bytes", int, Ints)


@dataclass(frozen=True, slots=True)
class Share:
    """Rank ``rank`` of ``ranks``."""

    rank: int
    ranks: int

    @property
    def grid(self) -> int:
        """Bytes of which the capacity of an arena that is exchanged is a multiple."""
        return self.ranks * PAGE


def share_nbytes(used: _Bytes, ranks: int) -> _Bytes:
    """Bytes of one share of an arena of which ``used`` bytes hold tensors, or of each of several."""
    return -(-used // (ranks * PAGE)) * PAGE


def take_share(layout: Layout, share: Share) -> Layout:
    """The same with the runs that this rank reads: of arenas that are exchanged its share alone.

    Each such arena is read in one go, with the first batch that uses it, for it is gathered once: its runs
    have that batch. Runs stay in the order of batches.
    """
    exchanged = layout.arena_exchanged[layout.run_arena]
    width = share_nbytes(layout.arena_used, share.ranks)[layout.run_arena]
    low, high = layout.run_offset, layout.run_offset + layout.run_nbytes
    begin = np.where(exchanged, np.maximum(low, share.rank * width), low)
    end = np.where(exchanged, np.minimum(high, (share.rank + 1) * width), high)
    # In the first batch of its arena; the others wait for the same gather.
    first = np.full(len(layout.arena_nbytes), layout.batch_count, np.int64)
    np.minimum.at(first, layout.run_arena, layout.run_batch)
    batch = np.where(exchanged, first[layout.run_arena], layout.run_batch).astype(np.int32)
    some = np.flatnonzero(end > begin)
    rows = some[np.argsort(batch[some], kind="stable")]
    return dataclasses.replace(
        layout,
        run_file=layout.run_file[rows],
        run_start=(layout.run_start + begin - low)[rows],
        run_nbytes=(end - begin)[rows],
        run_arena=layout.run_arena[rows],
        run_offset=begin[rows],
        run_batch=batch[rows],
        run_first=layout.run_first[rows],
    )
