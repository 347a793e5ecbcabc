"""What an engine's model consists of once its weights are there: all tensors, and numbers made of weights.

Parameters, buffers and derived tensors are where a seed looks by itself. Engines also keep tensors in what
their modules point to (kernels, methods of quantisation, closures), and numbers and switches in attributes of
Python (the scales of a KV cache, whether a draft has a head of its own). A fork that lacked one of these
would serve something else, so all are found here, on both sides in the same way, and by the same names.

What cannot be found is named: a handle of native code hides what it was made of, and an address in a tensor
is right in one process alone. A model with such things is neither offered nor forked as it is.
"""

from __future__ import annotations

import functools
import json
import operator
import re
import types
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from tensorlift.errors import ForkError, RequestError
from tensorlift.forking.offering import CACHES, named_tensors, offer
from tensorlift.forking.tensor_digests import made_digests
from tensorlift.format.quoting import plural, quote, some_of

__all__ = ["SCALARS", "State"]

SCALARS = "tensorlift.scalars"
"""The name of a tensor with the numbers and switches of modules."""

# Caches of rotary embeddings, which follow from the configuration.
_ROTARY = re.compile(r"(cos|sin)\w*cache$")
_OWN = frozenset(vars(torch.nn.Module()))
# Of an engine, yet not of a model: configurations, groups, and what runs requests.
_OUTSIDE = re.compile(
    r"(vllm\.(config|distributed|compilation|platforms|forward_context)"
    r"|sglang\.srt\.(configs|distributed|server_args|runtime_context|managers|mem_cache|model_executor))\b"
)
_FIRST_ADDRESS = 1 << 32
_SHOWN = 5
_HEAD_BYTES, _MODULE_BYTES = 4096, 128
# Of numbers as text; compressed, a thousandth may come.
_MOST_TEXT = 16 << 20


