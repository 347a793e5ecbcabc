"""vLLM on a CPU, load format safetensors against tensorlift: tokens, log probabilities, parameters, times.

    python benchmarks/engines_vllm.py PYTHON_OF_VLLM [--out FILE]

Each row is one start; the file has every one, with what was compared. Exits 1 where a row is not as it should
be. Tests of the same kind, fewer of them, are in tests/engines.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support import engine_report, engines  # noqa: E402
from support.engines import CONFLICT, EXTRA  # noqa: E402
from tensorlift.options import HOST_BACKENDS  # noqa: E402

MODELS, LOADED_ONLY = ("llama", "qwen2tied"), ("moe", "fp8")
DRAFT = {"method": "draft_model", "num_speculative_tokens": 2}


def rows(tiny: Path) -> dict[str, dict[str, Any]]:
    """Starts of one rank, by name; a row is compared with the first of its model."""
    made: dict[str, dict[str, Any]] = {}

    def row(
        name: str, model: Path, load_format: str = "tensorlift", do: str = "generate", **more: Any
    ) -> None:
        made[name] = {"model": str(model), "load_format": load_format, "do": do, "port": 29600, **more}

    for model in MODELS:
        row(f"{model}: safetensors", tiny / model, "safetensors")
        row(f"{model}: defaults", tiny / model)
        row(f"{model}: MMAP, chunk 8388608, depth 2", tiny / model, extra=EXTRA)
        row(f"{model}: the same, environment against it", tiny / model, extra=EXTRA, environ=CONFLICT)
        row(f"{model}: environment alone", tiny / model, environ=CONFLICT)
        for backend in HOST_BACKENDS:
            row(f"{model}: {backend}", tiny / model, extra={"backend": backend})
    row("llama: draft", tiny / "llama", more={"speculative_config": {"model": str(tiny / "llama"), **DRAFT}})
    flipped = engines.flipped(tiny / "llama", "flipped", "model.layers.0.mlp.up_proj.weight")
    row("flipped bit", flipped)
    row("llama: reload", tiny / "llama", do="reload", reload=str(flipped))
    for model in LOADED_ONLY:
        row(f"{model}: safetensors", tiny / model, "safetensors", "state")
        row(f"{model}: defaults", tiny / model, do="state")
    for name, (path, says) in engines.broken(tiny).items():
        row(f"broken: {name}", path, do="state", says=says)
    return made


def judged(name: str, job: dict[str, Any], result: dict[str, Any], done: dict[str, Any]) -> dict[str, Any]:
    """A row of the file: what it took, and whether it is as it should be."""
    about = {key: job[key] for key in ("load_format", "do", "extra", "environ", "tp") if job.get(key)}
    record: dict[str, Any] = {"row": name, **about}
    for key in ("load_seconds", "ready_seconds", "memory", "kv_tokens", "error", "reload_error"):
        if key in result:
            record[key] = result[key]
    record["log"] = result["log"]
    model = name.partition(":")[0]
    if name.startswith("broken"):
        record["ok"] = job["says"] in result.get("error", "")
    elif "error" in result:
        record["ok"] = False
    elif name == "flipped bit":
        record["ok"] = result["outputs"] != done["llama: safetensors"]["outputs"]
    else:
        kind = "state" if job["do"] == "state" else "outputs"
        same = result[kind] == done[f"{model}: safetensors"][kind]
        lines = [line for line in result["log"] if "tensorlift: rank 0:" in line]
        ours = job["load_format"] == "tensorlift"
        whole = f" {engines.data_bytes(Path(job['model']))} bytes "
        record["ok"] = same and bool(lines) == ours and all(whole in line for line in lines)
        if kind == "outputs":
            record["greatest_difference"] = difference(result, done[f"{model}: safetensors"])
        if job["do"] == "reload":
            record["ok"] &= result["reloaded"] == done["flipped bit"]["outputs"]
    return record


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The greatest difference of log probabilities, in prefill and decode; infinite for other tokens."""
    greatest = 0.0
    for ours, plain in zip(one["outputs"], other["outputs"], strict=True):
        for kind in ("prefill", "decode"):
            for a, b in zip(ours[kind], plain[kind], strict=True):
                if a.keys() != b.keys():
                    return float("inf")
                greatest = max([greatest, *(abs(a[token] - b[token]) for token in a)])
    return greatest


