"""What of vLLM 0.32.0 the load format uses, for tests without it: same names, arguments and order of calls.

``installed()`` puts it into sys.modules, and takes it and our loader, which was made of it, away again. The
real engine's tests (tests/engines) show that the interface is as it is here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

OURS = tuple(f"tensorlift.integrations.{name}" for name in ("vllm", "vllm_forks", "vllm_loader"))


@dataclasses.dataclass
class LoadConfig:
    load_format: str = "auto"
    safetensors_load_strategy: str | None = None
    model_loader_extra_config: Any = dataclasses.field(default_factory=dict)
    use_tqdm_on_load: bool = False


@dataclasses.dataclass
class EngineArgs:
    load_format: str = "auto"
    model_loader_extra_config: Any = dataclasses.field(default_factory=dict)
    draft: LoadConfig | None = None
    parallel: dict[str, Any] = dataclasses.field(default_factory=dict)

    def create_engine_config(self, usage: Any = None) -> Any:
        speculative = None if self.draft is None else types.SimpleNamespace(draft_load_config=self.draft)
        return types.SimpleNamespace(
            load_config=LoadConfig(
                self.load_format, model_loader_extra_config=self.model_loader_extra_config
            ),
            speculative_config=speculative,
            parallel_config=types.SimpleNamespace(
                **{"world_size": 1, "data_parallel_size": 1, **self.parallel}
            ),
            device_config=types.SimpleNamespace(
                device_type=sys.modules["vllm.platforms"].current_platform.device_type
            ),
        )


class DefaultModelLoader:
    @dataclasses.dataclass
    class Source:
        model_or_path: str
        revision: str | None
        subfolder: str | None = None
        prefix: str = ""
        fall_back_to_pt: bool = True
        allow_patterns_overrides: list[str] | None = None
        is_unused_weight: Any = None

    counter_before_loading_weights = 0.0

    def __init__(self, load_config: LoadConfig) -> None:
        self.load_config = load_config
        self.local_expert_ids: set[int] | None = None
        self._encoder_only_lm_prefixes = None
        self._encoder_only_weights_mapper = None
        if load_config.model_loader_extra_config:
            raise ValueError("Unexpected extra config keys")

    def _prepare_weights(self, path: str, subfolder: Any, revision: Any, pt: bool, overrides: Any) -> Any:
        assert self.load_config.load_format == "safetensors"
        files: list[str] = []
        for pattern in overrides or ["*.safetensors"]:
            files += glob.glob(os.path.join(path, pattern))
        if not files:
            raise RuntimeError(f"Cannot find any model weights with `{path}`")
        return path, files, True, "model.safetensors.index.json"

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._get_weights_iterator(
            self.Source(
                model_config.model,
                None,
                allow_patterns_overrides=getattr(model, "allow_patterns_overrides", None),
                is_unused_weight=getattr(model, "is_unused_checkpoint_weight", None),
            )
        )
        for source in getattr(model, "secondary_weights", ()):
            yield from self._get_weights_iterator(source)

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        model = model_config.make(vllm_config.compilation_config)
        self.load_weights(model, model_config)
        model_config.process(model)
        return model.eval()

    def load_weights(self, model: Any, model_config: Any) -> None:
        self.local_expert_ids = getattr(model_config, "local_expert_ids", None)
        model.load_weights(self.get_all_weights(model_config, model))
        assert self.counter_before_loading_weights > 0


class DummyModelLoader:
    def __init__(self, load_config: LoadConfig) -> None:
        assert not load_config.model_loader_extra_config

    def load_weights(self, model: Any, model_config: Any) -> None:
        for parameter in model.parameters():
            parameter.data.fill_(0.001)


class Worker:
    """Does nothing, and can be told to fail."""

    fails = False

    def _work(self, *args: Any, **kwargs: Any) -> str:
        if self.fails:
            raise RuntimeError("the worker fails")
        return "done"

    compile_or_warm_up_model = reload_weights = start_weight_update = start_draft_weight_update = _work
    update_weights = finish_weight_update = sleep = wake_up = discard = elastic_ep_execute = shutdown = _work
    reset_weights = _work


class BaseKVCacheMethod:
    pass


class VocabParallelEmbedding(torch.nn.Module):
    pass


class Group:
    def __init__(self, world_size: int = 1) -> None:
        self.world_size, self.device_group = world_size, f"group of {world_size}"
        self.rank_in_group = 0


def _should_skip_weight(name: str, experts: set[int] | None) -> bool:
    parts = name.split(".")
    return (
        experts is not None and "experts" in parts and int(parts[parts.index("experts") + 1]) not in experts
    )


@contextlib.contextmanager
def installed(device: str = "cpu", version: str = "0.32.0") -> Iterator[types.SimpleNamespace]:
    """``loaders``: the table of formats; ``config`` and ``groups`` are for the test to change."""
    state = types.SimpleNamespace(
        loaders={}, config=None, groups={"dp": Group(), "pp": Group(), "tp": Group()}
    )

    def register_model_loader(name: str) -> Any:
        return lambda cls: state.loaders.setdefault(name, cls)

    modules = {
        "vllm": {"__version__": version},
        "vllm.config": {"get_current_vllm_config_or_none": lambda: state.config},
        "vllm.distributed": {
            f"get_{kind}_group": lambda kind=kind: state.groups[kind] for kind in state.groups
        },
        "vllm.engine.arg_utils": {"EngineArgs": type("EngineArgs", (EngineArgs,), {})},
        "vllm.model_executor.layers.quantization.kv_cache": {"BaseKVCacheMethod": BaseKVCacheMethod},
        "vllm.model_executor.layers.vocab_parallel_embedding": {
            "VocabParallelEmbedding": VocabParallelEmbedding
        },
        "vllm.model_executor.model_loader": {"register_model_loader": register_model_loader},
        "vllm.model_executor.model_loader.default_loader": {"DefaultModelLoader": DefaultModelLoader},
        "vllm.model_executor.model_loader.dummy_loader": {"DummyModelLoader": DummyModelLoader},
        "vllm.model_executor.model_loader.ep_weight_filter": {"should_skip_weight": _should_skip_weight},
        "vllm.model_executor.model_loader.weight_utils": {
            "enable_tqdm": lambda wanted: wanted,
            "filter_mm_encoder_only_safetensors_files": lambda files, *more, **named: files[:1],
        },
        "vllm.v1.worker.gpu_worker": {
            "Worker": type("Worker", (Worker,), {**vars(Worker), "__module__": "vllm.v1.worker.gpu_worker"})
        },
        "vllm.platforms": {"current_platform": types.SimpleNamespace(device_type=device)},
    }
    for name in [name for name in sys.modules if name in OURS]:
        del sys.modules[name]
    made = {}
    for name, content in modules.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            inner = ".".join(parts[:end])
            made.setdefault(inner, types.ModuleType(inner)).__path__ = []  # type: ignore[attr-defined]
        vars(made[name]).update(content)
    sys.modules.update(made)
    finders = list(sys.meta_path)
    try:
        yield state
    finally:
        sys.meta_path[:] = finders
        for name in [*made, *OURS]:
            sys.modules.pop(name, None)
