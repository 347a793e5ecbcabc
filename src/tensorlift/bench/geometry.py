"""The tensors of real models: names, shapes and dtypes as published, computed, nothing written.

The figures are those of each model's own config.json; names and dtypes are those of its safetensors index and
headers. A model is cut by taking its first layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tensorlift.sources.writing import Spec

__all__ = ["MODELS", "Model", "Spec"]


@dataclass(frozen=True, slots=True)
class Model:
    """A model whose checkpoints can be imitated."""

    name: str
    layers: int
    about: str
    make: Callable[[int], Iterator[Spec]]

    def specs(self, layers: int | None = None) -> list[Spec]:
        """Its tensors, those of the first ``layers`` layers, in the order of the model."""
        return list(self.make(self.layers if layers is None else layers))


def _bf16(name: str, *shape: int) -> Spec:
    return Spec(name + ".weight", "BF16", shape)


def _fp8(name: str, rows: int, columns: int) -> Iterator[Spec]:
    """A weight in FP8 with one scale for each block of 128 x 128."""
    yield Spec(name + ".weight", "F8_E4M3", (rows, columns))
    yield Spec(name + ".weight_scale_inv", "F32", (-(-rows // 128), -(-columns // 128)), 0)


def _nvfp4(name: str, rows: int, columns: int) -> Iterator[Spec]:
    """A weight in NVFP4: two values a byte, a scale for each 16 of them, two scalars."""
    yield Spec(name + ".weight", "U8", (rows, columns // 2), rows * columns)
    yield Spec(name + ".weight_scale", "F8_E4M3", (rows, columns // 16), 0)
    yield Spec(name + ".weight_scale_2", "F32", (), 0)
    yield Spec(name + ".input_scale", "F32", (), 0)


def _plain(name: str, rows: int, columns: int) -> Iterator[Spec]:
    yield _bf16(name, rows, columns)


_Linear = Callable[[str, int, int], Iterator[Spec]]


def _mlp(prefix: str, hidden: int, inner: int, linear: _Linear) -> Iterator[Spec]:
    yield from linear(prefix + "gate_proj", inner, hidden)
    yield from linear(prefix + "up_proj", inner, hidden)
    yield from linear(prefix + "down_proj", hidden, inner)


def _model(
    layers: int, hidden: int, vocabulary: int, layer: Callable[[int, str], Iterator[Spec]]
) -> Iterator[Spec]:
    """Embeddings, the layers, each between its two norms, the last norm and the head."""
    yield _bf16("model.embed_tokens", vocabulary, hidden)
    for number in range(layers):
        prefix = f"model.layers.{number}."
        yield _bf16(prefix + "input_layernorm", hidden)
        yield _bf16(prefix + "post_attention_layernorm", hidden)
        yield from layer(number, prefix)
    yield _bf16("model.norm", hidden)
    yield _bf16("lm_head", vocabulary, hidden)


def _grouped_attention(prefix: str, hidden: int, heads: int, shared: int, head: int) -> Iterator[Spec]:
    yield _bf16(prefix + "q_proj", heads * head, hidden)
    yield _bf16(prefix + "k_proj", shared * head, hidden)
    yield _bf16(prefix + "v_proj", shared * head, hidden)
    yield _bf16(prefix + "o_proj", hidden, heads * head)


def _qwen3_moe(layers: int, experts: _Linear = _plain) -> Iterator[Spec]:
    hidden, count, inner, head = 2048, 128, 768, 128

    def layer(_: int, prefix: str) -> Iterator[Spec]:
        yield from _grouped_attention(prefix + "self_attn.", hidden, 32, 4, head)
        yield _bf16(prefix + "self_attn.q_norm", head)
        yield _bf16(prefix + "self_attn.k_norm", head)
        yield _bf16(prefix + "mlp.gate", count, hidden)
        for expert in range(count):
            yield from _mlp(f"{prefix}mlp.experts.{expert}.", hidden, inner, experts)

    return _model(layers, hidden, 151936, layer)


def _nvfp4_moe(layers: int) -> Iterator[Spec]:
    return _qwen3_moe(layers, _nvfp4)


def _llama3(layers: int) -> Iterator[Spec]:
    hidden = 4096

    def layer(_: int, prefix: str) -> Iterator[Spec]:
        yield from _grouped_attention(prefix + "self_attn.", hidden, 32, 8, 128)
        yield from _mlp(prefix + "mlp.", hidden, 14336, _plain)

    return _model(layers, hidden, 128256, layer)


def _latent_attention(prefix: str, hidden: int) -> Iterator[Spec]:
    """Multi-head latent attention: queries and keys of 128 + 64, values of 128, ranks 1536 and 512."""
    heads, q_rank, kv_rank, plain, turned, value = 128, 1536, 512, 128, 64, 128
    yield from _fp8(prefix + "q_a_proj", q_rank, hidden)
    yield _bf16(prefix + "q_a_layernorm", q_rank)
    yield from _fp8(prefix + "q_b_proj", heads * (plain + turned), q_rank)
    yield from _fp8(prefix + "kv_a_proj_with_mqa", kv_rank + turned, hidden)
    yield _bf16(prefix + "kv_a_layernorm", kv_rank)
    yield from _fp8(prefix + "kv_b_proj", heads * (plain + value), kv_rank)
    yield from _fp8(prefix + "o_proj", hidden, heads * value)


def _deepseek_v3(layers: int) -> Iterator[Spec]:
    hidden, dense, experts, inner = 7168, 3, 256, 2048

    def layer(number: int, prefix: str) -> Iterator[Spec]:
        yield from _latent_attention(prefix + "self_attn.", hidden)
        if number < dense:
            yield from _mlp(prefix + "mlp.", hidden, 18432, _fp8)
            return
        yield _bf16(prefix + "mlp.gate", experts, hidden)
        yield Spec(prefix + "mlp.gate.e_score_correction_bias", "F32", (experts,))
        for expert in range(experts):
            yield from _mlp(f"{prefix}mlp.experts.{expert}.", hidden, inner, _fp8)
        yield from _mlp(prefix + "mlp.shared_experts.", hidden, inner, _fp8)

    return _model(layers, hidden, 129280, layer)


_ALL = (
    Model("qwen3-30b-a3b", 48, "Qwen3-30B-A3B, bf16: 128 experts a layer, 61 GB", _qwen3_moe),
    Model(
        "deepseek-v3",
        61,
        "DeepSeek-V3 in FP8 without the layer that predicts further tokens: 256 experts a layer after 3 dense"
        " layers, 673 GB",
        _deepseek_v3,
    ),
    Model("llama-3-8b", 32, "Llama-3-8B, bf16: dense, 16 GB", _llama3),
    Model(
        "nvfp4-moe",
        48,
        "Qwen3-30B-A3B with its experts in NVFP4, 4 tensors a weight, the rest bf16: 74,000 tensors, 19 GB",
        _nvfp4_moe,
    ),
)

MODELS: dict[str, Model] = {model.name: model for model in _ALL}
"""The models by name."""
