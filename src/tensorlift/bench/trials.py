"""Timed loads of a part of a checkpoint, warm or cold, for the search of the best settings.

Cold drops what is cached of these files and of nothing else (posix_fadvise), and is proven: the kernel counts
what this process fetched from storage. Nothing is written, and no setting of the machine is changed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from tensorlift import sources
from tensorlift.bench.ceilings import drop_cache, fill_cache
from tensorlift.bench.tuning import AUTOMATIC, Choice
from tensorlift.bench.worker import disk_bytes
from tensorlift.engine.sizing import EngineSize, size_engine
from tensorlift.errors import CheckpointError
from tensorlift.options import LoadOptions

__all__ = ["Trials"]

MIB = 1 << 20
FIRST_BYTES = 128 * MIB
LEAST_BYTES = 64 * MIB
MOST_BYTES = 8 << 30
# Pages that are read ahead or shared with a neighbour make the count differ from the bytes asked for.
PROVEN_SHARE = 0.9


class Trials:
    """Loads of the first tensors of a checkpoint, as many as one sample can afford."""

    def __init__(self, paths: list[str], device: str) -> None:
        """Reads the headers. Raises errors of the tree, CheckpointError where there is nothing to read."""
        self.paths: Any = paths[0] if len(paths) == 1 else paths
        self.device = device
        self._checkpoint = sources.read_headers(sources.find(self.paths))
        self.total_bytes = int(self._checkpoint.sizes.sum())
        if self.total_bytes == 0:
            raise CheckpointError(f"{self._checkpoint.where}: no tensor has a byte; nothing can be measured")
        self.fetched: list[float] = []
        """For each cold load, fetched from storage in parts of what was loaded."""
        self._state = ""
        self.take(FIRST_BYTES)

    def take(self, nbytes: int) -> None:
        """Loads from now on read the first tensors of about this many bytes (at least one, at most all)."""
        ends = np.cumsum(self._checkpoint.sizes)
        count = int(np.searchsorted(ends, min(nbytes, self.total_bytes))) + 1
        names = self._checkpoint.names[:count]
        self.bytes = int(ends[len(names) - 1])
        self._names = None if len(names) == len(ends) else frozenset(names)
        files = np.unique(self._checkpoint.shard_of[:count]).tolist()
        self.files = [Path(os.fsdecode(self._checkpoint.shards[file].absolute)) for file in files]
        self._state = ""

    def fit(self, state: str, seconds: float) -> None:
        """Takes so much that one load takes about ``seconds``, within what memory holds twice."""
        self.take(FIRST_BYTES)
        self.measure(state, AUTOMATIC)
        rate = self.bytes / self.measure(state, AUTOMATIC)
        room = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
        self.take(max(LEAST_BYTES, min(int(rate * seconds), room, MOST_BYTES)))

    def size(self) -> EngineSize:
        """What the automatic choice is for this work."""
        return size_engine(LoadOptions.resolve(), self.bytes, device=self.device != "cpu")

    def measure(self, state: str, choice: Choice) -> float:
        """Seconds of one load, ``warm`` or ``cold``, headers left out."""
        from tensorlift.loading import load  # torch only now

        if state == "cold":
            drop_cache(self.files)
        elif self._state != "warm":
            fill_cache(self.files)
        self._state = state
        wanted = self._names
        before = _fetched_bytes()
        tensors = load(
            self.paths,
            self.device,
            names=None if wanted is None else wanted.__contains__,
            **choice.options(),
        )
        if state == "cold" and before is not None:
            self.fetched.append(((_fetched_bytes() or 0) - before) / self.bytes)
        seconds = tensors.stats.seconds
        return seconds["total"] - seconds.get("headers", 0.0)

    @property
    def cold_is_proven(self) -> bool:
        """Whether every cold load fetched its bytes from storage, as far as the kernel counts that."""
        return bool(self.fetched) and min(self.fetched) >= PROVEN_SHARE


def _fetched_bytes() -> int | None:
    """The same as disk_bytes(); None where the kernel does not say."""
    try:
        return disk_bytes()
    except OSError:
        return None
