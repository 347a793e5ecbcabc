"""An engine at work for one load: its files, what it reports, and how it ends."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tensorlift.engine.engine import Engine
from tensorlift.engine.report import report_of
from tensorlift.engine.sizing import size_engine
from tensorlift.engine.trace import Trace
from tensorlift.errors import RequestError
from tensorlift.format.checkpoint import Checkpoint
from tensorlift.options import LoadOptions
from tensorlift.stats import LoadStats
from tensorlift.tensors.memory import Memory

__all__ = ["Running", "Tick", "both"]

Tick = Callable[[], object]

# From here on the ring is made while headers are read and tensors laid out: it took 35 ms where each slot was
# made when it was first wanted, as long as 2 GB take (one H200).
_WORTH_WARMING = 256 << 20


def both(first: Tick | None, second: Tick | None) -> Tick | None:
    """What calls both."""
    if first is None or second is None:
        return first or second

    def tick() -> None:
        first()
        second()

    return tick


class Running:
    """What loads into arenas and loads into existing tensors share. close() may come from any thread, at any
    time, more than once.
    """

    def __init__(
        self,
        memory: Memory,
        options: LoadOptions,
        nbytes: int,
        *,
        trace: Trace | None,
        digest: bool,
        ranks: int = 1,
    ) -> None:
        """Makes an engine for about ``nbytes`` bytes, to digest them or not; ``ranks``: on this host."""
        self.memory = memory
        device = memory.native_kind != 0
        size = size_engine(
            options, nbytes, device=device, digest=digest, pci_address=memory.pci_address, ranks=ranks
        )
        self._engine = Engine(
            size,
            memory.native_kind,
            memory.native_index,
            trace=trace is not None,
            warm=device and nbytes >= _WORTH_WARMING,
            keep=bool(options.keep_pinned),
        )
        self._trace = trace
        self._known: dict[bytes, int] = {}
        self._report = LoadStats()
        # For the end alone. Reentrant: a collection of garbage that comes under it may close as well.
        self._ending = threading.RLock()

    def _add_files(self, checkpoint: Checkpoint, used: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Names the shards in ``used``; the engine's index of a file by the shard's (-1: not named)."""
        files = np.full(len(checkpoint.shards), -1, np.int32)
        for number in np.flatnonzero(np.bincount(used)).tolist():
            shard = checkpoint.shards[number]
            # One file may have tensors in several parts of a load.
            if shard.absolute not in self._known:
                self._known[shard.absolute] = self._engine.add_file(shard)
            files[number] = self._known[shard.absolute]
        return files

    def _arrive(self, ticket: int, tick: Tick | None, stream: int | None = None) -> None:
        """Waits until a ticket is there for work on a stream, the caller's where none is given; raises what
        stopped the engine.
        """
        self._engine.wait(ticket, tick)
        if self.memory.native_kind != 0:
            self._engine.stream_wait(self.memory.stream() if stream is None else stream)
            self.memory.ready()

    def report(self) -> LoadStats:
        """The engine's counters, now or when it was closed."""
        with self._ending:
            return self._report if self._engine.closed else report_of(self._engine)

    def bytes_done(self) -> int:
        """Bytes delivered so far."""
        with self._ending:
            return self._report.bytes if self._engine.closed else self._engine.bytes_done()

    def close(self) -> None:
        """Cancels what is under way, waits for it, lets all go: no byte is written after this."""
        if self._engine.forked:
            # The lock may be held for ever by a thread that this process does not have.
            self._engine.close()
            self._let_go()
            return
        with self._ending:
            try:
                # Where another close() was interrupted, the engine answers no more, and may be at work still.
                with contextlib.suppress(RequestError):
                    self._report = report_of(self._engine, log=True)
                    if self._trace is not None:
                        self._trace.take(self._engine)
                self._engine.close()
            finally:
                if self._engine.closed:
                    self._let_go()

    def close_well(self) -> None:
        """close() of a load that all went well for; raises what only shows when its last copies are over."""
        self.close()
        self._engine.check_end()

    def __del__(self) -> None:
        """Does what an interrupted close() has left, if anything: an exception that comes here is lost."""
        if hasattr(self, "_ending") and not self._engine.closed:
            self.close()

    def _let_go(self) -> None:
        """Gives back what the engine wrote into."""
