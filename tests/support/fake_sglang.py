"""As much of SGLang as the plug-in touches, for machines without it; tests/engines has the real one."""

from __future__ import annotations

import abc
import dataclasses
import enum
import glob
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from support.checkpoints import Row, random_row


class HookType(enum.Enum):
    AROUND = "around"


class LoadFormat(str, enum.Enum):
    AUTO = "auto"
    SAFETENSORS = "safetensors"


@dataclasses.dataclass
class LoadConfig:
    load_format: Any = "auto"
    model_loader_extra_config: Any = dataclasses.field(default_factory=dict)
    tp_rank: int | None = None
    draft_model_idx: int | None = None
    load_group: Any = "default"


@dataclasses.dataclass
class Source:
    model_or_path: str
    revision: str | None = None
    prefix: str = ""
    fall_back_to_pt: bool = True
    allow_patterns_overrides: list[str] | None = None
    model_config: Any = None


class BaseModelLoader(abc.ABC):
    @abc.abstractmethod
    def load_model(self, *, model_config: Any, device_config: Any) -> Any: ...


class DefaultModelLoader(BaseModelLoader):
    _MTP_PATTERN = re.compile(r"model\.mtp\.layers\.(\d+)\.")
    Source = Source
    counter_before_loading_weights = 0.0

    def __init__(self, load_config: LoadConfig) -> None:
        self.load_config = load_config
        if unknown := set(load_config.model_loader_extra_config) - {"num_threads"}:
            raise ValueError(f"Unexpected extra config keys: {unknown}")

    def _prepare_weights(
        self, path: str, revision: str | None, fall_back_to_pt: bool, patterns: list[str] | None = None
    ) -> tuple[str, list[str], bool]:
        if self.load_config.load_format not in (LoadFormat.AUTO, LoadFormat.SAFETENSORS):
            raise ValueError(f"Unknown load_format: {self.load_config.load_format}")
        for pattern in ["*.safetensors", *(["*.pt"] if fall_back_to_pt else [])]:
            if files := glob.glob(os.path.join(path, pattern)):
                return path, files, True
        raise RuntimeError(f"Cannot find any model weights with `{path}`")

    @classmethod
    def _filter_mtp_weights(cls, pairs: Any, prefix: str, index: int) -> Any:
        for name, tensor in pairs:
            match = cls._MTP_PATTERN.match(name)
            if match is None or int(match[1]) == index:
                yield prefix + (name.replace(match[0], "model.mtp.layers.0.") if match else name), tensor

    def load_model(self, *, model_config: Any, device_config: Any) -> Any:
        model = model_config.make()
        source = Source(model_config.model_path, model_config=model_config)
        self.load_weights_and_postprocess(model, self._all(source), torch.device("cpu"))
        return model

    def _all(self, source: Source) -> Any:
        yield from self._get_weights_iterator(source)  # type: ignore[attr-defined]

    @staticmethod
    def load_weights_and_postprocess(model: Any, weights: Any, target: Any) -> None:
        raise AssertionError("the loader has its own")

    @staticmethod
    def load_weights_only(model: Any, weights: Any, target: Any) -> None:
        parameters = dict(model.named_parameters())
        for name, tensor in weights:
            if name in parameters:
                parameters[name].data.copy_(tensor)

    @staticmethod
    def postprocess_weights(model: Any, target: Any) -> None:
        model.postprocessed = True


class Scheduler:
    """Loads nothing by itself: a test has done so before."""

    def __init__(self, server_args: Any, port_args: Any) -> None:
        self.weight_updater = SchedulerWeightUpdaterManager()


class SchedulerWeightUpdaterManager:
    """Answers what a test has it answer, and raises what it has it raise; keeps a session as SGLang does."""

    def __init__(self) -> None:
        self._session, self.success, self.error = None, True, None

    def _answer(self, request: Any) -> Any:
        if self.error is not None:
            raise self.error
        return SimpleNamespace(success=self.success)

    update_weights_from_disk = update_weights_from_ipc = _answer
    release_memory_occupation = resume_memory_occupation = check_weights = _answer

    def begin_weight_update(self, request: Any) -> Any:
        if self._session is not None:
            return SimpleNamespace(success=False)
        answer = self._answer(request)
        self._session = SimpleNamespace() if answer.success else None
        return answer

    def _in_session(self, request: Any) -> Any:
        return SimpleNamespace(success=False) if self._session is None else self._answer(request)

    update_weights_from_tensor = update_weights_from_distributed = _in_session

    def end_weight_update(self, request: Any) -> Any:
        answer = self._in_session(request)
        self._session = None
        return answer


class ModelOptModelLoader(DefaultModelLoader):
    pass


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(16, 4))
        self.norm = torch.nn.LayerNorm(8, bias=False)
        self.scale = torch.nn.Parameter(torch.tensor(-1.0))  # has a default: no checkpoint needs it


def rows(*, but: str = "", seed: int = 0) -> dict[str, Row]:
    found = {
        "weight": random_row("F32", [16, 4], seed),
        "norm.weight": random_row("F32", [8], seed + 1),
        "more": random_row("F32", [3], seed + 2),
    }
    return {name: row for name, row in found.items() if name != but}


