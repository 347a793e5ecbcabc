"""What a load wants of the other ranks of its process group, if it has any; distributed/exchange.py is it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tensorlift.plan.arenas import Rules
from tensorlift.plan.shares import Share
from tensorlift.tensors.memory import Arena

__all__ = ["Exchanging"]


class Exchanging(Protocol):
    """The all-gathers that complete arenas, numbered from 0 in the order in which every rank issues them."""

    share: Share
    """What this rank reads of each arena."""
    rows: npt.NDArray[np.bool_]
    """Which of the wanted tensors all ranks want."""
    ranks_per_host: int
    """How many divide what a host has."""

    def rules(self, rules: Rules) -> Rules:
        """The rules by which all ranks lay out what is exchanged."""
        ...

    def plan(self, used: list[int]) -> None:
        """Says how many bytes of each arena are to be gathered; the same on all ranks."""
        ...

    def check(self) -> None:
        """Raises what ended the load on another rank; to be called while the load waits."""
        ...

    def end_where_failed(self) -> bool:
        """Where the load has failed, has its gathers come to an end; False where one may never."""
        ...

    @property
    def issued(self) -> int:
        """Gathers issued so far."""
        ...

    def due(self, number: int) -> int:
        """Gathers that are to be issued before arena ``number`` is handed out."""
        ...

    def issue(self, arena: Arena, local: Callable[[int], None]) -> None:
        """Issues the next gather; ``local(stream)`` makes a stream wait for this rank's share."""
        ...

    def wait(self, number: int, tick: Callable[[], object] | None) -> None:
        """Waits until arena ``number`` is whole, for work on the caller's stream.

        ``tick`` is called meanwhile, and may raise.
        """
        ...
