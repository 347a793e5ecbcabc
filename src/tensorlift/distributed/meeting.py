"""The store through which ranks find each other for a group of their own.

Imported only where there is torch.distributed to make one.
"""

from __future__ import annotations

import datetime
import threading
import time
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = ["Meeting"]

_LOOK = 0.005  # seconds between two looks at what is waited for


class Meeting(Store):
    """A store in which ranks find each other, whose waits end when the group is not wanted any more."""

    def __init__(self, store: Any, released: threading.Event, timeout: datetime.timedelta) -> None:
        """``timeout``: of a wait that is not given one."""
        super().__init__()
        self._store, self._released, self._timeout = store, released, timeout

    def set(self, key: str, value: Any) -> None:
        """As any store."""
        self._store.set(key, value)

    def add(self, key: str, value: int) -> int:
        """As any store."""
        return int(self._store.add(key, value))

    def check(self, keys: list[str]) -> bool:
        """As any store."""
        return bool(self._store.check(keys))

    def get(self, key: str) -> bytes:
        """As any store."""
        self.wait([key])
        return bytes(self._store.get(key))

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        """As any store; RuntimeError once the group was released."""
        deadline = time.monotonic() + (timeout or self._timeout).total_seconds()
        while not self._store.check(keys):
            if self._released.wait(_LOOK) or time.monotonic() > deadline:
                raise RuntimeError("the ranks of a load did not find each other")
