"""Tensors of some files of a load: laid out in arenas, the pieces that fill these, and what comes of them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tensorlift.engine.digesting import Checks
from tensorlift.errors import RequestError
from tensorlift.format.checkpoint import Checkpoint
from tensorlift.plan import pieces as plan_pieces
from tensorlift.plan.arenas import Layout, Rules, Wanted, lay_out
from tensorlift.plan.parts import spread_of
from tensorlift.plan.shares import take_share
from tensorlift.tensors.exchanging import Exchanging
from tensorlift.tensors.memory import Arena, Memory
from tensorlift.tensors.views import Table

__all__ = ["Part"]


class Part:
    """Batches are numbered from 0 here; batch k holds consecutive wanted tensors.

    Its owner gives files and arenas, and says when an arena is no longer written to.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        rows: npt.NDArray[np.int64],
        rules: Rules,
        exchange: Exchanging | None = None,
    ) -> None:
        """Lays out ``rows``; raises DtypeError for a tensor that the running torch cannot express."""
        self.table = table = Table(checkpoint, rows)
        self._spread = spread = spread_of(checkpoint, rows)
        alone = None if spread is None else spread.counts > 0
        wanted = Wanted(table.files, table.starts, table.sizes, table.alignments, alone)
        layout = lay_out(wanted, rules, None if exchange is None else exchange.rows)
        self._arena_of = [-1] * layout.batch_count
        self._first_arenas: list[list[int]] = [[] for _ in range(layout.batch_count)]
        self._last_use: dict[int, list[int]] = {}
        self._follow_arenas(layout)
        self.gathered: list[tuple[int, int]] = []
        """Of each gather, in their order: the batch with which the arena is read, and the arena."""
        if exchange is not None:
            self.gathered = [
                (batch, arena)
                for batch, arenas in enumerate(self._first_arenas)
                for arena in arenas
                if layout.arena_exchanged[arena]
            ]
            exchange.plan([int(layout.arena_used[arena]) for _, arena in self.gathered])
            layout = take_share(layout, exchange.share)
        self.gather_of = {batch: number for number, (batch, _) in enumerate(self.gathered)}
        self.layout = layout
        self.batch_count = layout.batch_count
        edges = np.arange(layout.batch_count + 1)
        self.batch_edges: list[int] = np.searchsorted(layout.batches, edges).tolist()
        self._run_edges: list[int] = np.searchsorted(layout.run_batch, edges).tolist()
        self.files = np.zeros(0, np.int32)
        """The engine's index of a file by the shard's."""
        self.checks: Checks | None = None
        self.arenas: dict[int, Arena] = {}
        self._addresses = np.zeros(len(layout.arena_nbytes), np.uint64)

    def _follow_arenas(self, layout: Layout) -> None:
        """The arena of each batch that has bytes, and the arenas by the first and the last batch of each."""
        last: dict[int, int] = {}
        for arena, batch in zip(layout.run_arena.tolist(), layout.run_batch.tolist(), strict=True):
            if arena not in last:
                self._first_arenas[batch].append(arena)
            last[arena] = batch
            self._arena_of[batch] = arena
        for arena, batch in last.items():
            self._last_use.setdefault(batch, []).append(arena)

    @property
    def piece_count(self) -> int:
        """Pieces of all batches."""
        return self.ticket(self.batch_count - 1) if self.batch_count else 0

    def ticket(self, batch: int) -> int:
        """Pieces of the batches up to this one."""
        if self.checks is not None:
            return self.checks.ticket(self.batch_edges[batch + 1])
        return self._run_edges[batch + 1]

    def names(self, batch: int) -> list[str]:
        """Names of a batch's tensors."""
        return self.table.names[self.batch_edges[batch] : self.batch_edges[batch + 1]]

    def cost(self, batch: int) -> int:
        """Bytes of the arenas that this batch is the first to use."""
        return int(self.layout.arena_nbytes[self._first_arenas[batch]].sum())

    def allocate(self, first: int, last: int, memory: Memory) -> int:
        """Takes the arenas that batches [first, last) are the first to use; their bytes."""
        begun = list(itertools.chain.from_iterable(self._first_arenas[first:last]))
        sizes = [int(self.layout.arena_nbytes[arena]) for arena in begun]
        if sizes:
            # In one step: what an interrupt leaves outside of this is never given back.
            self.arenas.update(zip(begun, memory.allocate(sizes), strict=True))
        for arena in begun:
            held = self.arenas.get(arena)
            if held is None:
                raise RequestError("the load was closed")
            self._addresses[arena] = held.address
        return sum(sizes)

    def pieces(self, first: int, last: int) -> npt.NDArray[Any]:
        """Pieces of batches [first, last), whose arenas are there."""
        if self.checks is not None:
            return self._tensor_pieces(self.checks, first, last)
        layout = self.layout
        runs = slice(self._run_edges[first], self._run_edges[last])
        owners = layout.run_arena[runs]
        pieces = plan_pieces.new_pieces(
            self.files[layout.run_file[runs]],
            layout.run_start[runs],
            layout.run_nbytes[runs],
            self._addresses[owners] + layout.run_offset[runs].astype(np.uint64),
            *(() if self._spread is None else self._spread.take(layout.run_first[runs])),
        )
        # Runs of one arena that come one after another belong to one batch: nothing but padding lies between
        # them.
        pieces["flags"][1:] = np.where(owners[1:] == owners[:-1], plan_pieces.JOIN, 0)
        return pieces

    def _tensor_pieces(self, checks: Checks, first: int, last: int) -> npt.NDArray[Any]:
        """The same for tensors that are to be checked."""
        low, high = self.batch_edges[first], self.batch_edges[last]
        owners = self.layout.arenas[low:high]
        # A tensor of no bytes has no arena (-1), and no piece either.
        bases = np.append(self._addresses, np.uint64(0))[owners]
        addresses = bases + self.layout.offsets[low:high].astype(np.uint64)
        return checks.pieces(low, high, self.files[self.table.files[low:high]], addresses, owners)

    def tensors(self, batch: int, memory: Memory) -> list[torch.Tensor]:
        """The tensors of a batch whose arena is there; RequestError where it was let go."""
        first, last = self.batch_edges[batch], self.batch_edges[batch + 1]
        used = self._arena_of[batch]
        arena = self.arenas.get(used)
        if arena is None and used >= 0:
            raise RequestError("the load was closed")
        return self.table.tensors(first, last, arena, self.layout.offsets[first:last], memory)

    def used_on(self, batch: int, stream: int) -> None:
        """A batch that has come is handed out to work on this stream."""
        arena = self.arenas.get(self._arena_of[batch])
        if arena is not None:
            arena.used_on(stream)

    def release(self, batch: int) -> int:
        """Lets go of the arenas that no later batch uses, which tensors may still keep; their bytes."""
        freed = 0
        for arena in self._last_use.get(batch, ()):
            held = self.arenas.pop(arena, None)
            if held is not None:
                freed += held.nbytes
                held.release()
        return freed

    def release_all(self) -> None:
        """Lets go of all."""
        while self.arenas:
            self.arenas.popitem()[1].release()
