"""Filling tensors that exist: in place where that can be, by a converting copy where not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tensorlift.engine.sizing import budget
from tensorlift.errors import MismatchError, TensorNotFoundError
from tensorlift.format.checkpoint import Checkpoint, Names
from tensorlift.format.digests import Expected
from tensorlift.format.quoting import clean, quote
from tensorlift.options import LoadOptions
from tensorlift.plan.arenas import Rules
from tensorlift.progress import Report, reporter
from tensorlift.stats import LoadStats, merged
from tensorlift.tensors import memory as memories
from tensorlift.tensors.destinations import Match, Target, match, tensors_of
from tensorlift.tensors.direct import Direct
from tensorlift.tensors.transfer import Clock, Transfer
from tensorlift.tensors.views import check_expressible, collector_paused

__all__ = ["Filled", "fill"]


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
    checkpoint: Checkpoint,
    rows: npt.NDArray[np.int64],
    names: Names,
    strict: bool,
    options: LoadOptions,
    clock: Clock,
    expected: Expected | None = None,
) -> Filled:
    """Fills the tensors of ``model`` from the selected ``rows``; see loading.load_into."""
    tensors = tensors_of(model)
    changed: list[Target] = []
    copied: list[Transfer] = []
    with contextlib.ExitStack() as stack:
        # Also after a failure, which leaves them half written; when nothing is written any more.
        stack.callback(_bump_versions, changed)
        with clock.phase("plan"), collector_paused():
            # Engines first: they make their rings while names and shapes are compared.
            directs = _engines(tensors.values(), checkpoint, rows, options, clock, expected is not None)
            for direct in directs.values():
                stack.callback(direct.close)
            found = match(tensors, checkpoint, rows.tolist(), _asked(names, list(tensors)))
            if strict:
                _check_names(found, checkpoint)
            used = np.sort(np.array([target.row for target in found.targets], np.int64))
            check_expressible(checkpoint, used)
            targets = _by_device(found.direct)
            for device in directs.keys() - targets.keys():
                directs.pop(device).close()
            for device, direct in directs.items():
                direct.plan(checkpoint, targets[device], expected)
        report = stack.enter_context(reporter(options.progress))
        changed += found.direct
        progress = _Progress(report, int(checkpoint.sizes[used].sum()), [*directs.values()])
        for direct in directs.values():
            direct.start()
        with clock.phase("read"):
            for direct in directs.values():
                direct.wait(progress.tick)
        if found.copied or found.ordered:
            for direct in directs.values():
                direct.close()  # one ring at a time
        held: dict[str, torch.Tensor] = {}
        stack.callback(held.clear)
        ordered = {target.name for target in found.ordered}
        for device, some in _by_device([*found.copied, *found.ordered]).items():
            memory = memories.for_device(device)
            copied.append(_copying(checkpoint, some, memory, options, clock, expected))
            stack.callback(copied[-1].close)
            progress.parts.append(copied[-1])
            _copy_all(copied[-1], some, ordered, held, progress.tick)
        with clock.phase("hand_out"):
            for target in found.ordered:
                _copy(target.tensor, held.pop(target.name))
        progress.finish()
    parts = [direct.stats() for direct in directs.values()] + [transfer.stats() for transfer in copied]
    stats = merged(parts, seconds=dict(clock.seconds), files=len(np.unique(checkpoint.shard_of[used])))
    return Filled(found.missing, found.unexpected, stats)


def _engines(
    tensors: Iterable[torch.Tensor],
    checkpoint: Checkpoint,
    rows: npt.NDArray[np.int64],
    options: LoadOptions,
    clock: Clock,
    digest: bool,
) -> dict[torch.device, Direct]:
    """One for each device that there are tensors on."""
    nbytes = int(checkpoint.sizes[rows].sum())
    return {
        device: Direct(memories.for_device(device), options, nbytes, clock.trace, digest=digest)
        for device in {tensor.device for tensor in tensors}
        if device.type in ("cpu", "cuda")
    }


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
            more = f" and {len(names) - 20} more" if len(names) > 20 else ""
            parts.append(f"{len(names)} {text}: {', '.join(map(quote, names[:20]))}{more}")
    raise MismatchError(
        f"{clean(checkpoint.where)}: checkpoint and model have different names: {'; '.join(parts)}; "
        "pass strict=False to load what fits"
    )


def _devices(targets: list[Target]) -> list[torch.device]:
    return list(dict.fromkeys([target.device for target in targets]))


def _by_device(targets: list[Target]) -> dict[torch.device, list[Target]]:
    devices = _devices(targets)
    if len(devices) == 1:
        return {devices[0]: targets}
    return {device: [target for target in targets if target.device == device] for device in devices}


def _copying(
    checkpoint: Checkpoint,
    targets: list[Target],
    memory: memories.Memory,
    options: LoadOptions,
    clock: Clock,
    expected: Expected | None,
) -> Transfer:
    device = memory.native_kind != 0
    limits = budget(options, device=device, free=memory.free_bytes())
    rows = np.array(sorted(target.row for target in targets), np.int64)
    rules = Rules(limits.arena_size, device, uniform=True)
    return Transfer.of(checkpoint, rows, memory, options, rules, clock, expected)


def _copy_all(
    transfer: Transfer,
    targets: list[Target],
    ordered: set[str],
    held: dict[str, torch.Tensor],
    tick: Callable[[], object] | None,
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
                    _copy(by_name[name], tensor)
        del made, tensor
        transfer.finish(batch)


def _copy(destination: torch.Tensor, source: torch.Tensor) -> None:
    with torch.inference_mode(destination.is_inference()), torch.no_grad():
        destination.copy_(source)


def _bump_versions(targets: list[Target]) -> None:
    """Autograd has to see that the engine changed these in place; inference tensors keep no version."""
    changed = [target.tensor for target in targets if not target.tensor.is_inference()]
    if changed:
        torch.autograd.graph.increment_version(changed)


class _Progress:
    """Sums what several engines have done."""

    def __init__(self, report: Report | None, total: int, parts: list[Direct | Transfer]) -> None:
        self._report, self._total, self.parts = report, total, parts

    @property
    def tick(self) -> Callable[[], object] | None:
        report = self._report
        if report is None:
            return None
        return lambda: report(min(sum(part.bytes_done() for part in self.parts), self._total), self._total)

    def finish(self) -> None:
        if self._report is not None:
            self._report(self._total, self._total)
