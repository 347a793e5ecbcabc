"""What a load changes of the interpreter for as long as bytes wait for Python, and puts back."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator

__all__ = ["collector_paused", "short_turns"]

# numpy gives the GIL away for more than 500 elements, each time, some 60 times before the first byte of
# load_into; where another thread never rests it comes back after as long: 5 ms by default.
_TURN_SECONDS = 0.0005


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses the garbage collector: making 30,000 tensors took 206 ms without and 463 ms with it."""
    enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def short_turns() -> Iterator[None]:
    """Python threads take shorter turns with the GIL (`sys.setswitchinterval`), if they take longer ones.

    Of loads in several threads the one that shortened them puts them back; what somebody else sets meanwhile
    stays.
    """
    before = sys.getswitchinterval()
    try:
        if before > _TURN_SECONDS:
            sys.setswitchinterval(_TURN_SECONDS)
        yield
    finally:
        if before > _TURN_SECONDS and sys.getswitchinterval() == _TURN_SECONDS:
            sys.setswitchinterval(before)
