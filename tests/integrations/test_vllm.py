"""vLLM's plug-in over a stand-in that keeps vLLM's interface; tests/engines has the real one."""

from __future__ import annotations

import logging
import types

import pytest
import torch
from safetensors.torch import save_file

from support import fake_vllm, new_option
from tensorlift.errors import CheckpointError, DeviceError, MismatchError, OptionError, RequestError


class Model(torch.nn.Module):
    def __init__(self, **sizes):
        super().__init__()
        for name, size in sizes.items():
            setattr(self, name, torch.nn.Parameter(torch.empty(size)))

    def load_weights(self, tensors):
        for name, tensor in tensors:
            if name in (parameters := dict(self.named_parameters())):
                parameters[name].data.copy_(tensor)


@pytest.fixture
def vllm():
    with fake_vllm.installed() as state:
        from tensorlift.integrations.vllm import register

        register()
        register()
        yield state


@pytest.fixture
def folder(tmp_path):
    save_file({"a": torch.arange(8.0), "b": torch.ones(4)}, tmp_path / "model.safetensors")
    return tmp_path


def loader(state, **config):
    return state.loaders["tensorlift"](fake_vllm.LoadConfig("tensorlift", **config))


def config_of(folder, **more):
    return types.SimpleNamespace(model=str(folder), **more)


def test_a_start_fills_the_model_and_says_so_in_one_line(vllm, folder, caplog):
    model = Model(a=8, b=4)
    with caplog.at_level(logging.INFO):
        loader(vllm).load_weights(model, config_of(folder))
    assert torch.equal(model.a.data, torch.arange(8.0))
    (line,) = [r.getMessage() for r in caplog.records if r.name == "vllm.tensorlift"]
    assert "48 bytes" in line


def test_a_parameter_that_nothing_reached_ends_the_start(vllm, folder, caplog):
    with pytest.raises(MismatchError, match="would start and emit garbage"):
        loader(vllm).load_weights(Model(a=8, b=4, c=2), config_of(folder))
    loader(vllm, model_loader_extra_config={"strict": False}).load_weights(Model(a=8, c=2), config_of(folder))
    assert "1 parameter of the model: c" in caplog.text


def test_arguments_are_checked_where_the_configuration_is_made(vllm):
    from vllm.engine.arg_utils import EngineArgs

    EngineArgs("auto", {"num_threads": 2}).create_engine_config()
    EngineArgs("tensorlift", {"backend": "MMAP"}).create_engine_config()
    with pytest.raises(OptionError, match="num_threads"):
        EngineArgs("Tensorlift", {"num_threads": 2}).create_engine_config()
    draft = fake_vllm.LoadConfig("tensorlift", model_loader_extra_config={"copy": True})
    with pytest.raises(OptionError, match="copy"):
        EngineArgs("auto", draft=draft).create_engine_config()


def test_an_option_of_the_library_is_one_of_the_plugin(vllm, folder, monkeypatch):
    from vllm.engine.arg_utils import EngineArgs

    seen = new_option.added(monkeypatch)
    config = EngineArgs("tensorlift", {"brand_new": 3}).create_engine_config().load_config
    vllm.loaders["tensorlift"](config).load_weights(Model(a=8, b=4), config_of(folder))
    assert seen == {"brand_new": 3}


def test_a_device_that_is_not_supported_is_refused_and_other_formats_are_not():
    with fake_vllm.installed(device="xpu") as state:
        from vllm.engine.arg_utils import EngineArgs

        from tensorlift.integrations.vllm import register

        register()
        EngineArgs("auto").create_engine_config()
        with pytest.raises(DeviceError, match="vLLM runs on device 'xpu'"):
            EngineArgs("tensorlift").create_engine_config()
        with pytest.raises(DeviceError, match="other formats work"):
            loader(state).load_weights(Model(a=8), config_of("nowhere"))


def test_a_vllm_that_does_not_fit_goes_on_with_a_line_in_the_log(caplog):
    with fake_vllm.installed():
        import vllm.model_executor.model_loader.default_loader as module

        del module.DefaultModelLoader
        from tensorlift.integrations.vllm import register

        register()
    assert "does not fit this vLLM" in caplog.text


def test_a_vllm_with_other_configurations_starts_with_its_own_formats():
    with fake_vllm.installed():
        from vllm.engine.arg_utils import EngineArgs

        from tensorlift.integrations.vllm import register

        EngineArgs.create_engine_config = lambda self: "another configuration"
        register()
        assert EngineArgs.create_engine_config(object()) == "another configuration"


def test_kinds_of_files(vllm, folder):
    model = Model(a=8, b=4)
    model.allow_patterns_overrides = ["*.safetensors", "*.bin"]
    (folder / "more.bin").touch()
    with pytest.raises(CheckpointError, match=r"more\.bin"):
        loader(vllm).load_weights(model, config_of(folder))
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"more\.bin"):
        loader(vllm).load_weights(Model(a=8), config_of(folder))
    (folder / "more.bin").unlink()
    with pytest.raises(CheckpointError, match="Cannot find any model weights"):
        loader(vllm).load_weights(Model(a=8), config_of(folder))


