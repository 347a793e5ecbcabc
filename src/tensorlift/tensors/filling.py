"""Filling tensors that exist: in place where that can be, by a converting copy where not."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tensorlift.errors import DtypeError, MismatchError, RequestError, TensorNotFoundError
from tensorlift.format import dtypes
from tensorlift.format.checkpoint import Checkpoint, Names
from tensorlift.format.quoting import clean, quote, some_of
from tensorlift.options import LoadOptions
from tensorlift.plan.parts import Asked
from tensorlift.progress import finished, reporter, ticker
from tensorlift.stats import LoadStats, merged
from tensorlift.tensors import memory as memories
from tensorlift.tensors.destinations import (
    Destinations,
    Match,
    Target,
    check_storage,
    is_versioned,
    match,
    reach,
    tensors_of,
)
from tensorlift.tensors.direct import check_writable
from tensorlift.tensors.exchanging import Exchanging
from tensorlift.tensors.interpreter import collector_paused
from tensorlift.tensors.moving import FILES, Batches, Movers, Straight
from tensorlift.tensors.running import Tick, both
from tensorlift.tensors.transfer import Clock, budget_of, rules_of
from tensorlift.tensors.views import check_expressible, torch_dtype

__all__ = ["ExchangeOf", "Filled", "copy_into", "fill"]

ExchangeOf = Callable[..., Exchanging]
"""See distributed.ranks.Ranks.exchange: what asks the other ranks, and returns what comes from them."""


@dataclass(frozen=True, slots=True)
class Filled:
    """What load_into did; the first two are named as in torch's load_state_dict."""

    missing_keys: list[str]
    """Names of the model that the checkpoint lacks."""
    unexpected_keys: list[str]
    """Names of the checkpoint that the model lacks."""
    stats: LoadStats


def fill(
    model: object,
    ask: Callable[[Callable[[], object] | None], Asked],
    names: Names,
    strict: bool,
    options: LoadOptions,
    clock: Clock,
    nbytes: int | None = None,
    exchange_of: ExchangeOf | None = None,
    movers: Movers = FILES,
) -> Filled:
    """Fills the tensors of ``model`` from what ``ask()`` says, which reads headers and calls what it is given
    meanwhile; see loading.load_into.

    ``nbytes``: of all that will be asked for, where that is known before: engines make their rings, and
    destinations are looked at, while headers are read. ``exchange_of``: what asks the load's other ranks.
    ``movers``: what brings the bytes.
    """
    given = Destinations(tensors_of(model))
    with contextlib.ExitStack() as stack:
        directs: dict[torch.device, Straight] = {}
        if nbytes is not None:
            with clock.phase("plan"):
                _make_engines(movers, directs, given.devices, nbytes, options, clock, stack)
        asked = ask(None if nbytes is None else lambda: given.columns)
        checkpoint, rows, _ = asked
        with clock.phase("plan"), collector_paused():
            found = match(given, checkpoint, rows.tolist(), _asked(names, list(given.by_name)))
            if strict:
                _check_names(found, checkpoint)
            used = np.sort(np.array([target.row for target in found.targets], np.int64))
            check_expressible(checkpoint, used)
            total = int(checkpoint.sizes[used].sum())
        others = None if exchange_of is None else _other_ranks(exchange_of, found, checkpoint, used, options)
        together = others if others is not None and others.rows.any() else None
        with clock.phase("plan"), collector_paused():
            _check_others(found, checkpoint)
            targets = _by_device(found.direct)
            if nbytes is None:
                ranks = 1 if others is None else others.ranks_per_host
                _make_engines(movers, directs, targets, total, options, clock, stack, ranks)
            _plan(directs, targets, asked)
        report = stack.enter_context(reporter(options.progress))
        parts: list[Straight | Batches] = [*directs.values()]
        tick = both(
            None if others is None else others.check,
            ticker(report, lambda: sum(part.bytes_done() for part in parts), total),
        )
        _read_in_place(directs.values(), found, clock, tick)
        make = functools.partial(_copying, movers, asked, options, clock, together)
        _copy_others(found, make, clock, stack, parts, tick)
        finished(report, total)
    stats = merged(
        [part.stats() for part in parts],
        seconds=dict(clock.seconds),
        files=len(np.unique(checkpoint.shard_of[used])),
    )
    return Filled(found.missing, found.unexpected, stats)