class State:
    """The tensors and numbers of a model, by name."""

    def __init__(self, model: torch.nn.Module, engine: str, *, hold: bool = False) -> None:
        """``engine``: the package whose objects are looked into.

        hold: keeps the tensors as they are now, for an engine that goes on to put others in their place.
        """
        self._engine = engine
        self._modules = {id(module) for module in model.modules()}
        self._seen: set[int] = set()
        self._storages: set[int] = set()
        self._tensors: dict[str, Callable[[], torch.Tensor]] = {}
        self._owners: dict[str, dict[str, Any]] = {}
        self.hidden: list[str] = []
        """What nobody outside of this process can bring, for a message."""
        modules = list(model.named_modules(remove_duplicate=False))
        for path, module in modules:
            self._add_module(path, module)
        for path, module in modules:
            self._look_inside(path, _attributes(module))
        self._likes = {name: _like(get()) for name, get in self._tensors.items()}
        self._scalars = torch.zeros(_HEAD_BYTES + _MODULE_BYTES * len(modules), dtype=torch.uint8)
        self._held = {name: get().detach() for name, get in self._tensors.items()} if hold else None
        self._digests = self._digests_now()
        self._first = self._numbers()
        self.refresh()

    @property
    def is_held(self) -> bool:
        """Whether these are no longer the tensors that the model runs with."""
        return self._held is not None

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of them, as they are now. Raises RequestError for what is hidden, gone, or of another form."""
        if self.hidden:
            raise RequestError(
                f"the engine keeps weights where they cannot be read: {some_of(self.hidden, _SHOWN)}"
            )
        if self._held is not None:
            if self._digests_now() != self._digests:
                raise RequestError(
                    "the engine has changed weights in place that were to be offered as they came"
                )
            return {**self._held, SCALARS: self._scalars}
        found: dict[str, torch.Tensor] = {}
        for name, get in self._tensors.items():
            try:
                # Engines have kinds of parameters of their own, which are plain tensors with more attributes.
                found[name] = get().detach()
            except (AttributeError, LookupError, ValueError):
                raise RequestError(f"{quote(name)} is no longer there") from None
            if _like(found[name]) != self._likes[name]:
                raise RequestError(f"{quote(name)} has another dtype, shape or stride than behind the load")
        return {**found, SCALARS: self._scalars}

    def refresh(self) -> None:
        """Writes the numbers as they are now into their tensor. RequestError where they are too many.

        Switches stay what they were behind the load: serving turns some, and forks compare theirs.
        """
        now = {name: value for name, value in self._numbers().items() if type(value) is float}
        numbers = {name: now.get(name, first) for name, first in self._first.items()}
        written = json.dumps(numbers).encode()
        raw = zlib.compress(written)
        if len(raw) + 4 > len(self._scalars) or len(written) > _MOST_TEXT:
            raise RequestError(
                f"the attributes of this model take {len(raw):,} bytes, {len(written):,} as text, more than "
                f"are sent: {len(self._scalars) - 4:,}, {_MOST_TEXT:,} as text"
            )
        text = np.frombuffer(len(raw).to_bytes(4, "little") + raw, np.uint8)
        self._scalars.zero_()
        self._scalars[: len(text)] = torch.from_numpy(text.copy())

    def take(self) -> None:
        """Has the model have the numbers that came into their tensor.

        A number is taken as it is, and a switch where there is none here. Raises ForkError where a switch
        differs: then the model was made in another way.
        """
        raw = self._scalars.numpy().tobytes()
        try:
            theirs = json.loads(_unpacked(raw[4 : 4 + int.from_bytes(raw[:4], "little")]))
            pairs = sorted((str(name), value) for name, value in theirs.items())
        except (zlib.error, ValueError, AttributeError, RecursionError):
            raise ForkError("the attributes that the seed sent cannot be read") from None
        ours = self._numbers()
        if lacking := [name for name in ours if name not in theirs]:
            raise ForkError(f"{quote(lacking[0])} is {ours[lacking[0]]!r} here, and not there in the seed")
        wanted: list[tuple[dict[str, Any], str, float | bool]] = []
        for name, value in pairs:
            path, _, attribute = name.rpartition(".")
            mine, owner = ours.get(name), self._owners.get(path)
            if owner is None or type(value) not in (bool, float):
                raise ForkError(f"{quote(name)} of the seed has no place here")
            if name in ours and (type(mine) is not type(value) or (mine != value and type(value) is bool)):
                raise ForkError(f"{quote(name)} is {mine!r} here, and {value!r} in the seed")
            wanted.append((owner, attribute, value))
        for owner, attribute, value in wanted:
            owner[attribute] = value

    def _numbers(self) -> dict[str, float | bool]:
        return {
            _joined(path, name): value
            for path, owner in self._owners.items()
            for name, value in owner.items()
            if type(value) in (float, bool) and name not in _OWN
        }

    def _digests_now(self) -> dict[str, str]:
        return {} if self._held is None else dict(made_digests(offer(named_tensors(self._held))))

    def _add_module(self, path: str, module: torch.nn.Module) -> None:
        self._owners[path] = vars(module)
        for name in (*module._parameters, *module._buffers, *_attributes(module)):
            value = getattr(module, name, None)
            derived = name in vars(module)
            if isinstance(value, torch.Tensor) and not (CACHES if derived else _ROTARY).search(name):
                self._add(_joined(path, name), value, functools.partial(getattr, module, name))
                self._storages.add(_storage(value))

    def _add(self, name: str, tensor: torch.Tensor, get: Callable[[], torch.Tensor]) -> None:
        wide = tensor.dtype in (torch.int64, torch.uint64) and not tensor.is_meta and tensor.numel()
        if wide and bool((tensor.detach().view(torch.int64).abs() >= _FIRST_ADDRESS).any()):
            self.hidden.append(f"{quote(name)} (an address, or the handle of native code)")
        self._tensors[name] = get

    def _look_inside(self, path: str, values: Mapping[str, Any]) -> None:
        """At what the attributes of a module, or of an object of the engine, lead to."""
        for name, value in values.items():
            if not isinstance(value, torch.Tensor):
                self._visit(_joined(path, name), value, None)

    def _visit(self, name: str, value: Any, get: Callable[[], Any] | None) -> None:
        """``get``: how to come to it later; None where it is not a tensor."""
        if isinstance(value, torch.Tensor):
            if get is not None and not value.is_meta and _storage(value) not in self._storages:
                self._add(name, value, get)
            return
        if isinstance(value, torch.ScriptObject):
            self.hidden.append(f"{quote(name)} (an object of native code)")
            return
        if id(value) in self._seen or id(value) in self._modules:
            return
        if not isinstance(value, str | bytes | int | float | type(None)):
            self._seen.add(id(value))
        for label, inner, found in self._parts(value):
            if not CACHES.search(label):
                self._visit(f"{name}.{label}", inner, found)
        if self._is_engines(value):
            self._owners.setdefault(name, getattr(value, "__dict__", {}))

    def _parts(self, value: Any) -> Iterator[tuple[str, Any, Callable[[], Any]]]:
        """What something consists of, as far as it is known how to look into it."""
        if isinstance(value, Mapping):
            for key, inner in value.items():
                yield str(key), inner, functools.partial(operator.getitem, value, key)
        elif isinstance(value, list | tuple):
            for at, inner in enumerate(value):
                yield str(at), inner, functools.partial(operator.getitem, value, at)
        elif isinstance(value, functools.partial):
            for key, inner in (*enumerate(value.args), *value.keywords.items(), ("func", value.func)):
                yield str(key), inner, functools.partial(_same, inner)
        elif isinstance(value, types.MethodType):
            yield "self", value.__self__, lambda: value.__self__
        elif isinstance(value, types.FunctionType):
            names = value.__code__.co_freevars if self._is_engines(value) else ()
            for name, cell in zip(names, value.__closure__ or (), strict=False):
                try:
                    yield name, cell.cell_contents, functools.partial(getattr, cell, "cell_contents")
                except ValueError:  # not set yet
                    continue
        elif self._is_engines(value):
            slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
            if isinstance(value, torch.nn.Module):
                slots += [*value._parameters, *value._buffers, *value._modules]
            for name in (*slots, *(name for name in getattr(value, "__dict__", ()) if name not in _OWN)):
                if hasattr(value, name):
                    yield name, getattr(value, name), functools.partial(getattr, value, name)

    def _is_engines(self, value: Any) -> bool:
        """Whether it is an object (or a function) of the engine's, and of its model rather than around it."""
        if isinstance(value, type | types.ModuleType | torch.nn.Module):
            return isinstance(value, torch.nn.Module)
        where = value.__module__ if isinstance(value, types.FunctionType) else type(value).__module__
        return str(where).partition(".")[0] == self._engine and not _OUTSIDE.match(str(where))

    def __repr__(self) -> str:
        """How much there is."""
        return f"<State of {plural(len(self._tensors), 'tensor')}>"


def _unpacked(raw: bytes) -> bytes:
    """No more than _MOST_TEXT is made of it: ForkError. Raises zlib.error for what is no whole stream."""
    unpacking = zlib.decompressobj()
    text = unpacking.decompress(raw, _MOST_TEXT + 1)
    if len(text) > _MOST_TEXT:
        raise ForkError(
            f"the attributes that the seed sent, {len(raw):,} bytes, are more than {_MOST_TEXT:,} bytes of "
            "text, which those of no model are"
        )
    if not unpacking.eof:
        raise zlib.error("it is cut off")
    return text


def _attributes(module: torch.nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _OWN}


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _same(value: Any) -> Any:
    return value


def _storage(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()


def _like(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), tensor.device
