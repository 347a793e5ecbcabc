"""load(), open(), load_into(): the steps of a load, readable from top to bottom.

    1 find       sources.find          a path, a list or a Hub id becomes an ordered list of files
    2 parse      sources.read_headers  each header is read and checked in full
    3 select     Checkpoint.select     what is not wanted is never read
    4 lay out    plan/arenas           wanted tensors are grouped into arenas (load_into has destinations)
    5 plan       plan/pieces           arenas and runs become pieces
    6 execute    engine/               the native engine reads pieces, Python waits for tickets
    7 hand out   tensors/views         tensors that own their bytes

Every tensor handed out is owned: it stays right for as long as somebody holds it, and has a storage of
exactly its own bytes. It holds its arena back, which is at most `arena_size` or itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch

from tensorlift import sources
from tensorlift.engine.sizing import Budget, budget
from tensorlift.engine.trace import traced
from tensorlift.errors import OptionError, RequestError
from tensorlift.format.checkpoint import Checkpoint, Names
from tensorlift.format.quoting import plural, quote
from tensorlift.options import LoadOptions
from tensorlift.plan.arenas import Rules
from tensorlift.progress import Report, reporter
from tensorlift.stats import LoadStats
from tensorlift.tensors import devices
from tensorlift.tensors import memory as memories
from tensorlift.tensors.filling import Filled, fill
from tensorlift.tensors.transfer import Clock, Transfer

__all__ = ["LoadedState", "Weights", "load", "load_into", "open"]

Verify: TypeAlias = "bool | str | os.PathLike[str] | Mapping[str, str] | None"


class LoadedState(dict[str, torch.Tensor]):
    """What load() returns: a dict of tensors that also has ``stats``.

    Copies and pickles are ordinary dicts: ``torch.save`` writes an OrderedDict, as it does for a module's
    state.
    """

    stats: LoadStats

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """An OrderedDict: ``torch.load(weights_only=True)`` takes that, a class of ours it would not."""
        return OrderedDict, (), None, None, iter(self.items())


def load(
    path: Any,
    device: str | int | torch.device = "cpu",
    *,
    names: Names = None,
    verify: Verify = None,
    **options: object,
) -> LoadedState:
    """Loads a checkpoint: a dict of tensors by name, in file order, every one owned.

    path: a file, a list of files, a folder, or a Hub id (from the local cache, else downloaded).
    device: "cpu", "cuda" (the current one), "cuda:1" or a torch.device.
    names: only these tensors: an exact name, a glob, a compiled regular expression (of the whole name),
        a predicate, or a list of such.
    verify: compare each tensor with its digest: True takes what ``tensorlift digest`` wrote beside the files,
        a path names it (each loaded tensor has to be in it, with its dtype and shape); a mapping from names
        to 32 hexadecimal digits checks those tensors alone. None: ``TENSORLIFT_VERIFY``, else nothing.
    options: the fields of LoadOptions; an explicit value wins over ``TENSORLIFT_<NAME>``.

    The dict's ``stats`` is a LoadStats. On a device, the bytes are there for work on the current stream.
    Raises errors of the tree below TensorliftError (TypeError for a path that is none); nothing is left
    behind then.
    """
    begin = time.perf_counter()
    settings = LoadOptions.resolve(verify=verify, **options)
    memory = memories.for_device(device)
    with traced(settings.trace) as trace:
        clock = Clock(trace)
        with clock.phase("headers"):
            found = sources.find(path)
        # What names and digests mean shows only when all headers are there.
        if names is None and settings.verify in (None, False) and len(found.files) > 1 and memory.native_kind:
            state = _load_in_parts(found, memory, settings, clock)
        else:
            with clock.phase("headers"):
                checkpoint = sources.read_headers(found)
            state = load_tensors(checkpoint, memory, settings, clock, names)
    state.stats = _timed(state.stats, time.perf_counter() - begin)
    return state


def load_tensors(
    checkpoint: Checkpoint,
    memory: memories.Memory,
    settings: LoadOptions,
    clock: Clock,
    names: Names = None,
) -> LoadedState:
    """load() of a checkpoint whose headers are read; its ``stats`` lack the total."""
    rows = checkpoint.select(names)
    expected = sources.expected_digests(checkpoint, rows, settings, whole=names is None)
    rules = _rules(_budget(settings, memory), memory, uniform=False)
    return _collected(Transfer.of(checkpoint, rows, memory, settings, rules, clock, expected), (), settings)


def _load_in_parts(
    found: sources.Found, memory: memories.Memory, settings: LoadOptions, clock: Clock
) -> LoadedState:
    """load() that reads tensors while other files' headers are still read and laid out."""
    rules = _rules(_budget(settings, memory), memory, uniform=False)
    transfer = Transfer(memory, settings, rules, sources.file_bytes(found), clock)
    with contextlib.closing(sources.read_headers_in_parts(found)) as parts:
        return _collected(transfer, _timed_parts(parts, clock), settings)


