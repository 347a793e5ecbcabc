"""SGLang's part of forks and seeds: keys, placeholder weights, and when a scheduler's weights change.

SGLang tells a caller what failed instead of raising, so answers are looked at.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tensorlift.integrations.imports import imported_publisher
from tensorlift.integrations.sglang import ENGINE

__all__ = ["fill_with_placeholders", "key_of", "watch_scheduler", "watch_updates"]

_WEIGHTS = "weights"


def key_of(model_config: Any, draft: int | None) -> Any:
    """Which weights this rank has. ``draft``: the number of one of several drafts."""
    from sglang.srt.runtime_context import get_device, get_parallel, get_serving

    from tensorlift.forking.manifest import ModelKey
    from tensorlift.integrations.devices import describe_device
    from tensorlift.integrations.sglang import found_version

    place = get_parallel()
    role = "draft" if getattr(model_config, "is_draft_model", False) else "target"
    return ModelKey(
        model=get_serving().served_model_name or model_config.model_path,
        revision=getattr(model_config, "revision", None) or "",
        role=role if draft is None else f"{role} {draft}",
        dtype=str(model_config.dtype).removeprefix("torch."),
        quantization=model_config.quantization or "",
        tp=(place.tp_rank, place.tp_size),
        pp=(place.pp_rank, place.pp_size),
        ep=(place.moe_ep_rank, place.moe_ep_size),
        engine=f"{ENGINE} {found_version()}, {describe_device(get_device().device)}",
    )


def fill_with_placeholders(model: Any) -> None:
    """Weights of SGLang's load format "dummy", which its processing is known to take."""
    from sglang.srt.model_loader.loader import post_load_weights
    from sglang.srt.model_loader.weight_utils import initialize_dummy_weights

    initialize_dummy_weights(model)
    post_load_weights(model)


def watch_scheduler(module: ModuleType) -> None:
    """A scheduler that is made serves."""
    _wrap(module.Scheduler, "__init__", _made)


def watch_updates(module: ModuleType) -> None:
    """Wraps what the scheduler does with weights."""
    for name, around in _AROUND.items():
        _wrap(module.SchedulerWeightUpdaterManager, name, around)


def _wrap(kind: type, name: str, around: Callable[..., Any]) -> None:
    original = getattr(kind, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        def go() -> Any:
            return original(self, *args, **kwargs)

        # A scheduler's own start is what brings the publisher.
        if around is not _made and imported_publisher() is None:
            return go()
        return around(go, self, *args, **kwargs)

    setattr(kind, name, method)


def _made(go: Callable[[], Any], *_: Any, **__: Any) -> None:
    go()
    if (publisher := imported_publisher()) is not None:
        publisher.serve()


# SGLang allows both inside a session too, whose end is then the end of the update.


def _from_disk(go: Callable[[], Any], manager: Any, request: Any) -> Any:
    # One that fails has changed nothing, or SGLang has loaded the weights from before again.
    with imported_publisher().updating("weights are loaded from disk"):
        return _came(go(), _role(request))


def _from_ipc(go: Callable[[], Any], *_: Any) -> Any:
    with imported_publisher().updating("weights are updated"):
        return _came(_looked_at(go()))


def _begins(go: Callable[[], Any], manager: Any, request: Any) -> Any:
    publisher = imported_publisher()
    if publisher.is_updating:
        return go()  # which refuses a second session
    publisher.begin_update("weights are updated")
    try:
        answer = _looked_at(go())
    except BaseException:
        publisher.spoil()
        publisher.end_update()
        raise
    if not answer.success:
        publisher.end_update()
    return answer


def _role(request: Any) -> str:
    selector = getattr(request, "selector", "all")
    return "" if selector == "all" else str(selector)


def _within(go: Callable[[], Any], manager: Any, *_: Any) -> Any:
    """Outside of a session SGLang refuses, and nothing changes."""
    publisher = imported_publisher()
    if not publisher.is_updating:
        if getattr(manager, "_session", None) is not None:  # it has outlived ours
            publisher.withdraw("weights are updated behind an update that failed", lost=True)
        return go()
    try:
        return _looked_at(go())
    except BaseException:
        publisher.spoil()
        raise


def _brings(go: Callable[[], Any], manager: Any, request: Any) -> Any:
    return _came(_within(go, manager), _role(request))


def _ends(go: Callable[[], Any], manager: Any, *_: Any) -> Any:
    answer = _within(go, manager)
    imported_publisher().end_update()
    return answer


def _looked_at(answer: Any) -> Any:
    if not answer.success:
        imported_publisher().spoil()
    return answer


def _came(answer: Any, role: str = "") -> Any:
    if answer.success:
        imported_publisher().came(role)
    return answer


def _releases(go: Callable[[], Any], manager: Any, request: Any) -> Any:
    if not request.tags or _WEIGHTS in request.tags:
        from sglang.srt.runtime_context import get_exec

        kept = bool(getattr(get_exec().features, "enable_weights_cpu_backup", False))
        imported_publisher().withdraw("memory is released", lost=not kept, gone=True)
    return go()


def _resumes(go: Callable[[], Any], manager: Any, request: Any) -> Any:
    answer = go()
    if not request.tags or _WEIGHTS in request.tags:
        imported_publisher().restore()
    return answer


def _checks(go: Callable[[], Any], manager: Any, request: Any) -> Any:
    if request.action == "reset_tensors":
        imported_publisher().withdraw("the weights are reset", lost=True)
    return go()


_AROUND: dict[str, Callable[..., Any]] = {
    "update_weights_from_disk": _from_disk,
    "update_weights_from_ipc": _from_ipc,
    "begin_weight_update": _begins,
    "update_weights_from_tensor": _brings,
    "update_weights_from_distributed": _brings,
    "end_weight_update": _ends,
    "check_weights": _checks,
    "release_memory_occupation": _releases,
    "resume_memory_occupation": _resumes,
}
