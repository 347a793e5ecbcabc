"""Safetensors files as transformers sees them during one load: tensors that are read once it is known which.

transformers opens every file, takes a lazy slice of each tensor, says of those that the model has where they
go and with which dtype (`spawn_materialize`), and then indexes each slice. Here that second step is the plan
of one load for all of them (prefetch.py), and the third hands out what has come.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any

import numpy as np
import torch

from tensorlift import sources
from tensorlift.compat import safe_open
from tensorlift.engine.trace import traced
from tensorlift.errors import CheckpointError, DeviceError
from tensorlift.format import dtypes
from tensorlift.format.checkpoint import Checkpoint
from tensorlift.integrations.prefetch import Prefetch, Slice
from tensorlift.options import LoadOptions
from tensorlift.progress import finished, reporter
from tensorlift.stats import LoadStats, merged
from tensorlift.tensors import devices
from tensorlift.tensors.transfer import Clock
from tensorlift.tensors.views import torch_dtype

__all__ = ["LazyFile", "LazyTensor", "Session"]

_CPU = torch.device("cpu")
# What an index of the other package may raise when it is only tried.
_REFUSALS = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)


class Session:
    """One load of one checkpoint; closed by whoever made it."""

    def __init__(
        self,
        files: Sequence[str | os.PathLike[str]],
        settings: LoadOptions,
        *,
        weight_map: dict[str, str] | None = None,
        dtype: torch.dtype | None = None,
        converts: Callable[[str], bool] = lambda name: False,
    ) -> None:
        """Reads and checks all headers.

        ``weight_map``: of the index. ``dtype``: that of most parameters. ``converts``: whether something else
        than a parameter is made of a tensor of this name.
        """
        self._settings, self._converts = settings, converts
        self._prefetches: dict[torch.device, Prefetch] = {}
        self._lock = threading.Lock()
        self._parts: dict[tuple[int, torch.device], safe_open] = {}
        self._part_bytes = self._part_count = 0
        self.closed = False
        with contextlib.ExitStack() as ending:
            self.clock = Clock(ending.enter_context(traced(settings.trace)))
            with self.clock.phase("headers"):
                self.checkpoint = _read_headers(files, weight_map)
            rows = self.checkpoint.select()
            self._expected = sources.expected_digests(self.checkpoint, rows, settings, whole=True)
            # Last of what can fail: a bar that was begun has to be ended.
            self._report = ending.enter_context(reporter(settings.progress))
            self._ending = ending.pop_all()
        self._shards = {shard.path: number for number, shard in enumerate(self.checkpoint.shards)}
        self._names: list[list[str]] = [[] for _ in self._shards]
        for name, shard in zip(self.checkpoint.names, self.checkpoint.shard_of.tolist(), strict=True):
            self._names[shard].append(name)
        total = int(self.checkpoint.sizes.sum())
        same = np.array([torch_dtype(one) is dtype for one in dtypes.ALL])[self.checkpoint.dtypes]
        self.keeps_most = 2 * int(self.checkpoint.sizes[same].sum()) >= total
        """Whether most bytes have the dtype that is wanted."""

    def file(self, path: str) -> LazyFile | None:
        """A file of the checkpoint; None for another one."""
        number = self._shards.get(path)
        if number is None:
            return None
        metadata = self.checkpoint.shards[number].header.metadata
        return LazyFile(self, sorted(self._names[number]), metadata)

    def prefetch(self, device: object) -> Prefetch:
        """That of a device, or of the CPU for one that tensorlift does not load to."""
        try:
            place = devices.parse_device(device)
        except DeviceError:
            place = _CPU
        # Threads of a pool ask for their first tensors at the same time; a second one would never be closed.
        with self._lock:
            if place not in self._prefetches:
                self._prefetches[place] = Prefetch(
                    self.checkpoint, place, self._settings, self.clock, self._expected, self._tick
                )
            return self._prefetches[place]

    def stays(self, row: int, dtype: torch.dtype | None) -> bool:
        """Whether the tensor itself becomes a parameter if one of this dtype is wanted (None: its own)."""
        own = torch_dtype(dtypes.ALL[int(self.checkpoint.dtypes[row])])
        return dtype in (None, own) and not self._converts(self.checkpoint.names[row])

    def read(self, row: int, index: Any, device: torch.device) -> torch.Tensor:
        """A tensor, or a part of one, that was not planned: read right now."""
        name = self.checkpoint.names[row]
        if isinstance(index, EllipsisType):
            prefetch = self.prefetch(device)
            prefetch.want(row, None, stays=False)
            return prefetch.take(name)
        tensor = self._part_reader(int(self.checkpoint.shard_of[row]), device).get_slice(name)[index]
        with self._lock:
            self._part_bytes += tensor.nbytes
            self._part_count += 1
        return tensor

    def _part_reader(self, shard: int, device: torch.device) -> safe_open:
        """An opened file, for parts, which have no digests."""
        with self._lock:
            if (shard, device) not in self._parts:
                fields = [field.name for field in dataclasses.fields(self._settings)]
                known = {name: getattr(self._settings, name) for name in fields}
                known |= {"progress": False, "verify": False, "trace": None}
                file = safe_open(self.checkpoint.shards[shard].path, "pt", device, **known)
                self._parts[shard, device] = self._ending.enter_context(file)
            return self._parts[shard, device]

    def close(self) -> None:
        """Ends all reading. Tensors that were handed out stay."""
        self.closed = True
        with self._ending:
            for prefetch in self._prefetches.values():
                self._ending.callback(prefetch.close)

    def finish(self) -> None:
        """To be called where all went well, before close(): progress has come to its end."""
        finished(self._report, sum(prefetch.nbytes for prefetch in self._prefetches.values()))

    def stats(self) -> LoadStats:
        """What was done; ``seconds`` without ``total``."""
        parts = [prefetch.stats() for prefetch in self._prefetches.values()]
        files = set[int]().union(*(prefetch.files() for prefetch in self._prefetches.values()))
        total = merged(parts, files=len(files | {shard for shard, _ in self._parts}))
        return dataclasses.replace(
            total,
            bytes=total.bytes + self._part_bytes,
            tensors=total.tensors + self._part_count,
            seconds=dict(self.clock.seconds),
        )

    def _tick(self) -> None:
        if self._report is not None:
            loads = list(self._prefetches.values())  # another thread may add one
            self._report(sum(one.bytes_done() for one in loads), sum(one.nbytes for one in loads))


def _read_headers(files: Sequence[str | os.PathLike[str]], weight_map: dict[str, str] | None) -> Checkpoint:
    found = sources.find(list(files))
    try:
        return sources.read_headers(found)
    except CheckpointError:
        # Two files with one name: the index decides. Not asked before, for it may list what no file has;
        # that is a missing key to transformers, and no reason to load nothing.
        if weight_map is None:
            raise
        named = tuple(
            dataclasses.replace(source, member=os.path.basename(source.path)) for source in found.files
        )
        return sources.read_headers(dataclasses.replace(found, files=named, weight_map=weight_map))


class LazyFile:
    """What stands for ``safe_open(file)``."""

    def __init__(self, session: Session, names: list[str], metadata: dict[str, str] | None) -> None:
        """Made by Session.file()."""
        self._session, self._names, self._metadata = session, names, metadata

    def __enter__(self) -> LazyFile:
        """Itself."""
        return self

    def __exit__(self, *exc: Any) -> None:
        """The session ends what was opened."""

    def keys(self) -> list[str]:
        """Names of the tensors, sorted."""
        return list(self._names)

    def metadata(self) -> dict[str, str] | None:
        """The free-form metadata; None where there is none."""
        return self._metadata

    def get_slice(self, name: str) -> LazyTensor:
        """A tensor that is not read yet."""
        return LazyTensor(self._session, self._session.checkpoint.index(name))

    def get_tensor(self, name: str) -> torch.Tensor:
        """A tensor of the CPU, read right now."""
        return self.get_slice(name)[...]


class LazyTensor:
    """What stands for ``get_slice(name)``: shape, dtype, and the tensor or a part of it by an index."""

    __slots__ = ("_device", "_index", "_prefetch", "_row", "_session")

    def __init__(self, session: Session, row: int) -> None:
        """Made by LazyFile.get_slice()."""
        self._session, self._row = session, row
        self._device = _CPU
        self._prefetch: Prefetch | None = None
        self._index: Any = None

    @property
    def ended(self) -> bool:
        """Whether the load that it belongs to is over."""
        return self._session.closed

    def get_shape(self) -> list[int]:
        """As written in the file."""
        return list(self._session.checkpoint.shapes[self._row])

    def get_dtype(self) -> str:
        """As written in the file, such as "BF16"."""
        return dtypes.ALL[int(self._session.checkpoint.dtypes[self._row])].code

    def plan(
        self,
        device: Any,
        dtype: torch.dtype | None,
        shard: Callable[[Any], object] | None,
        passes: bool,
    ) -> None:
        """Says how it will be indexed: as a whole, or as ``shard`` does with what it is given.

        ``dtype``: what it will be converted to. ``passes``: something is made of it, and it is dropped.
        """
        prefetch = self._session.prefetch(_CPU if device is None else device)
        part: Slice | None = None
        index: Any = ...
        if shard is not None:
            asking = _Asking(self)
            with contextlib.suppress(*_REFUSALS):
                shard(asking)
            if len(asking.asked) != 1:  # nothing at all, or several pieces: each is read when asked for
                return
            index = asking.asked[0]
            known, part = _part_of(index, self.get_shape())
            if not known:
                return
        self._prefetch, self._index = prefetch, index
        prefetch.want(self._row, part, stays=not passes and self._session.stays(self._row, dtype))

    def place(self, device: Any) -> None:
        """Where parts come to that are read when they are asked for."""
        with contextlib.suppress(DeviceError):
            self._device = devices.parse_device(device)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """The tensor or a part of it."""
        if self._prefetch is not None and _same(index, self._index):
            prefetch, self._prefetch = self._prefetch, None
            return prefetch.take(self._session.checkpoint.names[self._row])
        return self._session.read(self._row, index, self._device)


class _Asking:
    """Stands for a lazy tensor while it is found out how that will be indexed."""

    def __init__(self, tensor: LazyTensor) -> None:
        self.get_shape, self.get_dtype = tensor.get_shape, tensor.get_dtype
        self.asked: list[Any] = []

    def __getitem__(self, index: Any) -> torch.Tensor:
        self.asked.append(index)
        return torch.empty(self.get_shape(), device="meta")[index]


def _same(index: Any, planned: Any) -> bool:
    if index is planned:
        return True
    slices = isinstance(index, tuple) and all(isinstance(one, slice) for one in index)
    return bool(slices and index == planned)


def _part_of(index: Any, shape: list[int]) -> tuple[bool, Slice | None]:
    """Whether an index is one that a load can take, and as what: None is the whole tensor."""
    if index is ...:
        return True, None
    if not isinstance(index, tuple) or len(index) > len(shape):
        return False, None
    parts = []
    for dim, one in enumerate(index):
        if not isinstance(one, slice):
            return False, None
        start, stop, step = one.indices(shape[dim])
        if step != 1 or stop <= start:
            return False, None
        if (start, stop) != (0, shape[dim]):
            parts.append((dim, start, stop))
    return len(parts) < 2, parts[0] if parts else None
