"""One rank's gathers, with a board and a work that do what a test wants."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
import torch

from tensorlift.distributed.agreement import Schedule
from tensorlift.distributed.exchange import Exchange, _Pending
from tensorlift.errors import PeerError
from tensorlift.tensors import memory as memories


class Board:
    """Says that the load has failed once it is told to."""

    def __init__(self) -> None:
        self.members = types.SimpleNamespace(rank=0, count=2)
        self.over = False

    def check(self) -> None:
        if self.over:
            raise PeerError("rank 1 failed", 1)


class Work:
    """A gather that the last rank issues after it has failed, while this one is between two looks."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def is_completed(self) -> bool:
        done, self._board.over = self._board.over, True
        return done

    def wait(self) -> None:
        pass


def test_a_gather_that_ends_after_the_load_is_not_handed_out() -> None:
    """However soon after: between the last look at the board and the last look at the gather."""
    board: Any = Board()
    memory = memories.for_device("cpu")
    exchange = Exchange(board, None, memory, np.ones(1, bool), Schedule("gather", "", 1, b"", {}, 2))
    work = Work(board)
    work.is_completed()
    exchange._pending[0] = _Pending(torch.zeros(1, dtype=torch.uint8), [work])
    with pytest.raises(PeerError, match="rank 1 failed"):
        exchange.wait(0, None)
