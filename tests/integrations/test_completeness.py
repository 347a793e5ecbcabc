"""Which parameters were reached: whoever writes them, whatever they were before, and without traces."""

from __future__ import annotations

import logging
import threading

import pytest
import torch

from tensorlift.errors import MismatchError
from tensorlift.integrations.completeness import compare_shapes, report, watch

log = logging.getLogger("test")


def never(name, module, parameter):
    return False


class Layer(torch.nn.Module):
    def __init__(self, **parameters):
        super().__init__()
        for name, tensor in parameters.items():
            setattr(self, name, torch.nn.Parameter(tensor, requires_grad=False))


def bits(model):
    return {name: p.data.clone().view(torch.uint8) for name, p in model.named_parameters()}


DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.int8,
    torch.int32,
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_nobody_wrote_is_found_and_left_as_it_was(dtype):
    model = Layer(a=torch.arange(40).to(dtype).view(20, 2), b=torch.arange(33).to(dtype))
    before = bits(model)
    with watch(model, never) as coverage:
        model.b.data.copy_(torch.arange(33).to(dtype))
    assert coverage.missing == ["a"]
    assert all(torch.equal(now, before[name]) for name, now in bits(model).items())


def test_writes_of_other_threads_through_data_views_and_fill_count():
    model = Layer(**{name: torch.empty(64, 4) for name in "abcd"})

    def write():
        model.a.data.copy_(torch.ones(64, 4))
        model.b.detach()[:, :].zero_()
        model.c.data.view(-1)[:] = 1

    with watch(model, never) as coverage:
        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
        model.d = torch.nn.Parameter(torch.ones(64, 4))  # put in its place
    assert coverage.missing == []


def test_values_equal_to_those_before_count_as_written():
    model = Layer(norm=torch.ones(64))
    with watch(model, never) as coverage:
        model.norm.data.copy_(torch.ones(64))
    assert coverage.missing == []


def test_parts_of_a_fused_parameter_are_told_apart():
    model = Layer(
        weight=torch.zeros(48, 4), scale=torch.zeros(3), packed=torch.zeros(4, 6, dtype=torch.int32)
    )
    model.output_partition_sizes = [16, 8, 24]
    model.packed.output_dim = 1
    with watch(model, never) as coverage:
        model.weight.data[:16] = 1
        model.weight.data[24:] = 1
        model.scale.data[1:] = 2
        model.packed.data[:, 2:] = 3
    assert coverage.missing == ["weight (part 2 of 3)", "scale (part 1 of 3)", "packed (part 1 of 3)"]


def test_each_expert_and_both_halves_of_w13():
    model = Layer(w13_weight=torch.zeros(4, 12, 8), w2_weight=torch.zeros(4, 8, 6))
    model.local_num_experts = 4
    with watch(model, never) as coverage:
        model.w13_weight.data[:, :5] = 1  # padded: the sixth row belongs to nobody
        model.w13_weight.data[:3, 6:11] = 1
        model.w2_weight.data[0] = 1
        model.w2_weight.data[2:] = 1
    assert coverage.missing == ["w13_weight (local expert 3, half 2)", "w2_weight (local expert 1)"]
    assert not model.w13_weight.data[:, 5].any()


def test_scales_and_biases_of_each_expert():
    model = Layer(w13_scale=torch.ones(4, 2), w2_scale=torch.ones(4), w13_bias=torch.zeros(4, 12))
    model.local_num_experts = 4
    with watch(model, never) as coverage:
        model.w13_scale.data[torch.arange(4) != 2] = 0.5
        model.w13_scale.data[2, 0] = 0.5
        model.w2_scale.data[:3] = 0.5
        model.w13_bias.data[1:] = 1
        model.w13_bias.data[0, 6:] = 1
    assert coverage.missing == [
        "w13_scale (local expert 2, half 2)",
        "w2_scale (local expert 3)",
        "w13_bias (local expert 0, half 1)",
    ]


def test_experts_whose_weights_are_transposed():
    model = Layer(w13_qweight=torch.zeros(4, 6, 16, dtype=torch.int32), w13_g_idx=torch.zeros(4, 6))
    model.local_num_experts = 4
    model.w13_qweight.is_transposed = model.w13_g_idx.is_transposed = True
    with watch(model, never) as coverage:
        model.w13_qweight.data[:, :, :8] = 1
        model.w13_qweight.data[:3, :, 8:] = 1
        model.w13_g_idx.data[:3] = 1
    assert coverage.missing == ["w13_qweight (local expert 3, half 2)", "w13_g_idx (local expert 3)"]


def test_tied_optional_meta_and_empty_parameters_are_no_false_alarms():
    model = torch.nn.Module()
    model.embed, model.head = Layer(weight=torch.zeros(32, 4)), Layer()
    model.head.weight = model.embed.weight
    model.alias = Layer(weight=model.embed.weight.data)  # the same memory, another parameter
    model.rest = Layer(k_scale=torch.ones(()), meta=torch.empty(3, device="meta"), none=torch.empty(0))
    model.rest.register_buffer("inv_freq", torch.ones(8))
    with watch(model, lambda name, module, parameter: name.endswith("k_scale")) as coverage:
        model.embed.weight.data.fill_(1)
    assert coverage.missing == []
    assert model.rest.k_scale == 1


def test_marks_go_after_an_error_too():
    model = Layer(a=torch.full((16,), 3.0))
    with pytest.raises(ZeroDivisionError), watch(model, never):
        raise ZeroDivisionError
    assert torch.equal(model.a.data, torch.full((16,), 3.0))


def test_what_is_missing_ends_the_start_with_names_or_is_warned_of(caplog):
    came = ["model.layers.0.up_proj.weight"]
    with pytest.raises(MismatchError, match=r"model\.layers\.1\.up_proj\.weight \(tensors with close names"):
        report(["model.layers.1.up_proj.weight"], came, strict=True, engine="vLLM", log=log)
    with caplog.at_level(logging.WARNING):
        report(["a.weight"] * 12, came, strict=False, engine="vLLM", log=log)
    assert "12 parameters" in caplog.text
    assert "and 2 more" in caplog.text
    report([], came, strict=True, engine="vLLM", log=log)


def test_a_reload_has_to_bring_what_the_start_brought(caplog):
    one, two = {"a": (2, 3)}, {"a": (2, 3), "b": (4,)}
    compare_shapes(one, two, strict=True, engine="vLLM", log=log)
    with pytest.raises(
        MismatchError, match=r"lacks 1 tensor that it started with: b\. Nothing was overwritten"
    ):
        compare_shapes(two, one, strict=True, engine="vLLM", log=log)
    with caplog.at_level(logging.WARNING):
        compare_shapes(two, one, strict=False, engine="vLLM", log=log)
    assert "keeps its weights" in caplog.text


def test_a_reload_has_to_have_the_shapes_of_the_start(caplog):
    before, now = {"a": (2, 3), "b": (4,)}, {"a": [1, 3], "b": [4]}
    with pytest.raises(MismatchError, match=r"1 tensor of .*: a \(\[1, 3\], not \[2, 3\]\)\. No"):
        compare_shapes(before, now, strict=True, engine="vLLM", log=log)
    compare_shapes(before, now, strict=False, engine="vLLM", log=log)
    assert "of another shape" in caplog.text
    with pytest.raises(MismatchError, match=r"started with: c; it has 2 tensors of another shape"):
        compare_shapes({**before, "c": (1,)}, {"a": (), "b": ()}, strict=True, engine="vLLM", log=log)
