"""The memory of a seed's tensors: whether they have it still, and held while it is read.

A tensor may be given other memory at any time (``parameter.data = ...``), and what it had is freed then
unless somebody holds it. To hold it always would keep a second copy of what an engine replaces; so it is held
from the first lease until nobody is connected, and known by weak references in between: while there is one no
other storage has its identity, whatever torch's allocator puts where it was.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tensorlift.forking.offering import Named

__all__ = ["Holding"]


class Holding:
    """Of tensors that can be offered. Under the lock that it is given, but for close()."""

    def __init__(
        self, named: Sequence[Named], changed: threading.Condition, reading: Callable[[], float]
    ) -> None:
        """Holds nothing yet. ``reading``: asked under the lock how long somebody reads at least."""
        self._changed, self._reading, self._is_watching = changed, reading, False
        storages = [one.tensor.untyped_storage() for one in named]
        self._known = [
            (one.name, one.tensor, one.tensor.data_ptr(), storage._cdata)
            for one, storage in zip(named, storages, strict=True)
        ]
        each = {one._cdata: one for one in storages}.values()
        self._weak = [StorageWeakRef(one) for one in each]  # type: ignore[no-untyped-call]
        self._held: list[torch.UntypedStorage] = []

    @property
    def is_held(self) -> bool:
        """Between hold() and let_go()."""
        return bool(self._held)

    def hold(self) -> str:
        """All of it, to let_go(); or nothing new, and the first tensor that has other memory by now."""
        found = []
        for name, tensor, address, identity in self._known:
            storage = tensor.untyped_storage()
            if storage._cdata != identity or tensor.data_ptr() != address:
                return name
            found.append(storage)
        self._held = found
        return ""

    def watch(self) -> None:
        """Lets go by itself when nobody reads any more; until then a thread sleeps."""
        if self._is_watching:
            return
        thread = threading.Thread(target=self._until_nobody_reads, name="tensorlift-seed-held", daemon=True)
        with contextlib.suppress(RuntimeError):  # no more threads: behind the next lease
            thread.start()
            self._is_watching = True

    def _until_nobody_reads(self) -> None:
        with self._changed:
            while self._held and (seconds := self._reading()):
                self._changed.wait(seconds)
            self._held, self._is_watching = [], False

    def let_go(self) -> None:
        """What tensors do not have any more may be freed."""
        self._held = []

    def close(self) -> None:
        """Of no tensor any more."""
        with self._changed:
            self._held, self._known, self._weak = [], [], []
            self._changed.notify_all()
