"""One load under way: the layout that an engine fills, and the arenas.

Arenas are released only after the engine is closed or their tickets have landed: no block is written after it
is given back. The object is owned by whoever calls close(); it refers to no iterator, so that it can outlive
one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tensorlift.engine.digesting import Checks
from tensorlift.engine.trace import Trace
from tensorlift.errors import RequestError
from tensorlift.format.checkpoint import Checkpoint
from tensorlift.format.digests import Expected
from tensorlift.options import LoadOptions
from tensorlift.plan import pieces as plan_pieces
from tensorlift.plan.arenas import Layout, Rules, Wanted, lay_out
from tensorlift.stats import LoadStats
from tensorlift.tensors.memory import Arena, Memory
from tensorlift.tensors.running import Running, Tick
from tensorlift.tensors.views import Table, collector_paused

__all__ = ["Clock", "Transfer"]


class Clock:
    """Seconds by phase, and the trace of the load where one is wanted."""

    def __init__(self, trace: Trace | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self.trace = trace

    @contextmanager
    def phase(self, name: str, **args: object) -> Iterator[None]:
        """Adds the time inside to a phase; ``args`` are for the trace."""
        begin = time.perf_counter_ns()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + (time.perf_counter_ns() - begin) / 1e9
            if self.trace is not None:
                # "read" is what the engine does meanwhile.
                self.trace.keep("wait" if name == "read" else name, begin, args)


class Transfer(Running):
    """Wanted tensors on their way into arenas of one device, batch by batch.

    Call submit(), wait() and tensors() for each batch in turn, then finish(): all from one thread at a time.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        rows: npt.NDArray[np.int64],
        memory: Memory,
        options: LoadOptions,
        rules: Rules,
        clock: Clock,
        expected: Expected | None = None,
    ) -> None:
        """Lays out ``rows`` and makes an engine; starts no thread and takes no memory for tensors yet.

        ``expected``: digests that wait() compares with.
        """
        self.clock = clock
        self._arenas: dict[int, Arena] = {}
        with clock.phase("plan"), collector_paused():
            self.table = Table(checkpoint, rows)
            self.layout = self._lay_out(rules)
            self._batch_edges = np.searchsorted(self.layout.batches, np.arange(self.batch_count + 1)).tolist()
            self._run_edges = np.searchsorted(self.layout.run_batch, np.arange(self.batch_count + 1)).tolist()
            self._last_use = _last_use(self.layout)
            self._first_arenas = _arenas_begun(self.layout)
            used, digest = int(self.layout.arena_used.sum()), expected is not None
            super().__init__(
                checkpoint, self.table.files, memory, options, used, trace=clock.trace, digest=digest
            )
            self._checks = None if expected is None else Checks(self._engine, checkpoint, rows, expected)
            self._checked = 0
        self._addresses = np.zeros(len(self.layout.arena_nbytes), np.uint64)
        self._tickets: list[int] = []
        self._arrived = 0
        self.held_bytes = self.peak_bytes = 0

    def _lay_out(self, rules: Rules) -> Layout:
        table = self.table
        return lay_out(Wanted(table.files, table.starts, table.sizes, table.alignments), rules)

    @property
    def batch_count(self) -> int:
        """Number of batches; batch k holds consecutive wanted tensors."""
        return self.layout.batch_count

    @property
    def submitted(self) -> int:
        """Number of batches submitted."""
        return len(self._tickets)

    def names(self, batch: int) -> list[str]:
        """Names of a batch's tensors."""
        return self.table.names[self._batch_edges[batch] : self._batch_edges[batch + 1]]

    def cost(self, batch: int) -> int:
        """Bytes of the arenas that submitting this batch allocates."""
        return int(self.layout.arena_nbytes[self._first_arenas[batch]].sum())

    def submit(self, count: int) -> None:
        """Allocates the arenas of the next ``count`` batches and hands their pieces to the engine."""
        first = self.submitted
        layout = self.layout
        begun = list(itertools.chain.from_iterable(self._first_arenas[first : first + count]))
        with self.clock.phase("allocate"):
            sizes = [int(layout.arena_nbytes[arena]) for arena in begun]
            for arena, made in zip(begun, self.memory.allocate(sizes) if sizes else [], strict=True):
                self._arenas[arena], self._addresses[arena] = made, made.address
        self.held_bytes += sum(sizes)
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        checks = self._checks
        if checks is None:
            pieces = self._run_pieces(first, first + count)
            self._tickets += self._run_edges[first + 1 : first + count + 1]
        else:
            pieces = self._tensor_pieces(checks, first, first + count)
            self._tickets += map(checks.ticket, self._batch_edges[first + 1 : first + count + 1])
        if len(pieces):
            self._engine.submit(pieces, self.memory.stream())

    def _run_pieces(self, first: int, last: int) -> npt.NDArray[Any]:
        """Pieces of batches [first, last)."""
        layout = self.layout
        low, high = self._run_edges[first], self._run_edges[last]
        runs = slice(low, high)
        owners = layout.run_arena[runs]
        pieces = plan_pieces.new_pieces(
            self._files[layout.run_file[runs]],
            layout.run_start[runs],
            layout.run_nbytes[runs],
            self._addresses[owners] + layout.run_offset[runs].astype(np.uint64),
        )
        # Runs of one arena that come one after another belong to one batch: nothing but padding lies between
        # them.
        pieces["flags"][1:] = np.where(owners[1:] == owners[:-1], plan_pieces.JOIN, 0)
        return pieces

    def _tensor_pieces(self, checks: Checks, first: int, last: int) -> npt.NDArray[Any]:
        """As _run_pieces, for tensors that are to be checked."""
        low, high = self._batch_edges[first], self._batch_edges[last]
        owners = self.layout.arenas[low:high]
        # A tensor of no bytes has no arena (-1), and no piece either.
        bases = np.append(self._addresses, np.uint64(0))[owners]
        addresses = bases + self.layout.offsets[low:high].astype(np.uint64)
        return checks.pieces(low, high, self._files[self.table.files[low:high]], addresses, owners)

    def tensors(self, batch: int) -> list[torch.Tensor]:
        """The tensors of a submitted batch. Their bytes are there once wait(batch) has returned."""
        first, last = self._batch_edges[batch], self._batch_edges[batch + 1]
        used = int(self.layout.arenas[first:last].max(initial=-1))
        # close() of another thread must not release the arena before its tensors hold it.
        with self.clock.phase("hand_out", batch=batch), collector_paused(), self._ending:
            arena = self._arenas.get(used)
            if arena is None and used >= 0:
                raise RequestError("the load was closed")
            return self.table.tensors(first, last, arena, self.layout.offsets[first:last], self.memory)

    def wait(self, batch: int, tick: Tick | None = None) -> None:
        """Waits until a batch is there for work on the caller's stream; raises what stopped the engine.

        Where digests are expected, all batches up to this one are compared first: DigestError.
        """
        with self.clock.phase("read", batch=batch):
            if self._checks is not None:
                self._check(self._checks, batch, tick)
            self._arrive(self._tickets[batch], tick)
        self._arrived = max(self._arrived, batch + 1)

    def _check(self, checks: Checks, last: int, tick: Tick | None) -> None:
        for batch in range(self._checked, last + 1):
            self._engine.wait(self._tickets[batch], tick)
            checks.check(self._batch_edges[batch], self._batch_edges[batch + 1])
            self._checked = batch + 1

    def finish(self, batch: int) -> None:
        """Lets go of the arenas that no later batch uses; tensors made of them keep them."""
        for arena in self._last_use.get(batch, ()):
            held = self._arenas.pop(arena, None)
            if held is not None:
                self.held_bytes -= held.nbytes
                held.release()

    def close(self) -> None:
        """See Running."""
        with self.clock.phase("close"):
            super().close()

    def _let_go(self) -> None:
        while self._arenas:
            self._arenas.popitem()[1].release()

    def stats(self) -> LoadStats:
        """What was done so far; ``seconds`` without ``total``."""
        report = self.report()
        done = self._batch_edges[self._arrived]
        return report.stats(
            nbytes=int(self.table.sizes[:done].sum()),
            tensors=done,
            files=len(np.unique(self.table.files[:done])),
            arenas=len(self.layout.arena_nbytes),
            device_peak_bytes=self.peak_bytes,
            verified=self._checks.checked if self._checks is not None else 0,
            seconds=dict(self.clock.seconds),
        )


def _last_use(layout: Layout) -> dict[int, list[int]]:
    """Arenas by the last batch that uses them."""
    last: dict[int, int] = {}
    for arena, batch in zip(layout.run_arena.tolist(), layout.run_batch.tolist(), strict=True):
        last[arena] = batch
    by_batch: dict[int, list[int]] = {}
    for arena, batch in last.items():
        by_batch.setdefault(batch, []).append(arena)
    return by_batch


def _arenas_begun(layout: Layout) -> list[list[int]]:
    """For each batch, the arenas that it is the first to use."""
    begun: list[list[int]] = [[] for _ in range(layout.batch_count)]
    arenas, first = np.unique(layout.run_arena, return_index=True)
    for arena, run in zip(arenas.tolist(), first.tolist(), strict=True):
        begun[int(layout.run_batch[run])].append(arena)
    return begun
