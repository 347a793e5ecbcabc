"""Models of transformers whose weights tensorlift reads.

    model = from_pretrained(AutoModelForCausalLM, path, device="cuda:0")

    with fast_loading() as loads:
        model = AutoModelForCausalLM.from_pretrained(path, device_map="cuda:0")
    print(loads.stats.summary())

All that transformers does around the tensors stays its own: which files, revisions, downloads, names, dtypes,
devices, shards of tensor parallelism, ties, missing weights. Four functions of it are replaced while somebody
is inside, each of which asks whether the load is one of ours and else calls the original:

    PreTrainedModel._load_pretrained_model   begins and ends a load of ours (lazy.Session)
    modeling_utils.safe_open                 gives lazy tensors in place of safetensors' own
    core_model_loading.spawn_materialize     says which tensors are wanted, where, as what dtype and part;
                                             they are taken on the caller's own thread then, not by a pool's
    modeling_utils.caching_allocator_warmup  would reserve the model's memory a second time

Whether a load is ours is a context variable: other threads' loads, and those of tasks that do not inherit the
context, are left alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

from tensorlift.errors import CheckpointError, OptionError, RequestError
from tensorlift.format.listing import SUFFIX
from tensorlift.format.quoting import clean
from tensorlift.integrations.lazy import LazyTensor, Session
from tensorlift.integrations.swaps import Swap, Swaps
from tensorlift.integrations.versions import check_version
from tensorlift.integrations.weights import summary
from tensorlift.options import LoadOptions
from tensorlift.stats import LoadStats, merged, timed
from tensorlift.tensors import devices

__all__ = ["PROVEN", "Loads", "fast_loading", "from_pretrained"]

PROVEN = "5.19.0"
"""The version of transformers that this was shown with."""

_log = logging.getLogger("tensorlift")
_swaps = Swaps()
# What several ranks that load together need: here each reads what it wants of the files, or its shard.
_NOT_HERE = ("exchange", "join_timeout", "peer_timeout")


@dataclasses.dataclass
class Loads:
    """What was loaded inside of a fast_loading()."""

    each: list[LoadStats] = dataclasses.field(default_factory=list)
    """One for each checkpoint; ``seconds["total"]`` is the time in which transformers filled the model."""

    @property
    def stats(self) -> LoadStats:
        """All of them together."""
        return merged(self.each)


class _Scope:
    """One fast_loading(): its settings, and the load that is under way in it."""

    def __init__(self, settings: LoadOptions, device: torch.device | None) -> None:
        self.settings, self.device = settings, device
        self.loads = Loads()
        self.session: Session | None = None


_scope: ContextVar[_Scope | None] = ContextVar("tensorlift_transformers", default=None)


@contextlib.contextmanager
def fast_loading(**options: object) -> Iterator[Loads]:
    """Inside, ``from_pretrained`` of every class of transformers reads safetensors files by tensorlift.

    options: the fields of LoadOptions; an explicit value wins over ``TENSORLIFT_<NAME>``.

    Only for the thread (or task) that is inside: others load as ever. May be nested, the innermost counts. A
    checkpoint that is not safetensors is a CheckpointError before anything is read; a ``state_dict`` that the
    caller gives is none of our business. Raises RequestError where transformers lacks what is replaced.
    """
    with _entered(_Scope(_settings(options), None)) as scope:
        yield scope.loads


def from_pretrained(
    cls: Any, path: Any, *args: Any, device: str | int | torch.device | None = None, **kwargs: Any
) -> Any:
    """``cls.from_pretrained(path, *args, **kwargs)`` with weights that tensorlift reads.

    cls: a class of transformers, such as AutoModelForCausalLM. path: a folder or a Hub id.
    device: where the whole model comes to; the same as ``device_map=device``, and works without accelerate.
    kwargs: those that are fields of LoadOptions are the load's settings, all others go to transformers.

    Returns what transformers does; the model has ``tensorlift_stats``, a LoadStats. Raises what transformers
    does, and errors of the tree below TensorliftError.
    """
    fields = {field.name for field in dataclasses.fields(LoadOptions)}
    settings = _settings({name: kwargs.pop(name) for name in fields & kwargs.keys()})
    for name, why in (
        ("process_group", "each rank reads what it needs; with tensor parallelism that is its shard alone"),
        ("state_dict", "the weights come from the files; without tensorlift, cls.from_pretrained takes it"),
        ("gguf_file", "only safetensors files are read; convert it, or use cls.from_pretrained"),
    ):
        if kwargs.get(name) is not None:
            raise OptionError(f"from_pretrained takes no {name}: {why}")
        kwargs.pop(name, None)
    place = None
    if device is not None:
        if kwargs.get("device_map") is not None:
            raise OptionError("give device or device_map, not both: they say the same")
        place = devices.parse_device(device)
        if _has_accelerate():
            kwargs["device_map"], place = place, None
    if not os.path.isdir(path):
        # Of a model on the Hub: what would be refused later is not downloaded first.
        kwargs.setdefault("use_safetensors", True)
    with _entered(_Scope(settings, place)) as scope:
        result = cls.from_pretrained(path, *args, **kwargs)
    model = result[0] if isinstance(result, tuple) else result
    if len(scope.loads.each) > 1:
        # Of an adapter's folder: the base came first, and has the record of the adapter alone.
        model.tensorlift_stats = scope.loads.stats
    if place is not None:
        # What no file has: buffers that are computed, weights that were missing.
        model.to(place)
    return result


def _settings(options: dict[str, Any]) -> LoadOptions:
    for name in _NOT_HERE:
        if options.get(name) is not None:
            raise OptionError(f"{name} is for ranks that load together, which loads of transformers do not")
    return LoadOptions.resolve(**options)


def _has_accelerate() -> bool:
    return bool(importlib.import_module("transformers.utils").is_accelerate_available())


@contextlib.contextmanager
def _entered(scope: _Scope) -> Iterator[_Scope]:
    check_version("transformers", _version(), PROVEN, _log, "tensorlift", "load without tensorlift")
    with _swaps.made(_find):
        token = _scope.set(scope)
        try:
            yield scope
        finally:
            _scope.reset(token)


def _version() -> str:
    return str(importlib.import_module("transformers").__version__)


def _find() -> list[Swap]:
    """What is to be replaced in the transformers that is there."""
    modeling = importlib.import_module("transformers.modeling_utils")
    found = []
    for holder, name, make, needed in (
        (modeling, "safe_open", _opening, True),
        (getattr(modeling, "PreTrainedModel", None), "_load_pretrained_model", _loading, True),
        (_module("transformers.core_model_loading"), "spawn_materialize", _planning, False),
        (modeling, "caching_allocator_warmup", _warming, False),
    ):
        if holder is not None and name in vars(holder):
            found.append(Swap(holder, name, make))
        elif needed:
            raise RequestError(
                f"transformers {_version()} has no {name} where tensorlift replaces it; load without "
                f"tensorlift, or install transformers {PROVEN}"
            )
    return found


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _loading(plain: Callable[..., Any]) -> Callable[..., Any]:
    """For _load_pretrained_model(model, state_dict, checkpoint_files, load_config, ...)."""

    @functools.wraps(plain)
    def load(
        model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        scope = _scope.get()
        if scope is None or not checkpoint_files:
            return plain(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
        _check_files(checkpoint_files)
        begin = time.perf_counter()
        # It has no meaning here: nothing is mapped, and safe_open would not be asked.
        if getattr(load_config, "disable_mmap", None):
            load_config = dataclasses.replace(load_config, disable_mmap=False)
        session = Session(
            [os.fspath(file) for file in checkpoint_files],
            _settings_for(scope.settings, load_config),
            weight_map=(getattr(load_config, "sharded_metadata", None) or {}).get("weight_map"),
            dtype=getattr(load_config, "dtype", None),
            converts=_converts(load_config),
        )
        outer, scope.session = scope.session, session
        try:
            result = plain(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
            session.finish()
        finally:
            scope.session = outer
            session.close()
        stats = timed(session.stats(), time.perf_counter() - begin)
        scope.loads.each.append(stats)
        model.tensorlift_stats = stats
        _log.info("transformers: %s", summary(stats))
        return result

    return load


def _check_files(files: Any) -> None:
    others = [clean(os.fspath(file)) for file in files if not os.fspath(file).endswith(SUFFIX)]
    if others:
        raise CheckpointError(
            f"{others[0]}: tensorlift reads {SUFFIX} files only; save the model once more with "
            "save_pretrained(), which writes such files, or load this one without tensorlift"
        )


def _settings_for(settings: LoadOptions, load_config: Any) -> LoadOptions:
    """Where weights are quantised as they come, some stay and some go, and which is not known before: then
    each has memory of its own, so that none holds others back.
    """
    quantizer = getattr(load_config, "hf_quantizer", None)
    if quantizer is None or getattr(quantizer, "pre_quantized", True) or settings.own is not None:
        return settings
    return dataclasses.replace(settings, own="tensor")


def _converts(load_config: Any) -> Callable[[str], bool]:
    """Whether transformers makes something else of a tensor of this name: it merges or splits it."""
    mapping = getattr(load_config, "weight_mapping", None) or []
    converters = [one for one in mapping if hasattr(one, "operations")]
    return lambda name: any(one.rename_source_key(name)[1] is not None for one in converters)


def _opening(plain: Callable[..., Any]) -> Callable[..., Any]:
    """For safe_open(file, framework, device, ...)."""

    @functools.wraps(plain)
    def open_file(filename: Any, *args: Any, **kwargs: Any) -> Any:
        scope = _scope.get()
        session = None if scope is None else scope.session
        # Outside of a load nothing but headers is looked at, for a dtype.
        file = None if session is None else session.file(os.fspath(filename))
        return plain(filename, *args, **kwargs) if file is None else file

    return open_file


def _planning(plain: Callable[..., Any]) -> Callable[..., Any]:
    """For spawn_materialize(thread_pool, tensor, device, dtype, sharding_op, tensor_idx)."""

    @functools.wraps(plain)
    def spawn(
        thread_pool: Any,
        tensor: Any,
        device: Any = None,
        dtype: Any = None,
        sharding_op: Any = None,
        tensor_idx: Any = None,
        **kwargs: Any,
    ) -> Any:
        if not isinstance(tensor, LazyTensor) or tensor.ended:
            return plain(thread_pool, tensor, device, dtype, sharding_op, tensor_idx, **kwargs)
        scope = _scope.get()
        if scope is not None and scope.device is not None:
            device = scope.device

        def shard(source: Any) -> object:
            return sharding_op.shard_tensor(source, tensor_idx=tensor_idx, device="meta", dtype=dtype)

        tensor.place(device)
        tensor.plan(device, dtype, None if sharding_op is None else shard, passes=tensor_idx is not None)
        # Without a pool it is called when its turn comes: on the caller's thread and stream, in one order.
        return plain(None, tensor, device, dtype, sharding_op, tensor_idx, **kwargs)

    return spawn


def _warming(plain: Callable[..., Any]) -> Callable[..., Any]:
    """For caching_allocator_warmup(model, device_map, quantizer)."""

    @functools.wraps(plain)
    def warm_up(model: Any, *args: Any, **kwargs: Any) -> Any:
        scope = _scope.get()
        session = None if scope is None else scope.session
        # Where tensors become parameters as they are, they bring their memory.
        if session is not None and session.keeps_most:
            return None
        return plain(model, *args, **kwargs)

    return warm_up
