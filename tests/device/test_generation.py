"""A model whose weights came through the loader says the same as one that the plain library loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.device import NO_DEVICE
from tensorlift import loading

if not torch.cuda.is_available():
    pytest.skip(NO_DEVICE, allow_module_level=True)
transformers = pytest.importorskip("transformers")

DEVICE = "cuda"
TOKENS = 32


def new_model(seed: int) -> Any:
    """A small Llama in fp16 with random weights."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config).half().to(DEVICE).eval()


def generated(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy tokens, and log probabilities of the prefill and of each step of the decoding."""
    prompt = torch.arange(48, device=DEVICE).remainder(1000).reshape(2, 24)
    logs, tokens = [], []
    with torch.inference_mode():
        out = model(prompt, use_cache=True)
        logs += [out.logits[:, place] for place in range(out.logits.shape[1])]
        for _ in range(TOKENS):
            token = out.logits[:, -1:].argmax(dim=-1)
            tokens.append(token)
            out = model(token, past_key_values=out.past_key_values, use_cache=True)
            logs.append(out.logits[:, -1])
    return torch.cat(tokens, dim=1), torch.stack(logs).float().log_softmax(dim=-1)


@pytest.mark.filterwarnings("ignore")
def test_generation_is_the_same(tmp_path: Path) -> None:
    source = new_model(1)
    path = tmp_path / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in source.state_dict().items()}, path)

    # Each begins with other weights, so that what is not loaded shows.
    plain, ours, filled = new_model(2), new_model(3), new_model(4)
    plain.load_state_dict(load_file(path, device=DEVICE), assign=True)
    ours.load_state_dict(loading.load(path, device=DEVICE), assign=True)
    loading.load_into(filled, path)

    tokens, logs = generated(plain)
    assert torch.isfinite(logs).all()
    for model in (ours, filled):
        their_tokens, their_logs = generated(model)
        assert torch.equal(their_tokens, tokens)
        assert (their_logs - logs).abs().max().item() == 0
