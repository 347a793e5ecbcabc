"""Which parameters of a model no tensor reached, for engines that start without them and emit garbage.

How it is found out: a few elements of each parameter are *marked* before the model takes its weights and
compared afterwards. A part all of whose marks are still there was not written; marks that are left get their
old values back, so that the model is as it would be without us. Why not another way:

- names that the model reports: some report none, and a fused parameter (gate and up, q, k and v, all
  experts) counts as there once one part of it came;
- ``Parameter._version``: engines write through ``param.data``, which counts for itself;
- wrappers around each parameter's ``weight_loader``: whoever writes without it looks like nobody, and
  engines compare and replace those functions;
- watching every operation: takes longer than the copies where there are a hundred thousand experts, and
  sees nothing of other threads.

Marks cost a few small operations a parameter, whatever its size, and see who wrote as little as the model.
What is marked is a number no checkpoint has: a NaN with a payload of ours, or for integers a pattern that
would have to be in all places of a part. NaN also passes through loaders that look at what was there before.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch

from tensorlift.errors import MismatchError
from tensorlift.format.nearest import nearest
from tensorlift.format.quoting import plural, some_of
from tensorlift.integrations.settings import LOAD_FORMAT

__all__ = ["Coverage", "Optional", "compare_shapes", "report", "watch"]

Optional = Callable[[str, torch.nn.Module, torch.Tensor], bool]
"""(name of the parameter, its module, the parameter) -> whether a checkpoint may lack it."""

_MARKS = 8  # in each part
_SHOWN = 10
_PLAIN = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# NaNs of the floating point types of 2, 4 and 8 bytes, bfloat16 and float16 alike, and of most of one byte.
_PATTERN = {1: 0xFF, 2: 0x7FA5, 4: 0x7FA5_5A27, 8: 0x7FF5_A5A5_5A5A_2727}


class _Marked:
    """Parts of a parameter that have equal shapes: a view whose last dimension has the marks of one part."""

    def __init__(self, label: str, view: torch.Tensor) -> None:
        self.label = label
        """What to add to the parameter's name, with the number of the part put in."""
        self.pattern = _PATTERN[view.element_size()]
        self.view = view.view(_PLAIN[view.element_size()])
        self.saved = self.view.clone()
        self.view.fill_(self.pattern)

    def reached(self) -> torch.Tensor:
        """A bool for each part; what is still marked gets its old value."""
        still = self.view == self.pattern
        self.view.copy_(torch.where(still, self.saved, self.view))
        return ~still.all(-1).reshape(-1)


class Coverage:
    """What of a model was reached while it was watched."""

    def __init__(self, model: torch.nn.Module, optional: Optional) -> None:
        """Marks all parameters but those that ``optional`` takes, and those that have no memory yet."""
        self._model = model
        self._marked: dict[str, tuple[int, list[_Marked]]] = {}
        self.missing: list[str] = []
        """Once it is over: parameters, or parts of them, that nobody wrote."""
        seen: set[tuple[int, int]] = set()
        for prefix, module in model.named_modules():
            for own, parameter in module.named_parameters(recurse=False):
                name = f"{prefix}.{own}" if prefix else own
                data = _memory_of(parameter)
                if data is None or optional(name, module, parameter):
                    continue
                place = (data.data_ptr(), data.numel())
                if place not in seen:  # else it is tied, and known under another name
                    seen.add(place)
                    marks = [_Marked(label, view) for label, view in _parts(own, module, parameter, data)]
                    self._marked[name] = (data.data_ptr(), marks)

    def end(self) -> None:
        """Looks what was written, and takes the marks away."""
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        found: list[tuple[str, _Marked, torch.Tensor]] = []
        for name, (address, marks) in self._marked.items():
            data = _memory_of(parameters.get(name))
            # Another memory than before: the model has put something in the parameter's place.
            if data is not None and data.data_ptr() == address:
                found += [(name, mark, mark.reached()) for mark in marks]
        self._marked.clear()
        lacking: dict[str, list[str]] = {}
        whole = {name for name, _, _ in found}
        for (name, mark, _), flags in zip(found, _fetched([flags for _, _, flags in found]), strict=True):
            lacking.setdefault(name, [])
            lacking[name] += [mark.label.format(k) for k, flag in enumerate(flags) if not flag]
            if any(flags):
                whole.discard(name)
        for name, labels in lacking.items():
            self.missing += [name] if name in whole else [name + label for label in labels]


def _memory_of(parameter: Any) -> torch.Tensor | None:
    """A parameter's plain data; None where there is nothing to mark."""
    if not isinstance(parameter, torch.nn.Parameter) or torch.nn.parameter.is_lazy(parameter):
        return None
    data = parameter.data
    size = data.element_size()
    strange = data.is_meta or data.layout is not torch.strided or data.is_complex()
    if strange or not data.numel() or data.dtype is torch.bool or size not in _PLAIN:
        return None
    # A pattern of one byte is no proof until it stands in several places.
    return None if size == 1 and data.numel() < _MARKS else data.as_subclass(torch.Tensor)


