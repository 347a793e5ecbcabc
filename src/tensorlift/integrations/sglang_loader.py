"""SGLang's loader: its default one, with the reading replaced. Imported where SGLang configures a load."""

from __future__ import annotations

import copy
import glob
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from sglang.srt.configs.load_config import _DEFAULT_LOAD_GROUP, LoadFormat
from sglang.srt.model_loader.loader import DefaultModelLoader, ModelOptModelLoader, get_model_loader
from sglang.srt.model_loader.weight_utils import maybe_add_mtp_safetensors
from sglang.srt.runtime_context import get_device, get_exec
from sglang.srt.utils.common import BAR_FORMAT

from tensorlift.errors import CheckpointError, OptionError
from tensorlift.format.listing import SUFFIX, USUAL_INDEX
from tensorlift.integrations import completeness
from tensorlift.integrations.bars import byte_bar
from tensorlift.integrations.devices import check_device
from tensorlift.integrations.forks import fork_model
from tensorlift.integrations.publisher import publisher
from tensorlift.integrations.settings import LOAD_FORMAT
from tensorlift.integrations.sglang import ENGINE, settings_of, tell_version
from tensorlift.integrations.sglang_forks import fill_with_placeholders, key_of
from tensorlift.integrations.state import State
from tensorlift.integrations.weights import (
    Delivery,
    check_files,
    check_index,
    iterate,
    other_weights,
    rank,
    world,
)
from tensorlift.sources.identifying import checkpoint_of

__all__ = ["TensorliftModelLoader", "may_be_missing"]

_log = logging.getLogger("tensorlift.sglang")
_started: dict[tuple[bool, str], dict[str, tuple[int, ...]]] = {}
"""Tensors that the process started with, shapes by name: by (a draft?, prefix)."""


class _LikeSafetensors(type(DefaultModelLoader)):  # type: ignore[misc]
    """Makes the loader's class, as a load format, equal to "safetensors".

    SGLang asks the load format of a LoadConfig in other places than the loader: what files to look for, to
    read LoRA adapters, to open the target again for a draft's embedding. To all of them a checkpoint of ours
    is one of safetensors files.
    """

    def __eq__(cls, other: object) -> bool:
        return other is cls or (isinstance(other, str) and other == LoadFormat.SAFETENSORS.value)

    __hash__ = type.__hash__


