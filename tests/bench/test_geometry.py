"""Whole models have the sizes that are published, computed without writing a byte."""

from __future__ import annotations

import pytest

from tensorlift.bench.geometry import MODELS


@pytest.mark.parametrize(
    ("name", "billions", "tensors"),
    [
        # Parameters as the model cards say; 18,867 and 291 tensors as their indexes list.
        ("qwen3-30b-a3b", 30.53, 18867),
        ("llama-3-8b", 8.03, 291),
        ("nvfp4-moe", 30.53, 18867 + 48 * 128 * 3 * 3),
        # 671 billion; its layer that predicts further tokens is not counted in that.
        ("deepseek-v3", 671.03, 90427),
    ],
)
def test_whole_models_have_their_published_sizes(name: str, billions: float, tensors: int) -> None:
    specs = MODELS[name].specs()
    assert round(sum(spec.parameters for spec in specs) / 1e9, 2) == billions
    assert len(specs) == tensors
    assert len({spec.name for spec in specs}) == tensors


@pytest.mark.parametrize("name", MODELS)
def test_cutting_takes_the_first_layers(name: str) -> None:
    model = MODELS[name]
    whole, one = model.specs(), model.specs(1)
    assert {spec.name for spec in one if ".layers." in spec.name} == {
        spec.name for spec in whole if ".layers.0." in spec.name
    }
    assert [s for s in one if ".layers." not in s.name] == [s for s in whole if ".layers." not in s.name]


def test_scales_of_fp8_cover_every_block() -> None:
    specs = {spec.name: spec for spec in MODELS["deepseek-v3"].specs(4)}
    prefix = "model.layers.3.self_attn.kv_a_proj_with_mqa."
    assert (specs[prefix + "weight"].dtype, specs[prefix + "weight"].shape) == ("F8_E4M3", (576, 7168))
    # 576 rows are four blocks and a half.
    assert (specs[prefix + "weight_scale_inv"].dtype, specs[prefix + "weight_scale_inv"].shape) == (
        "F32",
        (5, 56),
    )
    assert specs["model.layers.3.mlp.gate.weight"].dtype == "BF16"
    assert specs["model.layers.3.mlp.gate.e_score_correction_bias"].dtype == "F32"
    assert "model.layers.2.mlp.gate.weight" not in specs
    assert specs["model.layers.2.mlp.gate_proj.weight"].shape == (18432, 7168)


def test_nvfp4_packs_two_values_a_byte_and_scales_sixteen() -> None:
    specs = {spec.name: spec for spec in MODELS["nvfp4-moe"].specs(1)}
    prefix = "model.layers.0.mlp.experts.127.down_proj."
    kinds = {
        suffix: (specs[prefix + suffix].dtype, specs[prefix + suffix].shape)
        for suffix in ("weight", "weight_scale")
    }
    assert kinds == {"weight": ("U8", (2048, 384)), "weight_scale": ("F8_E4M3", (2048, 48))}
    scalars = [specs[prefix + suffix] for suffix in ("weight_scale_2", "input_scale")]
    assert {(spec.dtype, spec.shape, spec.nbytes) for spec in scalars} == {("F32", (), 4)}
