"""What brings the bytes of a seed's checkpoint: forks of as many tensors as a load wants at a time."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tensorlift.errors import RequestError
from tensorlift.forking.remote import SeedCheckpoint, allocated
from tensorlift.format import dtypes
from tensorlift.format.checkpoint import Checkpoint
from tensorlift.options import LoadOptions
from tensorlift.stats import LoadStats
from tensorlift.tensors import memory as memories
from tensorlift.tensors.destinations import Target, check_storage
from tensorlift.tensors.direct import check_writable
from tensorlift.tensors.memory import Memory
from tensorlift.tensors.moving import Movers
from tensorlift.tensors.running import Tick
from tensorlift.tensors.transfer import Clock, budget_of
from tensorlift.tensors.views import check_expressible, torch_dtype, torch_shape

__all__ = ["FORKS"]


class _Coming:
    """Tensors on their way; close() of another thread ends it."""

    def __init__(self, memory: Memory, options: LoadOptions) -> None:
        self.memory = memory
        self._limit = budget_of(options, memory).buffer_size
        self._done = 0
        self._closed = False
        # Held while bytes come. Reentrant: who is told of progress may close.
        self._coming = threading.RLock()

    def bytes_done(self) -> int:
        """So far."""
        return self._done

    def close(self) -> None:
        """Stops what is under way and waits for it: no byte is written after this."""
        self._closed = True
        with self._coming:
            pass

    def close_well(self) -> None:
        """Nothing shows only then."""
        self.close()

    def _bring(self, seed: SeedCheckpoint, tensors: Mapping[str, torch.Tensor], tick: Tick | None) -> None:
        before = self._done

        def told(done: int) -> None:
            if self._closed:
                raise RequestError("the load was closed")
            self._done = before + done
            if tick is not None:
                tick()

        with self._coming:
            seed.bring(tensors, self._limit, told)


class _Straight(_Coming):
    """See moving.Straight."""

    def __init__(self, memory: Memory, options: LoadOptions, *_: object, **__: object) -> None:
        super().__init__(memory, options)
        self._seed: SeedCheckpoint | None = None
        self._targets: Sequence[Target] = ()

    def plan(self, checkpoint: Checkpoint, targets: Sequence[Target], expected: object = None) -> None:
        """See moving.Straight."""
        assert isinstance(checkpoint, SeedCheckpoint)
        self._seed, self._targets = checkpoint, targets
        check_storage(targets)
        if self.memory.native_kind == 0:
            rows = [target.row for target in targets]
            addresses = np.array([target.address for target in targets], np.uint64)
            check_writable(addresses, checkpoint.sizes[rows], targets)

    def start(self) -> None:
        """Nothing: bytes come while somebody waits for them."""

    def wait(self, tick: Tick | None = None) -> None:
        """See moving.Straight."""
        if self._seed is not None:
            self._bring(self._seed, {target.name: target.tensor for target in self._targets}, tick)

    def stats(self) -> LoadStats:
        """See moving.Straight."""
        return _stats(self._seed, self._done, len(self._targets), {})


class _Batches(_Coming):
    """See moving.Batches. A batch has no more bytes than may be held ahead of a consumer, or one tensor."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        rows: npt.NDArray[np.int64],
        memory: Memory,
        options: LoadOptions,
        rules: object,
        clock: Clock,
        *_: Any,
    ) -> None:
        assert isinstance(checkpoint, SeedCheckpoint)
        super().__init__(memory, options)
        check_expressible(checkpoint, rows)
        self.clock = clock
        self._seed = checkpoint
        names = [checkpoint.names[row] for row in rows.tolist()]
        self._names = list(checkpoint.batches(names, self._limit))
        self.nbytes = int(checkpoint.sizes[rows].sum())
        self._made: dict[int, list[torch.Tensor]] = {}
        self.submitted = self._arrived = self.held_bytes = 0

    @property
    def batch_count(self) -> int:
        """Number of batches."""
        return len(self._names)

    def names(self, batch: int) -> list[str]:
        """Of a batch's tensors."""
        return self._names[batch]

    def cost(self, batch: int) -> int:
        """Bytes of its tensors."""
        seed = self._seed
        return sum(int(seed.sizes[seed.index(name)]) for name in self._names[batch])

    def submit(self, count: int) -> None:
        """They are wanted; bytes come, and memory is taken, while somebody waits for them."""
        self.held_bytes += sum(map(self.cost, range(self.submitted, self.submitted + count)))
        self.submitted += count
        if self.memory.native_kind == 0:
            memories.check_host(self.held_bytes)

    def tensors(self, batch: int) -> list[torch.Tensor]:
        """See moving.Batches; those that have come are the caller's alone."""
        return self._made.pop(batch) if batch < self._arrived else self._tensors(batch)

    def wait(self, batch: int, tick: Tick | None = None) -> None:
        """See moving.Batches."""
        with self.clock.phase("read", batch=batch):
            wanted: dict[str, torch.Tensor] = {}
            for number in range(self._arrived, batch + 1):
                wanted.update(zip(self._names[number], self._tensors(number), strict=True))
            self._bring(self._seed, wanted, tick)
            self._arrived = max(self._arrived, batch + 1)

    def follow(self, batch: int) -> None:
        """Nothing: the host has waited for what came."""

    def finish(self, batch: int) -> None:
        """See moving.Batches."""
        self.held_bytes -= self.cost(batch)

    def close(self) -> None:
        """See moving.Batches."""
        super().close()
        self._made.clear()

    def stats(self) -> LoadStats:
        """See moving.Batches."""
        arrived = sum(map(len, self._names[: self._arrived]))
        return _stats(self._seed, self._done, arrived, dict(self.clock.seconds))

    def _tensors(self, batch: int) -> list[torch.Tensor]:
        if batch not in self._made:
            with self.clock.phase("allocate"):
                self._made[batch] = [self._empty(name) for name in self._names[batch]]
        return self._made[batch]

    def _empty(self, name: str) -> torch.Tensor:
        row = self._seed.index(name)
        kind = dtypes.ALL[int(self._seed.dtypes[row])]
        shape, dtype = torch_shape(kind, self._seed.shapes[row]), torch_dtype(kind)
        return allocated(lambda: torch.empty(shape, dtype=dtype, device=self.memory.device), name)


def _stats(seed: SeedCheckpoint | None, nbytes: int, tensors: int, seconds: Mapping[str, float]) -> LoadStats:
    readers = {seed.client.url: nbytes} if seed is not None and nbytes else {}
    return LoadStats(bytes=nbytes, tensors=tensors, files=min(tensors, 1), seconds=seconds, readers=readers)


FORKS = Movers(_Straight, _Batches)
"""What brings the bytes of a SeedCheckpoint."""
