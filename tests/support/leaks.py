"""What a load must not leave behind: threads, descriptors, arenas."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence

from tensorlift.engine import abi


@functools.cache
def _freeze() -> None:
    """Modules and tests that were collected stay: to look through them takes 0.2 s each time."""
    gc.collect()
    gc.freeze()


def held() -> tuple[int, set[str], int]:
    """(threads, open descriptors' targets, live arenas) of this process."""
    _freeze()
    gc.collect()
    targets = set()
    for number in os.listdir("/proc/self/fd"):
        # The descriptor of the listing itself is gone by now.
        with contextlib.suppress(FileNotFoundError):
            targets.add(f"{number}:{os.readlink(f'/proc/self/fd/{number}')}")
    return len(os.listdir("/proc/self/task")), targets, abi.library().arena_live()


def comes_to_nothing(left: Callable[[], Sequence[object]], seconds: float = 10) -> bool:
    """Whether nothing is left after a while: the kernel lists a thread that was joined for a moment more."""
    end = time.monotonic() + seconds
    while found := left():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return not found


@contextlib.contextmanager
def nothing_left(arenas: bool = True) -> Iterator[None]:
    """Asserts at the end that nothing more is held than before; ``arenas``: no tensor was kept either."""
    # The first load starts what torch and the library start once.
    before = held()
    yield
    after, end = held(), time.monotonic() + 5
    # The kernel lists a thread that was joined for a moment more.
    while after[0] > before[0] and time.monotonic() < end:
        time.sleep(0.001)
        after = held()
    assert after[0] <= before[0], "threads are left"
    assert after[1] <= before[1], "descriptors are left"
    if arenas:
        assert after[2] == before[2], "arenas are left"
