"""What a load must not leave behind: threads, descriptors, arenas."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator

from tensorlift.engine import abi


def held() -> tuple[int, set[str], int]:
    """(threads, open descriptors' targets, live arenas) of this process."""
    gc.collect()
    targets = set()
    for number in os.listdir("/proc/self/fd"):
        # The descriptor of the listing itself is gone by now.
        with contextlib.suppress(FileNotFoundError):
            targets.add(f"{number}:{os.readlink(f'/proc/self/fd/{number}')}")
    return len(os.listdir("/proc/self/task")), targets, abi.library().arena_live()


@contextlib.contextmanager
def nothing_left(arenas: bool = True) -> Iterator[None]:
    """Asserts at the end that nothing more is held than before; ``arenas``: no tensor was kept either."""
    # The first load starts what torch and the library start once.
    before = held()
    yield
    after = held()
    assert after[0] <= before[0], "threads are left"
    assert after[1] <= before[1], "descriptors are left"
    if arenas:
        assert after[2] == before[2], "arenas are left"
