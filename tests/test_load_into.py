"""load_into(): existing parameters, ties, overlaps, copies, and what is checked before a byte is written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from support import leaks
from support.checkpoints import Row, random_checkpoint, random_row, write_safetensors
from support.tensors import assert_state
from tensorlift import loading
from tensorlift.errors import (
    DeviceError,
    DtypeError,
    HeaderError,
    MismatchError,
    OptionError,
    RequestError,
    TensorNotFoundError,
    TruncatedError,
)
from tensorlift.format.dtypes import BY_CODE

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(state: dict[str, torch.Tensor]) -> Path:
        codes = {getattr(torch, d.torch_name): d.code for d in BY_CODE.values() if d.torch_name}
        rows: dict[str, Row] = {}
        for name, tensor in state.items():
            raw = bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
            rows[name] = (codes[tensor.dtype], tuple(tensor.shape), raw)
        return write_safetensors(tmp_path / "m.safetensors", rows)

    return write


def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def test_every_dtype_in_place(tmp_path: Path) -> None:
    made = random_checkpoint(tmp_path, shards=2, tensors=60, elements=20_000, seed=3)
    state = dict(loading.load(tmp_path))
    places = {name: tensor.data_ptr() for name, tensor in state.items()}
    for tensor in state.values():
        tensor.reshape(-1).view(torch.uint8).fill_(0)
    with leaks.nothing_left():
        result = loading.load_into(state, tmp_path)
    assert_state(state, made.tensors)
    assert {name: tensor.data_ptr() for name, tensor in state.items()} == places
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert result.stats.bytes == sum(len(raw) for _, _, raw in made.tensors.values())
    assert result.stats.tensors == len(made.tensors)
    assert result.stats.files == 2
    assert result.stats.arenas == 0


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


def test_a_module_with_ties_and_buffers(write: Write) -> None:
    source, model = Model(), Model()
    state = {name: values(*t.shape).to(t.dtype) for name, t in source.state_dict().items()}
    state["head.weight"] = state["embed.weight"]
    result = loading.load_into(model, write(state))
    assert result.missing_keys == result.unexpected_keys == []
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    assert model.embed.weight is model.head.weight
    assert model.embed.weight.requires_grad
    assert result.stats.tensors == len(state) - 1


def test_ties_satisfy_strict(write: Write) -> None:
    for missing in ("embed.weight", "head.weight"):
        model = Model()
        state = {name: values(*t.shape).to(t.dtype) for name, t in model.state_dict().items()}
        del state[missing]
        result = loading.load_into(model, write(state))
        assert result.missing_keys == []
        assert torch.equal(model.head.weight, state["head.weight" if missing[0] == "e" else "embed.weight"])


def test_of_tied_names_the_last_of_the_model_wins(write: Write) -> None:
    model, reference = Model(), Model()
    state = {name: values(*t.shape).to(t.dtype) for name, t in model.state_dict().items()}
    path = write(dict(reversed(state.items())))
    loading.load_into(model, path)
    reference.load_state_dict(state)
    assert torch.equal(model.embed.weight, reference.embed.weight)
    assert torch.equal(model.embed.weight, state["head.weight"])


def test_names_that_differ(write: Write) -> None:
    state = {"a": values(2), "b": values(2), "c": values(3)}
    path = write(state)
    into = {"a": torch.zeros(2), "x": torch.zeros(1), "c": torch.zeros(3)}
    with pytest.raises(
        MismatchError, match=r"1 not in the checkpoint: 'x'; 1 not in the model: 'b'.*strict=False"
    ):
        loading.load_into(into, path)
    assert not into["a"].any()
    result = loading.load_into(into, path, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["x"], ["b"])
    assert torch.equal(into["a"], state["a"])
    assert torch.equal(into["c"], state["c"])
    assert not into["x"].any()


def test_a_filter_means_both_sides(write: Write) -> None:
    state = {"a.1": values(2), "a.2": values(2), "b": values(3)}
    path = write(state)
    into = {"a.1": torch.zeros(2), "a.2": torch.zeros(2), "c": torch.zeros(3)}
    assert loading.load_into(into, path, names="a.*").missing_keys == []
    assert torch.equal(into["a.2"], state["a.2"])
    with pytest.raises(MismatchError, match=r"not in the checkpoint: 'a.3'"):
        loading.load_into({**into, "a.3": torch.zeros(2)}, path, names=(name for name in ["a.*"]))
    with pytest.raises(MismatchError, match=r"not in the model: 'b'"):
        loading.load_into(into, path, names=["a.*", "b"])
    with pytest.raises(TensorNotFoundError):
        loading.load_into(into, path, names="nowhere")


def test_every_shape_that_differs_is_listed(write: Write) -> None:
    path = write({"a": values(2), "b": values(2, 3), "c": values()})
    into = {"a": torch.zeros(3), "b": torch.zeros(3, 2), "c": torch.zeros(())}
    with pytest.raises(
        MismatchError, match=r"2 shapes differ.*\n.*'a': \[2\] in .*\[3\] in the model\n.*'b'"
    ):
        loading.load_into(into, path)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32])
def test_other_dtypes_are_converted(write: Write, dtype: torch.dtype) -> None:
    state = {f"t{k}": values(100, 30) * 50 for k in range(5)}
    into = {name: torch.zeros(100, 30, dtype=dtype) for name in state}
    result = loading.load_into(into, write(state), arena_size="16KiB")
    assert all(torch.equal(into[name], state[name].to(dtype)) for name in state)
    assert result.stats.bytes == 5 * 12_000


def test_not_contiguous(write: Write) -> None:
    state = {"t": values(6, 4), "every": values(5), "plain": values(3)}
    base, wide = torch.zeros(4, 6), torch.zeros(10)
    into = {"t": base.T, "every": wide[::2], "plain": torch.zeros(3)}
    loading.load_into(into, write(state))
    assert torch.equal(base, state["t"].T)
    assert torch.equal(wide[::2], state["every"])
    assert not wide[1::2].any()
    assert torch.equal(into["plain"], state["plain"])


def test_overlapping_destinations_are_written_in_the_models_order(write: Write) -> None:
    state = {"a": values(6), "b": values(6), "c": values(4)}
    for order in ("abc", "cba", "bca"):
        whole, wanted = torch.zeros(16), torch.zeros(16)
        parts = {"a": slice(0, 6), "b": slice(4, 10), "c": slice(12, 16)}
        for name in order:
            wanted[parts[name]] = state[name]
        loading.load_into({name: whole[parts[name]] for name in order}, write(state))
        assert torch.equal(whole, wanted), order


def test_neighbours_in_one_buffer_do_not_overlap(write: Write) -> None:
    state = {"a": values(6), "b": values(5)}
    whole = torch.zeros(11)
    result = loading.load_into({"a": whole[:6], "b": whole[6:]}, write(state))
    assert torch.equal(whole, torch.cat([state["a"], state["b"]]))
    assert result.stats.arenas == 0


def test_autograd_sees_the_change(write: Write) -> None:
    layer = nn.Linear(3, 3, bias=False)
    loss = layer(torch.ones(1, 3)).pow(2).sum()
    before = layer.weight._version
    loading.load_into(layer, write({"weight": values(3, 3)}))
    assert layer.weight._version > before
    product = layer.weight * layer.weight
    loading.load_into(layer, write({"weight": values(3, 3)}))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    del loss


def test_inference_tensors(write: Write) -> None:
    state = {"a": values(4), "b": values(4)}
    with torch.inference_mode():
        into = {"a": torch.zeros(4), "b": torch.zeros(4, dtype=torch.float64)}
    loading.load_into(into, write(state))
    assert torch.equal(into["a"], state["a"])
    assert torch.equal(into["b"], state["b"].double())
    ordinary = {"a": torch.zeros(4), "b": torch.zeros(4, dtype=torch.float64)}
    with torch.inference_mode():
        loading.load_into(ordinary, write(state))
    assert torch.equal(ordinary["b"], state["b"].double())


def test_meta_is_refused_with_a_hint(write: Write) -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2, bias=False)
    with pytest.raises(RequestError, match=r"'weight' is on the meta device.*to_empty"):
        loading.load_into(model, write({"weight": values(2, 2)}))
    # Where the checkpoint has nothing for it, a meta tensor is only missing.
    into = {"weight": torch.zeros(2, 2), "other": torch.empty(1, device="meta")}
    result = loading.load_into(into, write({"weight": values(2, 2)}), strict=False)
    assert result.missing_keys == ["other"]


def test_lazy_expanded_sparse_and_other_devices_are_refused(write: Write) -> None:
    path = write({"weight": values(2, 2)})
    with pytest.raises(RequestError, match="no shape yet"):
        loading.load_into(nn.LazyLinear(2, bias=False), path)
    with pytest.raises(RequestError, match="share one place"):
        loading.load_into({"weight": torch.zeros(2, 1).expand(2, 2)}, path)
    with pytest.raises(RequestError, match="layout"):
        loading.load_into({"weight": torch.zeros(2, 2).to_sparse()}, path)


@pytest.mark.parametrize("wrong", [torch.bits8, torch.float4_e2m1fn_x2])
def test_a_dtype_that_torch_cannot_convert_to_is_refused_first(write: Write, wrong: torch.dtype) -> None:
    path = write({"a": torch.ones(2), "b": torch.ones(3)})
    into = {"a": torch.zeros(2), "b": torch.zeros(3, dtype=torch.uint8).view(wrong)}
    with pytest.raises(
        DtypeError, match=f"tensor 'b' has dtype F32, which .* not convert .* model's {wrong}"
    ):
        loading.load_into(into, path)
    assert not into["a"].any()


def test_a_four_bit_dtype_is_converted_to_none(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "m.safetensors", {"a": random_row("F4", [2, 4])})
    with pytest.raises(DtypeError, match="'a' has dtype F4, which this torch does not convert"):
        loading.load_into({"a": torch.zeros(2, 2)}, path)


def test_a_subclass_that_refuses_a_copy(write: Write) -> None:
    with FakeTensorMode():
        fake = torch.zeros(2)
    with pytest.raises(
        RequestError, match=r"'a' is a FakeTensor of torch\.float32 that cannot be copied into"
    ):
        loading.load_into({"a": fake}, write({"a": torch.ones(2)}))


@pytest.mark.parametrize("model", [3, [torch.zeros(1)], {"a": 1}, {1: torch.zeros(1)}, None])
def test_what_is_no_model_is_refused(write: Write, model: object) -> None:
    with pytest.raises(RequestError, match="load_into fills"):
        loading.load_into(model, write({"a": values(1)}))  # type: ignore[arg-type]


class Extra(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: object) -> None: ...


def test_extra_state_is_left_out(write: Write) -> None:
    layer = Extra(2, 2, bias=False)
    assert loading.load_into(layer, write({"weight": values(2, 2)})).missing_keys == []


def test_subclasses_get_a_copy(write: Write) -> None:
    class Mine(torch.Tensor):
        pass

    state = {"a": values(3, 3)}
    into = {"a": torch.zeros(3, 3).as_subclass(Mine)}
    loading.load_into(into, write(state))
    assert torch.equal(into["a"].as_subclass(torch.Tensor), state["a"])


def test_conjugated_and_negated_views_get_a_copy(write: Write) -> None:
    state = {"conj": values(3, dtype=torch.complex64), "neg": values(1), "plain": values(2)}
    base = torch.zeros(3, dtype=torch.complex64)
    into = {"conj": base.conj(), "neg": torch.zeros(1, dtype=torch.complex64).conj().imag}
    into["plain"] = torch.zeros(2)
    assert into["conj"].is_conj()
    assert into["neg"].is_neg()
    loading.load_into(into, write(state))
    assert all(torch.equal(into[name], state[name]) for name in state)
    assert torch.equal(base, state["conj"].conj())


def test_headers_are_checked_before_anything_is_written(tmp_path: Path) -> None:
    for number in range(2):
        write_safetensors(tmp_path / f"{number}.safetensors", {f"t{number}": random_row("F32", [10], 1)})
    second = tmp_path / "1.safetensors"
    second.write_bytes(second.read_bytes()[:-1])
    into = {"t0": torch.zeros(10), "t1": torch.zeros(10)}
    with pytest.raises((TruncatedError, HeaderError)):
        loading.load_into(into, tmp_path)
    assert not into["t0"].any()


def test_f6_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    rows = {"good": random_row("F32", [4]), "bad": random_row("F6_E2M3", [4])}
    into = {"good": torch.zeros(4), "bad": torch.zeros(4)}
    with pytest.raises(DtypeError, match="'bad'"):
        loading.load_into(into, write_safetensors(tmp_path / "m.safetensors", rows))
    assert not into["good"].any()


def test_a_failure_leaves_no_thread_and_no_descriptor(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write({"a": values(1000, 1000), "b": values(1000, 1000).double()})
    into = {"a": torch.zeros(1000, 1000), "b": torch.zeros(1000, 1000)}
    before = into["a"]._version
    read_headers = loading.sources.read_headers

    def shortened(found: Any, meanwhile: Any) -> object:
        checkpoint = read_headers(found, meanwhile)
        os.truncate(path, 2_000_000)
        return checkpoint

    monkeypatch.setattr(loading.sources, "read_headers", shortened)
    with leaks.nothing_left():
        with pytest.raises(TruncatedError, match="'a'") as caught:
            loading.load_into(into, path)
        caught.value.__traceback__ = None
        del caught
    assert into["a"]._version > before, "it may be half written: autograd has to know"


def test_progress_and_options(write: Write) -> None:
    path = write({"a": values(10), "b": values(10)})
    into = {"a": torch.zeros(10), "b": torch.zeros(10, dtype=torch.float64)}
    seen = []
    loading.load_into(into, path, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (80, 80)
    with pytest.raises(OptionError, match="device"):
        loading.load_into(into, path, device="cpu")


def test_nothing_to_fill(write: Write) -> None:
    assert loading.load_into({}, write({})).stats.bytes == 0
    into = {"z": torch.empty(0, 3)}
    assert loading.load_into(into, write({"z": torch.empty(0, 3)})).missing_keys == []


def test_a_device_that_is_not_supported(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorlift.tensors import usable

    def refuse(device: object) -> torch.device:
        raise DeviceError(f"device {device} is not supported")

    monkeypatch.setattr(usable, "check_kind", refuse)
    with pytest.raises(DeviceError, match="'a': device cpu is not supported"):
        loading.load_into({"a": torch.zeros(4)[::2]}, write({"a": values(2)}))


def test_a_device_is_that_of_the_model(write: Write) -> None:
    path = write({"weight": torch.ones(2)})
    with pytest.raises(OptionError, match="load_into takes no device: bytes go to where the model is"):
        loading.load_into({"weight": torch.zeros(2)}, path, device="cpu")
