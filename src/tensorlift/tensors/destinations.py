"""Where `load_into` writes: the tensors of a model or a dict, which of them take bytes as they are, and which share memory.

Rules
    - Names that are one and the same tensor (tied parameters) are filled once: the last name in the model's order that the
      checkpoint has wins, as in `load_state_dict`. The other names are satisfied by it.
    - A destination that is dense, has the checkpoint's dtype and overlaps no other is written in place.
    - The others get a copy: of another dtype, not contiguous, of a subclass of Tensor; destinations that overlap in part
      are copied last, in the model's order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from tensorlift.errors import DeviceError, MismatchError, RequestError
from tensorlift.format import dtypes
from tensorlift.format.checkpoint import Checkpoint
from tensorlift.plan.extents import Extents, overlapping
from tensorlift.tensors.devices import check_kind
from tensorlift.tensors.views import torch_dtype, torch_shape

__all__ = ["Match", "Target", "match", "tensors_of"]

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """One destination, and the checkpoint's row that fills it."""

    name: str
    tensor: torch.Tensor
    row: int


@dataclass(frozen=True, slots=True)
class Match:
    """What a load does to its destinations. ``ordered`` are copied last, in this order."""

    direct: list[Target] = field(default_factory=list)
    copied: list[Target] = field(default_factory=list)
    ordered: list[Target] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)

    @property
    def targets(self) -> list[Target]:
        """All, each destination once."""
        return [*self.direct, *self.copied, *self.ordered]


def tensors_of(model: object) -> dict[str, torch.Tensor]:
    """Destinations by name, in order: parameters and persistent buffers of a module, or the tensors of a mapping.

    What a module's state has besides tensors (extra state) is left out. Raises RequestError for anything else.
    """
    if isinstance(model, torch.nn.Module):
        state = model.state_dict(keep_vars=True)
        return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    if not isinstance(model, Mapping):
        raise RequestError(f"load_into fills a torch.nn.Module or a dict of tensors, not a {type(model).__name__}")
    for name, value in model.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise RequestError(
                f"load_into fills a dict of names and tensors; under {name!r} there is a {type(value).__name__}"
            )
    return dict(model)


def match(
    tensors: Mapping[str, torch.Tensor],
    checkpoint: Checkpoint,
    rows: Iterable[int],
    asked: Callable[[str], bool],
) -> Match:
    """Brings destinations and the selected rows together; touches no memory.

    ``asked`` says whether a name of the model is meant at all. Raises RequestError for a destination without memory,
    MismatchError that lists every shape that differs, DeviceError.
    """
    row_of = {checkpoint.names[row]: row for row in rows}
    ties = _Ties()
    found: list[Target] = []
    for name, tensor in tensors.items():
        row = row_of.get(name)
        if row is not None:
            _check_usable(name, tensor)
            found.append(Target(name, tensor, row))
            ties.add(name, tensor)
    _check_shapes(found, checkpoint)
    result = Match(
        missing=[
            name
            for name, tensor in tensors.items()
            if name not in row_of and asked(name) and not ties.filled(tensor)
        ],
        unexpected=[name for name in row_of if name not in tensors],
    )
    winners = [target for target in found if ties.wins(target)]
    for target, crosses in zip(winners, _crossing(winners), strict=True):
        dtype = torch_dtype(dtypes.ALL[int(checkpoint.dtypes[target.row])])
        if crosses:
            result.ordered.append(target)
        elif _is_plain(target.tensor) and target.tensor.dtype is dtype and target.tensor.is_contiguous():
            result.direct.append(target)
        else:
            result.copied.append(target)
    return result


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor is nothing but strided memory."""
    return (
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


class _Ties:
    """Names that are one tensor: same memory, shape, strides, dtype."""

    def __init__(self) -> None:
        self._winner: dict[object, str] = {}

    @staticmethod
    def _key(tensor: torch.Tensor) -> object:
        if not _is_plain(tensor) or tensor.is_meta or tensor.numel() == 0:
            return id(tensor)
        return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self._winner[self._key(tensor)] = name

    def wins(self, target: Target) -> bool:
        return self._winner[self._key(target.tensor)] == target.name

    def filled(self, tensor: torch.Tensor) -> bool:
        lazy = isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin)
        return not lazy and self._key(tensor) in self._winner


def _crossing(targets: list[Target]) -> list[bool]:
    """For each destination, whether it shares bytes with another one of the same device."""
    crosses = [False] * len(targets)
    places: dict[torch.device, list[int]] = {}
    for at, target in enumerate(targets):
        if _is_plain(target.tensor):
            places.setdefault(target.tensor.device, []).append(at)
    for positions in places.values():
        spans = [_span(targets[at].tensor) for at in positions]
        starts, stops = (np.array(column, np.int64) for column in zip(*spans, strict=True))
        for at, found in zip(positions, overlapping(Extents(starts, stops)).tolist(), strict=True):
            crosses[at] = found
    return crosses


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte of a strided tensor, and the one after its last."""
    begin = tensor.data_ptr()
    if tensor.numel() == 0:
        return begin, begin
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (reach + 1) * tensor.element_size()


def _check_usable(name: str, tensor: torch.Tensor) -> None:
    if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
        raise RequestError(f"{name!r} has no shape yet; run the model once (or give it shapes) before load_into")
    if tensor.is_meta:
        raise RequestError(
            f"{name!r} is on the meta device and has no memory to load into; make it real first with "
            "model.to_empty(device=...), or load with tensorlift.load() and model.load_state_dict(state, assign=True)"
        )
    try:
        check_kind(tensor.device)
    except DeviceError as error:
        raise DeviceError(f"{name!r}: {error}") from None
    if tensor.layout is not torch.strided:
        raise RequestError(f"{name!r} has layout {tensor.layout}; load_into fills strided tensors only")
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise RequestError(
            f"{name!r} is expanded: several of its elements share one place; give load_into its own memory"
        )


def _check_shapes(targets: list[Target], checkpoint: Checkpoint) -> None:
    wrong = []
    for target in targets:
        dtype = dtypes.ALL[int(checkpoint.dtypes[target.row])]
        shape = torch_shape(dtype, checkpoint.shapes[target.row])
        if tuple(target.tensor.shape) != shape:
            path = checkpoint.shards[int(checkpoint.shard_of[target.row])].path
            wrong.append(f"{target.name!r}: {list(shape)} in {path}, {list(target.tensor.shape)} in the model")
    if wrong:
        count = "one shape differs" if len(wrong) == 1 else f"{len(wrong)} shapes differ"
        raise MismatchError(f"{count} between checkpoint and model:\n  " + "\n  ".join(wrong))
