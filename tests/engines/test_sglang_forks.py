"""Forks of a real SGLang on a CPU, without a server: a seed and its forks are loads of one process a rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support import engines
from support.ports import free_port
from support.sglang_runs import MARKS, Results, job, make_models, same

pytestmark = MARKS


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("sglang"))


def three(name: str, model: Path, **more: Any) -> dict[str, dict[str, Any]]:
    """A load by SGLang's own means, a seed, and its fork."""
    port = free_port()
    return {
        f"{name} plain": job(model, "safetensors", **more),
        f"{name} seed": job(model, extra={"publish": {"port": port}}, serve="alone", **more),
        # Files that cannot be loaded: all has to come from the seed.
        f"{name} fork": job(model, extra={"seed": f"http://127.0.0.1:{port}", "fallback": False}, **more),
    }


@pytest.fixture(scope="module")
def results(models: Path) -> Results:
    state: dict[str, Any] = {"do": "state"}
    jobs = {
        **three("llama", models / "llama"),
        **three("tied", models / "qwen2tied", **state),
        **three("moe", models / "moe", **state),
        **three("fp8", models / "fp8", capability=[9, 0], **state),
        **three("latent", models / "latent", **state),
        "other": job(models / "llama", do="state", extra={"seed": f"http://127.0.0.1:{free_port()}"}),
        **three("front", models / "llama", **state),
    }
    # A draft of the same process, behind the URL of its target.
    draft = {"draft": True, **state}
    jobs["draft seed"] = job(models / "draft", extra={"publish": True}, serve="beside", **draft)
    jobs["draft fork"] = job(models / "draft", extra=jobs["front fork"]["extra"], **draft)
    return Results(models, jobs)


@pytest.mark.parametrize("name", ["llama", "tied", "moe", "fp8", "latent"])
def test_a_fork_is_what_a_load_is(results: Results, name: str) -> None:
    """Quantised weights, experts and derived tensors too, none of them processed again."""
    plain, fork = results[f"{name} plain"], results[f"{name} fork"]
    assert "error" not in fork, fork
    assert "tensorlift: rank 0: forked " in fork["log"]
    assert "tensors from" not in fork["log"]
    assert fork["state"] == plain["state"]
    if name == "llama":
        same(fork, plain)


def test_a_draft_forks_from_the_url_of_its_target(results: Results) -> None:
    assert "error" not in results["draft fork"], results["draft fork"]
    assert "(draft, " in results["draft fork"]["log"]
    assert results["draft fork"]["state"] == results["draft seed"]["state"]
    assert results["front fork"]["state"] == results["front plain"]["state"]


def test_files_stand_in(results: Results, models: Path) -> None:
    said = results["other"]["log"]
    assert "cannot be reached" in said
    assert "; loading from files" in said
    assert f" {engines.data_bytes(models / 'llama')} bytes " in said
    assert results["other"]["state"] == results["llama plain"]["state"]


def test_two_ranks_fork_from_their_peers_behind_one_url(models: Path) -> None:
    jobs = three("llama", models / "llama")
    dead = f"http://127.0.0.1:{free_port()}"
    jobs["other"] = job(models / "llama", extra={"seed": dead})
    results = Results(models, jobs, ranks=2)
    for rank in results.by_rank:
        for name in ("llama fork", "other"):
            same(rank[name], rank["llama plain"])
            assert rank[name]["state"] == rank["llama plain"]["state"]
        assert "forked " in rank["llama fork"]["log"]
        assert "loading from files" in rank["other"]["log"]
    first, second = (rank["llama fork"]["log"] for rank in results.by_rank)
    assert "tp 0 of 2" in first
    assert "tp 1 of 2" in second