def _parts(
    own: str, module: torch.nn.Module, parameter: torch.Tensor, data: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """What of a parameter comes from tensors of its own, as (label, view with the marks last)."""
    if data.dim() == 0:
        yield "", data.reshape(1)
        return
    if _experts(module) == data.shape[0] and (data.dim() > 2 or data.element_size() > 1):
        yield from _parts_of_experts(own, module, parameter, data)
        return
    # Engines of this family say so where several tensors make one parameter, and along which dimension.
    dim = getattr(parameter, "output_dim", 0)
    dim = dim if isinstance(dim, int) and 0 <= dim < data.dim() else 0
    sizes = _shares(getattr(module, "output_partition_sizes", None), data.shape[dim])
    if sizes is None:
        yield "", _line(data, dim)
        return
    begin = 0
    for place, size in enumerate(sizes):
        yield f" (part {place + 1} of {len(sizes)})", _line(data.narrow(dim, begin, size), dim)
        begin += size


def _parts_of_experts(
    own: str, module: torch.nn.Module, parameter: torch.Tensor, data: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """Of what has a row for each expert: weights, biases, and scales, which may be one number each.

    w13 holds two tensors of each expert, one after the other along their outputs: those come last where
    the engine has weights transposed.
    """
    transposed = getattr(parameter, "is_transposed", False) or getattr(module, "use_triton_kernels", False)
    dim = 2 if transposed else 1
    if dim >= data.dim():
        yield " (local expert {})", data.reshape(len(data), -1)[:, :_MARKS]
        return
    halves = 2 if "w13" in own and data.shape[dim] % 2 == 0 else 1
    size = data.shape[dim] // halves
    for half in range(halves):
        which = f", half {half + 1}" if halves > 1 else ""
        yield f" (local expert {{}}{which})", _line(data.narrow(dim, half * size, size), dim, 0)


def _shares(sizes: object, length: int) -> list[int] | None:
    """How ``length`` is divided among the tensors of a fused parameter; None where it is not, or unclear.

    Packed weights and scales of blocks have fewer elements than the layer has outputs, in proportion.
    """
    if not isinstance(sizes, (list, tuple)) or len(sizes) < 2 or not all(sizes):
        return None
    if length == len(sizes):
        return [1] * length  # one scale for each
    total = sum(sizes)
    if any(size * length % total for size in sizes):
        return None
    shares = [size * length // total for size in sizes]
    return shares if all(shares) else None


def _experts(module: torch.nn.Module) -> int | None:
    for attribute in ("local_num_experts", "num_local_experts"):
        if isinstance(count := getattr(module, attribute, None), int):
            return count
    return None


def _line(data: torch.Tensor, dim: int, keep: int | None = None) -> torch.Tensor:
    """A few elements that lie evenly along ``dim``, at the beginning of all others but ``keep``.

    The beginning, for where memory is padded, that comes last.
    """
    step = -(-data.shape[dim] // _MARKS)
    return data[
        tuple(
            slice(None, None, step) if at == dim else slice(None) if at == keep else 0
            for at in range(data.dim())
        )
    ]


def _fetched(flags: list[torch.Tensor]) -> list[list[bool]]:
    """The values of many tensors, with one wait a device and not one for each of them."""
    values: dict[torch.device, Iterator[bool]] = {}
    for device in {tensor.device for tensor in flags}:
        values[device] = iter(torch.cat([t for t in flags if t.device == device]).tolist())
    return [list(islice(values[tensor.device], tensor.numel())) for tensor in flags]


@contextlib.contextmanager
def watch(model: torch.nn.Module, optional: Optional) -> Iterator[Coverage]:
    """Around a model's taking of its weights; ``missing`` is there behind it. Marks go after errors too."""
    coverage = Coverage(model, optional)
    try:
        yield coverage
    finally:
        coverage.end()


def report(
    missing: Sequence[str], delivered: Iterable[str], *, strict: bool, engine: str, log: logging.Logger
) -> None:
    """Ends the start with the names of what is missing, or warns of them."""
    if not missing:
        return
    came = list(dict.fromkeys(delivered))

    def shown(name: str) -> str:
        close = nearest(name.partition(" (")[0], came, 2)
        return f"{name} (tensors with close names: {', '.join(close)})" if close else name

    text = (
        f"load format {LOAD_FORMAT!r}: none of the {plural(len(came), 'tensor')} that were loaded reached "
        f"{plural(len(missing), 'parameter')} of the model: "
        f"{some_of(missing, _SHOWN, shown, '; ')}. {engine} would start "
        "and emit garbage: the checkpoint lacks tensors, or is one of another model"
    )
    if strict:
        raise MismatchError(
            f"{text}. If it is right nevertheless, have this as a warning: "
            "--model-loader-extra-config '{\"strict\": false}'"
        )
    log.warning("%s", text)


def compare_shapes(
    before: Mapping[str, Sequence[int]],
    now: Mapping[str, Sequence[int]],
    *,
    strict: bool,
    engine: str,
    log: logging.Logger,
) -> None:
    """For a reload, before anything is overwritten: it has to bring what the start brought.

    Of equal shapes too: the model would refuse others when its weights from before are gone already. Other
    dtypes it may take. Both are shapes by names of tensors.
    """
    lacking = [name for name in before if name not in now]
    other = [
        f"{name} ({list(now[name])}, not {list(shape)})"
        for name, shape in before.items()
        if name in now and tuple(now[name]) != tuple(shape)
    ]
    wrong = [
        f"{what}: {some_of(names, _SHOWN)}"
        for what, names in (
            (f"lacks {plural(len(lacking), 'tensor')} that it started with", lacking),
            (f"has {plural(len(other), 'tensor')} of another shape than at the start", other),
        )
        if names
    ]
    if not wrong:
        return
    text = f"load format {LOAD_FORMAT!r}: what {engine} reloads {'; it '.join(wrong)}"
    if strict:
        raise MismatchError(f"{text}. Nothing was overwritten; the weights from before are still there")
    log.warning("%s%s", text, ". What it lacks keeps its weights from before" if lacking else "")
