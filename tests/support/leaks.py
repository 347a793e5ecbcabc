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


Held = tuple[int, set[str], int]


def held() -> Held:
    """(threads, open descriptors' targets, live arenas) of this process."""
    _freeze()
    gc.collect()
    targets = set()
    for number in os.listdir("/proc/self/fd"):
        # The descriptor of the listing itself is gone by now.
        with contextlib.suppress(FileNotFoundError):
            targets.add(f"{number}:{os.readlink(f'/proc/self/fd/{number}')}")
    return len(os.listdir("/proc/self/task")), targets, abi.library().arena_live()


def left(before: Held, seconds: float = 10) -> list[int]:
    """How many threads, descriptors and arenas are held beyond ``before``.

    The kernel lists a thread that was joined for a moment more: then, and now.
    """
    end = time.monotonic() + seconds
    while (now := held())[0] > before[0] and time.monotonic() < end:
        time.sleep(0.001)
    return [max(0, now[0] - before[0]), len(now[1] - before[1]), now[2] - before[2]]


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
    threads, descriptors, arenas_left = left(before)
    assert not threads, "threads are left"
    assert not descriptors, f"descriptors are left: {held()[1] - before[1]}"
    if arenas:
        assert arenas_left == 0, "arenas are left"
