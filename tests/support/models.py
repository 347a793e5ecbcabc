"""Tiny models of transformers with random weights, made offline from their configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from support.tensors import raw

WORDS = 120
_SMALL = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 11,  # so that the order of names is not that of numbers
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
_T5 = {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4}
_BERT = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("AutoModelForCausalLM", "LlamaConfig", {**_SMALL, "tie_word_embeddings": False}),
    "tied": ("AutoModelForCausalLM", "Qwen2Config", {**_SMALL, "tie_word_embeddings": True}),
    "experts": ("AutoModelForCausalLM", "Qwen3MoeConfig", {**_SMALL, **_EXPERTS}),
    "encoder-decoder": ("AutoModelForSeq2SeqLM", "T5Config", _T5),
    "encoder": ("AutoModelForMaskedLM", "BertConfig", _BERT),
}
"""By name: the class that loads it, the class of its configuration, and what that is given."""


def auto(kind: str) -> Any:
    return getattr(transformers, KINDS[kind][0])


def saved(kind: str, folder: Path, *, shards: bool = False, dtype: Any = torch.float32) -> Path:
    """A model of the kind in a folder, in one file or in several."""
    _, config, values = KINDS[kind]
    torch.manual_seed(7)
    model = auto(kind).from_config(getattr(transformers, config)(**values)).to(dtype)
    with torch.no_grad():
        # Biases and norms too: as they are made, they would be right if they never came.
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder, max_shard_size="40KB" if shards else "1GB")
    return folder


def data_bytes(folder: Path) -> int:
    """Bytes of all tensors in the safetensors files of a folder."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            total += path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")
    return total


def assert_equal(ours: Any, plain: Any) -> None:
    """The same in every byte of parameters and buffers, in dtypes, devices, ties and flags."""
    mine, theirs = dict(_all(ours)), dict(_all(plain))
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        own = mine[name]
        assert (own.dtype, own.device, own.shape) == (tensor.dtype, tensor.device, tensor.shape), name
        assert own.requires_grad == tensor.requires_grad, name
        assert type(own) is type(tensor), name
        assert raw(own.detach().cpu()) == raw(tensor.detach().cpu()), name
    assert _ties(mine) == _ties(theirs)
    assert ours.training == plain.training
    assert ours.config.to_dict() == plain.config.to_dict()


def logits(model: Any) -> torch.Tensor:
    words = torch.arange(40, device=model.device).remainder(WORDS).reshape(2, 20)
    extra = {"decoder_input_ids": words} if model.config.is_encoder_decoder else {}
    with torch.inference_mode():
        return model(words, **extra).logits


def _all(model: Any) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _ties(tensors: dict[str, torch.Tensor]) -> set[frozenset[str]]:
    """Names that are one tensor."""
    by_identity: dict[int, set[str]] = {}
    for name, tensor in tensors.items():
        by_identity.setdefault(id(tensor), set()).add(name)
    return {frozenset(names) for names in by_identity.values()}
