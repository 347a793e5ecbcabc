"""The tensors of the files that an engine has chosen, as the pairs that its models take."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from tensorlift import loading
from tensorlift.errors import CheckpointError, TensorliftError
from tensorlift.format.listing import INDEX_SUFFIX, OTHER_WEIGHTS, SUFFIX, natural_key, parse_index
from tensorlift.format.quoting import clean, some_of
from tensorlift.integrations import devices
from tensorlift.integrations.settings import LOAD_FORMAT, Settings
from tensorlift.progress import Report
from tensorlift.sources.finding import index_text
from tensorlift.stats import LoadStats, human_bytes
from tensorlift.weights import Weights

__all__ = ["Delivery", "check_files", "check_index", "iterate", "other_weights", "rank", "summary", "world"]

_SHOWN = 5


@dataclasses.dataclass
class Delivery:
    """What came, for those who ask afterwards."""

    names: list[str] = dataclasses.field(default_factory=list)
    """Handed out, with their prefix, in order."""
    _open: list[Weights] = dataclasses.field(default_factory=list)

    def failed(self, error: BaseException, log: logging.Logger) -> None:
        """Says at which tensor a model stopped, and tells the other ranks why.

        A generator that is merely dropped could do neither.
        """
        if self.names and not isinstance(error, TensorliftError):
            log.error(
                "load format %s: loading stopped with %s: %s. The model had tensor %r last",
                LOAD_FORMAT,
                type(error).__name__,
                error,
                self.names[-1],
            )
        while self._open:
            self._open.pop().__exit__(type(error), error, error.__traceback__)


def rank() -> int:
    """Of this process in its world; 0 where there is none."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world() -> str | None:
    """The group of all ranks, made for one load; None where this process is the only one."""
    there = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return "world" if there else None


def other_weights(folder: str) -> list[str]:
    """Files of a folder that hold weights in another format, for a message that names them."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    return [os.path.join(folder, name) for name in names if name.lower().endswith(OTHER_WEIGHTS)]


def check_index(folder: str) -> None:
    """For where an engine stumbled over what it read: CheckpointError if an index of the folder is wrong.

    Engines read it as if it were right, and end with a KeyError that names no file.
    """
    # None of a folder here, or what cannot be read: the engine has its own words for it.
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(folder)):
            if name.endswith(INDEX_SUFFIX):
                path = os.path.join(folder, name)
                parse_index(index_text(path), path)


def check_files(files: Sequence[str | os.PathLike[str]]) -> list[str]:
    """The files in the order in which engines read them; CheckpointError where one is no safetensors file.

    By their names alone, and all of them: an engine that falls back to .bin or .pt must not have half a
    checkpoint loaded when that shows.
    """
    paths = [os.fspath(file) for file in files]
    if not paths:
        raise CheckpointError(f"load format {LOAD_FORMAT!r}: the engine has found no files to load")
    others = [clean(path) for path in paths if not path.endswith(SUFFIX)]
    if others:
        raise CheckpointError(
            f"load format {LOAD_FORMAT!r} takes {SUFFIX} files only, and the engine has chosen "
            f"{some_of(others, _SHOWN)}; convert the checkpoint, or leave --load-format out"
        )
    return sorted(paths, key=natural_key)


def iterate(
    files: Sequence[str | os.PathLike[str]],
    settings: Settings,
    *,
    device: torch.device,
    process_group: Any = None,
    needed: Callable[[str], bool] | None = None,
    prefix: str = "",
    delivery: Delivery | None = None,
    opened: Callable[[dict[str, tuple[int, ...]]], object] | None = None,
    bar: Callable[[], AbstractContextManager[Report]] | None = None,
    log: logging.Logger,
) -> Iterator[tuple[str, torch.Tensor]]:
    """(prefix + name, tensor) of all tensors of the files, each of which owns its memory.

    Files are checked by name right here, before the first step of the iteration; their headers at that step.

    device: of ``check_device``; the current one of its kind is taken when the iteration begins.
    process_group: as for ``tensorlift.open``; who it is has to follow from how the engine loads.
    needed: says of a name as it is in the file whether this rank wants it; what it refuses is not read.
    delivery: is told what was handed out.
    opened: is called with the shapes of what will come, by name with the prefix, once headers are read and
        before any tensor is handed out; what it raises ends the load before a parameter is touched.
    bar: draws progress; called on the rank that shows it. The setting ``progress`` overrules it.
    log: one line a rank, at the end, goes there.
    """
    paths = check_files(files)
    told = Delivery() if delivery is None else delivery

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        options = dict(settings.options)
        with contextlib.ExitStack() as ending:
            if bar is not None and settings.resolved().progress is None:
                options["progress"] = ending.enter_context(bar())
            weights = loading.open(
                paths, devices.current_device(device), names=needed, process_group=process_group, **options
            )
            ending.enter_context(weights)
            told._open.append(weights)
            if opened is not None:
                opened({prefix + name: shape for name, shape in weights.shapes.items()})
            for name, tensor in weights:
                told.names.append(prefix + name)
                yield prefix + name, tensor
                del tensor  # what the model does not keep goes before the next one is made
            if weights in told._open:
                told._open.remove(weights)
            stats = weights.stats
        log.info("%s", summary(stats))

    return tensors()


def summary(stats: LoadStats) -> str:
    """One line about a load of this rank; the exact bytes stand first, to be compared with the files'."""
    total = stats.seconds.get("total", 0.0)
    readers = ", ".join(f"{name} {human_bytes(nbytes)}" for name, nbytes in stats.readers.items())
    parts = [
        f"{LOAD_FORMAT}: rank {rank()}: {stats.bytes} bytes ({human_bytes(stats.bytes)}) of {stats.tensors} "
        f"tensors from {stats.files} files in {total:.3f} s ({human_bytes(stats.rate)}/s)",
        f"readers: {readers or 'none'}",
        f"fallbacks: {'; '.join(stats.fallbacks) or 'none'}",
        f"pinned at most {human_bytes(stats.pinned_peak_bytes)}, "
        f"arenas at most {human_bytes(stats.device_peak_bytes)}",
    ]
    if stats.ranks > 1:
        why = f" ({stats.exchange_reason})" if stats.exchange_reason else ""
        received = human_bytes(stats.received_bytes)
        parts.insert(1, f"{stats.ranks} ranks, exchange {stats.exchange}{why}, received {received}")
    return "; ".join(parts)
