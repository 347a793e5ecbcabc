"""Bytes straight into tensors that exist: no arena, no copy of ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tensorlift.engine.digesting import Checks
from tensorlift.engine.engine import Engine
from tensorlift.engine.report import EngineReport, report_of
from tensorlift.engine.sizing import size_engine
from tensorlift.engine.trace import Trace
from tensorlift.format.checkpoint import Checkpoint
from tensorlift.format.digests import Expected
from tensorlift.options import LoadOptions
from tensorlift.plan.pieces import merge_pieces, new_pieces
from tensorlift.stats import LoadStats
from tensorlift.tensors.destinations import Target
from tensorlift.tensors.memory import Memory

__all__ = ["Direct"]


class Direct:
    """Destinations of one device on their way; the tensors must stay as they are until close()."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        targets: Sequence[Target],
        memory: Memory,
        options: LoadOptions,
        trace: Trace | None = None,
        expected: Expected | None = None,
    ) -> None:
        """Plans; nothing is written before start(). ``expected``: digests that wait() compares with."""
        self._memory, self._trace = memory, trace
        self._targets = sorted(targets, key=lambda target: target.row)
        rows = np.array([target.row for target in self._targets], np.int64)
        files = checkpoint.shard_of[rows]
        self._sizes, self._count = checkpoint.sizes[rows], len(rows)
        self.nbytes, self.files = int(self._sizes.sum()), len(np.unique(files))
        size = size_engine(
            options,
            self.nbytes,
            device=memory.native_kind != 0,
            digest=expected is not None,
            pci_address=memory.pci_address,
        )
        self._engine = Engine(size, memory.native_kind, memory.native_index, trace=trace is not None)
        index = np.full(len(checkpoint.shards), -1, np.int32)
        for shard in np.unique(files).tolist():
            index[shard] = self._engine.add_file(checkpoint.shards[shard])
        addresses = np.array([target.tensor.data_ptr() for target in self._targets], np.uint64)
        self._checks = None if expected is None else Checks(self._engine, checkpoint, rows, expected)
        if self._checks is not None:
            self._pieces = self._checks.pieces(0, len(rows), index[files], addresses)
        else:
            pieces = new_pieces(index[files], checkpoint.starts[rows], self._sizes, addresses)
            self._pieces = merge_pieces(pieces)
        self._ticket = 0
        self._report = EngineReport()

    def start(self) -> None:
        """Hands all pieces to the engine; from now on destinations change."""
        if len(self._pieces):
            self._ticket = self._engine.submit(self._pieces, self._memory.stream())

    def wait(self, tick: Callable[[], object] | None = None) -> None:
        """Waits until all bytes are there for work on the caller's stream; then compares digests."""
        self._engine.wait(self._ticket, tick)
        if self._checks is not None:
            self._checks.check(0, self._count)
        if self._memory.native_kind != 0:
            self._engine.stream_wait(self._memory.stream())
            self._memory.ready()

    def bytes_done(self) -> int:
        """Bytes delivered so far."""
        return self._report.nbytes if self._engine.closed else self._engine.bytes_done()

    def close(self) -> None:
        """Cancels what is under way and waits for it: no byte is written after this."""
        if not self._engine.closed:
            self._report = report_of(self._engine, log=True)
            if self._trace is not None:
                self._trace.take(self._engine)
            self._engine.close()

    def stats(self) -> LoadStats:
        """What was done; seconds are the caller's to add."""
        report = self._report if self._engine.closed else report_of(self._engine)
        return report.stats(
            nbytes=self.nbytes,
            tensors=self._count,
            files=self.files,
            arenas=0,
            device_peak_bytes=0,
            verified=self._checks.checked if self._checks is not None else 0,
            seconds={},
        )
