"""A thread that says something again and again: in time, at once when there is news, and seldom to nobody."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
from collections.abc import Callable

from tensorlift.errors import TensorliftError
from tensorlift.forking.joining import GOODBYE_SECONDS

__all__ = ["Heartbeat"]

# A registry that was begun again knows seeds for one lease: they come back sooner.
_FIRST_BACKOFF, _LAST_BACKOFF = 1.0, 10.0
# However the other side counts.
_SHORTEST_REST, _LONGEST_REST = 0.5, 600.0
_log = logging.getLogger("tensorlift")


class Heartbeat:
    """From its beginning until close(). What goes wrong is logged once, and tried again."""

    def __init__(self, say: Callable[[], float], what: str, is_told: bool = False) -> None:
        """``say``: returns the seconds after which it should be called again; ``what``: for the log;
        ``is_told``: who began it says by itself what problem() was at first, and the log does not.
        """
        self._say, self._what, self._is_told = say, what, is_told
        self._state = threading.Condition()
        self._ending, self._news = False, True
        self._last: Callable[[], None] = lambda: None
        self._failures, self._problem = 0, ""
        self.was_heard: bool | None = None
        """The last time; None before the first."""
        self._thread = threading.Thread(target=self._stay, name="tensorlift-registry", daemon=True)
        self._thread.start()

    def news(self) -> None:
        """It is said again now, not in time; and behind failures, when it would be tried anyway."""
        with self._state:
            self._news = True
            self._state.notify_all()

    def problem(self, seconds: float) -> str:
        """Why it was not heard the last time; "" where it was. The first time is waited for so long."""
        with self._state:
            if not self._state.wait_for(lambda: self.was_heard is not None, seconds):
                return f"there is no answer in {seconds:g} s"
            return self._problem

    def close(self, last: Callable[[], None]) -> None:
        """Nothing more is said but the ``last``, behind what is being said. Both are waited for no longer
        than GOODBYE_SECONDS: who does not listen holds nobody. The thread ends when they do.
        """
        with self._state:
            if not self._ending:
                self._ending, self._last = True, last
            self._state.notify_all()
        self._thread.join(GOODBYE_SECONDS)

    def _stay(self) -> None:
        self._repeat()
        with contextlib.suppress(TensorliftError):
            self._last()

    def _repeat(self) -> None:
        rest = 0.0
        while self._rested(rest):
            try:
                rest = min(max(_SHORTEST_REST, self._say()), _LONGEST_REST)
            except Exception as error:  # noqa: BLE001 - also what nobody expects: it would end for ever
                rest = min(_FIRST_BACKOFF * 2**self._failures, _LAST_BACKOFF)
                self._failed(error)
            else:
                if self._failures:
                    _log.warning("%s: it is heard again", self._what)
                self._failures, self._problem = 0, ""
            with self._state:
                self.was_heard = not self._failures
                self._state.notify_all()
            # So that those who were begun together do not speak together for ever.
            rest *= random.uniform(0.8, 1.0)

    def _failed(self, error: Exception) -> None:
        is_ours = isinstance(error, TensorliftError)
        said = str(error) if is_ours else f"{type(error).__name__}: {error}"
        if not self._failures and not (self._is_told and self.was_heard is None):
            trace = None if is_ours else error
            _log.warning("%s: %s; this is tried again", self._what, said, exc_info=trace)
        self._failures, self._problem = min(self._failures + 1, 10), said

    def _rested(self, seconds: float) -> bool:
        with self._state:
            self._state.wait_for(lambda: self._ending or (self._news and not self._failures), seconds)
            self._news = False
            return not self._ending