class TensorliftModelLoader(DefaultModelLoader, metaclass=_LikeSafetensors):  # type: ignore[misc]
    """One load, or one reload: SGLang makes a loader for each."""

    counter_before_loading_weights: float = 0.0

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        self._settings = settings_of(load_config)
        self._delivery = Delivery()
        self._starting = False
        """Whether a model is made and filled, rather than filled anew."""
        self._draft = False
        self._only_layout = False
        """Whether the weights of the model that is made are only placeholders."""

    def load_model(self, *, model_config: Any, device_config: Any) -> Any:
        """A model with its weights; SGLang calls it once for the target and once for each draft."""
        tell_version()
        check_device(device_config.device, ENGINE)
        self._check_quantization(model_config)
        self._starting = True
        self._draft = bool(getattr(model_config, "is_draft_model", False))
        instances = self._settings.instances
        model = self._forked(model_config, device_config) if instances.forks else None
        if model is None:
            model = self._made(model_config, device_config)
            if instances.publish:
                self._offer(model_config, lambda: State(model, "sglang"), _checkpoint(model_config))
        return model

    def _made(self, model_config: Any, device_config: Any) -> Any:
        return super().load_model(model_config=model_config, device_config=device_config)

    def _forked(self, model_config: Any, device_config: Any) -> Any:
        """A model with the weights of a running instance; None where files have to do.

        They are as SGLang's processing has left them. So the model is made and processed with placeholders
        first, which gives it its layout, and is not processed again.
        """
        if self.counter_before_loading_weights == 0.0:
            self.counter_before_loading_weights = time.perf_counter()
        self._only_layout = True
        try:
            found = fork_model(
                lambda: self._made(model_config, device_config),
                self._key(model_config),
                self._settings,
                engine="sglang",
                group=self._group(),
                bar=_bar if rank() == 0 else None,
                log=_log,
                own=lambda: _checkpoint(model_config),
            )
        finally:
            self._only_layout = False
        if found is None:
            return None
        model, state, came = found
        self.counter_after_loading_weights = time.perf_counter()
        self._offer(model_config, lambda: state, came.weights)
        return model

    def _key(self, model_config: Any) -> Callable[[], Any]:
        return lambda: key_of(model_config, self.load_config.draft_model_idx)

    def _offer(self, model_config: Any, state: Callable[[], State], weights: str) -> None:
        publisher.add(state, self._key(model_config), self._settings.instances, _log, weights)

    def _check_quantization(self, model_config: Any) -> None:
        """SGLang takes a loader's class before it asks how the model is quantised: done here instead."""
        config = copy.copy(self.load_config)
        config.load_format = LoadFormat.SAFETENSORS
        plain = get_model_loader(config, model_config)
        quantized = isinstance(plain, ModelOptModelLoader) and model_config._is_already_quantized()
        if getattr(model_config, "modelopt_quant", None) or not (
            quantized or type(plain) is DefaultModelLoader
        ):
            raise OptionError(
                f"{ENGINE} quantises this model while it loads, by its own {type(plain).__name__} "
                f"(quantization {model_config.quantization!r}), which cannot take load format "
                f"{LOAD_FORMAT!r}; leave --load-format out"
            )

    def load_weights_and_postprocess(self, model: Any, weights: Any, target_device: Any) -> None:
        """As the default loader does, with a look at what the model has taken in between.

        In between, for what follows may put other tensors in a parameter's place, or make all of it up from
        what is there.
        """
        if self._only_layout:
            fill_with_placeholders(model)
            DefaultModelLoader.postprocess_weights(model, target_device)
            return
        try:
            if not self._starting:
                DefaultModelLoader.load_weights_only(model, weights, target_device)
            else:
                with completeness.watch(model, may_be_missing(self._draft)) as coverage:
                    DefaultModelLoader.load_weights_only(model, weights, target_device)
                completeness.report(
                    coverage.missing,
                    self._delivery.names,
                    # A poor draft costs time and no answer: the target checks each of its tokens. And some
                    # are published without a bias that SGLang's model has.
                    strict=self._settings.strict and not self._draft,
                    engine=ENGINE,
                    log=_log,
                )
        except BaseException as error:
            self._delivery.failed(error, _log)
            raise
        DefaultModelLoader.postprocess_weights(model, target_device)

    def _get_weights_iterator(
        self,
        source: Any,
        *,
        resolved_source: Any = None,
        startup_prefetch_started: bool = False,
        startup_prefetch_active: bool = False,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of one source. The first is read here already, and with it all headers.

        For a reload, that is the last moment at which SGLang can still refuse: whatever is wrong with the
        files, the weights from before stay, and the server goes on.
        """
        device = check_device(get_device().device, ENGINE)
        files = self._files(source, resolved_source)
        index = self.load_config.draft_model_idx
        if self.counter_before_loading_weights == 0.0:
            self.counter_before_loading_weights = time.perf_counter()
        pairs = iterate(
            files,
            self._settings,
            device=device,
            process_group=self._group(),
            needed=None if index is None else self._of_draft(index),
            # What picks a draft's layer adds the prefix itself, to names that it has changed.
            prefix=source.prefix if index is None else "",
            delivery=self._delivery,
            opened=lambda shapes: self._compare(source, shapes),
            bar=_bar if rank() == 0 else None,
            log=_log,
        )
        pairs = _begun(pairs)
        return pairs if index is None else self._filter_mtp_weights(pairs, source.prefix, index)

    def _of_draft(self, index: int) -> Callable[[str], bool]:
        """Whether the draft of that number wants a tensor: what it does not want is not read."""

        def needed(name: str) -> bool:
            match = self._MTP_PATTERN.match(name)
            return match is None or int(match.group(1)) == index

        return needed

    def _files(self, source: Any, resolved: Any) -> list[str]:
        """The files of a source, found and filtered by SGLang; its reasons for finding none, in our words."""
        if resolved is not None:
            return list(resolved.weight_files)
        try:
            folder, files, _ = self._prepare_weights(
                source.model_or_path,
                source.revision,
                source.fall_back_to_pt,
                source.allow_patterns_overrides,
            )
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
            check_index(source.model_or_path)
            raise
        except RuntimeError as error:
            # It has found nothing, or not all that the index lists; what it passed over says why.
            folder = source.model_or_path
            if not glob.glob(os.path.join(glob.escape(folder), f"*{SUFFIX}")) and (
                others := other_weights(folder)
            ):
                check_files(others)
            raise CheckpointError(f"load format {LOAD_FORMAT!r}: {error}") from error
        if source.model_config is not None:
            files = maybe_add_mtp_safetensors(files, folder, USUAL_INDEX, source.model_config.hf_config)
        return list(files)

    def _group(self) -> Any:
        """Who loads together, which follows from how SGLang loads.

        All ranks of the world load at the same time, drafts and reloads included, but where there are
        several pipeline stages: then SGLang names the group of the ranks of one.
        """
        group = self.load_config.load_group
        if group is _DEFAULT_LOAD_GROUP:
            return None if self._alone() else world()
        return None if group is None or group.world_size <= 1 else group.device_group

    def _alone(self) -> bool:
        """With elastic experts a rank joins, or fetches experts from disk, while the others serve."""
        moe = get_exec().moe
        joins = bool(getattr(moe, "is_ep_joiner", False))
        return joins or (getattr(moe, "elastic_ep_backend", None) is not None and not self._starting)

    def _compare(self, source: Any, shapes: dict[str, tuple[int, ...]]) -> None:
        """Keeps what a start brings; a reload must have it all, in the same shapes."""
        config = source.model_config
        place = (bool(getattr(config, "is_draft_model", False)), source.prefix)
        if self._starting:
            _started[place] = shapes
        elif place in _started:
            completeness.compare_shapes(
                _started[place], shapes, strict=self._settings.strict, engine=ENGINE, log=_log
            )


def _checkpoint(model_config: Any) -> str:
    return checkpoint_of(model_config.model_path, getattr(model_config, "revision", None))


def _bar() -> Any:
    return byte_bar(f"Loading safetensors using {LOAD_FORMAT}", bar_format=BAR_FORMAT)


def _begun(pairs: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The same after its first step, so that what can be wrong with files and headers has come out."""
    first = list(itertools.islice(pairs, 1))

    def rest() -> Iterator[tuple[str, torch.Tensor]]:
        while first:  # taken out of the list: nobody shall hold it longer than the model does
            yield first.pop()
        yield from pairs

    return rest()


def may_be_missing(draft: bool) -> completeness.Optional:
    """Which parameters of SGLang's models a checkpoint may lack.

    Scales and such that have a default of their own: what is neither a weight nor a bias and has one value
    throughout. Not 0, which is often in memory that nobody has filled, nor the lowest number, which SGLang
    puts where a checkpoint has to bring something else; but of the scales of a fused layer, one for each of
    its parts, a checkpoint that is fused itself brings only the first.

    A draft has embedding and head from its target, after it was loaded.
    """

    def optional(name: str, module: torch.nn.Module, parameter: torch.Tensor) -> bool:
        if draft and ("embed_tokens." in name or "lm_head." in name):
            return True
        if name.rpartition(".")[2] in ("weight", "bias") or parameter.element_size() < 2:
            return False
        # A few of its values: all of an expert's would take longer to look at than to load.
        few = parameter.detach()[tuple(slice(None, None, max(1, size // 8)) for size in parameter.shape)]
        values = few.double().reshape(-1)
        first = float(values[0])
        if first == 0 or not bool((values == first).all()):
            return False
        parts = getattr(module, "output_partition_sizes", ())
        unset = parameter.is_floating_point() and first == torch.finfo(parameter.dtype).min
        return not unset or (len(parts) > 1 and parameter.numel() == len(parts))

    return optional
