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
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch

from tensorlift import sources
from tensorlift.distributed import Ranks, join
from tensorlift.engine.trace import traced
from tensorlift.errors import OptionError
from tensorlift.forking.remote import check_options
from tensorlift.format.checkpoint import Checkpoint, Names, filters_of
from tensorlift.options import LoadOptions, parse_switch
from tensorlift.plan.parts import Asked, Slices
from tensorlift.progress import finished, reporter, ticker
from tensorlift.stats import LoadStats, timed
from tensorlift.tensors import memory as memories
from tensorlift.tensors.filling import Filled, fill
from tensorlift.tensors.moving import Batches
from tensorlift.tensors.transfer import Clock, Transfer, budget_of, rules_of
from tensorlift.weights import Weights, find, movers_of, read_headers

__all__ = ["LoadedState", "load", "load_into", "load_tensors", "open"]

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
    slices: Slices = None,
    process_group: Any = None,
    **options: object,
) -> LoadedState:
    """Loads a checkpoint: a dict of tensors by name, in file order, every one owned.

    path: a file, a list of files, a folder, a Hub id (from the local cache, else downloaded), or a seed as
        "tensorlift://host:port/key" (docs/tensors.md).
    device: "cpu", "cuda" (the current one), "cuda:1" or a torch.device.
    names: only these tensors: an exact name, a glob, a compiled regular expression (of the whole name),
        a predicate, or a list of such.
    verify: compare each tensor with its digest: True takes what ``tensorlift digest`` wrote beside the files,
        a path names it (each loaded tensor has to be in it, with its dtype and shape); a mapping from names
        to 32 hexadecimal digits checks those tensors alone. None: ``TENSORLIFT_VERIFY``, else nothing.
    slices: take only a part of some tensors: a mapping from names to (dim, start, stop), or a function of
        name and shape that returns such, or None for all of it. What comes is ``tensor.narrow(dim, start,
        stop - start)``, owned and contiguous, and no more is read than the rows that it touches. Shapes are
        those in the file (F4 counts half bytes); dim counts from 0, 0 <= start <= stop <= shape[dim]. Names
        that ``names`` leaves out are passed over. Parts have no digests: ``verify`` compares whole tensors
        alone (``stats.verified`` counts them), and a mapping of digests must not name a part.
    process_group: the ranks that load this together: "world" (all, through a group of torch.distributed that
        is made for this load), or a ProcessGroup that this rank is in. Each of them calls this, with the same
        files; each gets what it asked for, or all raise (docs/ranks.md). None: this process alone.
    options: the fields of LoadOptions; an explicit value wins over ``TENSORLIFT_<NAME>``.

    The dict's ``stats`` is a LoadStats. On a device, the bytes are there for work on the current stream.
    Raises errors of the tree below TensorliftError (TypeError for a path that is none); nothing is left
    behind then.
    """
    begin = time.perf_counter()
    check_options(path, verify=verify, slices=slices, process_group=process_group, **options)
    ranks, settings = join(process_group, lambda: LoadOptions.resolve(verify=verify, **options))
    with ranks or contextlib.nullcontext():
        memory = memories.for_device(device, private=settings.own != "tensor")
        with traced(settings.trace) as trace:
            clock = Clock(trace)
            with clock.phase("headers"):
                found = find(path)
            # What names, slices and digests mean shows only when all headers are there.
            plain = names is None and slices is None and settings.verify in (None, False) and ranks is None
            if plain and isinstance(found, sources.Found) and len(found.files) > 1 and memory.native_kind:
                state = _load_in_parts(found, memory, settings, clock)
            else:
                checkpoint = read_headers(found, clock, ranks)
                state = load_tensors(checkpoint, memory, settings, clock, names, slices, ranks)
        if ranks is not None:
            ranks.complete = True
    stats = state.stats if ranks is None else ranks.told(state.stats)
    state.stats = timed(stats, time.perf_counter() - begin)
    return state


def load_tensors(
    checkpoint: Checkpoint,
    memory: memories.Memory,
    settings: LoadOptions,
    clock: Clock,
    names: Names = None,
    slices: Slices = None,
    ranks: Ranks | None = None,
) -> LoadedState:
    """load() of a checkpoint whose headers are read; its ``stats`` lack the total."""
    checkpoint, rows, expected = sources.asked_of(checkpoint, names, slices, settings)
    rules = rules_of(budget_of(settings, memory), memory, uniform=False)
    exchange = None if ranks is None else ranks.exchange(checkpoint, rows, memory, settings, rules.capacity)
    movers = movers_of(checkpoint)
    transfer = movers.batches(checkpoint, rows, memory, settings, rules, clock, expected, exchange)
    return _collected(transfer, (), settings)


