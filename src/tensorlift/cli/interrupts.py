"""Ctrl-C while modules are imported: the process ends at once, for an exception there comes out as anything.

Modules in C make an ImportError of it, and an import outside of a verb ends in a traceback. Nothing is held
yet that would have to be given back.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["at_once", "leave_at_once", "raise_again", "until_terminated"]

_INTERRUPTED = 130


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    os._exit(_INTERRUPTED)


def leave_at_once() -> None:
    """From here on Ctrl-C ends the process; not where the caller has it ignored, or has a handler."""
    _replace(signal.default_int_handler, _leave)


def raise_again() -> None:
    """From here on it is a KeyboardInterrupt, as usual."""
    _replace(_leave, signal.default_int_handler)


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """For imports inside a verb."""
    leave_at_once()
    try:
        yield
    finally:
        raise_again()


class _TerminatedError(KeyboardInterrupt):
    """SIGTERM."""


@contextlib.contextmanager
def until_terminated() -> Iterator[None]:
    """SIGTERM ends what is inside like Ctrl-C, but as the way in which it should end: nothing is raised.

    Not where the caller has it ignored, or has a handler.
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise _TerminatedError

    ours = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, end)
    try:
        yield
    except _TerminatedError:
        pass
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _replace(old: object, new: signal.Handlers | object) -> None:
    # Handlers are set by the main thread alone.
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is old:
        signal.signal(signal.SIGINT, new)  # type: ignore[arg-type]
