"""Counts, exactly, how often the calling thread gives the GIL away.

Whatever gives it away waits up to a switch interval (5 ms) to get it back where another Python thread never
rests. What counts is a library that is preloaded (native/tests/giveaways.c), so time plays no part, and no
other thread is needed. Use ``call()`` to run a function where it is, and ``Counter`` in that function.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from typing import Any

from support import device
from support.native_build import build
from tensorlift.tensors import interpreter


def call(function: Callable[..., Any], *arguments: Any, **environment: str) -> Any:
    """As device.call(): in a fresh process, in which give-aways can be counted."""
    library = build("plain", target="giveaways") / "native" / "tests" / "libgiveaways.so"
    preload = ":".join(filter(None, (str(library), os.environ.get("LD_PRELOAD"))))
    return device.call(function, *arguments, LD_PRELOAD=preload, **environment)


class Counter:
    """Of the thread that makes it. From then on nobody takes the GIL by force: what is counted was given."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        library.giveaways_of_this_thread.restype = ctypes.c_void_p
        library.giveaways_learn()
        sys.setswitchinterval(1000)
        interpreter._TURN_SECONDS = 1000  # nor does a load ask for shorter turns
        self._count = ctypes.c_uint64.from_address(library.giveaways_of_this_thread())

    @property
    def value(self) -> int:
        """So far."""
        return self._count.value

    def of(self, function: Callable[..., Any], *arguments: Any) -> int:
        """Of one call; what it returns is gone afterwards."""
        before = self.value
        function(*arguments)
        return self.value - before
