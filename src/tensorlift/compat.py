"""The face of safetensors: safe_open and load_file with its signatures, for one file or for lists of them.

Differences: a device's bytes are there for work on the current stream, every tensor owns its memory, errors
are of the tree below TensorliftError, and an index may hold one list of integers at most.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tensorlift import sources
from tensorlift.distributed import join
from tensorlift.engine.digesting import check_built, check_in_memory
from tensorlift.engine.engine import Engine
from tensorlift.engine.sizing import size_engine
from tensorlift.engine.small import LARGEST, SmallReads
from tensorlift.engine.trace import traced
from tensorlift.errors import (
    FileError,
    MachineError,
    OptionError,
    RanksError,
    RequestError,
    TensorliftError,
)
from tensorlift.format import dtypes
from tensorlift.format.quoting import shown
from tensorlift.loading import LoadedState, load, load_tensors
from tensorlift.options import LoadOptions
from tensorlift.plan.arenas import Rules
from tensorlift.plan.indexing import slice_tensor
from tensorlift.plan.pieces import merge_pieces, new_pieces
from tensorlift.tensors import memory as memories
from tensorlift.tensors.transfer import Clock, Transfer
from tensorlift.tensors.views import Single, sliced
from tensorlift.weights import read_headers

__all__ = ["TensorSlice", "load_file", "safe_open"]

_FRAMEWORKS = ("pt", "torch", "pytorch")


def load_file(filename: Any, device: str | int | torch.device = "cpu", **options: Any) -> LoadedState:
    """All tensors of a file (or a list of files, a folder, a Hub id) by name; see loading.load."""
    return load(filename, device, **options)


class safe_open:  # noqa: N801 - the name that safetensors gives it
    """Opens a file, or a list of them, for tensors in any order; a context manager, usable from several
    threads.

    filename: as for loading.load. framework: "pt" (also "torch", "pytorch"). device and options: as for
    loading.load. Headers are read here, data when a tensor or a slice is asked for.

    process_group: as for loading.load. Its ranks compare their files here, and a read that fails on one makes
    the others' next call raise PeerError. Each reads by itself: random access has no order to exchange in.
    """

    def __init__(
        self,
        filename: Any,
        framework: str,
        device: str | int | torch.device = "cpu",
        *,
        process_group: Any = None,
        **options: Any,
    ) -> None:
        """Reads and checks the headers."""

        def resolve() -> LoadOptions:
            if not isinstance(framework, str) or framework not in _FRAMEWORKS:
                raise OptionError(
                    f"framework is {shown(framework)}; expected one of {', '.join(_FRAMEWORKS)}, for torch "
                    "(for another framework convert them, or use safetensors itself)"
                )
            return LoadOptions.resolve(**options)

        self._ranks, self._options = join(process_group, resolve, at_random=True)
        with self._telling(all_of_it=True):
            self._memory = memories.for_device(device, private=self._options.own != "tensor")
            self._checkpoint = read_headers(sources.find(filename), Clock(), self._ranks)
            rows = self._checkpoint.select()
            self._expected = sources.expected_digests(self._checkpoint, rows, self._options, whole=True)
            if self._expected is not None:
                check_built()
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._files: dict[int, int] = {}
        in_place = self._memory.native_kind == 0 and self._options.backend in (None, ("AUTO",))
        self._small = SmallReads() if in_place else None
        self._closed = False

    def __enter__(self) -> safe_open:
        """Itself."""
        self._check_open()
        return self

    def __exit__(self, *exc: Any) -> None:
        """Closes."""
        if self._ranks is not None and exc[1] is not None:
            self._ranks.leave(exc[1])
        self.close()

    def __del__(self) -> None:
        """The other ranks are told that this one is through."""
        if getattr(self, "_closed", True) is False and self._ranks is not None:
            self.close()

    @contextmanager
    def _telling(self, all_of_it: bool = False) -> Iterator[None]:
        """Around what may fail: the other ranks learn of it, and theirs comes out here."""
        if self._ranks is None:
            yield
            return
        self._ranks.check()
        try:
            yield
        except BaseException as error:
            # A name that is not there is this caller's affair.
            if all_of_it or isinstance(error, (FileError, MachineError)):
                self._ranks.leave(error)
            raise

    def __len__(self) -> int:
        """Number of tensors."""
        return len(self._checkpoint.names)

    def close(self) -> None:
        """Ends it: reads under way are stopped, further calls raise RequestError. Tensors handed out stay."""
        self._closed = True
        with self._lock:
            engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
        if self._small is not None:
            self._small.close()
        if self._ranks is not None:
            # The store may have gone with a rank that was through before: no failure of anything here.
            with suppress(RanksError):
                self._ranks.through()

    def keys(self) -> list[str]:
        """Names of the tensors, sorted."""
        self._check_open()
        return sorted(self._checkpoint.names)

    def offset_keys(self) -> list[str]:
        """Names of the tensors in file order."""
        self._check_open()
        return list(self._checkpoint.names)

    def metadata(self) -> dict[str, str] | None:
        """The free-form metadata; None where there is none."""
        self._check_open()
        found = self._checkpoint.metadata
        return None if found is None else dict(found)

    def get_tensor(self, name: str) -> torch.Tensor:
        """One tensor, owned. Raises TensorNotFoundError, DtypeError and what reading raises."""
        self._check_open()
        with self._telling():
            return self._tensor(name)

    def _tensor(self, name: str) -> torch.Tensor:
        row = self._checkpoint.index(name)
        expected = self._expected
        if expected is not None and not self._is_small(int(self._checkpoint.sizes[row])):
            return self._checked(row)
        single = Single(self._checkpoint, row)
        if single.nbytes == 0:
            if expected is not None:
                check_in_memory(self._checkpoint, row, 0, 0, expected)
            return single.empty(single.shape, self._memory)
        with self._read(row, np.array([single.start]), single.nbytes) as arena:
            if expected is not None:
                check_in_memory(self._checkpoint, row, arena.address, single.nbytes, expected)
            return single.tensor(arena, self._memory)

    def _is_small(self, nbytes: int) -> bool:
        """Whether a block of this size is read without an engine."""
        return self._small is not None and nbytes <= LARGEST

    def _checked(self, row: int) -> torch.Tensor:
        """One tensor that is compared with its digest; an engine of its own, for its digests are by piece."""
        memory = self._memory
        rules = Rules(int(self._checkpoint.sizes[row]), device=memory.native_kind != 0)
        rows = np.array([row], np.int64)
        transfer = Transfer.of(self._checkpoint, rows, memory, self._options, rules, Clock(), self._expected)
        try:
            transfer.submit(1)
            transfer.wait(0)
            tensor = transfer.tensors(0)[0]
            transfer.close_well()
            return tensor
        finally:
            transfer.close()

    def get_tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name, in file order."""
        self._check_open()
        with self._telling(), traced(self._options.trace) as trace:
            return load_tensors(self._checkpoint, self._memory, self._options, Clock(trace))

    def get_slice(self, name: str) -> TensorSlice:
        """A tensor to be indexed: only the bytes that an index asks for are read.

        Parts have no digests: ``verify`` does not cover them.
        """
        self._check_open()
        return TensorSlice(self, self._checkpoint.index(name))

    def _slice(self, row: int, index: Any) -> torch.Tensor:
        self._check_open()
        single = Single(self._checkpoint, row)
        part = slice_tensor(single.shape, single.item_nbytes, index)
        if 0 in part.shape:
            return single.empty(part.shape, self._memory)
        with self._telling(), self._read(row, part.blocks.starts + single.start, part.block_nbytes) as arena:
            return sliced(single.integers(arena, self._memory), part, single.dtype)

    @contextmanager
    def _read(self, row: int, starts: npt.NDArray[np.int64], nbytes: int) -> Iterator[memories.Arena]:
        """An arena with blocks of ``nbytes`` bytes each, from the offsets ``starts`` in the tensor's file."""
        memory, count = self._memory, len(starts)
        (arena,) = memory.allocate([nbytes * count])
        try:
            if count == 1 and self._small is not None and self._is_small(nbytes):
                shard = int(self._checkpoint.shard_of[row])
                self._small.read(shard, self._checkpoint.shards[shard], int(starts[0]), nbytes, arena.address)
                yield arena
                return
            failed = False
            try:
                self._fill(*self._engine_for(row, nbytes * count), starts, nbytes, arena)
            except TensorliftError:
                failed = True
            if failed:
                # An engine tells its first failure to all, and that may be another thread's. What is wrong
                # with this read shows when it has an engine to itself.
                self._check_open()
                with self._new_engine(nbytes * count) as engine:
                    file = engine.add_file(self._checkpoint.shards[int(self._checkpoint.shard_of[row])])
                    self._fill(engine, file, starts, nbytes, arena)
            yield arena
        finally:
            arena.release()

    def _fill(
        self, engine: Engine, file: int, starts: npt.NDArray[np.int64], nbytes: int, arena: memories.Arena
    ) -> None:
        """Blocks of ``nbytes`` bytes each, one after another into the arena."""
        memory, count = self._memory, len(starts)
        places = arena.address + np.arange(count, dtype=np.uint64) * np.uint64(nbytes)
        pieces = merge_pieces(new_pieces(file, starts, np.full(count, nbytes), places))
        try:
            engine.wait(engine.submit(pieces, memory.stream()))
            if memory.native_kind != 0:
                engine.stream_wait(memory.stream())
                memory.ready()
        except BaseException:
            # The engine may be writing still, and one that failed stays so: the next call makes another.
            self._drop(engine)
            raise

    def _new_engine(self, nbytes: int) -> Engine:
        memory = self._memory
        size = size_engine(
            self._options, nbytes, device=memory.native_kind != 0, pci_address=memory.pci_address
        )
        keep = bool(self._options.keep_pinned)
        return Engine(size, memory.native_kind, memory.native_index, keep=keep)

    def _engine_for(self, row: int, nbytes: int) -> tuple[Engine, int]:
        """The engine, made for the largest tensor at the first call, and its index of the tensor's file."""
        shard = int(self._checkpoint.shard_of[row])
        with self._lock:
            self._check_open()
            if self._engine is None:
                largest = int(self._checkpoint.sizes.max(initial=nbytes))
                self._engine, self._files = self._new_engine(largest), {}
            if shard not in self._files:
                self._files[shard] = self._engine.add_file(self._checkpoint.shards[shard])
            return self._engine, self._files[shard]

    def _drop(self, engine: Engine) -> None:
        with self._lock:
            if self._engine is engine:
                self._engine = None
        engine.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("this file is closed; open it again")


class TensorSlice:
    """A tensor of a file that is read by indexing, as far as it is asked for.

    An index has integers, slices with a positive step, ..., None and at most one list of integers; it raises
    IndexError or ValueError as torch does. The result is contiguous and owned.
    """

    def __init__(self, file: safe_open, row: int) -> None:
        """Made by safe_open.get_slice()."""
        self._file, self._row = file, row

    def get_shape(self) -> list[int]:
        """The shape as written in the file (F4 counts half bytes; an index is of torch's shape)."""
        return list(self._file._checkpoint.shapes[self._row])

    def get_dtype(self) -> str:
        """The dtype as written in the file, such as "BF16"."""
        return dtypes.ALL[int(self._file._checkpoint.dtypes[self._row])].code

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Reads a part."""
        return self._file._slice(self._row, index)
