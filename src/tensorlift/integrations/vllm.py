"""The load format for vLLM: ``--load-format tensorlift``.

vLLM calls ``register`` in each of its processes (entry point group ``vllm.general_plugins``). It must not
fail, for nothing guards the call, and must not cost: vLLM's loaders and the library come with the first model
that is loaded (``vllm_loader.py``), not with the plug-in.
"""

from __future__ import annotations

import functools
import logging
from types import ModuleType
from typing import Any

from tensorlift.integrations.imports import when_imported
from tensorlift.integrations.settings import LOAD_FORMAT, Settings, parse
from tensorlift.integrations.versions import check_version

__all__ = ["ENGINE", "PROVEN", "check", "log", "register"]

ENGINE = "vLLM"
PROVEN = "0.32.0"

# Where weights move between ranks or are there more than once: argument, and its value without.
_MOVES_WEIGHTS = (("data_parallel_size", 1), ("enable_eplb", False), ("enable_elastic_ep", False))

# Below vLLM's own logger, so that lines come where its lines do, with its marks of process and rank.
log = logging.getLogger("vllm.tensorlift")

_registered = False


def register() -> None:
    """Makes the load format known; called again it does nothing, and it never raises."""
    global _registered
    if _registered:
        return
    _registered = True
    try:
        when_imported("vllm.model_executor.model_loader", _guarded(_add_loader))
        when_imported("vllm.engine.arg_utils", _guarded(_check_arguments))
        for worker in ("gpu_worker", "cpu_worker"):
            when_imported(f"vllm.v1.worker.{worker}", _guarded(_watch))
    except Exception:  # vLLM has to start, with whatever other load format
        log.exception("load format %s could not be registered", LOAD_FORMAT)


def _guarded(step: Any) -> Any:
    """The same step, whose failure is said in the log: who does not want the format must not notice."""

    @functools.wraps(step)
    def guarded(module: ModuleType) -> None:
        try:
            step(module)
        except Exception:
            log.exception("load format %s does not fit this vLLM (shown with %s)", LOAD_FORMAT, PROVEN)

    return guarded


def _add_loader(model_loader: Any) -> None:
    from tensorlift.integrations.vllm_loader import TensorliftLoader

    model_loader.register_model_loader(LOAD_FORMAT)(TensorliftLoader)


def _watch(worker: ModuleType) -> None:
    from tensorlift.integrations.vllm_forks import watch

    watch(worker)


def _check_arguments(arg_utils: Any) -> None:
    """Has configurations checked where they are made, in the first process, before others are started."""
    arguments = arg_utils.EngineArgs
    original = arguments.create_engine_config

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Before vLLM's own work, which may be a download: the arguments alone show what is wrong.
        _check_if_ours(self)
        config = original(self, *args, **kwargs)
        speculative = getattr(config, "speculative_config", None)
        loads = (getattr(config, "load_config", None), getattr(speculative, "draft_load_config", None))
        for settings in filter(None, map(_check_if_ours, loads)):
            from tensorlift.integrations.devices import check_device

            check_device(config.device_config.device_type, ENGINE)
            parallel = config.parallel_config
            settings.instances.check_engine(ENGINE, parallel, parallel.world_size, _MOVES_WEIGHTS)
        return config

    arguments.create_engine_config = create_engine_config


def _check_if_ours(load: Any) -> Settings | None:
    """The settings of a configuration, or of arguments, that are of this load format, checked; else None.

    Nothing of another format may fail here, so what another vLLM may have elsewhere is asked for with care.
    """
    ours = str(getattr(load, "load_format", None)).lower() == LOAD_FORMAT
    return check(load.model_loader_extra_config) if ours else None


def check(extra: object) -> Settings:
    """The settings in an extra configuration; looks at vLLM's version too, now that it matters."""
    from vllm import __version__ as found

    check_version(ENGINE, found, PROVEN, log)
    return parse(extra, ENGINE)
