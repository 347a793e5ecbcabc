"""Forks of what a real vLLM's processing leaves, on a CPU, without a forward: all in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support import engines
from support.ports import free_port
from support.vllm_runs import PYTHON

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="TENSORLIFT_TEST_VLLM names no Python with vLLM (make engines)"),
    pytest.mark.timeout(900),
]
MODELS = ("llama", "qwen2tied", "gptq")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("vllm")
    tiny = engines.tiny(PYTHON, folder)

    def job(model: str, **more: Any) -> dict[str, Any]:
        return {
            **{"model": str(tiny / model), "load_format": "safetensors", "do": "fork"},
            **{"port": free_port(), "seed_port": free_port(), **more},
        }

    jobs = {
        "first": job("llama", do="state"),  # vLLM sets its logging up during the first one
        **{name: job(name) for name in MODELS},
        # Of bfloat16 oneDNN takes nothing where the CPU has no instructions for it.
        "handles": job("llama", handles=True, more={"dtype": "float32"}),
    }
    done, text = engines.run_jobs(PYTHON, "vllm_jobs.py", list(jobs.values()), folder)
    print(text[-3000:])
    return dict(zip(jobs, done, strict=True))


@pytest.mark.parametrize("model", MODELS)
def test_a_fork_is_what_vllm_makes_of_the_files(results: dict[str, Any], model: str) -> None:
    """4 bits too, which vLLM packs anew behind a load: what was packed comes, and is not packed again."""
    assert "error" not in results[model], results[model]["error"]
    states = results[model]["states"]
    assert states["fork"] == states["seed"] == states["plain"]
    said = "\n".join(results[model]["log"])
    assert "tensorlift: rank 0: forked " in said
    assert "loading from files" not in said
    if model == "gptq":
        assert "gptq" in said


def test_weights_in_handles_are_neither_offered_nor_taken(results: dict[str, Any]) -> None:
    said = "\n".join(results["handles"]["log"])
    assert "is not offered: RequestError: the engine keeps weights where they cannot be read" in said
    assert "; loading from files" in said
    assert results["handles"]["states"]["fork"] == results["handles"]["states"]["plain"]
