"""What every change is tried with: each engine starts plainly, with defaults and with one more configuration.

The other modules of this folder have the whole matrix.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support import engines, sglang_runs
from support.ports import free_port

VLLM, SGLANG = engines.interpreter("vllm"), engines.interpreter("sglang")
pytestmark = pytest.mark.timeout(900)
FLIPPED = "model.layers.0.mlp.up_proj.weight"


def jobs(models: Path) -> dict[str, dict[str, Any]]:
    model = str(models / "llama")
    flipped = str(engines.flipped(models / "llama", "flipped", FLIPPED))
    ours = {"load_format": "tensorlift", "do": "generate", "port": 29650}
    return {
        "plain": {**ours, "model": model, "load_format": "safetensors"},
        "defaults": {**ours, "model": model},
        "extra": {**ours, "model": model, "extra": engines.EXTRA, "environ": engines.CONFLICT},
        "flipped": {**ours, "model": flipped},
        # Nobody is there to fork from.
        "nobody": {**ours, "model": model, "extra": {"seed": f"http://127.0.0.1:{free_port()}"}},
    }


def assert_loaded(said: dict[str, str], outputs: dict[str, Any], nbytes: int) -> None:
    """``outputs``: tokens and log probabilities."""
    assert outputs["plain"]
    assert outputs["defaults"] == outputs["extra"] == outputs["nobody"] == outputs["plain"]
    assert outputs["flipped"] != outputs["plain"]
    assert "tensorlift: rank" not in said["plain"]
    assert "cannot be reached" in said["nobody"]
    assert "; loading from files" in said["nobody"]
    for name in ("defaults", "extra", "flipped", "nobody"):
        assert f"tensorlift: rank 0: {nbytes} bytes" in said[name], said[name]
        assert ("readers: MMAP " in said[name]) == (name == "extra"), said[name]


@pytest.mark.skipif(not VLLM, reason="TENSORLIFT_TEST_VLLM names no Python with vLLM (make smoke)")
def test_vllm(tmp_path: Path) -> None:
    models = engines.tiny(str(VLLM), tmp_path)
    wanted = jobs(models)
    done, text = engines.run_jobs(str(VLLM), "vllm_jobs.py", list(wanted.values()), tmp_path)
    results = dict(zip(wanted, done, strict=True))
    print(text[-3000:])
    said = {name: "\n".join(result["log"]) for name, result in results.items()}
    outputs = {name: result.get("outputs", result.get("error")) for name, result in results.items()}
    assert_loaded(said, outputs, engines.data_bytes(models / "llama"))


@pytest.mark.skipif(not SGLANG, reason="TENSORLIFT_TEST_SGLANG names no Python with SGLang (make smoke)")
def test_sglang(tmp_path: Path) -> None:
    models = engines.tiny(str(SGLANG), tmp_path)
    port = free_port()
    wanted = jobs(models)
    wanted["seed"] = {**wanted["defaults"], "extra": {"publish": {"port": port}}, "serve": "alone"}
    wanted["fork"] = {**wanted["defaults"], "extra": {"seed": f"http://127.0.0.1:{port}", "fallback": False}}
    results = sglang_runs.Results(tmp_path, wanted)
    said = {name: results[name]["log"] for name in wanted}
    outputs = {
        name: (results[name]["tokens"], results[name]["logprobs"])
        if "error" not in results[name]
        else results[name]["error"]
        for name in wanted
    }
    assert_loaded(said, outputs, engines.data_bytes(models / "llama"))
    assert outputs["fork"] == outputs["plain"]
    assert f"from http://127.0.0.1:{port} (" in said["fork"]
