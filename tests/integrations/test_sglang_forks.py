"""Forks and seeds of SGLang, over a stand-in that keeps its interface; tests/engines has the real one."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support import fake_sglang
from support.checkpoints import write_safetensors
from support.fake_sglang import Model, arguments, configuration, rows
from tensorlift.errors import ForkError, OptionError, SeedError
from tensorlift.forking.client import SeedClient
from tensorlift.integrations import publisher as publishing
from tensorlift.integrations import sglang
from tensorlift.integrations import weights as weights_module

OURS = ("sglang_forks", "sglang_loader")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[fake_sglang.Engine]:
    caplog.set_level(logging.INFO)
    found = fake_sglang.install(monkeypatch)
    monkeypatch.setattr(weights_module, "rank", lambda: 0)
    monkeypatch.setattr(sglang, "found_version", lambda: sglang.PROVEN)
    monkeypatch.setattr(sglang, "_started_with", None)
    monkeypatch.setattr(fake_sglang.DefaultModelLoader, "postprocess_weights", staticmethod(processed))
    for name in OURS:
        monkeypatch.delitem(sys.modules, f"tensorlift.integrations.{name}", raising=False)
    sglang.register()
    yield found
    publishing.publisher.close()
    for name in OURS:
        sys.modules.pop(f"tensorlift.integrations.{name}", None)


def processed(model: Any, target: Any) -> None:
    """Stands for the processing of a quantised model: a packed weight, a derived tensor and a number."""
    model.processed = getattr(model, "processed", 0) + 1
    model.weight = torch.nn.Parameter((model.weight.data * 2).reshape(8, 8), requires_grad=False)
    model.derived = model.weight.sum(0)
    model.weight_max = float(model.weight.max())


def load(engine: fake_sglang.Engine, path: Path, make: Any = Model, **extra: Any) -> Any:
    """A worker's load."""
    more = {"progress": False, **extra}
    config = engine.configure(load_format="tensorlift", tp_rank=0, model_loader_extra_config=more)
    model = configuration(path, make=make, is_draft_model=extra.pop("draft", False))
    return engine.loader(config, model).load_model(
        model_config=model, device_config=SimpleNamespace(device="cpu")
    )


def serve(caplog: pytest.LogCaptureFixture) -> tuple[str, Any]:
    """(URL, what updates weights) of a scheduler."""
    caplog.clear()
    scheduler = sys.modules["sglang.srt.managers.scheduler"]
    kind: Any = scheduler.Scheduler  # type: ignore[attr-defined]
    kind(None, None)
    said = [record.getMessage() for record in caplog.records if " offers " in record.getMessage()]
    return said[0].rpartition(" at ")[2], scheduler.SchedulerWeightUpdaterManager()  # type: ignore[attr-defined]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_safetensors(tmp_path / "model.safetensors", rows())
    return tmp_path


@pytest.fixture
def seeded(
    engine: fake_sglang.Engine, folder: Path, caplog: pytest.LogCaptureFixture
) -> tuple[str, Any, Any]:
    """(URL, updater, model) of an instance."""
    model = load(engine, folder, publish=True)
    return *serve(caplog), model