def _plan(
    directs: dict[torch.device, Straight], targets: Mapping[torch.device, list[Target]], asked: Asked
) -> None:
    for device in directs.keys() - targets.keys():
        directs.pop(device).close()
    for device, direct in directs.items():
        direct.plan(asked.checkpoint, targets[device], asked.expected)


def _read_in_place(directs: Iterable[Straight], found: Match, clock: Clock, tick: Tick | None) -> None:
    with clock.phase("submit"):
        try:
            for direct in directs:
                direct.start()
        finally:
            _bump_versions(found.direct)
    with clock.phase("read"):
        for direct in directs:
            direct.wait(tick)
    for direct in directs:
        direct.close_well()  # one ring at a time


def _other_ranks(
    exchange_of: ExchangeOf,
    found: Match,
    checkpoint: Checkpoint,
    used: npt.NDArray[np.int64],
    options: LoadOptions,
) -> Exchanging:
    """What comes from other ranks, which is copied: gathers need whole arenas, and parameters are none."""
    devices = _devices(found.targets) or [torch.device("cpu")]
    memory = memories.for_device(devices[0])
    arena_size = budget_of(options, memory).arena_size
    others = exchange_of(checkpoint, used, memory, options, arena_size, several=len(devices) > 1)
    if others.rows.any():
        found.copied[:0] = found.direct
        found.direct.clear()
    return others


def _check_others(found: Match, checkpoint: Checkpoint) -> None:
    """As Direct does for what is written in place: a copy into a read-only map would end the process, and one
    beyond a storage's end damage its memory. And what torch cannot convert is known before a byte is read.
    """
    check_storage((*found.copied, *found.ordered))
    _check_dtypes((*found.copied, *found.ordered), checkpoint)
    others = [
        target for target in (*found.copied, *found.ordered) if target.plain and target.device.type == "cpu"
    ]
    if others:
        addresses = np.array([target.address for target in others], np.uint64)
        check_writable(addresses, np.array([reach(target) for target in others], np.int64), others)


def _check_dtypes(targets: Iterable[Target], checkpoint: Checkpoint) -> None:
    for target in targets:
        dtype = dtypes.ALL[int(checkpoint.dtypes[target.row])]
        ours = torch_dtype(dtype)
        if target.plain and ours is not None and not _is_converted(ours, target.tensor.dtype):
            path = checkpoint.shards[int(checkpoint.shard_of[target.row])].path
            raise DtypeError(
                f"{clean(path)}: tensor {quote(target.name)} has dtype {dtype.code}, which this torch does "
                f"not convert to the model's {target.tensor.dtype} (torch {torch.__version__}); make the "
                "model in the checkpoint's dtype, or leave the tensor out with names="
            )


@functools.cache
def _is_converted(source: torch.dtype, destination: torch.dtype) -> bool:
    """Whether torch copies from one dtype into the other: only trying tells."""
    try:
        torch.empty(1, dtype=destination).copy_(torch.empty(1, dtype=source))
    except (NotImplementedError, RuntimeError):
        return source is destination
    return True


def _make_engines(
    movers: Movers,
    directs: dict[torch.device, Straight],
    devices: Iterable[torch.device],
    nbytes: int,
    options: LoadOptions,
    clock: Clock,
    stack: contextlib.ExitStack,
    ranks: int = 1,
) -> None:
    """One for each device; ``ranks``: how many divide what the host has."""
    digest = options.verify not in (None, False)
    for device in devices:
        if device.type in ("cpu", "cuda"):
            memory = memories.for_device(device)
            directs[device] = movers.straight(
                memory, options, nbytes, clock.trace, digest=digest, ranks=ranks
            )
            stack.callback(directs[device].close)


def _copy_others(
    found: Match,
    make: Callable[[list[Target], memories.Memory], Batches],
    clock: Clock,
    stack: contextlib.ExitStack,
    parts: list[Straight | Batches],
    tick: Tick | None,
) -> None:
    """Fills what does not take bytes as they are; its transfers join ``parts``, and ``stack`` closes them."""
    held: dict[str, torch.Tensor] = {}
    stack.callback(held.clear)
    ordered = {target.name for target in found.ordered}
    for device, some in _by_device([*found.copied, *found.ordered]).items():
        memory = memories.for_device(device)
        transfer = make(some, memory)
        stack.callback(transfer.close)
        parts.append(transfer)
        _copy_all(transfer, some, ordered, held, tick)
        transfer.close_well()
    with clock.phase("hand_out"):
        for target in found.ordered:
            copy_into(target.tensor, held.pop(target.name), target.name)


