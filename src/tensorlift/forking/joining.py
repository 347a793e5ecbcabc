"""A rank that stands behind the URL of another seed: it joins, says now and then that it is there, leaves."""

from __future__ import annotations

import contextlib
import queue
import threading
import time

from tensorlift.errors import OptionError, SeedError
from tensorlift.forking.client import SeedClient
from tensorlift.forking.encryption import Ca
from tensorlift.forking.ranks import JoinRequest

__all__ = ["GOODBYE_SECONDS", "Joined", "client_of_front"]

GOODBYE_SECONDS = 2.0
"""How long whoever ends waits until others have heard of it."""

_BETWEEN_TRIES = 0.2
# However a front counts: no rank asks without a rest, and none rests for ever.
_SHORTEST_REST, _LONGEST_REST = 1.0, 600.0


def client_of_front(join: str | None, token: str, ca: Ca | None) -> SeedClient | None:
    """Who is joined, if anybody. Raises RequestError, OptionError."""
    if join is not None:
        return SeedClient(join, token, ca=ca)
    if ca is not None:
        raise OptionError("ca is for join: which seed is asked under TLS")
    return None


class Joined:
    """From its beginning until close() the front knows this rank, and again after it was away."""

    def __init__(self, front: SeedClient, rank: JoinRequest, seconds: float) -> None:
        """``seconds``: how long the front may not be there yet. Raises SeedError."""
        self._front, self._rank = front, rank
        # Its put() may be interrupted by a signal's handler that calls close() too.
        self._ending: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_ended = False
        rest = self._first(time.monotonic() + seconds)
        self._thread = threading.Thread(
            target=self._stay, args=[rest], name="tensorlift-seed-joined", daemon=True
        )
        self._thread.start()

    def _first(self, end: float) -> float:
        while True:
            try:
                return self._joined()
            except SeedError as error:
                if error.answered or time.monotonic() + _BETWEEN_TRIES >= end:
                    raise
                time.sleep(_BETWEEN_TRIES)

    def _joined(self) -> float:
        """Seconds until it should be said again."""
        return min(max(_SHORTEST_REST, self._front.join(self._rank).seconds / 3), _LONGEST_REST)

    def _stay(self, rest: float) -> None:
        while True:
            with contextlib.suppress(queue.Empty):
                self._ending.get(timeout=rest)
                break
            # A front that is away may come back on the same port, and knows nobody then.
            with contextlib.suppress(SeedError):
                rest = self._joined()
        with contextlib.suppress(SeedError):
            self._front.leave(self._rank.instance)

    def close(self) -> None:
        """The front is told, where it is there, and waited for no longer than GOODBYE_SECONDS."""
        if self._is_ended:
            return
        self._is_ended = True
        self._ending.put(None)
        self._thread.join(GOODBYE_SECONDS)
