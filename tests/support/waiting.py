"""What a test waits for: never for ever, and never for longer than it takes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

SECONDS = 60


def until(happens: Callable[[], object]) -> None:
    """Returns when it does."""
    end = time.monotonic() + SECONDS
    while not happens():
        assert time.monotonic() < end, f"it has not come about in {SECONDS} s"
        time.sleep(0.001)


@contextlib.contextmanager
def when(happens: Callable[[], object], act: Callable[[], object]) -> Iterator[None]:
    """On another thread ``act`` is called once it happens, before this ends."""

    def run() -> None:
        until(happens)
        act()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()
