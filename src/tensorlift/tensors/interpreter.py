"""What a load changes of the interpreter for as long as bytes wait for Python, and puts back."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
from collections.abc import Callable, Iterator

__all__ = ["collector_paused", "short_turns"]

# numpy gives the GIL away for more than 500 elements, each time, dozens of times before the first byte of
# load_into; where another thread never rests it comes back after as long: 5 ms by default.
_TURN_SECONDS = 0.0005
# How each load under way puts back what it has changed.
_changes: dict[object, Callable[[], object]] = {}


def _put_all_back() -> None:
    while _changes:
        _changes.popitem()[1]()


# A child has none of the other threads, so theirs would never be put back there.
os.register_at_fork(after_in_child=_put_all_back)


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses the garbage collector: making 30,000 tensors took 206 ms without and 463 ms with it."""
    enabled, key = gc.isenabled(), object()
    try:
        if enabled:
            _changes[key] = gc.enable
            gc.disable()
        yield
    finally:
        if enabled:
            gc.enable()
            _changes.pop(key, None)


@contextlib.contextmanager
def short_turns() -> Iterator[None]:
    """Python threads take shorter turns with the GIL (`sys.setswitchinterval`), if they take longer ones.

    Of loads in several threads the one that shortened them puts them back; what somebody else sets meanwhile
    stays.
    """
    before, key = sys.getswitchinterval(), object()
    try:
        if before > _TURN_SECONDS:
            _changes[key] = functools.partial(_lengthen_turns, before)
            sys.setswitchinterval(_TURN_SECONDS)
        yield
    finally:
        if before > _TURN_SECONDS:
            _lengthen_turns(before)
        _changes.pop(key, None)


def _lengthen_turns(seconds: float) -> None:
    if sys.getswitchinterval() == _TURN_SECONDS:
        sys.setswitchinterval(seconds)
