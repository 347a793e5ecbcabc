"""Whether ranks exchange what all of them want: what exchange="auto" does."""

from __future__ import annotations

from collections.abc import Sequence

from tensorlift.distributed.agreement import Request
from tensorlift.format.checkpoint import Checkpoint

__all__ = ["cached", "choose"]


def cached(checkpoint: Checkpoint) -> float:
    """What share of a checkpoint's files is in the page cache; -1 where that is not known."""
    return -1.0


def choose(given: Sequence[Request], nbytes: int) -> tuple[str, str, dict[str, float]]:
    """("gather" or "none", why, the figures that it rests on) for ``nbytes`` bytes that all want."""
    if any(request.verify for request in given):
        return "none", "digests are of tensors that are read whole", {}
    return "gather", "", {}
