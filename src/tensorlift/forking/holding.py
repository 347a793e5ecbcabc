"""The memory of a seed's tensors: whether they have it still, and held while it is read.

A tensor may be given other memory at any time (``parameter.data = ...``), and what it had is freed then
unless somebody holds it. To hold it always would keep a second copy of what an engine replaces; so it is held
from the first lease until nobody is connected, and known by weak references in between: while there is one no
other storage has its identity, whatever torch's allocator puts where it was.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tensorlift.forking.offering import Named

__all__ = ["Holding"]


class Holding:
    """Of tensors that can be offered. No lock of its own."""

    def __init__(self, named: Sequence[Named]) -> None:
        """Holds nothing yet."""
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

    def let_go(self) -> None:
        """What tensors do not have any more may be freed."""
        self._held = []

    def close(self) -> None:
        """Of no tensor any more."""
        self._held, self._known, self._weak = [], [], []
