"""Where `load_into` writes: the tensors of a model or a dict, which of them take bytes as they are, and which
share memory.

Rules
    - Names that are one and the same tensor (tied parameters) are filled once: the last name in the model's
      order that the checkpoint has wins, as in `load_state_dict`. The other names are satisfied by it.
    - A destination that is dense, has the checkpoint's dtype and overlaps no other is written in place.
    - The others get a copy: of another dtype, not contiguous, of a subclass of Tensor; destinations that
      overlap in part are copied last, in the model's order.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from tensorlift.errors import MismatchError, RequestError
from tensorlift.format import dtypes
from tensorlift.format.checkpoint import Checkpoint
from tensorlift.format.quoting import clean, shown
from tensorlift.plan.extents import Extents, overlapping
from tensorlift.tensors.usable import beyond_storage, check_usable
from tensorlift.tensors.views import torch_dtype, torch_shape

__all__ = [
    "Destinations",
    "Match",
    "Target",
    "check_storage",
    "is_versioned",
    "match",
    "reach",
    "tensors_of",
]

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, torch.nn.Buffer))
_DEVICE, _DTYPE, _SHAPE = map(attrgetter, ("device", "dtype", "shape"))
_FITS, _PLACE, _ROW = map(attrgetter, ("fits", "address", "row"))
_ADDRESS = torch.Tensor.data_ptr
# Tensor.is_neg(), is_conj() and is_inference() give the GIL away, each time; what they look at does not.
_keys_of, _Key = torch._C._dispatch_keys, torch._C.DispatchKey
# Nothing for a tensor that no flag conjugates or negates, in half the time that its keys take.
_flags_of = torch._C._get_tensor_metadata  # type: ignore[attr-defined]
_NEGATED, _CONJUGATED, _VERSIONED = _Key.Negative, _Key.Conjugate, _Key.ADInplaceOrView
_PACKED = frozenset(dtype.id for dtype in dtypes.ALL if dtype.elements > 1)


class Target(msgspec.Struct, eq=False, gc=False):
    """One destination, and the checkpoint's row that fills it.

    A dataclass takes longer to make, and so many that the garbage collector knew would have it run before the
    first byte is read.
    """

    name: str
    tensor: torch.Tensor
    row: int
    device: torch.device
    plain: bool
    """Nothing but strided memory: no subclass of Tensor, not quantised, conjugated or negated by a flag."""
    fits: bool
    """Plain, contiguous, with the checkpoint's dtype and shape: takes bytes as they are."""
    address: int
    """Of its first byte; 0 where it is not plain."""


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
    """Destinations by name, in order: parameters and persistent buffers of a module, or the tensors of a
    mapping.

    What a module's state has besides tensors (extra state) is left out. Raises RequestError for anything
    else.
    """
    if isinstance(model, torch.nn.Module):
        state = model.state_dict(keep_vars=True)
        return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    if not isinstance(model, Mapping):
        raise RequestError(
            f"load_into fills a torch.nn.Module or a dict of tensors, not a {type(model).__name__}"
        )
    if not ({str}.issuperset(map(type, model)) and _PLAIN.issuperset(map(type, model.values()))):
        for name, value in model.items():
            if not isinstance(name, str) or not isinstance(value, torch.Tensor):
                raise RequestError(
                    f"load_into fills a dict of names and tensors; under {shown(name)} is a "
                    f"{type(value).__name__}"
                )
    return dict(model)


class Destinations:
    """The tensors of a model by name, in order, and what they are as columns: there may be 100,000 of them,
    and nothing is read before the last is known.
    """

    def __init__(self, by_name: Mapping[str, torch.Tensor]) -> None:
        """Looks at devices alone."""
        self.by_name = by_name
        self.tensors = list(by_name.values())
        self.device_of = list(map(_DEVICE, self.tensors))
        self.devices = list(dict.fromkeys(self.device_of))
        """Each once."""

    @functools.cached_property
    def columns(self) -> _Columns | None:
        """What the tensors are when it is first asked for, which takes no header; None where not all of them
        are ordinary.
        """
        tensors = self.tensors
        kinds = {device.type for device in self.devices}
        if not (_PLAIN.issuperset(map(type, tensors)) and kinds <= {"cpu", "cuda"}):
            return None
        try:
            dense = list(map(torch.Tensor.is_contiguous, tensors))
            if any(map(_flags_of, tensors)):
                dense = [every and not _flags_of(one) for every, one in zip(dense, tensors, strict=True)]
            addresses = list(map(_ADDRESS, tensors))
            return _Columns(list(map(_DTYPE, tensors)), list(map(_SHAPE, tensors)), dense, addresses)
        except RuntimeError:  # sparse tensors have no address, nested ones no shape
            return None

    def now(self) -> Destinations:
        """The same as the tensors are now: another thread may have given one of them other memory since they
        were looked at, and with it another device, dtype or shape.
        """
        if "columns" in vars(self):
            columns = self.columns
            if columns is None or columns.addresses == list(map(_ADDRESS, self.tensors)):
                return self
        return Destinations(self.by_name)