def two_ranks(python: str, model: Path, folder: Path) -> list[dict[str, Any]]:
    """Starts of two ranks: workers are processes of vLLM's, whose lines are in what it prints."""
    ours: dict[str, dict[str, Any]] = {
        "defaults": {},
        "gather": {"extra": {"exchange": "gather"}},
        "MMAP, chunk 8388608, depth 2, environment against it": {"extra": EXTRA, "environ": CONFLICT},
        **{backend: {"extra": {"backend": backend}} for backend in HOST_BACKENDS},
    }
    every = {"model": str(model), "do": "generate", "tp": 2}
    jobs = {"safetensors": {**every, "load_format": "safetensors"}}
    jobs |= {name: {**every, "load_format": "tensorlift", **more} for name, more in ours.items()}
    binding = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    done, text = engines.run_jobs(python, "vllm_jobs.py", list(jobs.values()), folder, binding, timeout=3600)
    lines = [
        line[line.index("tensorlift: rank") :] for line in text.splitlines() if "tensorlift: rank" in line
    ]
    found = []
    for (name, job), result in zip(jobs.items(), done, strict=True):
        same = "error" not in result and result["outputs"] == done[0].get("outputs")
        record = {"row": f"{model.name}: two ranks, {name}", **job, "model": model.name, "ok": same}
        if same:
            record["greatest_difference"] = difference(result, done[0])
        kept = ("load_seconds", "ready_seconds", "kv_tokens", "error")
        found.append(record | {key: result[key] for key in kept if key in result})
    whole = f" {engines.data_bytes(model)} bytes "
    proof = len(lines) == 2 * len(ours) and all(whole in line for line in lines)
    return [*found, {"row": f"{model.name}: two ranks, lines of both", "ok": proof, "log": lines}]


def expert_parallel(python: str, tiny: Path, folder: Path) -> list[dict[str, Any]]:
    """Two ranks that need half of the experts each, with and without vLLM's filter: their parameters."""
    filters = (
        {"enable_expert_parallel": True},
        {"enable_expert_parallel": True, "enable_ep_weight_filter": True},
    )
    formats = [("safetensors", None), ("tensorlift", None), ("tensorlift", {"exchange": "gather"})]
    jobs = [
        {"model": str(tiny / "moe"), "load_format": name, "do": "state", "more": more, "extra": extra}
        for more in filters
        for name, extra in formats
    ]
    jobs = [{**job, "port": 29700 + place} for place, job in enumerate(jobs)]
    found = []
    for rank, (done, _) in enumerate(engines.run_ranks(python, "vllm_jobs.py", jobs, 2, folder)):
        for place, (job, result) in enumerate(zip(jobs, done, strict=True)):
            plain = done[place - place % len(formats)]
            record = {"row": f"moe: two ranks, rank {rank}", **job, "model": "moe", "log": result["log"]}
            record["ok"] = "error" not in result and result["state"] == plain.get("state")
            if "error" in result:
                record["error"] = result["error"]
            found.append(record)
    return found


def main() -> int:
    parser = engine_report.parser(__doc__)
    parser.add_argument("--one-rank", action="store_true")
    asked = parser.parse_args()

    def measure(folder: Path) -> list[dict[str, Any]]:
        tiny = engines.tiny(asked.python, folder)
        jobs = rows(tiny)
        results, _ = engines.run_jobs(asked.python, "vllm_jobs.py", list(jobs.values()), folder, timeout=3000)
        done = dict(zip(jobs, results, strict=True))
        records = [judged(name, jobs[name], result, done) for name, result in done.items()]
        if asked.one_rank:
            return records
        for model in MODELS:
            records += two_ranks(asked.python, tiny / model, folder)
        return records + expert_parallel(asked.python, tiny, folder)

    return engine_report.report(asked, "benchmarks/engines_vllm.py", "vllm-cpu", measure)


if __name__ == "__main__":
    sys.exit(main())
