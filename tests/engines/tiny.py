"""Writes tiny random checkpoints, each with a tokenizer of its own; runs in an engine's environment.

    python tiny.py FOLDER [name ...]

No test itself: the tests of engines start it. What the engines' CPU paths cannot run (experts, quantised
weights) is only ever loaded.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3MoeConfig,
)

TEXT = "hello world the quick brown fox jumps over the lazy dog"
COMMON = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
CONFIGS: dict[str, Any] = {
    "llama": (LlamaConfig, {"tie_word_embeddings": False, "head_dim": 32}),
    "qwen2tied": (Qwen2Config, {"tie_word_embeddings": True}),
    "moe": (
        Qwen3MoeConfig,
        {
            "tie_word_embeddings": False,
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    ),
    # With tensors that are derived from others: what latent attention multiplies by.
    "latent": (
        DeepseekV2Config,
        {
            "tie_word_embeddings": False,
            "first_k_dense_replace": 2,
            "moe_layer_freq": 1,
            "kv_lora_rank": 32,
            "q_lora_rank": None,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
}


def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator([TEXT] * 10, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def write(folder: Path, name: str) -> None:
    """One checkpoint in shards of 100 kB, with an index."""
    words = tokenizer()
    kind, more = CONFIGS[name]
    torch.manual_seed(0)
    config = kind(vocab_size=-(-len(words) // 64) * 64, **COMMON, **more)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    # Norms that are all ones, as they are made, would look the same if they were not loaded.
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.uniform_(0.5, 1.5)
    model.save_pretrained(folder / name, max_shard_size="100KB")
    words.save_pretrained(folder / name)


def write_fp8(folder: Path) -> None:
    """The llama in FP8 with a scale for each channel, as compressed-tensors writes it; one file."""
    source, target = folder / "llama", folder / "fp8"
    target.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(shard).items():
            if "proj" not in name:
                tensors[name] = tensor
                continue
            scale = tensor.float().abs().amax(1, keepdim=True) / 448
            tensors[name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
            tensors[name.replace(".weight", ".weight_scale")] = scale
    save_file(tensors, target / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        },
    }
    (target / "config.json").write_text(json.dumps(config))
    tokenizer().save_pretrained(target)


def write_gptq(folder: Path) -> None:
    """The llama in 4 bits, at random, as GPTQ packs them: eight rows of an input to an int32."""
    source, target = folder / "llama", folder / "gptq"
    target.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    torch.manual_seed(1)
    for shard in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(shard).items():
            if "proj" not in name:
                tensors[name] = tensor
                continue
            (rows, columns), layer = tensor.shape, name.removesuffix("weight")
            tensors[f"{layer}qweight"] = torch.randint(
                -(2**31), 2**31, (columns // 8, rows), dtype=torch.int32
            )
            tensors[f"{layer}scales"] = (torch.rand(columns // 32, rows) / 100).bfloat16()
            tensors[f"{layer}qzeros"] = torch.full((columns // 32, rows // 8), 0x77777777, dtype=torch.int32)
            tensors[f"{layer}g_idx"] = torch.arange(columns, dtype=torch.int32) // 32
    save_file(tensors, target / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        **{"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
        "lm_head": False,
    }
    (target / "config.json").write_text(json.dumps(config))
    tokenizer().save_pretrained(target)


QUANTISED = {"fp8": write_fp8, "gptq": write_gptq}


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[2:] or [*CONFIGS, "gptq", "fp8"]:
        if name in QUANTISED:
            QUANTISED[name](folder)
        else:
            write(folder, name)


if __name__ == "__main__":
    main()
