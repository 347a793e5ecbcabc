"""One load under way: an engine, the layout that it fills, and the arenas.

Arenas are released only after the engine is closed or their tickets have landed: no block is written after it
is given back. The object is owned by whoever calls close(); it refers to no iterator, so that it can outlive
one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tensorlift.engine.digesting import Checks
from tensorlift.engine.engine import Engine
from tensorlift.engine.report import EngineReport, report_of
from tensorlift.engine.sizing import size_engine
from tensorlift.engine.trace import Trace
from tensorlift.format.checkpoint import Checkpoint
from tensorlift.format.digests import Expected
from tensorlift.options import LoadOptions
from tensorlift.plan import pieces as plan_pieces
from tensorlift.plan.arenas import Layout, Rules, Wanted, lay_out
from tensorlift.stats import LoadStats
from tensorlift.tensors.memory import Arena, Memory
from tensorlift.tensors.views import Table, collector_paused

__all__ = ["Clock", "Transfer"]

Tick = Callable[[], object]


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


class Transfer:
    """Wanted tensors on their way into arenas of one device, batch by batch.

    Call submit(), wait() and tensors() for each batch in turn, then finish(); close() at any time, more than
    once.
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
        self.memory, self.clock = memory, clock
        with clock.phase("plan"), collector_paused():
            self.table = Table(checkpoint, rows)
            self.layout = self._lay_out(rules)
            self._batch_edges = np.searchsorted(self.layout.batches, np.arange(self.batch_count + 1)).tolist()
            self._run_edges = np.searchsorted(self.layout.run_batch, np.arange(self.batch_count + 1)).tolist()
            self._last_use = _last_use(self.layout)
            self._first_arenas = _arenas_begun(self.layout)
            device = memory.native_kind != 0
            used, digest = int(self.layout.arena_used.sum()), expected is not None
            size = size_engine(options, used, device=device, digest=digest, pci_address=memory.pci_address)
            self._engine = Engine(
                size, memory.native_kind, memory.native_index, trace=clock.trace is not None
            )
            self._files = _add_files(self._engine, checkpoint, self.table.files)
            self._checks = None if expected is None else Checks(self._engine, checkpoint, rows, expected)
            self._checked = 0
        self._arenas: dict[int, Arena] = {}
        self._addresses = np.zeros(len(self.layout.arena_nbytes), np.uint64)
        self._submitted = 0
        self._tickets: list[int] = []
        self.held_bytes = self.peak_bytes = 0
        self._report = EngineReport()

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
        arenas = self.layout.arenas[first:last]
        used = int(arenas.max(initial=-1))
        arena = self._arenas[used] if used >= 0 else None
        with self.clock.phase("hand_out", batch=batch), collector_paused():
            return self.table.tensors(first, last, arena, self.layout.offsets[first:last], self.memory)

    def wait(self, batch: int, tick: Tick | None = None) -> None:
        """Waits until a batch is there for work on the caller's stream; raises what stopped the engine.

        Where digests are expected, all batches up to this one are compared first: DigestError.
        """
        with self.clock.phase("read", batch=batch):
            if self._checks is not None:
                self._check(self._checks, batch, tick)
            self._engine.wait(self._tickets[batch], tick)
            if self.memory.native_kind != 0:
                self._engine.stream_wait(self.memory.stream())
                self.memory.ready()

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

    def bytes_done(self) -> int:
        """Bytes delivered so far."""
        return self._report.nbytes if self._engine.closed else self._engine.bytes_done()

    def close(self) -> None:
        """Cancels what is under way, waits for it, lets all go."""
        if not self._engine.closed:
            with self.clock.phase("close"):
                self._report = report_of(self._engine, log=True)
                if self.clock.trace is not None:
                    self.clock.trace.take(self._engine)
                self._engine.close()
        while self._arenas:
            self._arenas.popitem()[1].release()

    def stats(self) -> LoadStats:
        """What was done so far; ``seconds`` without ``total``."""
        report = self._report if self._engine.closed else report_of(self._engine)
        done = self._batch_edges[self.submitted]
        return report.stats(
            nbytes=int(self.table.sizes[:done].sum()),
            tensors=done,
            files=len(np.unique(self.table.files[:done])),
            arenas=len(self.layout.arena_nbytes),
            device_peak_bytes=self.peak_bytes,
            verified=self._checks.checked if self._checks is not None else 0,
            seconds=dict(self.clock.seconds),
        )


def _add_files(engine: Engine, checkpoint: Checkpoint, files: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Names the wanted files to the engine; index of the engine by index of the shard."""
    index = np.full(len(checkpoint.shards), -1, np.int32)
    for shard in np.unique(files).tolist():
        index[shard] = engine.add_file(checkpoint.shards[shard])
    return index


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
