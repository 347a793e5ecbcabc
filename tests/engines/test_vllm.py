"""The load format in a real vLLM, on a CPU: skipped where TENSORLIFT_TEST_VLLM names no environment.

One process runs all that can share one, for importing vLLM takes longer than a tiny model's start.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from typing import Any

import pytest

from support import engines
from support.engines import CONFLICT, EXTRA

PYTHON = engines.interpreter("vllm")
pytestmark = [
    pytest.mark.skipif(
        PYTHON is None, reason="TENSORLIFT_TEST_VLLM names no Python with vLLM (make engines)"
    ),
    pytest.mark.timeout(1200),
]
MODELS = ("llama", "qwen2tied")
LOADED_ONLY = ("moe", "fp8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def tiny(folder):
    return engines.tiny(PYTHON, folder)


@pytest.fixture(scope="module")
def results(folder, tiny) -> dict[str, Any]:
    jobs: dict[str, dict[str, Any]] = {}

    def job(key, model, load_format="tensorlift", do="generate", **more):
        jobs[key] = {"model": str(model), "load_format": load_format, "do": do, "port": 29600, **more}

    for model in MODELS:
        job(f"{model} plain", tiny / model, "safetensors")
        job(f"{model} default", tiny / model)
        job(f"{model} extra", tiny / model, extra=EXTRA, environ=CONFLICT)
    job("flipped", engines.flipped(tiny / "llama", "flipped", "model.layers.0.mlp.up_proj.weight"))
    broken = engines.broken(tiny)
    job("reload", tiny / "llama", do="reload", reload=str(tiny / "broken" / "flipped"))
    job("bad reload", tiny / "llama", do="reload", reload=str(broken["no_up"][0]))
    draft = {"model": str(engines.draft_of(tiny / "llama", "LlamaForCausalLM")), "method": "eagle"}
    job("draft", tiny / "llama", more={"speculative_config": {**draft, "num_speculative_tokens": 1}})
    job("wrong key", tiny / "llama", extra={"num_threads": 3})
    for model in LOADED_ONLY:
        job(f"{model} plain", tiny / model, "safetensors", "state")
        job(f"{model} state", tiny / model, do="state")
    for name, (path, _) in broken.items():
        job(name, path, do="state")
    job("not strict", broken["no_up"][0], do="state", extra={"strict": False})
    done, text = engines.run_jobs(PYTHON, "vllm_jobs.py", list(jobs.values()), folder)
    print(text[-3000:])
    return dict(zip(jobs, done, strict=True)) | {"broken": broken}


def summaries(result):
    return [line for line in result["log"] if "tensorlift: rank 0:" in line]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("how", ["default", "extra"])
def test_the_same_tokens_and_log_probabilities(results, tiny, model, how):
    plain, ours = results[f"{model} plain"], results[f"{model} {how}"]
    assert "error" not in ours, ours["error"]
    assert ours["outputs"] == plain["outputs"]
    (line,) = summaries(ours)
    assert f" {engines.data_bytes(tiny / model)} bytes " in line
    assert ("MMAP" in line) == (how == "extra")
    assert not summaries(plain)


def test_one_flipped_bit_changes_the_output(results):
    assert results["flipped"]["outputs"] != results["llama default"]["outputs"]


def test_a_draft_that_has_embedding_and_head_from_its_target(results, tiny):
    draft = results["draft"]
    assert "error" not in draft, draft["error"]
    tokens = [[one["tokens"] for one in results[name]["outputs"]] for name in ("draft", "llama plain")]
    assert tokens[0] == tokens[1]
    for line, name in zip(summaries(draft), ("llama", "draft"), strict=True):
        assert f" {engines.data_bytes(tiny / name)} bytes " in line


def test_a_reload_while_serving(results):
    reload = results["reload"]
    assert "reload_error" not in reload, reload["reload_error"]
    assert reload["outputs"] == results["llama default"]["outputs"]
    assert reload["reloaded"] == results["flipped"]["outputs"]
    assert len(summaries(reload)) == 2


def test_a_reload_that_lacks_tensors_leaves_the_engine_serving(results):
    bad = results["bad reload"]
    assert "lacks 1 tensor that it started with" in bad["reload_error"]
    assert bad["reloaded"] == bad["outputs"]


def test_a_wrong_key_ends_the_start_before_any_work(results):
    assert "'num_threads' belongs to the engine's own loaders" in results["wrong key"]["error"]
    assert results["wrong key"]["seconds"] < 5


@pytest.mark.parametrize("model", LOADED_ONLY)
def test_the_same_parameters_where_no_forward_runs(results, model):
    assert "error" not in results[f"{model} state"], results[f"{model} state"]["error"]
    assert results[f"{model} state"]["state"] == results[f"{model} plain"]["state"]


def test_what_is_wrong_with_a_checkpoint_ends_the_start_with_our_message(results):
    for name, (_, says) in results["broken"].items():
        assert says in results[name].get("error", "it started"), name


@pytest.mark.parametrize(
    ("model", "extra", "text"),
    [
        ("broken/no_up", "{}", "gate_up_proj.weight (part 2 of 2)"),
        ("broken/missing_shard", "{}", "model-00002-of-00003.safetensors"),
        ("llama", '{"chunk_sise": 4096}', "did you mean chunk_size"),
    ],
)
def test_a_server_does_not_half_start(results, tiny, folder, model, extra, text):
    """With an engine in a process of its own, as it is served."""
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny / model)]
    command += ["--load-format", "tensorlift", "--model-loader-extra-config", extra, "--port", "29599"]
    command += ["--dtype", "bfloat16", "--max-model-len", "128", "--enforce-eager"]
    environ = engines.environment(folder) | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    said = folder / "server.log"
    with said.open("wb") as out:
        server = subprocess.Popen(
            command, env=environ, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        assert server.wait(300) != 0
        assert text in said.read_text(errors="replace")
        assert engines.left(server.pid) == []
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, 9)


def test_not_strict_warns(results):
    assert "error" not in results["not strict"]
    assert any(line.startswith("WARNING") and "part 2 of 2" in line for line in results["not strict"]["log"])