class _Columns(NamedTuple):
    """Of tensors that are no subclass of Tensor, strided, on devices that are loaded to."""

    dtypes: list[torch.dtype]
    shapes: list[torch.Size]
    dense: list[bool]
    """Contiguous, and not conjugated or negated by a flag."""
    addresses: list[int]


def match(
    given: Destinations,
    checkpoint: Checkpoint,
    rows: Sequence[int],
    asked: Callable[[str], bool],
) -> Match:
    """Brings destinations and the selected rows together; touches no memory.

    ``rows`` ascend; ``asked`` says whether a name of the model is meant at all. Raises RequestError for a
    destination without memory, MismatchError that lists every shape that differs, DeviceError.
    """
    names = checkpoint.names
    if len(rows) < len(names):
        names = list(map(names.__getitem__, rows))
    row_of = dict(zip(names, rows, strict=True))
    tensors = given.by_name
    lacking: list[tuple[str, torch.Tensor]] = []
    if row_of.keys() >= tensors.keys():
        given = given.now()
    else:
        lacking = [(name, tensor) for name, tensor in tensors.items() if name not in row_of and asked(name)]
        given = Destinations({name: tensor for name, tensor in tensors.items() if name in row_of})
    found = _found(given, list(map(row_of.__getitem__, given.by_name)), checkpoint)
    all_fit = all(map(_FITS, found))
    if not all_fit:
        _check_shapes(found, checkpoint)
    unexpected = [name for name in row_of if name not in tensors] if len(found) < len(row_of) else []
    crossing = _crossing(found, checkpoint)
    # What is one tensor under two names shares its bytes with itself.
    if all_fit and not crossing.any():
        return Match(found, missing=_missing(lacking, found), unexpected=unexpected)
    winners = _winners(found)
    if len(winners) < len(found):
        crossing = _crossing(winners, checkpoint)
    result = Match(missing=_missing(lacking, winners), unexpected=unexpected)
    for target, crosses in zip(winners, crossing.tolist(), strict=True):
        if crosses:
            result.ordered.append(target)
        elif target.fits:
            result.direct.append(target)
        else:
            result.copied.append(target)
    return result


def _found(given: Destinations, rows: list[int], checkpoint: Checkpoint) -> list[Target]:
    """The destinations as they are, each with its row."""
    known = [torch_dtype(dtype) for dtype in dtypes.ALL]
    ids = checkpoint.dtypes[np.array(rows, np.int64)].tobytes()
    wanted = list(map(known.__getitem__, ids))
    shapes = list(map(checkpoint.shapes.__getitem__, rows))
    if _PACKED.intersection(ids):
        shapes = [torch_shape(dtypes.ALL[number], shape) for number, shape in zip(ids, shapes, strict=True)]
    columns, always = given.columns, itertools.repeat(True)
    if columns is None:
        return list(map(_target, given.by_name, given.tensors, rows, wanted, shapes))
    found = list(
        map(Target, given.by_name, given.tensors, rows, given.device_of, always, always, columns.addresses)
    )
    # Compared as a whole first.
    if not all(columns.dense) or columns.dtypes != wanted or columns.shapes != shapes:
        for at, (dense, dtype, shape) in enumerate(
            zip(columns.dense, columns.dtypes, columns.shapes, strict=True)
        ):
            if not dense or dtype is not wanted[at] or shape != shapes[at]:
                one = found[at]
                found[at] = _target(one.name, one.tensor, one.row, wanted[at], shapes[at])
    return found


