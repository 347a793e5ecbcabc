"""A model that decodes, token by token, for what disturbs it; and the memory of a fork of it."""

from __future__ import annotations

import time
import zlib
from typing import Any

from tensorlift.forking.client import SeedClient

__all__ = ["Decoder", "hash_of", "llama", "room_for"]

# 3.5 billion parameters with 16 layers.
_SIZES = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32,
    "num_key_value_heads": 32, "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip


def llama(layers: int, hidden: int | None, device: str) -> Any:
    """A Llama of transformers, random weights in bf16; another hidden size with all else in proportion."""
    import torch
    import transformers

    sizes: dict[str, Any] = dict(_SIZES)
    if hidden is not None:
        share = hidden / sizes["hidden_size"]
        for name in ("vocab_size", "hidden_size", "intermediate_size"):
            sizes[name] = int(sizes[name] * share)
        heads = max(4, int(sizes["num_attention_heads"] * share))
        sizes |= {"num_attention_heads": heads, "num_key_value_heads": heads}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=layers)
    with torch.device(device):
        made: Any = transformers.AutoModelForCausalLM
        return made.from_config(config, dtype=torch.bfloat16).eval()


def room_for(url: str, device: str) -> dict[str, Any]:
    """Memory for all tensors of a seed."""
    import torch

    return {
        one.name: torch.empty_strided(one.shape, one.stride, dtype=getattr(torch, one.dtype), device=device)
        for one in SeedClient(url).manifest().tensors
    }


def hash_of(tensor: Any) -> int:
    """CRC-32 of a tensor's bytes."""
    import torch

    return zlib.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


class Decoder:
    """Greedy decoding behind one prompt, a token at a time, with a static cache; on a device the step is one
    CUDA graph, as engines decode: kernel by kernel from Python the host's noise is all that one sees.
    """

    def __init__(self, model: Any, tokens: int, device: str) -> None:
        import torch
        from transformers import StaticCache

        self._model, self._tokens, self._device = model, tokens, device
        self._cache: Any = StaticCache(config=model.config, max_cache_len=tokens + 32)
        self._prompt = torch.arange(16, device=device).reshape(1, -1)
        self._token = torch.zeros(1, 1, dtype=torch.long, device=device)
        self._begin()
        self._graph: Any = None
        if device != "cpu":
            with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
                for _ in range(3):
                    self._forward(self._token)
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._forward(self._token)

    def _begin(self) -> None:
        import torch

        with torch.inference_mode():
            self._cache.reset()
        self._forward(self._prompt)

    def _forward(self, tokens: Any) -> None:
        import torch

        with torch.inference_mode():
            out = self._model(tokens, past_key_values=self._cache, use_cache=True)
            self._token.copy_(out.logits[:, -1].argmax(-1, keepdim=True))

    def run(self) -> tuple[list[int], list[float]]:
        """Tokens, and the seconds of each until the host has it."""
        self._begin()
        found, seconds = [], []
        for _ in range(self._tokens):
            begin = time.perf_counter()
            if self._graph is None:
                self._forward(self._token)
            else:
                self._graph.replay()
            found.append(int(self._token.item()))
            seconds.append(time.perf_counter() - begin)
        return found, seconds
