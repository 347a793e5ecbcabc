"""The plug-in and the loader for SGLang over a stand-in for it; tests/engines has the real one."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support import fake_sglang, new_option
from support.checkpoints import random_row, write_safetensors
from support.fake_sglang import Model, arguments, configuration, rows
from tensorlift import loading
from tensorlift.errors import CheckpointError, DeviceError, MismatchError, OptionError
from tensorlift.integrations import sglang
from tensorlift.integrations import weights as weights_module


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_sglang.Engine]:
    found = fake_sglang.install(monkeypatch)
    monkeypatch.setattr(weights_module, "rank", lambda: 1)  # no bar: tqdm is no dependency
    monkeypatch.setattr(sglang, "found_version", lambda: sglang.PROVEN)
    monkeypatch.delenv("TENSORLIFT_BACKEND", raising=False)
    monkeypatch.setattr(sglang, "_started_with", None)
    sglang.register()
    yield found
    sys.modules.pop("tensorlift.integrations.sglang_loader", None)


def start(engine: fake_sglang.Engine, path: Path, model: Any = None, **given: Any) -> Any:
    """What a worker does with --load-format tensorlift."""
    config = engine.configure(load_format="tensorlift", tp_rank=0, **given)
    model = model or configuration(path)
    loader = engine.loader(config, model)
    return loader.load_model(model_config=model, device_config=SimpleNamespace(device="cpu"))


# --- The plug-in --------------------------------------------------------------------------------------------


def test_importing_the_plugin_imports_no_torch() -> None:
    program = "import sys, tensorlift.integrations.sglang; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_registering_twice_changes_nothing(engine: fake_sglang.Engine) -> None:
    sglang.register()
    assert engine.choices == ["auto", "safetensors", "tensorlift"]
    assert [hook[0] for hook in engine.hooks] == [
        "sglang.srt.configs.load_config.LoadConfig._verify_load_format"
    ]
    assert len(engine.steps["handle_load_format"]) == 1
    assert "tensorlift.integrations.sglang_loader" not in sys.modules


def test_another_sglang_loses_the_load_format_only(
    engine: fake_sglang.Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine.choices.remove("tensorlift")
    monkeypatch.delattr(sys.modules["sglang.srt.plugins.hook_registry"], "HookRegistry")
    sglang.register()
    assert "load format tensorlift is not available" in caplog.text
    assert "tensorlift" not in engine.choices


def test_another_version_warns_once(
    engine: fake_sglang.Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sglang, "found_version", lambda: "0.9.9")
    engine.check(arguments())
    engine.check(arguments())
    assert caplog.text.count("SGLang 0.5.23, and this is 0.9.9") == 1


# --- Arguments ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "formats", [{}, {"load_format": "auto", "speculative_draft_load_format": "tensorlift"}]
)
@pytest.mark.parametrize("device", ["xpu", "npu", "hpu:0", "mps"])
def test_devices_are_refused_with_the_arguments(
    engine: fake_sglang.Engine, formats: dict[str, str], device: str
) -> None:
    with pytest.raises(DeviceError, match=f"SGLang runs on device '{device}'"):
        engine.check(arguments(device=device, **formats))


@pytest.mark.parametrize("device", ["cuda", "cpu", None])
def test_devices_that_are_served(engine: fake_sglang.Engine, device: str | None) -> None:
    engine.check(arguments(device=device))


def test_an_sglang_that_shows_arguments_in_another_way(
    engine: fake_sglang.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "sglang.srt.arg_groups.model_override_base")
    engine.check(arguments(load_format="auto", device="xpu"))
    with pytest.raises(DeviceError):
        engine.check(arguments(device="xpu"))


def test_other_formats_keep_working(engine: fake_sglang.Engine) -> None:
    extra = '{"num_threads": 4}'
    engine.check(arguments(load_format="auto", device="xpu", model_loader_extra_config=extra))
    assert engine.configure(load_format="safetensors").load_format is fake_sglang.LoadFormat.SAFETENSORS
    with pytest.raises(ValueError, match="no_such"):
        engine.configure(load_format="no_such")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"weight_cache_mode": "daemon"}, "weight cache"),
        ({"encoder_only": True}, "encoder"),
        ({"enable_elastic_expert_backup": True}, "backup"),
        ({"use_ray": True}, "Ray"),
        ({"model_loader_extra_config": '{"device": "cpu"}'}, "'device' is set by the engine"),
        ({"model_loader_extra_config": '{"num_threads": 4}'}, "'num_threads' belongs to the engine's own"),
        ({"model_loader_extra_config": "{"}, "no JSON"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_the_arguments(
    engine: fake_sglang.Engine, given: dict[str, Any], text: str
) -> None:
    with pytest.raises(OptionError, match=text):
        engine.check(arguments(**given))


def test_what_is_pointless_is_said(engine: fake_sglang.Engine, caplog: pytest.LogCaptureFixture) -> None:
    engine.check(arguments(weight_loader_prefetch_checkpoints=True))
    assert "weight_loader_prefetch_checkpoints changes nothing" in caplog.text


def test_an_option_of_the_library_is_one_of_the_plugin(
    engine: fake_sglang.Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_safetensors(tmp_path / "model.safetensors", rows())
    seen = new_option.added(monkeypatch)
    engine.check(arguments(model_loader_extra_config='{"brand_new": 3}'))
    start(engine, tmp_path, model_loader_extra_config={"brand_new": 3})
    assert seen == {"brand_new": 3}


# --- The load configuration ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tensorlift", "Tensorlift"])
def test_the_format_becomes_the_loader(engine: fake_sglang.Engine, name: str) -> None:
    config = engine.configure(load_format=name, model_loader_extra_config={"backend": "MMAP"})
    assert isinstance(config.load_format, type)
    assert issubclass(config.load_format, fake_sglang.DefaultModelLoader)
    assert sglang.settings_of(config).options == {"backend": "MMAP"}


def test_loaders_of_sglang_can_be_made_of_the_same_configuration(
    engine: fake_sglang.Engine, tmp_path: Path
) -> None:
    """As for LoRA adapters."""
    write_safetensors(tmp_path / "adapter.safetensors", rows())
    config = engine.configure(load_format="tensorlift", model_loader_extra_config={"backend": "MMAP"})
    plain = fake_sglang.DefaultModelLoader(config)
    assert plain._prepare_weights(str(tmp_path), None, False)[1] == [str(tmp_path / "adapter.safetensors")]
    assert config.load_format != fake_sglang.LoadFormat.AUTO
    assert {config.load_format: 1}[config.load_format] == 1


def test_a_reload_has_the_configuration_of_the_start(engine: fake_sglang.Engine) -> None:
    engine.configure(load_format="tensorlift", tp_rank=0, model_loader_extra_config={"threads": 3})
    reload = engine.configure(load_format="tensorlift")
    assert sglang.settings_of(reload).options == {"threads": 3}
    engine.configure(load_format="tensorlift", tp_rank=0)
    assert sglang.settings_of(engine.configure(load_format="tensorlift")).options == {}
    given = engine.configure(load_format="tensorlift", model_loader_extra_config={"io_depth": 2})
    assert sglang.settings_of(given).options == {"io_depth": 2}


def test_a_wrong_configuration_is_refused_where_it_is_made(engine: fake_sglang.Engine) -> None:
    with pytest.raises(OptionError, match="unknown setting 'thread'; did you mean threads"):
        engine.configure(load_format="tensorlift", model_loader_extra_config={"thread": 3})


# --- The loader ---------------------------------------------------------------------------------------------


def test_a_start(engine: fake_sglang.Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tensorlift.sglang")
    write_safetensors(tmp_path / "a.safetensors", rows())
    model = start(engine, tmp_path)
    assert model.weight.data.numpy().tobytes() == rows()["weight"][2]
    assert float(model.scale.detach()) == -1
    assert model.postprocessed
    assert "300 bytes" in caplog.text


@pytest.mark.parametrize("name", ["weight", "norm.weight"])
def test_what_no_tensor_reached(
    engine: fake_sglang.Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    write_safetensors(tmp_path / "a.safetensors", rows(but=name))
    with pytest.raises(MismatchError, match=rf"1 parameter of the model: {name}"):
        start(engine, tmp_path)
    model = start(engine, tmp_path, model_loader_extra_config={"strict": False})
    assert f"of the model: {name}" in caplog.text
    assert not torch.isnan(model.weight).any()
    assert not torch.isnan(model.norm.weight).any()


def test_a_draft_has_embedding_and_head_from_its_target(engine: fake_sglang.Engine, tmp_path: Path) -> None:
    class Draft(Model):
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens = torch.nn.Embedding(4, 4)

    write_safetensors(tmp_path / "a.safetensors", rows())
    start(engine, tmp_path, configuration(tmp_path, make=Draft, is_draft_model=True))
    with pytest.raises(MismatchError, match=r"embed_tokens\.weight"):
        start(engine, tmp_path, configuration(tmp_path, make=Draft))


@pytest.mark.parametrize(
    ("parameter", "parts", "optional"),
    [
        (torch.tensor(-1.0), [], True),
        (torch.ones(3), [4, 4, 4], True),
        (torch.zeros(3), [], False),  # what nobody has filled
        (torch.arange(3.0), [], False),
        (torch.full((8, 1), torch.finfo(torch.float32).min), [4, 4], False),  # what has to come
        (torch.full((2,), torch.finfo(torch.float32).min), [4, 4], True),  # or for the first part alone
    ],
)
def test_scales_that_have_a_default(
    engine: fake_sglang.Engine, parameter: torch.Tensor, parts: list[int], optional: bool
) -> None:
    engine.configure(load_format="tensorlift")
    judge = sys.modules["tensorlift.integrations.sglang_loader"].may_be_missing(False)
    module: Any = SimpleNamespace(output_partition_sizes=parts)
    assert judge("layer.scale", module, parameter) is optional
    assert not judge("layer.weight", module, parameter)


def test_the_prefix_and_files_beside_the_index(engine: fake_sglang.Engine, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a.safetensors", rows())
    (tmp_path / "mtp").mkdir()
    extra = write_safetensors(tmp_path / "mtp" / "mtp.safetensors", {"late": random_row("U8", [5])})
    model = configuration(tmp_path, hf_config=SimpleNamespace(more_files=[str(extra)]))
    source = fake_sglang.Source(str(tmp_path), prefix="model.", model_config=model)
    names = [name for name, _ in engine.iterator(source)]
    assert names == ["model.weight", "model.norm.weight", "model.more", "model.late"]


def test_files_that_sglang_has_resolved(engine: fake_sglang.Engine, tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "a.safetensors", rows())
    loader = engine.loader(engine.configure(load_format="tensorlift"))
    pairs = loader._get_weights_iterator(
        fake_sglang.Source("nowhere"), resolved_source=SimpleNamespace(weight_files=(str(path),))
    )
    assert [name for name, _ in pairs] == list(rows())


def test_one_layer_of_a_draft(
    engine: fake_sglang.Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tensorlift.sglang")
    layers = {f"model.mtp.layers.{k}.w": random_row("U8", [100], k) for k in range(3)}
    write_safetensors(tmp_path / "a.safetensors", {**layers, "other": random_row("U8", [7])})
    source = fake_sglang.Source(str(tmp_path), prefix="p.")
    pairs = list(engine.iterator(source, draft_model_idx=1))
    assert [name for name, _ in pairs] == ["p.model.mtp.layers.0.w", "p.other"]
    assert pairs[0][1].numpy().tobytes() == layers["model.mtp.layers.1.w"][2]
    assert "107 bytes" in caplog.text  # those of the other layers are not read


def test_the_device_is_checked_before_files_are_looked_for(engine: fake_sglang.Engine) -> None:
    engine.device.device = "xpu"
    with pytest.raises(DeviceError, match="'xpu'"):
        engine.iterator(fake_sglang.Source("nowhere"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("model.pt", r"model\.pt; convert the checkpoint"),
        ("model.bin", r"model\.bin; convert the checkpoint"),
        ("readme", "load format 'tensorlift': Cannot find any model weights"),
    ],
)
def test_other_files(engine: fake_sglang.Engine, tmp_path: Path, name: str, text: str) -> None:
    write_safetensors(tmp_path / name, rows())
    with pytest.raises(CheckpointError, match=text):
        engine.iterator(fake_sglang.Source(str(tmp_path)))


def test_a_wrong_index(engine: fake_sglang.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_sglang.DefaultModelLoader, "_prepare_weights", lambda *_: {}["weight_map"])
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"index\.json: the index has no 'weight_map'"):
        engine.iterator(fake_sglang.Source(str(tmp_path)))


def test_quantising_loaders_are_not_replaced(engine: fake_sglang.Engine, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a.safetensors", rows())
    about = {"quantization": "modelopt_fp8", "_is_already_quantized": lambda: False}
    with pytest.raises(OptionError, match="by its own ModelOptModelLoader"):
        start(engine, tmp_path, configuration(tmp_path, **about))
    about["_is_already_quantized"] = lambda: True
    start(engine, tmp_path, configuration(tmp_path, **about))


def test_a_reload_is_refused_before_a_weight_is_touched(engine: fake_sglang.Engine, tmp_path: Path) -> None:
    first, second = tmp_path / "1", tmp_path / "2"
    for folder, lacking in ((first, ""), (second, "norm.weight")):
        folder.mkdir()
        write_safetensors(folder / "a.safetensors", rows(but=lacking, seed=len(lacking)))
    model = configuration(first)
    start(engine, first, model)
    with pytest.raises(MismatchError, match=r"lacks 1 tensor that it started with: norm\.weight"):
        engine.iterator(fake_sglang.Source(str(second), model_config=model))
    names = [n for n, _ in engine.iterator(fake_sglang.Source(str(first), model_config=model))]
    assert names == list(rows())


# --- The group ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "moe", "tp_rank", "expected"),
    [
        ("default", {}, 0, "world"),
        ("default", {}, None, "world"),
        (None, {}, 0, None),
        (SimpleNamespace(world_size=1, device_group="alone"), {}, 0, None),
        (SimpleNamespace(world_size=2, device_group="stage"), {}, None, "stage"),
        ("default", {"is_ep_joiner": True}, 0, None),
        ("default", {"elastic_ep_backend": "mooncake"}, None, None),
    ],
)
def test_who_loads_together(
    engine: fake_sglang.Engine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    group: Any,
    moe: dict[str, Any],
    tp_rank: int | None,
    expected: Any,
) -> None:
    write_safetensors(tmp_path / "a.safetensors", rows())
    vars(engine.moe).update(moe)
    config = engine.configure(load_format="tensorlift", tp_rank=tp_rank, load_group=group)
    loader = engine.loader(config)
    module = sys.modules["tensorlift.integrations.sglang_loader"]
    monkeypatch.setattr(module, "world", lambda: "world")
    seen: list[Any] = []
    opened = loading.open

    def recorded(*args: Any, process_group: Any, **options: Any) -> Any:
        seen.append(process_group)
        return opened(*args, **options)

    monkeypatch.setattr(loading, "open", recorded)
    with contextlib.closing(loader._get_weights_iterator(fake_sglang.Source(str(tmp_path)))) as pairs:
        next(pairs)
    assert seen == [expected]


def test_the_first_rank_draws_a_bar(
    engine: fake_sglang.Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_safetensors(tmp_path / "a.safetensors", rows())
    loader = engine.loader(engine.configure(load_format="tensorlift"))
    module = sys.modules["tensorlift.integrations.sglang_loader"]
    calls: list[tuple[int, int]] = []

    @contextlib.contextmanager
    def bar(title: str, **given: Any) -> Iterator[Any]:
        assert given == {"bar_format": "{desc}"}
        yield lambda done, total: calls.append((done, total))

    monkeypatch.setattr(module, "byte_bar", bar)
    monkeypatch.setattr(module, "rank", lambda: 0)
    list(loader._get_weights_iterator(fake_sglang.Source(str(tmp_path))))
    assert calls[-1] == (300, 300)