def _collected(transfer: Transfer, more: Iterable[Checkpoint], settings: LoadOptions) -> LoadedState:
    """All tensors of a transfer, and of the checkpoints that are still to be added to it."""
    state = LoadedState()
    try:
        with reporter(settings.progress) as report:
            # The whole plan at once: the engine never waits for Python, and tensors are made while it reads.
            transfer.submit(transfer.batch_count)
            for checkpoint in more:
                transfer.submit(transfer.add(checkpoint, checkpoint.select()))
            for batch in range(transfer.batch_count):
                state.update(zip(transfer.names(batch), transfer.tensors(batch), strict=True))
            if transfer.batch_count:
                transfer.wait(transfer.batch_count - 1, _tick(report, transfer))
            _finished(report, transfer.nbytes)
    except BaseException:
        # Closed before its tensors go: the engine may still be writing into them.
        transfer.close()
        state.clear()
        raise
    transfer.close()
    state.stats = transfer.stats()
    return state


def _timed_parts(parts: Iterator[Checkpoint], clock: Clock) -> Iterator[Checkpoint]:
    """The same; the time that each takes to come is that of the headers."""
    while True:
        with clock.phase("headers"):
            part = next(parts, None)
        if part is None:
            return
        yield part


def open(
    path: Any,
    device: str | int | torch.device = "cpu",
    *,
    names: Names = None,
    verify: Verify = None,
    **options: object,
) -> Weights:
    """Opens a checkpoint for one pass over its tensors; arguments and errors as for load().

    Headers are read and checked here; data is read from the first step of the iteration on, ``buffer_size``
    bytes ahead of the consumer. With ``verify`` a tensor is right when it is handed out: DigestError comes
    before those that were read together with a wrong one.
    """
    settings = LoadOptions.resolve(verify=verify, **options)
    return Weights(path, memories.for_device(device), names, settings)


class Weights:
    """An opened checkpoint: iterate once over (name, tensor) in file order; a context manager, though it need
    not be.

    Tensors are owned by whoever holds them. However the iteration ends, reads under way are stopped and
    waited for, and memory that was read ahead goes back; an exception of the consumer comes out as it is.
    """

    def __init__(self, path: Any, memory: memories.Memory, names: Names, settings: LoadOptions) -> None:
        """Made by open()."""
        begin = time.perf_counter()
        self._memory, self._settings = memory, settings
        with contextlib.ExitStack() as ending:
            self._clock = Clock(ending.enter_context(traced(settings.trace)))
            self._checkpoint = _headers(path, self._clock)
            self._rows = self._checkpoint.select(names)
            self._expected = sources.expected_digests(self._checkpoint, self._rows, settings, names is None)
            # From here on the end of the pass, or close(), ends the trace.
            self._ending = ending.pop_all()
        self._pass: _Pass | None = None
        self._opening = time.perf_counter() - begin
        self._generator: Callable[[], Generator[tuple[str, torch.Tensor], None, None] | None] = lambda: None
        self._closed = False

    def __repr__(self) -> str:
        """What, where to, and whether it can be iterated over still."""
        state = "closed" if self._closed else "open" if self._pass is None else "iterated over"
        count = plural(len(self._rows), "tensor")
        return f"<Weights of {quote(self._checkpoint.where)}: {count} for {self.device}, {state}>"

    def __enter__(self) -> Weights:
        """Itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Closes."""
        self.close()

    @property
    def device(self) -> torch.device:
        """Where the tensors come to."""
        return self._memory.device

    @property
    def metadata(self) -> dict[str, str] | None:
        """The free-form metadata of the checkpoint; None where there is none."""
        return self._checkpoint.metadata

    @property
    def stats(self) -> LoadStats:
        """What was done so far; time that the consumer took between tensors is not in it."""
        if self._pass is None:
            return LoadStats(seconds={**self._clock.seconds, "total": self._opening})
        return _timed(self._pass.transfer.stats(), self._opening + self._pass.seconds)

    @property
    def names(self) -> list[str]:
        """Names of the selected tensors, in file order."""
        return [self._checkpoint.names[row] for row in self._rows.tolist()]

    def __len__(self) -> int:
        """Number of selected tensors."""
        return len(self._rows)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Starts reading; raises RequestError the second time and after close()."""
        if self._closed:
            raise RequestError("these weights are closed; open the checkpoint again")
        if self._pass is not None:
            raise RequestError(
                "these weights were iterated over already; open the checkpoint again for another pass"
            )
        devices.check_kind(self._memory.device)
        begin = time.perf_counter()
        settings, memory = self._settings, self._memory
        limits = _budget(settings, memory)
        rules = _rules(limits, memory, uniform=True)
        transfer = Transfer.of(
            self._checkpoint, self._rows, memory, settings, rules, self._clock, self._expected
        )
        self._pass = _Pass(transfer, limits.buffer_size, self._ending)
        self._pass.seconds = time.perf_counter() - begin
        generator = self._pass.run(settings)
        # Weakly, and the generator does not know this object: a consumer that drops it ends the pass at once.
        self._generator = weakref.ref(generator)
        return generator

    def close(self) -> None:
        """Ends the pass: stops reads and waits for them, gives memory back. Tensors handed out stay."""
        self._closed = True
        if self._pass is not None:
            # Another thread may be inside the generator; closing the transfer makes its wait fail.
            self._pass.transfer.close()
        generator = self._generator()
        # That of another thread ends by its own next step, which fails now: closed from here it would look as
        # if it had come to its end, or refuse the other thread's step.
        if generator is not None and self._pass is not None and self._pass.thread == threading.get_ident():
            # It runs already where this is called below it, from a signal's handler or to tell of progress.
            with contextlib.suppress(ValueError):
                generator.close()
        self._ending.close()


class _Pass:
    """One pass over a transfer, reading ahead."""

    def __init__(self, transfer: Transfer, buffer_size: int, ending: contextlib.ExitStack) -> None:
        self.transfer, self._buffer_size, self._ending = transfer, buffer_size, ending
        self.seconds = 0.0
        self.thread = 0
        """Of the consumer's last step."""

    def run(self, settings: LoadOptions) -> Generator[tuple[str, torch.Tensor], None, None]:
        transfer = self.transfer
        begin = time.perf_counter()
        self.thread = threading.get_ident()
        try:
            with self._ending, reporter(settings.progress) as report:
                # Before the trace ends: it wants what the engine has kept.
                self._ending.callback(transfer.close)
                for batch in range(transfer.batch_count):
                    self._read_ahead(batch)
                    transfer.wait(batch, _tick(report, transfer))
                    # Popped one by one: a tensor that the consumer drops is gone while the pass goes on.
                    tensors = transfer.tensors(batch)
                    tensors.reverse()
                    for name in transfer.names(batch):
                        self.seconds += time.perf_counter() - begin
                        yield name, tensors.pop()
                        begin = time.perf_counter()
                        self.thread = threading.get_ident()
                    transfer.finish(batch)
                _finished(report, transfer.nbytes)
        finally:
            self.seconds += time.perf_counter() - begin

    def _read_ahead(self, batch: int) -> None:
        """Submits as many batches as the bound allows, in one go; the one that is due in any case."""
        transfer = self.transfer
        count, ahead = 0, transfer.held_bytes
        while (due := transfer.submitted + count) < transfer.batch_count:
            cost = transfer.cost(due)
            if due > batch and ahead + cost > self._buffer_size:
                break
            ahead += cost
            count += 1
        if count:
            transfer.submit(count)


