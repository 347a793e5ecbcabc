"""vLLM's part of forks and seeds: keys, placeholder weights, and when a worker's weights change."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from tensorlift.integrations.imports import imported_publisher
from tensorlift.integrations.vllm import ENGINE

__all__ = [
    "fill_with_placeholders",
    "hides_weights",
    "key_of",
    "placeholders",
    "small_ones",
    "watch",
]

# Larger ones are weights, which files bring.
_SMALL_BYTES = 64 << 10


def hides_weights() -> bool:
    """Whether vLLM puts weights away in handles of native code, as it does on CPUs (oneDNN).

    Then they are offered and forked as they are before that, and vLLM does it on both sides.
    """
    from vllm.platforms import current_platform

    return str(current_platform.device_type) == "cpu"


def key_of(config: Any, model_config: Any, draft: bool) -> Any:
    """Which weights this worker has. Within distributed initialisation, which decides about ranks."""
    from vllm import __version__
    from vllm.distributed import get_pp_group, get_tp_group
    from vllm.platforms import current_platform

    from tensorlift.forking.manifest import ModelKey
    from tensorlift.integrations.devices import describe_device

    tensor, stage = get_tp_group(), get_pp_group()
    served = config.model_config.served_model_name
    name = (served if isinstance(served, str) else served[0]) if served else config.model_config.model
    expert = (
        (tensor.rank_in_group, tensor.world_size) if config.parallel_config.enable_expert_parallel else None
    )
    return ModelKey(
        model=name,
        revision=model_config.revision or "",
        role="draft" if draft else "target",
        dtype=str(model_config.dtype).removeprefix("torch."),
        quantization=model_config.quantization or "",
        tp=(tensor.rank_in_group, tensor.world_size),
        pp=(stage.rank_in_group, stage.world_size),
        ep=expert or (0, 1),
        processed=not hides_weights(),
        engine=f"{ENGINE} {__version__}, {describe_device(current_platform.device_type)}",
    )


@contextlib.contextmanager
def placeholders(config: Any, model_config: Any) -> Iterator[Callable[[], None]]:
    """Around a model with placeholder weights. Yields what forgets it, where another has to be made.

    vLLM's layers register by name, once. And equal placeholders of embedding and head would be tied for ever.
    """
    compilation = config.compilation_config
    layers, experts = dict(compilation.static_forward_context), list(compilation.static_all_moe_layers)
    untied = getattr(model_config, "word_embeddings_untied_by_checkpoint", False)

    def forget() -> None:
        compilation.static_forward_context.clear()
        compilation.static_forward_context.update(layers)
        compilation.static_all_moe_layers[:] = experts

    if untied:
        model_config.word_embeddings_untied_by_checkpoint = False
    try:
        yield forget
    finally:
        if untied:
            model_config.word_embeddings_untied_by_checkpoint = True


def fill_with_placeholders(load_config: Any, model: Any, model_config: Any) -> None:
    """Weights of vLLM's load format "dummy", which its processing is known to take."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    DummyModelLoader(load_config).load_weights(model, model_config)


def small_ones(model: Any) -> list[tuple[Any, Any]]:
    """Tensors that files may lack (scales with a default), each with a copy: a fork may fail half way."""
    tensors = [*model.parameters(), *model.buffers()]
    return [(one.data, one.data.clone()) for one in tensors if one.nbytes <= _SMALL_BYTES]


def watch(module: ModuleType) -> None:
    """Wraps what vLLM's workers of a module (gpu_worker, cpu_worker) do with their weights."""
    for kind in [kind for kind in vars(module).values() if isinstance(kind, type)]:
        if kind.__module__ == module.__name__ and kind.__name__.endswith("Worker"):
            for name, around in _AROUND.items():
                if name in vars(kind):
                    setattr(kind, name, _wrapped(vars(kind)[name], around))


# Another vLLM may have more arguments, which are its own business.


def _wrapped(original: Any, around: Any) -> Any:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (publisher := imported_publisher()) is None:
            return original(self, *args, **kwargs)
        with around(publisher, *args, **kwargs):
            return original(self, *args, **kwargs)

    return method


@contextlib.contextmanager
def _serves(publisher: Any, *_: Any, **__: Any) -> Iterator[None]:
    yield
    publisher.serve()


@contextlib.contextmanager
def _reloads(publisher: Any, *_: Any, **__: Any) -> Iterator[None]:
    with publisher.updating("weights are reloaded"):
        yield
        publisher.came()


@contextlib.contextmanager
def _begins(publisher: Any, *_: Any, role: str = "target", **__: Any) -> Iterator[None]:
    if publisher.is_updating:  # vLLM refuses a second session, and the first goes on
        yield
        return
    publisher.begin_update("weights are updated", role=role)
    with _goes_on(publisher):
        yield


@contextlib.contextmanager
def _goes_on(publisher: Any, *_: Any, **__: Any) -> Iterator[None]:
    if not publisher.is_updating:  # vLLM refuses, and nothing changes, or its session has outlived ours
        yield
        publisher.withdraw("weights were updated behind an update that failed", lost=True)
        return
    try:
        yield
    except BaseException:
        publisher.spoil()
        publisher.end_update()
        raise


@contextlib.contextmanager
def _brings(publisher: Any, *_: Any, **__: Any) -> Iterator[None]:
    with _goes_on(publisher):
        yield
    publisher.came()


@contextlib.contextmanager
def _ends(publisher: Any, *_: Any, **__: Any) -> Iterator[None]:
    with _goes_on(publisher):
        yield
    publisher.end_update()


@contextlib.contextmanager
def _sleeps(publisher: Any, level: int = 1, *_: Any, **__: Any) -> Iterator[None]:
    publisher.withdraw("the engine sleeps", lost=level > 1, gone=True)
    yield


@contextlib.contextmanager
def _wakes(publisher: Any, tags: list[str] | None = None, *_: Any, **__: Any) -> Iterator[None]:
    yield
    if tags is None or "weights" in tags:
        publisher.restore()


@contextlib.contextmanager
def _discards(publisher: Any, tags: tuple[str, ...], *_: Any, **__: Any) -> Iterator[None]:
    if "weights" in tags:
        publisher.withdraw("the weights are discarded", lost=True, gone=True)
    yield


@contextlib.contextmanager
def _resets(publisher: Any, *_: Any, **__: Any) -> Iterator[None]:
    publisher.withdraw("the weights are reset", lost=True)
    yield


@contextlib.contextmanager
def _moves(publisher: Any, *_: Any, **__: Any) -> Iterator[None]:
    publisher.withdraw("experts move between ranks", lost=True)
    yield


@contextlib.contextmanager
def _shuts_down(publisher: Any, *_: Any, **__: Any) -> Iterator[None]:
    publisher.close()
    yield


_AROUND = {
    "compile_or_warm_up_model": _serves,
    "reload_weights": _reloads,
    "start_weight_update": _begins,
    "start_draft_weight_update": functools.partial(_begins, role="draft"),
    "update_weights": _brings,
    "finish_weight_update": _ends,
    "sleep": _sleeps,
    "wake_up": _wakes,
    "discard": _discards,
    "reset_weights": _resets,
    "elastic_ep_execute": _moves,
    "shutdown": _shuts_down,
}
