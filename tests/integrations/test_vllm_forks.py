"""Forks and seeds of vLLM, over a stand-in that keeps its interface; tests/engines has the real one."""

from __future__ import annotations

import importlib
import logging
import types

import pytest
import torch
from safetensors.torch import save_file

import tensorlift
from support import fake_vllm
from tensorlift.errors import ForkError, OptionError


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(8), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.tensor(-1.0), requires_grad=False)

    def load_weights(self, tensors):
        parameters = dict(self.named_parameters())
        for name, tensor in tensors:
            parameters[name].data.copy_(tensor)
        self.has_own_head = True


class Config(types.SimpleNamespace):
    """A ModelConfig: makes a model, and stands for vLLM's processing of it."""

    def __init__(self, folder, **more):
        defaults = {
            "revision": None,
            "dtype": torch.float32,
            "quantization": None,
            "served_model_name": "served",
        }
        super().__init__(**{"model": str(folder), "processed": 0, "made": 0, **defaults, **more})

    def make(self, compilation):
        if "layer" in compilation.static_forward_context:
            raise ValueError("Duplicate layer name: layer")
        self.made += 1
        compilation.static_forward_context["layer"] = model = Layer()
        compilation.static_all_moe_layers.append("layer")
        return model

    def process(self, model):
        """Packs the weight, and derives a tensor and a number from it."""
        self.processed += 1
        model.a = torch.nn.Parameter((model.a.data * 2).reshape(2, 4), requires_grad=False)
        model.derived = model.a.sum(0)
        model.scale_float = float(model.a.max())