def test_an_index_that_vllm_stumbles_over(vllm, folder, monkeypatch):
    def stumbling(self, *arguments):
        raise KeyError("weight_map")

    made = loader(vllm)
    monkeypatch.setattr(type(made).__mro__[1], "_prepare_weights", stumbling)
    with pytest.raises(KeyError, match="weight_map"):
        made.load_weights(Model(a=8), config_of(folder))
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"index\.json: the index has no 'weight_map'"):
        made.load_weights(Model(a=8), config_of(folder))


def test_a_strategy_of_vllms_own_reading_is_not_dropped_silently(vllm, folder, caplog):
    loader(vllm, safetensors_load_strategy="eager").load_weights(Model(a=8), config_of(folder))
    assert "--safetensors-load-strategy eager" in caplog.text
    with pytest.raises(RequestError, match="torchao"):
        loader(vllm, safetensors_load_strategy="torchao").load_weights(Model(a=8), config_of(folder))


def test_only_needed_experts_are_read(vllm, tmp_path, caplog):
    tensors = {f"experts.{k}.weight": torch.ones(4) for k in range(4)} | {"unused": torch.ones(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    model = torch.nn.ModuleDict({"experts": torch.nn.ModuleDict({"1": Model(weight=4)})})
    model.load_weights = types.MethodType(Model.load_weights, model)
    model.is_unused_checkpoint_weight = lambda name: name == "unused"
    with caplog.at_level(logging.INFO):
        loader(vllm).load_weights(model, config_of(tmp_path, local_expert_ids={1}))
    assert "16 bytes" in caplog.text


def test_secondary_sources_have_their_prefix(vllm, folder, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    save_file({"c": torch.full((2,), 7.0)}, other / "x.safetensors")
    model = Model(a=8, b=4)
    model.inner = Model(c=2)
    model.secondary_weights = [fake_vllm.DefaultModelLoader.Source(str(other), None, prefix="inner.")]
    loader(vllm).load_weights(model, config_of(folder))
    assert torch.equal(model.inner.c.data, torch.full((2,), 7.0))


def test_a_reload_that_lacks_tensors_is_refused_before_the_engine_touches_the_model(vllm, folder):
    model = Model(a=8, b=4)
    loader(vllm).load_weights(model, config_of(folder))
    again = dict(loader(vllm).get_all_weights(config_of(folder), model))
    assert list(again) == ["a", "b"]
    save_file({"a": torch.zeros(8)}, folder / "model.safetensors")
    with pytest.raises(MismatchError, match="lacks 1 tensor that it started with: b"):
        loader(vllm).get_all_weights(config_of(folder), model)
    save_file({"a": torch.zeros(4), "b": torch.ones(4)}, folder / "model.safetensors")
    with pytest.raises(MismatchError, match=r"another shape than at the start: a \(\[4\], not \[8\]\)"):
        loader(vllm).get_all_weights(config_of(folder), model)


def test_what_the_model_had_last_is_said(vllm, folder, caplog):
    model = Model(a=9, b=4)
    with pytest.raises(RuntimeError, match="size"):
        loader(vllm).load_weights(model, config_of(folder))
    assert "The model had tensor 'a' last" in caplog.text


def test_who_loads_together(vllm, monkeypatch):
    from tensorlift.integrations import weights

    monkeypatch.setattr(weights, "world", lambda: "world")
    made = loader(vllm)
    made._delivery = weights.Delivery()
    assert made._group() == "world"
    vllm.groups.update(pp=fake_vllm.Group(2), tp=fake_vllm.Group(4))
    assert made._group() == "world"
    made._draft = True
    assert made._group() == "group of 4"
    vllm.groups.update(tp=fake_vllm.Group(1))
    assert made._group() is None
    made._draft, made._delivery = False, None
    assert made._group() == "world"
    vllm.groups.update(dp=fake_vllm.Group(2), tp=fake_vllm.Group(2))
    assert made._group() == "group of 2"
    made.local_expert_ids = {1}
    assert made._group() is None


def test_a_draft_may_lack_what_its_target_gives_it(vllm, folder):
    draft = config_of(folder)
    vllm.config = types.SimpleNamespace(speculative_config=types.SimpleNamespace(draft_model_config=draft))
    model = Model(a=8, b=4)
    model.embed = fake_vllm.VocabParallelEmbedding()
    model.embed.weight = torch.nn.Parameter(torch.empty(16))
    loader(vllm).load_weights(model, draft)
    with pytest.raises(MismatchError, match=r"embed\.weight"):
        loader(vllm).load_weights(model, config_of(folder))