def configuration(path: Path, **more: Any) -> SimpleNamespace:
    """A ModelConfig."""
    return SimpleNamespace(
        **{
            "model_path": str(path),
            "make": Model,
            "hf_config": None,
            "quantization": None,
            "dtype": torch.float32,
            **more,
        }
    )


def arguments(**given: Any) -> SimpleNamespace:
    """ServerArgs."""
    defaults = {
        "load_format": "tensorlift",
        "speculative_draft_load_format": None,
        "device": "cpu",
        "model_loader_extra_config": "{}",
        "weight_cache_mode": "off",
    }
    return SimpleNamespace(**{**defaults, **given})


class Engine:
    """The fake's state."""

    def __init__(self) -> None:
        self.choices = ["auto", "safetensors"]
        self.hooks: list[tuple[str, Callable[..., Any], HookType]] = []
        self.steps: dict[str, list[Callable[..., Any]]] = {}
        self.device = SimpleNamespace(device="cpu")
        self.moe = SimpleNamespace(is_ep_joiner=False, elastic_ep_backend=None)
        self.features = SimpleNamespace(enable_weights_cpu_backup=False)
        ranks = dict.fromkeys(("tp_rank", "pp_rank", "moe_ep_rank"), 0)
        sizes = dict.fromkeys(("tp_size", "pp_size", "moe_ep_size"), 1)
        self.parallel = SimpleNamespace(**ranks, **sizes)

    def step(self, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def kept(function: Callable[..., Any]) -> Callable[..., Any]:
            self.steps.setdefault(name, []).append(function)
            return function

        return kept

    def iterator(self, source: Source, **given: Any) -> Any:
        """What a reload reads."""
        loader = self.loader(self.configure(load_format="tensorlift", **given))
        pairs = loader._get_weights_iterator(source)
        assert loader.counter_before_loading_weights > 0
        return pairs

    def check(self, given: SimpleNamespace) -> None:
        """The step of resolving arguments that the plug-in has a part in."""
        self.steps["handle_load_format"][0](given, lambda server_args: None)

    def configure(self, **given: Any) -> LoadConfig:
        """What LoadConfig(...) does once the hook is in place."""
        config = LoadConfig(**given)

        def original(config: LoadConfig) -> None:
            config.load_format = LoadFormat(config.load_format)

        self.hooks[0][1](original, config)
        return config

    def loader(self, config: LoadConfig, model_config: Any = None) -> Any:
        """get_model_loader."""
        if isinstance(config.load_format, type):
            return config.load_format(config)
        quantised = getattr(model_config, "quantization", None) == "modelopt_fp8"
        return ModelOptModelLoader(config) if quantised else DefaultModelLoader(config)


def install(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Puts the modules in place for one test; the loader's module is imported anew under them."""
    engine = Engine()
    contents: dict[str, dict[str, Any]] = {
        "arg_groups.choices": {
            "LOAD_FORMAT_CHOICES": engine.choices,
            "add_load_format_choices": engine.choices.extend,
        },
        "arg_groups.resolution_hooks": {"register_resolution_hook": engine.step},
        "arg_groups.model_override_base": {"resolving_view": lambda arguments: arguments},
        "plugins.hook_registry": {
            "HookType": HookType,
            "HookRegistry": SimpleNamespace(register=lambda *hook: engine.hooks.append(hook)),
        },
        "configs.load_config": {"_DEFAULT_LOAD_GROUP": "default", "LoadFormat": LoadFormat},
        "model_loader.loader": {
            "DefaultModelLoader": DefaultModelLoader,
            "ModelOptModelLoader": ModelOptModelLoader,
            "get_model_loader": engine.loader,
            "post_load_weights": lambda model: None,
        },
        "model_loader.weight_utils": {
            "initialize_dummy_weights": _fill,
            "maybe_add_mtp_safetensors": _with_mtp,
        },
        "managers.scheduler": {
            kind.__name__: type(kind.__name__, (kind,), {})
            for kind in (Scheduler, SchedulerWeightUpdaterManager)
        },
        "runtime_context": {
            "get_device": lambda: engine.device,
            "get_exec": lambda: SimpleNamespace(moe=engine.moe, features=engine.features),
            "get_parallel": lambda: engine.parallel,
            "get_serving": lambda: SimpleNamespace(served_model_name="served"),
        },
        "utils.common": {"BAR_FORMAT": "{desc}"},
    }
    for name in ["sglang", "sglang.srt"] + [f"sglang.srt.{name.split('.')[0]}" for name in contents]:
        package = ModuleType(name)
        package.__path__ = []
        monkeypatch.setitem(sys.modules, name, package)
    for name, values in contents.items():
        module = sys.modules.get(f"sglang.srt.{name}") or ModuleType(f"sglang.srt.{name}")
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, f"sglang.srt.{name}", module)
    monkeypatch.delitem(sys.modules, "tensorlift.integrations.sglang_loader", raising=False)
    return engine


def _fill(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.fill_(0.001)


def _with_mtp(files: list[str], folder: str, index: str, config: Any) -> list[str]:
    return files + list(getattr(config, "more_files", ()))