def same(one: Any, other: Any) -> None:
    for name in ("weight", "derived", "scale"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert torch.equal(one.norm.weight, other.norm.weight)
    assert (one.weight_max, one.processed) == (other.weight_max, other.processed)


def state_of(url: str) -> str:
    """What a reader is told."""
    try:
        client = SeedClient(url)
        client.release(client.lease(1.0).id)
    except SeedError as error:
        return "updating" if "it updates its weights" in str(error) else "closed"
    return "open"


def test_a_fork_is_what_a_load_is_and_was_processed_once(
    engine: fake_sglang.Engine, seeded: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url, _, model = seeded
    same(load(engine, tmp_path / "no files", seed=url), model)
    assert "tensorlift: rank 0: forked " in caplog.text
    assert "'served' (target, float32, SGLang 0.5.23, cpu " in caplog.text


@pytest.mark.parametrize("case", ["nobody", "other layout"])
def test_files_stand_in_and_the_log_says_why(
    engine: fake_sglang.Engine, seeded: Any, folder: Path, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    url, _, model = seeded
    made = []

    def make() -> Model:
        made.append(Model())
        if case == "other layout" and len(made) == 1:
            made[0].more = torch.zeros(3)  # type: ignore[assignment]
        return made[-1]

    if case == "nobody":
        publishing.publisher.close()
    same(load(engine, folder, make, seed=url), model)
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert ("cannot be reached" if case == "nobody" else "'more' is not in the seed") in line
    assert line.endswith("; loading from files")
    publishing.publisher.close()
    with pytest.raises(ForkError, match="files may not stand in"):
        load(engine, folder, seed=url, fallback=False)


def test_drafts_stand_behind_the_url_of_their_target(
    engine: fake_sglang.Engine, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(engine, folder, publish=True)
    extra = {"progress": False, "publish": True}
    for index in (0, 1):
        config = engine.configure(
            load_format="tensorlift", tp_rank=0, model_loader_extra_config=extra, draft_model_idx=index
        )
        model = configuration(folder, is_draft_model=True)
        engine.loader(config, model).load_model(
            model_config=model, device_config=SimpleNamespace(device="cpu")
        )
    url, _ = serve(caplog)
    assert "(draft 0, " in caplog.text
    assert f"behind {url}" in caplog.text
    with pytest.raises(ForkError, match="draft 1"):
        SeedClient(url).peer(publishing.ModelKey(model="another"))


def request(**given: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"tags": None, "selector": "all", **given})


@pytest.mark.parametrize("method", ["update_weights_from_disk", "update_weights_from_ipc"])
def test_an_update_at_once(seeded: Any, method: str) -> None:
    url, updater, _ = seeded
    before = SeedClient(url).state().epoch
    getattr(updater, method)(request())
    assert (state_of(url), SeedClient(url).state().epoch) == ("open", before + 1)
    updater.success = False
    getattr(updater, method)(request())
    # From disk SGLang goes back to what was there.
    assert state_of(url) == ("open" if "disk" in method else "closed")
    updater.error = RuntimeError("half way")
    with pytest.raises(RuntimeError, match="half way"):
        getattr(updater, method)(request())
    assert state_of(url) == "closed"


def test_a_session_of_updates(seeded: Any) -> None:
    url, updater, _ = seeded
    updater.update_weights_from_tensor(request())
    assert state_of(url) == "open"
    updater.begin_weight_update(request())
    assert state_of(url) == "updating"
    updater.begin_weight_update(request())
    updater.update_weights_from_tensor(request())
    updater.update_weights_from_distributed(request())
    assert state_of(url) == "updating"
    updater.end_weight_update(request())
    assert state_of(url) == "open"
    updater.end_weight_update(request())
    assert state_of(url) == "open"


@pytest.mark.parametrize("method", ["update_weights_from_disk", "update_weights_from_ipc"])
def test_an_update_at_once_inside_of_a_session(seeded: Any, method: str) -> None:
    url, updater, _ = seeded
    updater.begin_weight_update(request())
    getattr(updater, method)(request())
    assert state_of(url) == "updating"
    updater.end_weight_update(request())
    assert state_of(url) == "open"


def test_a_session_goes_on_behind_a_withdrawal(engine: fake_sglang.Engine, seeded: Any) -> None:
    url, updater, _ = seeded
    engine.features.enable_weights_cpu_backup = True
    updater.begin_weight_update(request())
    updater.update_weights_from_tensor(request())
    updater.release_memory_occupation(request())
    updater.resume_memory_occupation(request())
    assert state_of(url) == "closed"  # half of the weights are old
    updater.update_weights_from_tensor(request())
    assert state_of(url) == "closed"
    updater.end_weight_update(request())
    assert state_of(url) == "open"


def test_a_session_that_outlives_its_update_is_not_believed(seeded: Any) -> None:
    url, updater, _ = seeded
    updater.begin_weight_update(request())
    publishing.publisher.spoil()
    publishing.publisher.end_update()
    updater.update_weights_from_disk(request())
    assert state_of(url) == "open"
    updater.update_weights_from_tensor(request())
    assert state_of(url) == "closed"


def test_a_session_while_memory_is_released(engine: fake_sglang.Engine, seeded: Any) -> None:
    url, updater, _ = seeded
    engine.features.enable_weights_cpu_backup = True
    updater.release_memory_occupation(request())
    updater.begin_weight_update(request())
    updater.end_weight_update(request())
    assert state_of(url) == "closed"
    updater.resume_memory_occupation(request())
    assert state_of(url) == "open"


def test_weights_that_are_reset_for_a_check(seeded: Any) -> None:
    url, updater, _ = seeded
    updater.check_weights(request(action="checksum"))
    assert state_of(url) == "open"
    updater.check_weights(request(action="reset_tensors"))
    updater.resume_memory_occupation(request())
    assert state_of(url) == "closed"
    updater.update_weights_from_disk(request())
    assert state_of(url) == "open"


def test_an_instance_of_another_checkpoint_is_not_forked(
    engine: fake_sglang.Engine, seeded: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url, _, model = seeded
    (tmp_path / "v2").mkdir()
    write_safetensors(tmp_path / "v2" / "model.safetensors", rows(seed=5))
    assert not torch.equal(load(engine, tmp_path / "v2", seed=url).weight, model.weight)
    assert "the instance has checkpoint " in caplog.text


def test_a_session_that_fails(seeded: Any) -> None:
    url, updater, _ = seeded
    updater.begin_weight_update(request())
    updater.success = False
    updater.update_weights_from_tensor(request())
    updater.success = True
    updater.end_weight_update(request())
    assert state_of(url) == "closed"
    updater.begin_weight_update(request(selector="draft"))
    updater.end_weight_update(request())
    assert state_of(url) == "closed"
    updater.begin_weight_update(request())
    updater.end_weight_update(request())
    assert state_of(url) == "closed"  # nothing has come
    updater.begin_weight_update(request())
    updater.update_weights_from_tensor(request())
    updater.end_weight_update(request())
    assert state_of(url) == "open"
    for method in ("begin_weight_update", "update_weights_from_tensor"):
        if method != "begin_weight_update":
            updater.begin_weight_update(request())
        updater.error = RuntimeError("half way")
        with pytest.raises(RuntimeError, match="half way"):
            getattr(updater, method)(request())
        updater.error, updater._session = None, None
        assert state_of(url) != "open"
        updater.update_weights_from_disk(request())


def test_a_beginning_that_is_refused_changes_nothing(seeded: Any) -> None:
    url, updater, _ = seeded
    updater.success = False
    updater.begin_weight_update(request())
    assert state_of(url) == "closed"  # what it has restored so far is not known


@pytest.mark.parametrize("session", [True, False])
@pytest.mark.parametrize("how", ["released", "reset", "half updated"])
def test_a_reload_that_is_refused_brings_nothing(seeded: Any, how: str, session: bool) -> None:
    url, updater, _ = seeded
    if how == "released":
        updater.release_memory_occupation(request())
        updater.resume_memory_occupation(request())
    elif how == "reset":
        updater.check_weights(request(action="reset_tensors"))
    else:
        updater.begin_weight_update(request())
        updater.success = False
        updater.update_weights_from_tensor(request())
        updater.success = True
        updater.end_weight_update(request())

    def reload(success: bool) -> str:
        if session:
            updater.begin_weight_update(request())
        updater.success = success
        updater.update_weights_from_disk(request())
        updater.success = True
        if session:
            updater.end_weight_update(request())
        return state_of(url)

    seen = [reload(success) for success in (False, False, True, False)]
    assert seen == ["closed", "closed", "open", "open"]


@pytest.mark.parametrize("kept", [True, False])
def test_memory_that_is_released(engine: fake_sglang.Engine, seeded: Any, kept: bool) -> None:
    url, updater, _ = seeded
    engine.features.enable_weights_cpu_backup = kept
    updater.release_memory_occupation(request(tags=["kv_cache"]))
    assert state_of(url) == "open"
    updater.release_memory_occupation(request(tags=[]))
    assert state_of(url) == "closed"
    updater.resume_memory_occupation(request(tags=["kv_cache"]))
    assert state_of(url) == "closed"
    updater.resume_memory_occupation(request(tags=["weights"]))
    assert state_of(url) == ("open" if kept else "closed")
    updater.update_weights_from_disk(request())
    assert state_of(url) == "open"


def test_what_cannot_be_offered_is_refused_with_the_arguments(engine: fake_sglang.Engine) -> None:
    engine.check(arguments(model_loader_extra_config='{"seed": "http://h:1"}', tp_size=8, enable_eplb=True))
    engine.check(arguments(model_loader_extra_config='{"publish": {"port": 7000}}', tp_size=8))
    for given, says in (
        ({"tp_size": 4, "pp_size": 2}, "with 8 ranks"),
        ({"enable_eplb": True}, "does not go with enable_eplb"),
        ({"dp_size": 2}, "does not go with dp_size"),
    ):
        with pytest.raises(OptionError, match=says):
            engine.check(arguments(model_loader_extra_config='{"publish": true}', **given))


def test_a_scheduler_without_ours_is_left_alone(
    engine: fake_sglang.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "tensorlift.integrations.publisher")
    module: Any = sys.modules["sglang.srt.managers.scheduler"]
    assert module.Scheduler(None, None).weight_updater is not None
    assert module.SchedulerWeightUpdaterManager().update_weights_from_disk(request()).success
    monkeypatch.undo()


def test_an_sglang_without_such_schedulers_starts(caplog: pytest.LogCaptureFixture) -> None:
    sglang._watch_scheduler(sys)
    assert "no weights are offered: this SGLang does not fit" in caplog.text
