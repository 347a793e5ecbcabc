"""SGLang's plug-in: makes ``--load-format tensorlift`` known, for draft models too, and checks arguments.

SGLang calls ``register`` in each of its processes, most of which load nothing; so this module imports neither
torch nor the loader (``sglang_loader``), which comes when the first load is configured.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tensorlift.errors import OptionError
from tensorlift.integrations.imports import when_imported
from tensorlift.integrations.settings import LOAD_FORMAT, Settings, parse
from tensorlift.integrations.versions import check_version

__all__ = ["ENGINE", "PROVEN", "found_version", "register", "settings_of", "tell_version"]

ENGINE = "SGLang"
PROVEN = "0.5.23"
_HOOKED = "sglang.srt.configs.load_config.LoadConfig._verify_load_format"
_log = logging.getLogger("tensorlift.sglang")

# What this process started with, for reloads.
_started_with: Settings | None = None

# Where SGLang reads weights by other ways than the loader, or in processes that know no plug-ins: argument,
# the value without it, and what it is.
_ELSEWHERE = (
    ("weight_cache_mode", "off", "the weight cache's daemon"),
    ("encoder_only", False, "the encoder of a disaggregated server"),
    ("enable_elastic_expert_backup", False, "the backup of elastic experts"),
    ("use_ray", False, "Ray's actors"),
)
# Where weights move between ranks or are there more than once: argument, and its value without.
_MOVES_WEIGHTS = (("dp_size", 1), ("enable_eplb", False), ("elastic_ep_backend", None))
# Of SGLang's own reading, which ours makes pointless.
_POINTLESS = ("weight_loader_prefetch_checkpoints", "weight_loader_drop_cache_after_load")


def register() -> None:
    """The entry point; may be called again.

    Where SGLang has changed so much that this fails, that is said once, and its other load formats work.
    """
    try:
        from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES, add_load_format_choices
        from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        if LOAD_FORMAT in LOAD_FORMAT_CHOICES:
            return
        HookRegistry.register(_HOOKED, _take_load_format, HookType.AROUND)
        register_resolution_hook("handle_load_format")(_check_arguments)
        when_imported("sglang.srt.managers.scheduler", _watch_scheduler)
        # Last: whoever finds the name among the choices can rely on the rest.
        add_load_format_choices([LOAD_FORMAT])
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        _log.warning(
            "load format %s is not available: %s %s has not what it needs (%s: %s); it was shown with %s",
            LOAD_FORMAT,
            ENGINE,
            found_version(),
            type(error).__name__,
            error,
            PROVEN,
        )


def _watch_scheduler(module: ModuleType) -> None:
    """Schedulers own weights, and with them come their updates; a failure of ours stops none of them."""
    try:
        from tensorlift.integrations.sglang_forks import watch_scheduler, watch_updates

        watch_scheduler(module)
        watch_updates(module)
    except Exception:  # noqa: BLE001 - whatever it is, SGLang has to start
        _log.exception("load format %s: no weights are offered: this %s does not fit", LOAD_FORMAT, ENGINE)


def found_version() -> str:
    """SGLang's, of this environment."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return "of an unknown version"


def tell_version() -> None:
    """Warns once a process where SGLang is not the one that was tried."""
    check_version(ENGINE, found_version(), PROVEN, _log)


def _check_arguments(server_args: Any, previous: Callable[[Any], None]) -> None:
    """A step of SGLang's resolution of arguments: refuses here what could only fail later.

    SGLang's main process runs it, before workers are started and before a device is touched.
    """
    previous(server_args)
    view = _view(server_args)
    formats = (getattr(view, "load_format", None), getattr(view, "speculative_draft_load_format", None))
    if LOAD_FORMAT not in formats:
        return
    from tensorlift.integrations.devices import check_device

    tell_version()
    device = getattr(view, "device", None)
    if device is not None:
        check_device(device, ENGINE)
    settings = parse(getattr(view, "model_loader_extra_config", None), ENGINE)
    ranks = (getattr(view, "tp_size", 1) or 1) * (getattr(view, "pp_size", 1) or 1)
    settings.instances.check_engine(ENGINE, view, ranks, _MOVES_WEIGHTS)
    for name, without, what in _ELSEWHERE:
        if (value := getattr(view, name, without)) not in (without, None):
            raise OptionError(
                f"{ENGINE}: {name}={value!r}: {what} cannot load with load format {LOAD_FORMAT!r}; leave one "
                "of the two out"
            )
    for name in _POINTLESS:
        if getattr(view, name, False):
            _log.warning("%s: %s changes nothing with load format %s", ENGINE, name, LOAD_FORMAT)


def _view(server_args: Any) -> Any:
    """The arguments as far as they are decided.

    Those of other formats come through here too: where another SGLang has no such view, they must not fail.
    """
    try:
        from sglang.srt.arg_groups.model_override_base import resolving_view

        return resolving_view(server_args)
    except (AttributeError, ImportError, TypeError):
        return server_args


def _take_load_format(original: Callable[[Any], None], config: Any) -> None:
    """Around ``LoadConfig._verify_load_format``, which knows only SGLang's own formats.

    Where the format is ours, it becomes the loader's class, which ``get_model_loader`` takes. The extra
    configuration is taken out of the LoadConfig: SGLang makes loaders of its own from the same one (for LoRA
    adapters), and those refuse keys that they do not know.
    """
    global _started_with
    given = config.load_format
    if not isinstance(given, str) or given.lower() != LOAD_FORMAT:
        original(config)
        return
    from tensorlift.integrations.sglang_loader import TensorliftModelLoader

    # A reload from disk is configured with neither extra configuration nor rank: it gets that of the start.
    extra = config.model_loader_extra_config
    if extra or config.tp_rank is not None:
        _started_with = parse(extra, ENGINE)
    config.tensorlift_settings = _started_with or parse(None, ENGINE)
    config.model_loader_extra_config = {}
    config.load_format = TensorliftModelLoader


def settings_of(config: Any) -> Settings:
    """What ``_take_load_format`` has left in a LoadConfig; for one made in another way, that of the start."""
    settings: Settings | None = getattr(config, "tensorlift_settings", None)
    return settings or _started_with or parse(config.model_loader_extra_config, ENGINE)
