"""Tensors of a checkpoint for a consumer that says in advance which it will take, and takes them about in
that order.

    want(row, part, stays)   the consumer will take this tensor, or this part of it
    take(name)               the tensor; waits for it

What was wanted goes to the engine in groups, the first after a little, so that it reads while the consumer
still says what else it wants. Two kinds are kept apart, each in arenas of its own: tensors that *stay* are
the consumer's for good (they become parameters), so they are read without a bound; those that *pass* are
dropped once something was made of them (another dtype, a stack of experts), so only ``buffer_size`` bytes of
them are read ahead. In one arena, a tensor that stays would hold back all that passed beside it.

A bound cannot block: what is asked for is read even if the window is full of tensors that nobody has taken.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from tensorlift.errors import RequestError
from tensorlift.format.checkpoint import Checkpoint
from tensorlift.format.digests import Expected
from tensorlift.options import LoadOptions
from tensorlift.plan.parts import Asked, take_parts
from tensorlift.stats import LoadStats
from tensorlift.tensors import memory as memories
from tensorlift.tensors.transfer import Clock, Transfer, budget_of, rules_of

__all__ = ["Prefetch", "Slice"]

Slice = tuple[int, int, int]
"""(dim, start, stop), as for ``slices`` of a load."""

# The first group is small, so that reading begins; the next ones grow, for each costs a little.
_FIRST_GROUP = 128 << 20


class _Wanted(NamedTuple):
    row: int
    part: Slice | None


class Prefetch:
    """For one device. Thread-safe; owned by whoever calls close()."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        settings: LoadOptions,
        clock: Clock,
        expected: Expected | None = None,
        tick: Callable[[], object] | None = None,
    ) -> None:
        """Starts an engine, which reads nothing yet. ``tick`` is called while take() waits."""
        self._checkpoint, self._expected, self._tick = checkpoint, expected, tick
        memory = memories.for_device(device, private=settings.own != "tensor")
        limits = budget_of(settings, memory)
        self._bound = limits.buffer_size
        self._rules = {stays: rules_of(limits, memory, uniform=not stays) for stays in (True, False)}
        self._lock = threading.RLock()
        self._waiting: dict[bool, list[_Wanted]] = {True: [], False: []}
        self._waiting_bytes, self._group = 0, _FIRST_GROUP
        self._batch_of: dict[str, int] = {}
        # By batch: whether it passes, and how many of its tensors were not taken.
        self._passes: list[bool] = []
        self._left: list[int] = []
        self._ahead = 0
        self._handed = 0
        self._ready: dict[str, torch.Tensor] = {}
        self._files: set[int] = set()
        self._closed = False
        self._transfer = Transfer(
            memory,
            settings,
            self._rules[True],
            int(checkpoint.sizes.sum()),
            clock,
            digest=expected is not None,
        )

    @property
    def nbytes(self) -> int:
        """Of all that is wanted so far and laid out."""
        return self._transfer.nbytes

    def bytes_done(self) -> int:
        """Delivered so far."""
        return self._transfer.bytes_done()

    def want(self, row: int, part: Slice | None, stays: bool) -> None:
        """Says that the tensor of a row of the checkpoint, or a part of it, will be taken once."""
        with self._lock:
            self._waiting[stays].append(_Wanted(row, part))
            self._files.add(int(self._checkpoint.shard_of[row]))
            self._waiting_bytes += self._nbytes(row, part)
            if self._waiting_bytes >= self._group:
                self._group *= 2
                self._lay_out()

    def take(self, name: str) -> torch.Tensor:
        """The tensor, once: it is the caller's. Raises what reading raises."""
        with self._lock:
            if self._closed:
                raise RequestError("the load was closed")
            if name not in self._ready:
                if name not in self._batch_of:
                    self._lay_out()
                self._hand_out(self._batch_of[name])
            tensor = self._ready.pop(name)
            batch = self._batch_of.pop(name)
            self._left[batch] -= 1
            if not self._left[batch] and self._passes[batch]:
                self._ahead -= self._transfer.cost(batch)
                self._read_ahead()
            return tensor

    def close(self) -> None:
        """Stops reading and waits for what is under way. Tensors that were taken stay."""
        self._closed = True
        # First, without the lock: a take() of another thread that waits ends with an error by this.
        self._transfer.close()
        with self._lock:
            # Once more, for what that thread allocated meanwhile.
            self._transfer.close()
            self._ready.clear()

    def stats(self) -> LoadStats:
        """What was done so far; ``seconds`` without ``total``, and ``files`` 0: see files()."""
        return self._transfer.stats()

    def files(self) -> set[int]:
        """Numbers of the shards that tensors were wanted of."""
        return self._files

    def _nbytes(self, row: int, part: Slice | None) -> int:
        nbytes = int(self._checkpoint.sizes[row])
        if part is None:
            return nbytes
        dim, start, stop = part
        return nbytes * (stop - start) // max(1, self._checkpoint.shapes[row][dim])

    def _lay_out(self) -> None:
        """Makes batches of what is wanted, and reads as far as the bound allows."""
        for stays, wanted in self._waiting.items():
            if not wanted:
                continue
            rows = np.array([one.row for one in wanted], np.int64)
            names = self._checkpoint.names
            slices = {names[one.row]: one.part for one in wanted if one.part is not None}
            asked = take_parts(Asked(self._checkpoint, rows, self._expected), slices or None, given=False)
            transfer, first = self._transfer, self._transfer.batch_count
            transfer.add(asked.checkpoint, asked.rows, asked.expected, self._rules[stays])
            for batch in range(first, transfer.batch_count):
                of_batch = transfer.names(batch)
                self._batch_of.update(dict.fromkeys(of_batch, batch))
                self._left.append(len(of_batch))
                self._passes.append(not stays)
            wanted.clear()
        self._waiting_bytes = 0
        self._read_ahead()

    def _read_ahead(self, through: int = -1) -> None:
        """Submits, in one go, all batches up to ``through`` and as many more as the bound allows."""
        transfer, count = self._transfer, 0
        while (due := transfer.submitted + count) < transfer.batch_count:
            cost = transfer.cost(due) if self._passes[due] else 0
            if due > through and cost and self._ahead + cost > self._bound:
                break
            self._ahead += cost
            count += 1
        if count:
            transfer.submit(count)

    def _hand_out(self, last: int) -> None:
        """Makes the tensors of all batches up to this one. In turn, for batches may share an arena."""
        transfer = self._transfer
        self._read_ahead(last)
        transfer.wait(last, self._tick)
        while self._handed <= last:
            batch = self._handed
            self._ready.update(zip(transfer.names(batch), transfer.tensors(batch), strict=True))
            transfer.finish(batch)
            self._handed += 1
