"""The load format in a real SGLang on a CPU, against its own loader, without a server.

Tests share processes: an import of SGLang takes longer than everything else.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from support import engines
from support.engines import EXTRA
from support.sglang_runs import MARKS, Results, job, loading_jobs, make_models, said_bytes, same
from tensorlift.options import HOST_BACKENDS

pytestmark = MARKS


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("sglang"))


BROKEN = ["missing_shard", "truncated", "foreign", "no_up", "no_k", "no_down", "no_norm", "no_head"]
PARTS = ["no_expert", "no_scale"]  # of a mixture of experts, and of FP8 weights


@pytest.fixture(scope="module")
def broken(models: Path) -> dict[str, tuple[Path, str]]:
    """Checkpoints that must not start, each with what is said of it."""
    return engines.broken(models)


@pytest.fixture(scope="module")
def llama(models: Path, broken: dict[str, tuple[Path, str]]) -> Results:
    model, fp8 = models / "llama", {"do": "state", "capability": [9, 0]}
    jobs = {
        **loading_jobs(model),
        "flipped": job(models / "broken" / "flipped"),
        "pickles": job(models / "broken" / "pickles"),
        **{name: job(broken[name][0], **fp8) for name in [*BROKEN, *PARTS]},
        "not strict": job(broken["no_up"][0], extra={"strict": False}),
        "unknown key": job(model, extra={"chunk_sise": 1}),
        "engine's key": job(model, extra={"process_group": "world"}),
        "generic key": job(model, extra={"num_threads": 8}),
        "bad value": job(model, extra={"backend": "FAST"}),
        "moe plain": job(models / "moe", "safetensors", do="state"),
        "moe": job(models / "moe", do="state"),
        "fp8 plain": job(models / "fp8", "safetensors", **fp8),
        "fp8": job(models / "fp8", **fp8),
        "draft plain": job(models / "draft", "safetensors", do="state", draft=True),
        "draft": job(models / "draft", do="state", draft=True),
        # From here on reloads, with the configuration of the start before them.
        "start": job(model, extra=EXTRA),
        "reload": job(model, do="reload"),
        "reload truncated": job(broken["truncated"][0], do="reload"),
        "reload lacking": job(broken["no_up"][0], do="reload"),
        "reload flipped": job(models / "broken" / "flipped", do="reload"),
    }
    return Results(models, jobs)


@pytest.fixture(scope="module")
def qwen(models: Path) -> Results:
    return Results(models, loading_jobs(models / "qwen2tied"))


NAMES = ["defaults", "mmap", *HOST_BACKENDS, "conflicting", "null", "as text"]


@pytest.mark.parametrize("name", NAMES)
def test_llama_is_the_same(llama: Results, models: Path, name: str) -> None:
    same(llama[name], llama["plain"])
    assert llama[name]["state"] == llama["plain"]["state"]
    assert said_bytes(llama[name]) == engines.data_bytes(models / "llama")


@pytest.mark.parametrize("name", NAMES)
def test_a_tied_model_is_the_same(qwen: Results, models: Path, name: str) -> None:
    same(qwen[name], qwen["plain"])
    assert qwen[name]["state"] == qwen["plain"]["state"]
    assert said_bytes(qwen[name]) == engines.data_bytes(models / "qwen2tied")


@pytest.mark.parametrize("name", ["mmap", "conflicting", "null", "as text", "MMAP", "reload"])
def test_settings_arrive(llama: Results, name: str) -> None:
    """Explicit ones override the environment, null keeps it, a reload has those of the start."""
    assert "readers: MMAP " in llama[name]["log"]


def test_experts_are_the_same(llama: Results, models: Path) -> None:
    assert llama["moe"]["state"] == llama["moe plain"]["state"]
    assert said_bytes(llama["moe"]) == engines.data_bytes(models / "moe")


def test_quantised_weights_are_the_same(llama: Results, models: Path) -> None:
    assert llama["fp8"]["state"] == llama["fp8 plain"]["state"]
    assert said_bytes(llama["fp8"]) == engines.data_bytes(models / "fp8")


def test_a_draft_is_the_same(llama: Results, models: Path) -> None:
    """As a second load of the process; embedding and head are the target's, and nobody fills them here."""
    ours, plain = (
        {
            name: digest
            for name, digest in state.items()
            if "embed_tokens" not in name and "lm_head" not in name
        }
        for state in (llama["draft"]["state"], llama["draft plain"]["state"])
    )
    assert ours == plain
    assert "model.fc.weight" in ours
    assert said_bytes(llama["draft"]) == engines.data_bytes(models / "draft")
    assert "garbage" not in llama["draft"]["log"]