def load_into(
    model: torch.nn.Module | dict[str, torch.Tensor],
    path: Any,
    *,
    strict: bool = True,
    names: Names = None,
    verify: Verify = None,
    **options: object,
) -> Filled:
    """Reads a checkpoint straight into the parameters and buffers of a module, or into a dict of tensors.

    A destination that is contiguous, has the checkpoint's dtype and overlaps no other is written in place,
    wherever it is (CPU and CUDA devices may be mixed); others get a copy that converts. Tied parameters are
    filled once. All headers are checked, and all names and shapes compared, before the first byte is written.

    strict: raise MismatchError for names of the model that the checkpoint lacks, or the other way round
        (ties satisfy it). With ``names``, only names that it selects count on either side.
    verify: as for load(); the bytes of the file are what is compared, before a dtype is converted. What is
        filled in place is in the parameters already when DigestError comes.

    Returns ``missing_keys``, ``unexpected_keys`` and ``stats``. After an error that comes while bytes are
    read, the contents of the destinations are undefined. Autograd sees the change as an in-place one. Raises
    as load() does, and RequestError for a meta tensor, MismatchError listing every shape that differs.
    """
    begin = time.perf_counter()
    if "device" in options:
        raise OptionError("load_into takes no device: bytes go to where the model is; move the model first")
    settings = LoadOptions.resolve(verify=verify, **options)
    if names is not None and not (isinstance(names, (str, re.Pattern)) or callable(names)):
        names = list(names)
    with traced(settings.trace) as trace:
        clock = Clock(trace)
        checkpoint = _headers(path, clock)
        rows = checkpoint.select(names)
        expected = sources.expected_digests(checkpoint, rows, settings, whole=names is None)
        filled = fill(model, checkpoint, rows, names, strict, settings, clock, expected)
    return Filled(
        filled.missing_keys, filled.unexpected_keys, _timed(filled.stats, time.perf_counter() - begin)
    )


def _headers(path: Any, clock: Clock) -> Checkpoint:
    with clock.phase("headers"):
        return sources.read_headers(sources.find(path))


def _budget(settings: LoadOptions, memory: memories.Memory) -> Budget:
    return budget(settings, device=memory.native_kind != 0, free=memory.free_bytes())


def _rules(limits: Budget, memory: memories.Memory, *, uniform: bool) -> Rules:
    return Rules(limits.arena_size, device=memory.native_kind != 0, uniform=uniform)


def _tick(report: Report | None, transfer: Transfer) -> Callable[[], object] | None:
    if report is None:
        return None
    total = transfer.nbytes
    return lambda: report(min(transfer.bytes_done(), total), total)


def _finished(report: Report | None, total: int) -> None:
    if report is not None:
        report(total, total)


def _timed(stats: LoadStats, total: float) -> LoadStats:
    return dataclasses.replace(stats, seconds={**stats.seconds, "total": total})