@pytest.fixture
def folder(tmp_path):
    save_file({"a": torch.arange(8.0), "scale": torch.tensor(0.5)}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture(params=["processed", "as on CPUs"])
def vllm(request, monkeypatch):
    with fake_vllm.installed() as state:
        from tensorlift.integrations import publisher as publishing
        from tensorlift.integrations.vllm import register

        register()
        if request.param == "processed":
            # Not by "from ... import": the package still has the module of the test before.
            module = importlib.import_module("tensorlift.integrations.vllm_forks")
            monkeypatch.setattr(module, "hides_weights", lambda: False)
        state.how, state.publisher = request.param, publishing.publisher
        import vllm.v1.worker.gpu_worker as worker

        state.worker = worker.Worker()
        yield state
        state.worker.fails = False
        state.worker.shutdown()


def load(state, config, compilation=None, **extra):
    """A worker's load: (its model, whole configuration)."""
    whole = types.SimpleNamespace(
        model_config=config,
        speculative_config=getattr(config, "speculative_config", None),
        parallel_config=types.SimpleNamespace(enable_expert_parallel=True),
        compilation_config=types.SimpleNamespace(static_forward_context={}, static_all_moe_layers=[]),
    )
    state.config = whole
    loader = state.loaders["tensorlift"](fake_vllm.LoadConfig("tensorlift", model_loader_extra_config=extra))
    return loader.load_model(vllm_config=whole, model_config=config), whole


def serve(state, caplog):
    """A seed's URL, once a worker serves."""
    caplog.clear()
    state.worker.compile_or_warm_up_model()
    said = [record.getMessage() for record in caplog.records if " offers " in record.getMessage()]
    return said[0].rpartition(" at ")[2]


@pytest.fixture
def url(vllm, folder, caplog):
    caplog.set_level(logging.INFO)
    load(vllm, Config(folder), publish=True)
    return serve(vllm, caplog)


def assert_right(model):
    assert model.a.tolist() == [[0.0, 2.0, 4.0, 6.0], [8.0, 10.0, 12.0, 14.0]]
    assert model.derived.tolist() == [8.0, 12.0, 16.0, 20.0]
    assert (model.scale_float, float(model.scale)) == (14.0, 0.5)
    assert model.has_own_head


def test_a_fork_is_what_a_load_is_and_was_processed_once(vllm, url, folder, caplog, tmp_path):
    empty = Config(tmp_path / "no files")
    model, whole = load(vllm, empty, seed=url)
    assert_right(model)
    assert (empty.made, empty.processed) == (1, 1)
    assert whole.compilation_config.static_forward_context["layer"] is model
    assert "tensorlift: rank 0: forked " in caplog.text
    assert ("not processed" in caplog.text) == (vllm.how != "processed")


def test_a_fork_is_a_seed_of_the_same_version(vllm, url, folder, caplog, tmp_path):
    load(vllm, Config(tmp_path / "no files"), seed=url, publish=True)
    vllm.publisher._offers[-1].weights = "v7"
    second = serve(vllm, caplog)
    model, _ = load(vllm, Config(tmp_path / "no files"), seed=second)
    assert_right(model)
    assert "version v7" in caplog.text


@pytest.mark.parametrize("case", ["nobody", "other key", "other layout", "processing"])
def test_files_stand_in_and_the_log_says_why(vllm, url, folder, caplog, case):
    config, says = Config(folder), "cannot be reached"
    if case == "nobody":
        vllm.worker.shutdown()
    elif case == "other key":
        config.served_model_name, says = ["another"], "does not have"
    elif case == "other layout":
        original, says = config.make, "has other weights than the model here"

        def make(compilation):
            model = original(compilation)
            if config.made == 1:
                model.more = torch.zeros(3)
            return model

        config.make = make
    else:
        original, says = config.process, "zeros cannot be packed"

        def process(model):
            if float(model.a.max()) < 1:
                raise RuntimeError(says)
            original(model)

        config.process = process
    model, whole = load(vllm, config, seed=url)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    if case == "processing" and vllm.how != "processed":
        assert not warnings  # the weights are there before they are processed
        return
    (line,) = warnings
    assert says in line
    assert line.endswith("; loading from files")
    if case == "other layout" and vllm.how != "processed":
        del model.more
    assert_right(model)
    assert whole.compilation_config.static_forward_context == {"layer": model}
    assert whole.compilation_config.static_all_moe_layers == ["layer"]


def test_without_fallback_the_start_ends(vllm, url, folder):
    vllm.worker.shutdown()
    with pytest.raises(ForkError, match="files may not stand in"):
        load(vllm, Config(folder), seed=url, fallback=False)


def test_an_instance_of_another_checkpoint_is_not_forked(vllm, url, folder, caplog, tmp_path):
    (tmp_path / "v2").mkdir()
    save_file({"a": torch.arange(8.0) + 1, "scale": torch.tensor(0.5)}, tmp_path / "v2" / "model.safetensors")
    model, _ = load(vllm, Config(tmp_path / "v2"), seed=url)
    assert float(model.a[-1, -1]) == 16.0
    assert "the instance has checkpoint " in caplog.text


def test_small_tensors_that_files_lack_are_as_before_a_fork_that_failed(vllm, url, folder, monkeypatch):
    from tensorlift.integrations import forks

    original = forks._forked

    def forked(*args):
        original(*args)
        raise ForkError("the seed died at the last byte")

    monkeypatch.setattr(forks, "_forked", forked)
    save_file({"a": torch.arange(8.0)}, folder / "model.safetensors")
    model, _ = load(vllm, Config(folder), seed=url, strict=False)
    assert float(model.scale) == -1.0


def test_a_target_and_its_draft_stand_behind_one_url(vllm, folder, caplog, tmp_path):
    caplog.set_level(logging.INFO)
    draft = Config(folder)
    speculative = types.SimpleNamespace(draft_model_config=draft)
    target = Config(folder, speculative_config=speculative)
    load(vllm, target, publish=True)
    draft.speculative_config = speculative
    load(vllm, draft, publish=True)
    url = serve(vllm, caplog)
    assert "(draft, " in caplog.text
    other = Config(tmp_path / "no files")
    other.speculative_config = types.SimpleNamespace(draft_model_config=other)
    model, _ = load(vllm, other, seed=url)
    assert_right(model)


def test_equal_placeholders_are_not_tied(vllm, url, tmp_path):
    config = Config(tmp_path / "no files", word_embeddings_untied_by_checkpoint=True)
    original, seen = config.process, []

    def process(model):
        seen.append(config.word_embeddings_untied_by_checkpoint)
        original(model)

    config.process = process
    load(vllm, config, seed=url)
    assert seen == [vllm.how != "processed"]
    assert config.word_embeddings_untied_by_checkpoint


def is_open(url):
    from tensorlift.errors import SeedError
    from tensorlift.forking.client import SeedClient

    try:
        client = SeedClient(url)
        client.release(client.lease(1.0).id)
    except SeedError as error:
        return str(error).partition(": ")[2] if error.answered else None
    return True


def test_what_a_worker_does_with_weights_keeps_readers_away(vllm, url, folder):
    worker = vllm.worker
    if vllm.how != "processed":
        for _ in range(2):
            worker.reload_weights()
            assert is_open(url) is None
        return
    epoch = epoch_of(url)
    worker.reload_weights(weights_path="model/")
    assert is_open(url) is True
    assert epoch_of(url) == epoch + 1
    worker.start_weight_update()
    assert "it updates its weights" in is_open(url)
    worker.update_weights({})
    assert "it updates its weights" in is_open(url)
    worker.finish_weight_update()
    assert is_open(url) is True
    worker.sleep(1)
    assert is_open(url) is None
    worker.wake_up(["kv_cache"])
    assert is_open(url) is None
    worker.wake_up()
    assert is_open(url) is True
    worker.sleep(level=2)
    worker.wake_up(tags=["weights"])
    worker.start_draft_weight_update()
    worker.finish_weight_update()
    assert is_open(url) is None
    worker.reload_weights()
    assert is_open(url) is True
    worker.discard(("kv_cache",))
    assert is_open(url) is True
    worker.discard(("weights",))
    assert is_open(url) is None
    worker.wake_up()
    assert is_open(url) is None
    worker.reload_weights()
    assert is_open(url) is True
    worker.reset_weights()
    worker.wake_up()
    assert is_open(url) is None


def test_a_session_of_vllm_is_one_update_whatever_comes_between(vllm, url):
    if vllm.how != "processed":
        return  # what is offered there ends with the first update
    worker = vllm.worker
    worker.fails = True
    for name in ("update_weights", "finish_weight_update"):  # without a session vLLM refuses
        with pytest.raises(RuntimeError):
            getattr(worker, name)()
        assert is_open(url) is True
    worker.fails = False
    worker.sleep(level=2)
    worker.wake_up()
    worker.start_draft_weight_update()  # which does not bring what was lost; a second session is refused
    worker.fails = True
    with pytest.raises(RuntimeError):
        worker.start_weight_update()
    worker.fails = False
    worker.update_weights({})
    worker.finish_weight_update()
    assert is_open(url) is None
    worker.start_weight_update()  # nor does one that has failed, where its end works behind all
    worker.fails = True
    with pytest.raises(RuntimeError):
        worker.finish_weight_update()
    worker.fails = False
    worker.finish_weight_update()
    assert is_open(url) is None
    worker.start_weight_update()  # weights of two versions are in memory that comes back amid it
    worker.update_weights({})
    worker.sleep(level=1)
    worker.wake_up()
    assert is_open(url) is None
    worker.finish_weight_update()
    assert is_open(url) is True


def epoch_of(url):
    from tensorlift.forking.client import SeedClient

    return SeedClient(url).state().epoch


@pytest.mark.parametrize(
    "at", ["reload_weights", "start_weight_update", "update_weights", "finish_weight_update"]
)
def test_an_update_that_fails_leaves_nothing_to_read(vllm, url, caplog, at):
    worker = vllm.worker
    if at in ("update_weights", "finish_weight_update"):
        worker.start_weight_update()
    worker.fails = True
    with pytest.raises(RuntimeError, match="the worker fails"):
        getattr(worker, at)(*([{}] if at == "update_weights" else []))
    worker.fails = False
    worker.start_weight_update()
    worker.finish_weight_update()
    assert is_open(url) is None  # nothing has come
    worker.start_weight_update()
    worker.update_weights({})
    worker.finish_weight_update()
    assert is_open(url) is (True if vllm.how == "processed" else None)


def test_arguments_of_another_vllm_are_passed_on(vllm, url):
    for name in ("compile_or_warm_up_model", "start_weight_update", "update_weights", "finish_weight_update"):
        assert getattr(vllm.worker, name)("more", new="argument") == "done"
    for name, first in (("sleep", 1), ("discard", ("weights",)), ("wake_up", None), ("reset_weights", 1)):
        assert getattr(vllm.worker, name)(first, "more", new="argument") == "done"


def test_moving_experts_and_the_end_close_the_seed(vllm, url):
    vllm.worker.elastic_ep_execute("load_model")
    assert is_open(url) is None
    vllm.worker.shutdown()
    assert vllm.publisher._offers == []


def test_a_worker_of_another_format_is_left_alone(monkeypatch):
    with fake_vllm.installed():
        from tensorlift.integrations.vllm import register

        register()
        forks = importlib.import_module("tensorlift.integrations.vllm_forks")
        monkeypatch.setattr(forks, "imported_publisher", lambda: None)
        import vllm.v1.worker.gpu_worker as module

        assert module.Worker().sleep() == "done"


def test_what_cannot_be_offered_is_refused_with_the_arguments(vllm):
    from vllm.engine.arg_utils import EngineArgs

    def check(extra, **parallel):
        return EngineArgs("tensorlift", extra, parallel=parallel).create_engine_config()

    check({"seed": "http://h:1"}, world_size=8, data_parallel_size=2)
    check({"publish": {"port": 7000}}, world_size=8)
    with pytest.raises(OptionError, match="with 8 ranks"):
        check({"publish": True}, world_size=8)
    with pytest.raises(OptionError, match="does not go with data_parallel_size"):
        check({"publish": True}, data_parallel_size=2)
    with pytest.raises(OptionError, match="does not go with enable_eplb"):
        check({"publish": True}, enable_eplb=True)


def test_weights_of_a_key_are_those_of_this_version_and_device(vllm, url):
    with pytest.raises(ForkError, match=r"there is 'served' \(target, float32, vLLM 0\.32\.0, cpu "):
        tensorlift.fork(url, into={"a": torch.zeros(1)}, key="another")