def test_a_flipped_byte_changes_the_output(llama: Results) -> None:
    assert llama["flipped"]["logprobs"] != llama["plain"]["logprobs"]


@pytest.mark.parametrize("name", [*BROKEN, *PARTS])
def test_a_broken_checkpoint_does_not_start(
    llama: Results, broken: dict[str, tuple[Path, str]], name: str
) -> None:
    assert broken[name][1] in llama[name]["error"]


def test_not_strict_warns(llama: Results) -> None:
    assert "gate_up_proj" in llama["not strict"]["log"]
    assert "error" not in llama["not strict"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("unknown key", "did you mean chunk_size"),
        ("engine's key", "'process_group' is set by the engine"),
        ("generic key", "'num_threads' belongs to the engine's own loaders"),
        ("bad value", "has 'FAST'; the known back ends are"),
        ("pickles", "model-00001-of-00003.pt"),
    ],
)
def test_what_is_wrong_is_named(llama: Results, name: str, text: str) -> None:
    assert text in llama[name]["error"]


def test_reloads(llama: Results, models: Path) -> None:
    same(llama["reload"], llama["plain"])
    assert said_bytes(llama["reload"]) == engines.data_bytes(models / "llama")
    assert llama["reload flipped"]["reload"][0]
    assert llama["reload flipped"]["logprobs"] == llama["flipped"]["logprobs"]


@pytest.mark.parametrize(
    ("name", "text"), [("truncated", "100 bytes missing"), ("lacking", "layers.1.mlp.up_proj.weight")]
)
def test_a_reload_that_is_refused_leaves_the_weights(llama: Results, name: str, text: str) -> None:
    done, why = llama[f"reload {name}"]["reload"]
    assert not done
    assert text in why
    same(llama[f"reload {name}"], llama["plain"])


def test_experts_on_two_ranks_that_have_half_of_them_each(models: Path) -> None:
    parallel, moe = {"do": "state", "arguments": ["--ep-size", "2"]}, models / "moe"
    results = Results(
        models,
        {
            "process": job(models / "llama", "safetensors", **parallel),
            "plain": job(moe, "safetensors", do="state"),
            "auto": job(moe, do="state"),
            "gather": job(moe, do="state", extra={"exchange": "gather"}),
        },
        ranks=2,
    )
    tensors = {name: t for shard in moe.glob("*.safetensors") for name, t in load_file(shard).items()}
    place = "model.layers.0.mlp.experts"
    for number, rank in enumerate(results.by_rank):
        for name in ("auto", "gather"):
            assert rank[name]["state"] == rank["plain"]["state"]
            assert said_bytes(rank[name]) == engines.data_bytes(moe)
        own = [tensors[f"{place}.{4 * number + k}.down_proj.weight"] for k in range(4)]  # whole, of 8
        digest = hashlib.sha256(torch.stack(own).view(torch.uint8).numpy().tobytes()).hexdigest()
        assert rank["auto"]["state"][f"{place}.w2_weight"] == digest


def test_two_ranks(models: Path) -> None:
    model = models / "llama"
    results = Results(
        models,
        {
            "plain": job(model, "safetensors"),
            "auto": job(model),
            "gather": job(model, extra={"exchange": "gather"}),
            "none": job(model, extra={"exchange": "none", **EXTRA}),
            "reload": job(model, do="reload"),
            "moe plain": job(models / "moe", "safetensors", do="state"),
            "moe": job(models / "moe", do="state", extra={"exchange": "gather"}),
            "draft": job(models / "draft", do="state", draft=True),
        },
        ranks=2,
    )
    for rank in results.by_rank:
        for name in ("auto", "gather", "none", "reload"):
            same(rank[name], rank["plain"])
            assert "2 ranks, exchange" in rank[name]["log"]
        assert "exchange gather" in rank["gather"]["log"]
        for name in ("auto", "gather", "none"):
            assert rank[name]["state"] == rank["plain"]["state"]
        assert rank["moe"]["state"] == rank["moe plain"]["state"]
        assert "2 ranks, exchange" in rank["draft"]["log"]
    first, second = results.by_rank
    assert first["plain"]["tokens"] == second["plain"]["tokens"]
    assert first["plain"]["state"] != second["plain"]["state"]  # each has its own part
