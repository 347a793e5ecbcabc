"""``tensorlift synth``: writes a checkpoint with a real model's geometry, to try and to measure with."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import typer

from tensorlift.cli.console import guarded
from tensorlift.cli.options import a_path
from tensorlift.format.quoting import clean, plural
from tensorlift.stats import human_bytes

__all__ = ["command"]


@guarded
def command(
    out: Path = typer.Argument(
        metavar="OUT", parser=a_path, help="The folder to write to; made if it is not there."
    ),
    like: str = typer.Option(
        ..., "--like", metavar="MODEL", help="qwen3-30b-a3b, deepseek-v3, llama-3-8b or nvfp4-moe."
    ),
    layers: int | None = typer.Option(None, min=1, help="Only the first layers; without it, all of them."),
    shards: int | None = typer.Option(
        None, min=1, help="How many files, of about one size; without it, as published: cut at 5 GB."
    ),
    seed: int = typer.Option(0, min=0, help="Of the bytes: the same seed gives the same files."),
    force: bool = typer.Option(False, "--force", help="Replace a checkpoint that is there."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Write a checkpoint with a real model's names, shapes, dtypes and shards, and seeded random bytes."""
    from tensorlift.bench.cases import write_model  # numpy only now
    from tensorlift.bench.geometry import MODELS

    start = time.perf_counter()
    case = write_model(out, like, layers, shards, seed, force)
    seconds = time.perf_counter() - start
    model = MODELS[like]
    facts: dict[str, Any] = {
        "folder": str(out),
        "like": like,
        "layers": layers or model.layers,
        "layers_of_the_model": model.layers,
        "seed": seed,
        "parameters": sum(spec.parameters for spec in model.specs(layers)),
        "tensors": case.tensors,
        "bytes": case.nbytes,
        "file_bytes": case.file_bytes,
        "files": [file.name for file in case.files],
        "seconds": seconds,
    }
    print(json.dumps(facts, indent=2) if as_json else _summary(facts))


def _summary(facts: dict[str, Any]) -> str:
    nbytes, seconds = facts["file_bytes"], facts["seconds"]
    layers = f"{facts['layers']} of {facts['layers_of_the_model']} layers"
    sizes = (
        f"{plural(facts['tensors'], 'tensor')}, {human_bytes(nbytes)}, {plural(len(facts['files']), 'file')}"
    )
    parameters = f"{facts['parameters'] / 1e9:.2f} billion parameters"
    return (
        f"{clean(facts['folder'])}: like {facts['like']}, {layers}, {parameters}\n"
        f"{sizes}, seed {facts['seed']}\n"
        f"written in {seconds:.2f} s: {human_bytes(nbytes / seconds)}/s"
    )