def _load_in_parts(
    found: sources.Found, memory: memories.Memory, settings: LoadOptions, clock: Clock
) -> LoadedState:
    """load() that reads tensors while other files' headers are still read and laid out."""
    rules = rules_of(budget_of(settings, memory), memory, uniform=False)
    transfer = Transfer(memory, settings, rules, sources.file_bytes(found), clock)
    with contextlib.closing(sources.read_headers_in_parts(found)) as parts:
        added = (transfer.add(part, part.select()) for part in _timed_parts(parts, clock))
        return _collected(transfer, added, settings)


def _collected(transfer: Batches, more: Iterable[int], settings: LoadOptions) -> LoadedState:
    """All tensors of a transfer; ``more``: batches that are added to it while it is iterated over."""
    state = LoadedState()
    try:
        with reporter(settings.progress) as report:
            # The whole plan at once: the engine never waits for Python, and tensors are made while it reads.
            transfer.submit(transfer.batch_count)
            for batches in more:
                transfer.submit(batches)
            for batch in range(transfer.batch_count):
                state.update(zip(transfer.names(batch), transfer.tensors(batch), strict=True))
            if transfer.batch_count:
                transfer.wait(transfer.batch_count - 1, ticker(report, transfer.bytes_done, transfer.nbytes))
            finished(report, transfer.nbytes)
        transfer.close_well()
    except BaseException:
        # Closed before its tensors go: the engine may still be writing into them.
        transfer.close()
        state.clear()
        raise
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
    slices: Slices = None,
    process_group: Any = None,
    **options: object,
) -> Weights:
    """Opens a checkpoint for one pass over its tensors; arguments and errors as for load().

    Headers are read and checked here; data is read from the first step of the iteration on, ``buffer_size``
    bytes ahead of the consumer. With ``verify`` a tensor is right when it is handed out: DigestError comes
    before those that were read together with a wrong one.

    With a process group the pass ends on all ranks together: whoever has all its tensors waits for the
    others, and a rank that stops early has all the others raise PeerError.
    """
    check_options(path, verify=verify, slices=slices, process_group=process_group, **options)
    ranks, settings = join(process_group, lambda: LoadOptions.resolve(verify=verify, **options))
    with contextlib.ExitStack() as ending:
        if ranks is not None:
            ending.enter_context(ranks)
        memory = memories.for_device(device, private=settings.own != "tensor")
        weights = Weights(path, memory, names, settings, slices, ranks)
        ending.pop_all()
    return weights


def load_into(
    model: torch.nn.Module | dict[str, torch.Tensor],
    path: Any,
    *,
    strict: bool = True,
    names: Names = None,
    verify: Verify = None,
    slices: Slices = None,
    process_group: Any = None,
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
    slices: as for load(); a destination has to have the shape of the slice.
    process_group: as for load(). What comes from other ranks is gathered beside the parameters, and copied.

    Returns ``missing_keys``, ``unexpected_keys`` and ``stats``. After an error that comes while bytes are
    read, the contents of the destinations are undefined. Autograd sees the change as an in-place one. Raises
    as load() does, and RequestError for a meta tensor, MismatchError listing every shape that differs.
    """
    begin = time.perf_counter()

    def resolve() -> LoadOptions:
        if "device" in options:
            raise OptionError(
                "load_into takes no device: bytes go to where the model is; move the model first"
            )
        parse_switch(strict, "strict")
        return LoadOptions.resolve(verify=verify, **options)

    check_options(path, verify=verify, slices=slices, process_group=process_group, **options)
    ranks, settings = join(process_group, resolve)
    with ranks or contextlib.nullcontext():
        names = None if names is None else filters_of(names)
        with traced(settings.trace) as trace:
            clock = Clock(trace)
            with clock.phase("headers"):
                found = find(path)

            def ask(meanwhile: Callable[[], object] | None) -> Asked:
                checkpoint = read_headers(found, clock, ranks, meanwhile)
                return sources.asked_of(checkpoint, names, slices, settings)

            everything = names is None and slices is None and ranks is None
            files = found if everything and isinstance(found, sources.Found) else None
            nbytes = None if files is None else sources.file_bytes(files)
            exchange = None if ranks is None else ranks.exchange
            filled = fill(model, ask, names, strict, settings, clock, nbytes, exchange, movers_of(found))
        if ranks is not None:
            ranks.complete = True
    stats = filled.stats if ranks is None else ranks.told(filled.stats)
    return dataclasses.replace(filled, stats=timed(stats, time.perf_counter() - begin))