def _asked(names: Names, known: list[str]) -> Callable[[str], bool]:
    """Whether a filter means a name of the model."""
    if names is None:
        return lambda name: True
    empty = np.zeros(0, np.int64)
    table = Checkpoint(
        (), known, empty.astype(np.int32), empty.astype(np.uint8), empty, empty, [], "the model"
    )
    meant: set[str] = set()
    for one in names if isinstance(names, list) else [names]:
        # What matches nothing in the model was found in the checkpoint: it will be unexpected there.
        with contextlib.suppress(TensorNotFoundError):
            meant.update(known[row] for row in table.select(one).tolist())
    return meant.__contains__


def _check_names(found: Match, checkpoint: Checkpoint) -> None:
    if not found.missing and not found.unexpected:
        return
    parts = []
    for names, text in ((found.missing, "not in the checkpoint"), (found.unexpected, "not in the model")):
        if names:
            parts.append(f"{len(names)} {text}: {some_of(names, 20, quote)}")
    raise MismatchError(
        f"{clean(checkpoint.where)}: checkpoint and model have different names: {'; '.join(parts)}; "
        "pass strict=False to load what fits"
    )


def _devices(targets: Iterable[Target]) -> list[torch.device]:
    return list(dict.fromkeys([target.device for target in targets]))


def _by_device(targets: list[Target]) -> dict[torch.device, list[Target]]:
    devices = _devices(targets)
    if len(devices) == 1:
        return {devices[0]: targets}
    return {device: [target for target in targets if target.device == device] for device in devices}


def _copying(
    movers: Movers,
    asked: Asked,
    options: LoadOptions,
    clock: Clock,
    others: Exchanging | None,
    targets: list[Target],
    memory: memories.Memory,
) -> Batches:
    rows = np.array(sorted(target.row for target in targets), np.int64)
    rules = rules_of(budget_of(options, memory), memory, uniform=True)
    checkpoint, _, expected = asked
    return movers.batches(checkpoint, rows, memory, options, rules, clock, expected, others)


def _copy_all(
    transfer: Batches,
    targets: list[Target],
    ordered: set[str],
    held: dict[str, torch.Tensor],
    tick: Tick | None,
) -> None:
    """Copies what comes into its destination, one batch ahead; what must keep an order goes to ``held``."""
    by_name = {target.name: target.tensor for target in targets}
    for batch in range(transfer.batch_count):
        ahead = min(batch + 2, transfer.batch_count)
        if transfer.submitted < ahead:
            transfer.submit(ahead - transfer.submitted)
        transfer.wait(batch, tick)
        made = transfer.tensors(batch)
        with transfer.clock.phase("hand_out"):
            for name, tensor in zip(transfer.names(batch), made, strict=True):
                if name in ordered:
                    held[name] = tensor
                else:
                    copy_into(by_name[name], tensor, name)
        del made, tensor
        transfer.finish(batch)


def copy_into(destination: torch.Tensor, source: torch.Tensor, name: str) -> None:
    """Copies into a parameter, a buffer or an inference tensor, without autograd knowing of it.

    Raises RequestError where torch or a subclass refuses, as one does that has no memory of its own.
    """
    try:
        with torch.inference_mode(destination.is_inference()), torch.no_grad():
            destination.copy_(source)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise RequestError(
            f"{quote(name)} is a {type(destination).__name__} of {destination.dtype} that cannot be copied "
            f"into: {clean(str(error))}; give load_into an ordinary tensor"
        ) from error


def _bump_versions(targets: list[Target]) -> None:
    """Autograd has to see that the engine changes these in place; inference tensors keep no version."""
    changed = [target.tensor for target in targets]
    try:
        torch.autograd.graph.increment_version(changed)
    except RuntimeError:
        torch.autograd.graph.increment_version(list(filter(is_versioned, changed)))