def _target(
    name: str, tensor: torch.Tensor, row: int, dtype: torch.dtype | None, shape: tuple[int, ...]
) -> Target:
    """One destination of any kind; raises for one that cannot be loaded into."""
    plain = _is_plain(tensor)
    ready = plain and tensor.is_contiguous() and (tensor.is_cuda or tensor.is_cpu)
    if not ready:
        check_usable(name, tensor)
    fits = ready and tensor.dtype is dtype and tensor.shape == shape
    return Target(name, tensor, row, tensor.device, plain, fits, tensor.data_ptr() if plain else 0)


def _is_plain(tensor: torch.Tensor) -> bool:
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    if tensor.is_nested:
        return False
    keys = _keys_of(tensor)
    return not (keys.has(_CONJUGATED) or keys.has(_NEGATED))


def is_versioned(tensor: torch.Tensor) -> bool:
    """Whether a tensor counts its changes: all but inference tensors do."""
    return _keys_of(tensor).has(_VERSIONED)


def _identity(tensor: torch.Tensor) -> object:
    """Equal for names that are one tensor: same memory, shape, strides, dtype."""
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _winners(found: list[Target]) -> list[Target]:
    """The targets without those that are the same tensor as a later one."""
    addresses = [target.address for target in found]
    if len(set(addresses)) == len(found):
        return found
    counts = Counter(addresses)
    last: dict[object, Target] = {}
    for target in found:
        # Few tensors share an address; a subclass is known by the object alone.
        if not target.plain:
            last[id(target.tensor)] = target
        elif counts[target.address] > 1 and target.tensor.numel():
            last[_identity(target.tensor)] = target
        else:
            last[target.name] = target
    kept = set(map(id, last.values()))
    return [target for target in found if id(target) in kept]


def _missing(lacking: list[tuple[str, torch.Tensor]], winners: list[Target]) -> list[str]:
    """Names that nothing fills: not in the checkpoint, and not one tensor with a name that is."""
    if not lacking:
        return []
    objects = {id(target.tensor) for target in winners}
    filled = {_identity(target.tensor) for target in winners if target.plain and target.tensor.numel()}
    missing = []
    for name, tensor in lacking:
        lazy = isinstance(tensor, UninitializedTensorMixin)
        plain = not lazy and _is_plain(tensor) and not tensor.is_meta
        if id(tensor) not in objects and not (plain and _identity(tensor) in filled):
            missing.append(name)
    return missing


def _crossing(targets: list[Target], checkpoint: Checkpoint) -> npt.NDArray[np.bool_]:
    """For each destination, whether it shares bytes with another one of the same device."""
    starts = np.array(list(map(_PLACE, targets)), np.int64)
    lengths = checkpoint.sizes[np.array(list(map(_ROW, targets)), np.int64)]
    if not all(map(_FITS, targets)):
        for at, target in enumerate(targets):
            if not target.fits:
                lengths[at] = reach(target)
    stops = starts + lengths
    crosses = overlapping(Extents(starts, stops))
    # Those of two devices may have the same addresses.
    if crosses.any():
        devices = [target.device for target in targets]
        for device in set(devices):
            here = np.array([other == device for other in devices])
            crosses[here] = overlapping(Extents(starts[here], stops[here]))
    return crosses


def reach(target: Target) -> int:
    """Bytes from the first of a strided tensor to its last; 0 where it is not plain."""
    tensor = target.tensor
    if not target.plain or tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def check_storage(targets: Iterable[Target]) -> None:
    """Raises RequestError for a tensor that is larger than its storage; see beyond_storage()."""
    for target in targets:
        if problem := beyond_storage(target.tensor, reach(target)):
            raise RequestError(f"{target.name!r} {problem} before load_into")


def _check_shapes(targets: list[Target], checkpoint: Checkpoint) -> None:
    wrong = []
    for target in targets:
        if target.fits:
            continue
        shape = torch_shape(dtypes.ALL[int(checkpoint.dtypes[target.row])], checkpoint.shapes[target.row])
        if target.tensor.shape != shape:
            path = checkpoint.shards[int(checkpoint.shard_of[target.row])].path
            wrong.append(
                f"{target.name!r}: {list(shape)} in {clean(path)}, {list(target.tensor.shape)} in the model"
            )
    if wrong:
        count = "one shape differs" if len(wrong) == 1 else f"{len(wrong)} shapes differ"
        raise MismatchError(f"{count} between checkpoint and model:\n  " + "\n  ".join(wrong))
