"""Bytes straight into tensors that exist: no arena, no copy of ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tensorlift.engine.digesting import Checks
from tensorlift.engine.trace import Trace
from tensorlift.errors import RequestError
from tensorlift.format.checkpoint import Checkpoint
from tensorlift.format.digests import Expected
from tensorlift.format.quoting import quote
from tensorlift.options import LoadOptions
from tensorlift.plan.parts import Spread, spread_of
from tensorlift.plan.pieces import merge_pieces, new_pieces
from tensorlift.stats import LoadStats
from tensorlift.tensors.destinations import Target, check_storage
from tensorlift.tensors.memory import Memory
from tensorlift.tensors.running import Running, Tick
from tensorlift.tensors.writable import first_read_only, read_only

__all__ = ["Direct", "check_writable"]

# Tensors that are submitted together at first: half a millisecond of Python. Then four times as many as
# before, for which the engine has work meanwhile: each time numpy gives the GIL away a few times.
_TOGETHER = 256
_ROW, _PLACE = attrgetter("row"), attrgetter("address")


class _Planned(NamedTuple):
    """Destinations in the order of the file: one element of each a tensor."""

    targets: Sequence[Target]
    files: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    addresses: npt.NDArray[np.uint64]
    spread: Spread | None


class Direct(Running):
    """Destinations of one device on their way; the tensors must stay as they are until close()."""

    def __init__(
        self,
        memory: Memory,
        options: LoadOptions,
        nbytes: int,
        trace: Trace | None,
        *,
        digest: bool,
        ranks: int = 1,
    ) -> None:
        """Makes an engine for at most ``nbytes`` bytes; see plan(). ``ranks``: on this host."""
        self._storages: list[torch.UntypedStorage] = []
        super().__init__(memory, options, nbytes, trace=trace, digest=digest, ranks=ranks)
        self._checks: Checks | None = None
        self._nbytes = self._tensors = self._shards = self._ticket = 0
        self._planned: _Planned | None = None

    def plan(
        self, checkpoint: Checkpoint, targets: Sequence[Target], expected: Expected | None = None
    ) -> None:
        """Nothing is written before start(). ``expected``: digests that wait() compares with."""
        ordered = sorted(targets, key=_ROW)
        rows = np.array(list(map(_ROW, ordered)), np.int64)
        addresses = np.array(list(map(_PLACE, ordered)), np.uint64)
        files, sizes = checkpoint.shard_of[rows], checkpoint.sizes[rows]
        self._nbytes, self._tensors, self._shards = int(sizes.sum()), len(rows), len(np.unique(files))
        if self.memory.native_kind == 0:
            check_writable(addresses, sizes, ordered)
        if expected is not None:
            self._checks = Checks(self._engine, checkpoint, rows, expected)
        self._planned = _Planned(
            ordered,
            self._add_files(checkpoint, files)[files],
            checkpoint.starts[rows],
            sizes,
            addresses,
            spread_of(checkpoint, rows),
        )

    def _let_go(self) -> None:
        self._storages.clear()

    def start(self) -> None:
        """Hands all pieces to the engine, which reads the first while the others are made; from now on
        destinations change.
        """
        planned, self._planned = self._planned, None
        if planned is not None:
            first = 0
            while first < self._tensors:
                last = min(max(_TOGETHER, 4 * first), self._tensors)
                self._submit(planned, slice(first, last))
                first = last

    def _submit(self, planned: _Planned, part: slice) -> None:
        targets, sizes, addresses = planned.targets[part], planned.sizes[part], planned.addresses[part]
        # Held until the engine has ended: `tensor.data = ...` in another thread frees the memory that was
        # there.
        storages = [target.tensor.untyped_storage() for target in targets]
        self._storages += storages
        _check_inside(storages, addresses, sizes, targets)
        if self._checks is not None:
            pieces = self._checks.pieces(part.start, part.stop, planned.files[part], addresses)
        else:
            spread = () if planned.spread is None else planned.spread.take(part)
            files, starts = planned.files[part], planned.starts[part]
            pieces = merge_pieces(new_pieces(files, starts, sizes, addresses, *spread))
        if len(pieces):
            self._ticket = self._engine.submit(pieces, self.memory.stream())

    def wait(self, tick: Tick | None = None) -> None:
        """Waits until all bytes are there for work on the caller's stream; compares digests before that."""
        if self._checks is not None:
            self._engine.wait(self._ticket, tick)
            self._checks.check(0, self._tensors)
        self._arrive(self._ticket, tick)

    def stats(self) -> LoadStats:
        """What was done; seconds are the caller's to add."""
        return dataclasses.replace(
            self.report(),
            bytes=self._nbytes,
            tensors=self._tensors,
            files=self._shards,
            verified=self._checks.checked if self._checks is not None else 0,
        )


def _check_inside(
    storages: Sequence[torch.UntypedStorage],
    addresses: npt.NDArray[np.uint64],
    sizes: npt.NDArray[np.int64],
    targets: Sequence[Target],
) -> None:
    """Whether each destination still is in its storage: another thread may have put another one there."""
    begins = np.array(list(map(torch.UntypedStorage.data_ptr, storages)), np.uint64)
    ends = begins + np.array(list(map(torch.UntypedStorage.nbytes, storages)), np.uint64)
    outside = (sizes > 0) & ((addresses < begins) | (addresses + sizes.astype(np.uint64) > ends))
    if outside.any():
        check_storage([targets[int(np.argmax(outside))]])
        name = targets[int(np.argmax(outside))].name
        raise RequestError(f"the memory of {quote(name)} was replaced while it was about to be loaded into")


def check_writable(
    addresses: npt.NDArray[np.uint64], sizes: npt.NDArray[np.int64], targets: Sequence[Target]
) -> None:
    """Whether each destination may be written; RequestError."""
    at = first_read_only(addresses, sizes)
    if at is not None:
        check_storage([targets[at]])
        raise RequestError(f"{read_only(targets[at].name)} Load into a copy (clone) of it")
