"""What brings the bytes of a checkpoint, as protocols: an engine that reads files, or forks of a seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from tensorlift.format.checkpoint import Checkpoint
from tensorlift.format.digests import Expected
from tensorlift.stats import LoadStats
from tensorlift.tensors.destinations import Target
from tensorlift.tensors.direct import Direct
from tensorlift.tensors.running import Tick
from tensorlift.tensors.transfer import Clock, Transfer

__all__ = ["FILES", "Batches", "Movers", "Straight"]


class Straight(Protocol):
    """Into destinations that take bytes as they are; see direct.Direct."""

    def plan(
        self, checkpoint: Checkpoint, targets: Sequence[Target], expected: Expected | None = None
    ) -> None:
        """Nothing is written before start()."""

    def start(self) -> None:
        """From now on destinations change."""

    def wait(self, tick: Tick | None = None) -> None:
        """Until all bytes are there for work on the caller's stream."""

    def bytes_done(self) -> int:
        """So far."""

    def stats(self) -> LoadStats:
        """What was done."""

    def close(self) -> None:
        """Stops it and waits for it: no byte is written after this."""

    def close_well(self) -> None:
        """The same where all went well; raises what shows only then."""


class Batches(Protocol):
    """Into tensors that are made for them; see transfer.Transfer."""

    clock: Clock
    held_bytes: int

    @property
    def nbytes(self) -> int:
        """Of all tensors."""

    @property
    def batch_count(self) -> int:
        """Number of batches."""

    @property
    def submitted(self) -> int:
        """Number of batches submitted."""

    def names(self, batch: int) -> list[str]:
        """Of its tensors."""

    def cost(self, batch: int) -> int:
        """Bytes that submitting it takes."""

    def submit(self, count: int) -> None:
        """The next ``count`` batches are wanted."""

    def tensors(self, batch: int) -> list[torch.Tensor]:
        """Of a submitted batch; their bytes are there once wait(batch) has returned."""

    def wait(self, batch: int, tick: Tick | None = None) -> None:
        """Until a batch, and each before it, is there for work on the caller's stream."""

    def follow(self, batch: int) -> None:
        """Before each tensor of a batch that has come: the caller's stream may be another by now."""

    def finish(self, batch: int) -> None:
        """Lets go of a batch whose tensors were taken."""

    def bytes_done(self) -> int:
        """So far."""

    def stats(self) -> LoadStats:
        """What was done so far."""

    def close(self) -> None:
        """Stops it and waits for it; gives memory back."""

    def close_well(self) -> None:
        """The same where all went well; raises what shows only then."""


class Movers(NamedTuple):
    """Makes both, with the arguments of Direct and of Transfer.of."""

    straight: Callable[..., Straight]
    batches: Callable[..., Batches]


FILES = Movers(Direct, Transfer.of)
"""Those of files, by the native engine."""
