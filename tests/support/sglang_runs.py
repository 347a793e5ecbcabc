"""Runs of a real SGLang, which lies in an environment of its own: TENSORLIFT_TEST_SGLANG names its Python."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from support import engines
from support.engines import CONFLICT, EXTRA
from support.ports import free_port
from tensorlift.options import HOST_BACKENDS

PYTHON = engines.interpreter("sglang") or ""
MARKS = [
    pytest.mark.skipif(not PYTHON, reason="TENSORLIFT_TEST_SGLANG names no Python with SGLang"),
    pytest.mark.timeout(900),
]
OWN = {"SGLANG_USE_CPU_ENGINE": "1"}
NORM = "model.norm.weight"


def make_models(folder: Path) -> Path:
    """The tiny checkpoints, a draft for the llama, and below "broken" copies of it that differ."""
    models = engines.tiny(PYTHON, folder)
    llama = models / "llama"
    engines.draft_of(llama, "LlamaForCausalLMEagle")
    engines.flipped(llama, "flipped", NORM)
    pickles = engines.copied(llama, "pickles")
    (pickles / engines.INDEX).unlink()
    for shard in pickles.glob("*.safetensors"):
        shard.rename(shard.with_suffix(".pt"))
    return models


class Results:
    """Jobs by name, run in one process a rank."""

    def __init__(self, folder: Path, jobs: dict[str, dict[str, Any]], ranks: int = 1) -> None:
        given = [{"do": "generate", "port": free_port(), **job} for job in jobs.values()]
        environ = (
            OWN | {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks)))} if ranks > 1 else OWN
        )
        outputs = engines.run_ranks(PYTHON, "sglang_jobs.py", given, ranks, folder, environ)
        self.by_rank = [dict(zip(jobs, results, strict=True)) for results, _ in outputs]

    def __getitem__(self, name: str) -> dict[str, Any]:
        return self.by_rank[0][name]


def job(model: Path, load_format: str = "tensorlift", **more: Any) -> dict[str, Any]:
    return {"model": str(model), "load_format": load_format, **more}


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert "error" not in one, one
    assert "error" not in other, other
    assert one["tokens"] == other["tokens"]
    assert one["logprobs"] == other["logprobs"]  # to the last bit, in prefill and in each step


def said_bytes(result: dict[str, Any]) -> int:
    found = re.search(r"tensorlift: rank \d+: (\d+) bytes", result["log"])
    assert found, result["log"]
    return int(found[1])


def loading_jobs(model: Path) -> dict[str, dict[str, Any]]:
    """One checkpoint in all ways that have to give the same."""
    return {
        "plain": job(model, "safetensors"),
        "defaults": job(model),
        "mmap": job(model, extra=EXTRA),
        **{name: job(model, extra={"backend": name}) for name in HOST_BACKENDS},
        "conflicting": job(model, extra=EXTRA, environ=CONFLICT),
        "null": job(model, extra={"backend": None}, environ={"TENSORLIFT_BACKEND": "MMAP"}),
        "as text": job(model, extra=json.dumps(EXTRA)),
    }


SERVER = [
    "-m",
    "sglang.launch_server",
    "--device",
    "cpu",
    "--host",
    "127.0.0.1",
    "--dtype",
    "bfloat16",
    "--max-total-tokens",
    "2048",
    "--mem-fraction-static",
    "0.3",
    "--attention-backend",
    "torch_native",
    "--disable-overlap-schedule",
    "--skip-server-warmup",
]


class Server(engines.Server):
    """One that was started, and what it says."""

    def command(self, model: Path) -> list[str]:
        return [PYTHON, *SERVER, "--model-path", str(model)]

    def environ(self) -> dict[str, str]:
        return OWN

    def generate(self) -> tuple[list[int], list[float]]:
        settings = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        body = {"text": "hello world the", "sampling_params": settings, "return_logprob": True}
        meta = self.ask("/generate", body)["meta_info"]
        pairs = meta["output_token_logprobs"]
        return [pair[1] for pair in pairs], [pair[0] for pair in pairs]

    def reload(self, model: Path) -> Any:
        return self.ask("/update_weights_from_disk", {"model_path": str(model)})
