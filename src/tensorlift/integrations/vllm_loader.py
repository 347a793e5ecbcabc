"""vLLM's model loader over tensorlift. Imported once vLLM has imported its own loaders.

Finding, filtering and downloading files, the quantisation's part and the log's times are vLLM's: this loader
is its default one, and differs in how the tensors of the chosen files come. What needs the library is
imported where it is used: the class is made in every process that loads models, in whatever format.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import chain
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed import get_dp_group, get_pp_group, get_tp_group
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight
from vllm.model_executor.model_loader.weight_utils import (
    enable_tqdm,
    filter_mm_encoder_only_safetensors_files,
)
from vllm.platforms import current_platform

from tensorlift.errors import CheckpointError, RequestError
from tensorlift.integrations.devices import check_device
from tensorlift.integrations.settings import LOAD_FORMAT
from tensorlift.integrations.vllm import ENGINE, check, log

if TYPE_CHECKING:
    from tensorlift.integrations.weights import Delivery
    from tensorlift.progress import Report

__all__ = ["TensorliftLoader"]

# Built from vLLM's configuration of a quantisation; no checkpoint has them.
_CONFIG_BUILT = ("input_scale_ub",)
# Of draft models: a table that only those with a vocabulary of their own bring.
_DRAFT_BUILT = ("draft_id_to_target_id",)

# Tensors that each model started with, shapes by name, by source, for reloads to be compared with.
_started: WeakKeyDictionary[torch.nn.Module, dict[int, dict[str, tuple[int, ...]]]] = WeakKeyDictionary()


class TensorliftLoader(DefaultModelLoader):  # type: ignore[misc] # vLLM has no types where it is not installed
    """vLLM's default loader, whose tensors come through tensorlift."""

    def __init__(self, load_config: Any) -> None:
        """Checks the extra configuration; nothing else, for vLLM makes several loaders in a process."""
        self.settings = check(load_config.model_loader_extra_config)
        # The base refuses keys that it does not know, and looks for the files of a format that it does.
        plain = dataclasses.replace(load_config, load_format="safetensors", model_loader_extra_config={})
        super().__init__(plain)
        self.counter_before_loading_weights: float
        # Whether parameters were reached is seen below, for all models and not only for those that say so.
        self.enable_weights_track = False
        self._model: torch.nn.Module | None = None
        self._source = 0
        self._delivery: Delivery | None = None
        self._draft = False
        # While a model is made: vLLM's whole configuration, and whether its weights are only placeholders.
        self._config: Any = None
        self._model_config: Any = None
        self._only_layout = False

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
        """A model with its weights: out of a running instance where one was named, else out of the files.

        Weights of an instance are as vLLM's processing has left them. So the model is made and processed with
        placeholders first, which gives it its layout, and is not processed again. Where processing hides
        weights, load_weights() forks instead.
        """
        check_device(current_platform.device_type, ENGINE)
        self._config, self._model_config = vllm_config, model_config
        self._draft = _is_draft(model_config)
        instances = self.settings.instances
        try:
            if self._hides() or not (instances.forks or instances.publish):
                return self._made(vllm_config, model_config, prefix)
            from tensorlift.integrations.state import State
            from tensorlift.integrations.vllm_forks import placeholders

            if instances.forks:
                with placeholders(vllm_config, model_config) as forget:
                    self._only_layout = True
                    model = self._forked(lambda: self._made(vllm_config, model_config, prefix))
                    self._only_layout = False
                    if model is not None:
                        return model
                    forget()
            model = self._made(vllm_config, model_config, prefix)
            if instances.publish:
                self._offer(lambda: State(model, "vllm"), self._checkpoint())
            return model
        finally:
            self._config = self._model_config = None
            self._only_layout = False

    def _made(self, vllm_config: Any, model_config: Any, prefix: str) -> torch.nn.Module:
        made: torch.nn.Module = super().load_model(vllm_config, model_config, prefix)
        return made

    def _hides(self) -> bool:
        from tensorlift.integrations.vllm_forks import hides_weights

        return hides_weights()

    def _forked(self, make: Callable[[], torch.nn.Module]) -> torch.nn.Module | None:
        """What ``make`` makes, with the weights of an instance; None where files have to do."""
        found = self._fork(make)
        if found is None:
            return None
        model, state, came = found
        self._offer(lambda: state, came.weights)
        return model

    def _fork(self, make: Callable[[], torch.nn.Module]) -> tuple[torch.nn.Module, Any, Any] | None:
        from tensorlift.integrations.forks import fork_model

        return fork_model(
            make,
            self._key,
            self.settings,
            engine="vllm",
            group=self._group(),
            bar=self._bar if enable_tqdm(self.load_config.use_tqdm_on_load) else None,
            log=log,
            own=self._checkpoint,
        )

    def _checkpoint(self) -> str:
        from tensorlift.sources.identifying import checkpoint_of

        return checkpoint_of(self._model_config.model, self._model_config.revision)

    def _key(self) -> Any:
        from tensorlift.integrations.vllm_forks import key_of

        return key_of(self._config, self._model_config, self._draft)

    def _offer(self, state: Callable[[], Any], weights: str) -> None:
        from tensorlift.integrations.publisher import publisher

        publisher.add(state, self._key, self.settings.instances, log, weights)

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """vLLM's own, watched: what a tensor did not reach ends the start."""
        check_device(current_platform.device_type, ENGINE)
        self._draft = _is_draft(model_config)
        if self._only_layout:
            from tensorlift.integrations.vllm_forks import fill_with_placeholders

            fill_with_placeholders(self.load_config, model, model_config)
            return
        instances = self.settings.instances
        if self._config is None or not self._hides():
            self._load_files(model, model_config)
            return
        weights = self._unprocessed(model) if instances.forks else None
        if weights is None:
            self._load_files(model, model_config)
        if instances.publish:
            from tensorlift.integrations.state import State

            version = self._checkpoint() if weights is None else weights
            self._offer(lambda: State(model, "vllm", hold=True), version)

    def _unprocessed(self, model: torch.nn.Module) -> str | None:
        """Forks weights that vLLM processes itself afterwards: their version; None where files have to do."""
        from tensorlift.integrations.vllm_forks import small_ones

        before = small_ones(model)
        found = self._fork(lambda: model)
        if found is not None:
            return str(found[2].weights)
        for tensor, value in before:
            tensor.copy_(value)
        return None

    def _load_files(self, model: torch.nn.Module, model_config: Any) -> None:
        from tensorlift.integrations.completeness import report, watch
        from tensorlift.integrations.weights import Delivery

        self._delivery = delivery = Delivery()
        try:
            with watch(model, self._is_optional) as coverage:
                super().load_weights(model, model_config)
        except BaseException as error:
            delivery.failed(error, log)
            raise
        finally:
            self._delivery = None
        report(coverage.missing, delivery.names, strict=self.settings.strict, engine=ENGINE, log=log)

    def get_all_weights(
        self, model_config: Any, model: torch.nn.Module
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors that a model takes; what reloads call."""
        self._model, self._source = model, 0
        tensors: Iterator[tuple[str, torch.Tensor]] = super().get_all_weights(model_config, model)
        if self._delivery is not None:
            return tensors
        # A reload takes the parameters out of the model before it asks for the first tensor. What is wrong
        # with the files has to show before: then the engine goes on with the weights that it has.
        first = next(tensors, None)
        return tensors if first is None else chain([first], tensors)

    def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of one source: of the model, or of another folder that it names."""
        from tensorlift.integrations.weights import iterate

        device = check_device(current_platform.device_type, ENGINE)
        if self.load_config.safetensors_load_strategy is not None:
            self._check_strategy(self.load_config.safetensors_load_strategy)
        files = self._files(source)
        if self.counter_before_loading_weights == 0.0:
            self.counter_before_loading_weights = time.perf_counter()
        number, self._source = self._source, self._source + 1
        return iterate(
            files,
            self.settings,
            device=device,
            process_group=self._group(),
            needed=self._needed(source),
            prefix=source.prefix,
            delivery=self._delivery,
            opened=lambda shapes: self._opened(number, shapes),
            bar=self._bar if enable_tqdm(self.load_config.use_tqdm_on_load) else None,
            log=log,
        )

    def _check_strategy(self, strategy: str) -> None:
        if strategy == "torchao":
            raise RequestError(
                f"load format {LOAD_FORMAT!r} does not put torchao's tensors together again (this checkpoint "
                "has them flattened); leave --load-format out"
            )
        log.warning(
            "--safetensors-load-strategy %s is for vLLM's own reading of files; load format %s has the "
            "setting backend instead",
            strategy,
            LOAD_FORMAT,
        )

    def _files(self, source: Any) -> list[str]:
        """What vLLM chooses, downloaded if need be; its refusals with the names of what is there."""
        from tensorlift.integrations.weights import check_files, check_index, other_weights

        try:
            folder, chosen, _, index = self._prepare_weights(
                source.model_or_path,
                source.subfolder,
                source.revision,
                source.fall_back_to_pt,
                source.allow_patterns_overrides,
            )
        except FileNotFoundError as error:
            raise CheckpointError(
                f"load format {LOAD_FORMAT!r}: {error}. A shard is missing; download or copy it again"
            ) from error
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
            check_index(source.model_or_path)
            raise
        except RuntimeError as error:
            # It has found nothing; what it passed over says why.
            if others := other_weights(source.model_or_path):
                check_files(others)
            raise CheckpointError(f"load format {LOAD_FORMAT!r}: {error}") from error
        files = check_files(chosen)
        if self._encoder_only_lm_prefixes is not None:
            files = list(
                filter_mm_encoder_only_safetensors_files(
                    files,
                    folder,
                    index,
                    self._encoder_only_lm_prefixes,
                    weights_mapper=self._encoder_only_weights_mapper,
                )
            )
        return files

    def _needed(self, source: Any) -> Callable[[str], bool] | None:
        """Which names this rank needs; None for all."""
        unused, experts = source.is_unused_weight, self.local_expert_ids
        if unused is None and experts is None:
            return None

        def needed(name: str) -> bool:
            return not (unused is not None and unused(name)) and not should_skip_weight(name, experts)

        return needed

    def _group(self) -> Any:
        """Who loads together: the world, unless it does not load at the same time, or not the same.

        With pipeline stages the draft model is on the last one alone. A reload reaches one replica of data
        parallelism at a time. Both have all ranks of a tensor parallel group. A load with an expert filter
        reads by itself: what a rank needs is little, and none of the others has it.
        """
        from tensorlift.integrations.weights import world

        if self.local_expert_ids is not None and self.settings.resolved().exchange != "gather":
            return None
        if (everyone := world()) is None:
            return None
        stage_alone = self._draft and get_pp_group().world_size > 1
        reloads = self._delivery is None and self._config is None
        replica_alone = reloads and get_dp_group().world_size > 1
        if stage_alone or replica_alone:
            group = get_tp_group()
            return group.device_group if group.world_size > 1 else None
        return everyone

    def _opened(self, number: int, shapes: dict[str, tuple[int, ...]]) -> None:
        """Remembers what a start brings; a reload has to bring as much, or is refused as a whole."""
        if self._model is None:
            return
        started = _started.setdefault(self._model, {})
        if self._delivery is not None:
            started[number] = shapes
        elif number in started:
            from tensorlift.integrations.completeness import compare_shapes

            compare_shapes(started[number], shapes, strict=self.settings.strict, engine=ENGINE, log=log)

    def _bar(self) -> AbstractContextManager[Report]:
        from tensorlift.integrations.bars import byte_bar

        return byte_bar("Loading safetensors using tensorlift")

    def _is_optional(self, name: str, module: torch.nn.Module, parameter: torch.Tensor) -> bool:
        """Whether a checkpoint may lack this parameter.

        As vLLM has it where it checks quantised models: scales of a cache have defaults; weights that are
        quantised while they are loaded are not in the checkpoint as such. Draft models share embedding and
        head with their target, which vLLM puts in after the load.
        """
        method = getattr(module, "quant_method", None)
        own = name.rpartition(".")[2]
        return (
            bool(getattr(method, "uses_meta_device", False))
            or isinstance(method, BaseKVCacheMethod)
            or own in _CONFIG_BUILT
            or (self._draft and (isinstance(module, VocabParallelEmbedding) or own in _DRAFT_BUILT))
        )


def _is_draft(model_config: Any) -> bool:
    config = get_current_vllm_config_or_none()
    speculative = None if config is None else config.speculative_config
    return speculative is not None and model_config is speculative.draft_model_config
