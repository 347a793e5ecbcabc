"""One load under way: the parts that an engine fills, and their arenas.

Arenas are released only after the engine is closed or their tickets have landed: no block is written after it
is given back. The object is owned by whoever calls close(); it refers to no iterator, so that it can outlive
one.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from tensorlift.engine.digesting import Checks
from tensorlift.engine.sizing import Budget, budget
from tensorlift.engine.trace import Trace
from tensorlift.errors import RequestError
from tensorlift.format.checkpoint import Checkpoint
from tensorlift.format.digests import Expected
from tensorlift.options import LoadOptions
from tensorlift.plan.arenas import Rules
from tensorlift.stats import LoadStats
from tensorlift.tensors.exchanging import Exchanging
from tensorlift.tensors.interpreter import collector_paused, short_turns
from tensorlift.tensors.memory import Memory
from tensorlift.tensors.part import Part
from tensorlift.tensors.running import Running, Tick, both

__all__ = ["Clock", "Transfer", "budget_of", "rules_of"]


def budget_of(options: LoadOptions, memory: Memory) -> Budget:
    """Memory for the tensors of a load, by what the device has free now."""
    return budget(options, device=memory.native_kind != 0, free=memory.free_bytes())


def rules_of(limits: Budget, memory: Memory, *, uniform: bool) -> Rules:
    """How tensors are to be laid out; ``uniform``: see Rules."""
    return Rules(limits.arena_size, device=memory.native_kind != 0, uniform=uniform)


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
            # In "read" Python waits for bytes, in all others bytes for Python.
            with nullcontext() if name == "read" else short_turns():
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + (time.perf_counter_ns() - begin) / 1e9
            if self.trace is not None:
                # "read" is what the engine does meanwhile.
                self.trace.keep("wait" if name == "read" else name, begin, args)


class Transfer(Running):
    """Wanted tensors on their way into arenas of one device, batch by batch.

    Give it tensors with add(); call submit(), wait() and tensors() for each batch in turn, then finish(): all
    from one thread at a time. Reading goes on while more is added.
    """

    def __init__(
        self,
        memory: Memory,
        options: LoadOptions,
        rules: Rules,
        nbytes: int,
        clock: Clock,
        *,
        digest: bool = False,
        exchange: Exchanging | None = None,
    ) -> None:
        """Makes an engine for about ``nbytes`` bytes, which may start its threads, but reads nothing yet.

        ``digest``: add() will give digests that wait() compares with. ``exchange``: other ranks that load
        the same; then add() comes once.
        """
        # What close() wants comes first: an interrupt may end this anywhere.
        self.clock = clock
        self._rules = rules if exchange is None else exchange.rules(rules)
        self._exchange = exchange
        self._parts: list[Part] = []
        ranks = 1 if exchange is None else exchange.ranks_per_host
        super().__init__(memory, options, nbytes, trace=clock.trace, digest=digest, ranks=ranks)
        self._batches: list[tuple[Part, int]] = []
        self._tickets: list[int] = []
        self._pieces = 0
        self._submitted = self._checked = self._gathered = self._arrived = 0
        self._consumer = 0
        self.held_bytes = self.peak_bytes = 0

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        rows: npt.NDArray[np.int64],
        memory: Memory,
        options: LoadOptions,
        rules: Rules,
        clock: Clock,
        expected: Expected | None = None,
        exchange: Exchanging | None = None,
    ) -> Transfer:
        """One that has all its tensors."""
        nbytes = int(checkpoint.sizes[rows].sum())
        transfer = cls(memory, options, rules, nbytes, clock, digest=expected is not None, exchange=exchange)
        try:
            transfer.add(checkpoint, rows, expected)
        except BaseException:
            transfer.close()
            raise
        return transfer

    def add(
        self,
        checkpoint: Checkpoint,
        rows: npt.NDArray[np.int64],
        expected: Expected | None = None,
        rules: Rules | None = None,
    ) -> int:
        """Lays out ``rows`` as batches after those that are there; how many. Takes no memory yet.

        ``rules``: others than those of the transfer.
        """
        with self.clock.phase("plan"), collector_paused():
            part = Part(checkpoint, rows, self._rules if rules is None else rules, self._exchange)
            part.files = self._add_files(checkpoint, part.table.files)
            if expected is not None:
                part.checks = Checks(self._engine, checkpoint, rows, expected, self._pieces)
            self._parts.append(part)
            self._batches += [(part, batch) for batch in range(part.batch_count)]
            self._tickets += [self._pieces + part.ticket(batch) for batch in range(part.batch_count)]
            self._pieces += part.piece_count
        return part.batch_count

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(part.table.nbytes for part in self._parts)

    @property
    def batch_count(self) -> int:
        """Number of batches so far."""
        return len(self._batches)

    @property
    def submitted(self) -> int:
        """Number of batches submitted."""
        return self._submitted

    def names(self, batch: int) -> list[str]:
        """Names of a batch's tensors."""
        part, own = self._batches[batch]
        return part.names(own)

    def cost(self, batch: int) -> int:
        """Bytes of the arenas that submitting this batch allocates."""
        part, own = self._batches[batch]
        return part.cost(own)

    def submit(self, count: int) -> None:
        """Allocates the arenas of the next ``count`` batches and hands their pieces to the engine."""
        try:
            while count:
                part, first = self._batches[self._submitted]
                last = min(first + count, part.batch_count)
                with self.clock.phase("allocate"):
                    self.held_bytes += part.allocate(first, last, self.memory)
                self.peak_bytes = max(self.peak_bytes, self.held_bytes)
                pieces = part.pieces(first, last)
                if len(pieces):
                    self._engine.submit(pieces, self.memory.stream())
                self._submitted += last - first
                count -= last - first
        finally:
            # close() of another thread, or of a signal's handler, did not see what was allocated meanwhile.
            if self._engine.closed:
                self.close()

    def tensors(self, batch: int) -> list[torch.Tensor]:
        """The tensors of a submitted batch. Their bytes are there once wait(batch) has returned."""
        part, own = self._batches[batch]
        # close() of another thread must not release the arena before its tensors hold it.
        with self.clock.phase("hand_out", batch=batch), collector_paused(), self._ending:
            return part.tensors(own, self.memory)

    def wait(self, batch: int, tick: Tick | None = None) -> None:
        """Waits until a batch is there for work on the caller's stream; raises what stopped the engine.

        Where digests are expected, all batches up to this one are compared first: DigestError. With other
        ranks, what ended the load there comes out here, also where nothing is left to wait for.
        """
        with self.clock.phase("read", batch=batch):
            if self._exchange is not None:
                self._exchange.check()
                tick = both(self._exchange.check, tick)
            while self._checked <= batch:
                part, own = self._batches[self._checked]
                if part.checks is not None:
                    self._engine.wait(self._tickets[self._checked], tick)
                    part.checks.check(part.batch_edges[own], part.batch_edges[own + 1])
                self._checked += 1
            part, own = self._batches[batch]
            if self._exchange is not None:
                # One after another, all up to this one: every rank issues them in the same order.
                while self._gathered <= batch:
                    self._gather(self._exchange, *self._batches[self._gathered], tick)
                    self._gathered += 1
            self._arrive(self._tickets[batch], tick)
            self._consumer = self.memory.stream()
            part.used_on(own, self._consumer)
        self._arrived = max(self._arrived, batch + 1)

    def follow(self, batch: int) -> None:
        """Before each tensor of a batch that has come: where the caller's stream is another by now, it waits
        as well.
        """
        stream = self.memory.stream()
        if stream != self._consumer:
            part, own = self._batches[batch]
            self._arrive(self._tickets[batch], None, stream)
            part.used_on(own, stream)
            self._consumer = stream

    def _gather(self, exchange: Exchanging, part: Part, batch: int, tick: Tick | None) -> None:
        """Issues the gathers that are due when a batch is handed out, and waits for the one that it needs."""
        number = part.gather_of.get(batch)
        if number is None:
            return
        while exchange.issued < exchange.due(number):
            begun, arena = part.gathered[exchange.issued]
            if self._submitted <= begun:
                self.submit(begun + 1 - self._submitted)
            held = part.arenas.get(arena)
            if held is None:
                raise RequestError("the load was closed")
            exchange.issue(held, partial(self._arrive, self._tickets[begun], tick))
        exchange.wait(number, tick)

    def finish(self, batch: int) -> None:
        """Lets go of the arenas that no later batch uses; tensors made of them keep them."""
        part, own = self._batches[batch]
        self.held_bytes -= part.release(own)

    def close(self) -> None:
        """See Running."""
        with self.clock.phase("close"):
            # First: what is pinned the driver takes back only from a device that rests.
            if self._exchange is not None and not self._exchange.end_where_failed():
                self._engine.set_aside()
            super().close()

    def _let_go(self) -> None:
        for part in self._parts:
            part.release_all()

    def stats(self) -> LoadStats:
        """What was done so far; ``seconds`` without ``total``."""
        nbytes = tensors = files = 0
        left = self._arrived
        for part in self._parts:
            done = part.batch_edges[min(left, part.batch_count)]
            left -= min(left, part.batch_count)
            nbytes += part.table.nbytes if done == len(part.table) else int(part.table.sizes[:done].sum())
            files += int(np.count_nonzero(np.bincount(part.table.files[:done])))
            tensors += done
        return dataclasses.replace(
            self.report(),
            bytes=nbytes,
            tensors=tensors,
            files=files,
            arenas=sum(len(part.layout.arena_nbytes) for part in self._parts),
            device_peak_bytes=self.peak_bytes,
            verified=sum(part.checks.checked for part in self._parts if part.checks is not None),
            seconds=dict(self.clock.seconds),
        )
