"""SGLang on a CPU, load format safetensors against tensorlift: tokens, log probabilities, parameters, times.

    python benchmarks/engines_sglang.py PYTHON_OF_SGLANG [--out FILE] [--no-servers]

Each row is one load in a process that several share, or one start of the server; the file has every one, with
what was compared. Exits 1 where a row is not as it should be. Tests of the same kind are in tests/engines.
"""

from __future__ import annotations

import os
import re
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support import engine_report, engines  # noqa: E402

MODELS = ("llama", "qwen2tied")
FP8 = {"capability": [9, 0]}  # is asked for, and never used: nothing is computed
LOADED_ONLY: dict[str, dict[str, Any]] = {"moe": {}, "fp8": FP8, "draft": {"draft": True}}
SHARED = re.compile(r"embed_tokens|lm_head")  # a draft's are its target's, and nobody fills them here


def loads(runs: Any, models: Path, ranks: int) -> list[dict[str, Any]]:
    """Loads by one rank or several: each compared with the plain one of its model, on each rank."""
    records = []
    for model in MODELS:
        jobs = runs.loading_jobs(models / model)
        for name, more in LOADED_ONLY.items() if model == MODELS[0] else ():
            for kind in ("safetensors", "tensorlift"):
                jobs[f"{name}: {kind}"] = runs.job(models / name, kind, do="state", **more)
        results = runs.Results(models, jobs, ranks)
        for rank, done in enumerate(results.by_rank):
            for name, job in jobs.items():
                plain = done["plain" if ":" not in name else name.partition(":")[0] + ": safetensors"]
                row = {"row": f"{model}: {name}", "ranks": ranks, "rank": rank}
                records.append(row | judged(job, done[name], plain))
    return records


def judged(job: dict[str, Any], result: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """What a load took, and whether it is as it should be."""
    record = {key: job[key] for key in ("load_format", "extra", "environ") if job.get(key)}
    record |= {key: result[key] for key in ("error", "seconds") if key in result}
    if "error" in result or "error" in plain:
        return record | {"ok": False}

    def counted(state: dict[str, str]) -> dict[str, str]:
        return {
            name: digest for name, digest in state.items() if not ("draft" in job and SHARED.search(name))
        }

    ok = counted(result["state"]) == counted(plain["state"])
    if "logprobs" in result:
        pairs = zip(chain(*result["logprobs"]), chain(*plain["logprobs"]), strict=True)
        record["greatest_difference"] = max(abs(one - other) for one, other in pairs)
        ok &= result["tokens"] == plain["tokens"] and record["greatest_difference"] == 0
    if job["load_format"] == "tensorlift":
        record["log"] = result["log"].strip()
        ok &= f" {engines.data_bytes(Path(job['model']))} bytes " in result["log"]
    return record | {"ok": ok}


def servers(runs: Any, models: Path, folder: Path) -> list[dict[str, Any]]:
    """Starts of the server: what each took, and the same answer whatever the load format."""
    records = []
    for model in MODELS:
        answers = []
        for load_format in ("safetensors", "tensorlift"):
            log = folder / f"{model}-{load_format}.log"
            begin = time.perf_counter()
            with runs.Server(models / model, log, "--load-format", load_format) as server:
                server.wait()
                ready = time.perf_counter() - begin
                memory = server.resident()
                answers.append(server.generate())
                text = server.text()
            line = f"tensorlift: rank 0: {engines.data_bytes(models / model)} bytes"
            proof = (line in text) == (load_format == "tensorlift")
            load = re.search(r"Load weight end\. elapsed=([\d.]+) s", text)
            tokens = re.search(r"max_total_num_tokens=(\d+)", text)
            records.append(
                {
                    "row": f"{model}: server",
                    "load_format": load_format,
                    "load_seconds": float(load[1]) if load else None,
                    "ready_seconds": ready,
                    "memory": memory,
                    "kv_tokens": int(tokens[1]) if tokens else None,
                    "ok": proof and answers[-1] == answers[0],
                }
            )
    return records


def main() -> int:
    parser = engine_report.parser(__doc__)
    parser.add_argument("--no-servers", action="store_true")
    asked = parser.parse_args()
    os.environ["TENSORLIFT_TEST_SGLANG"] = asked.python
    from support import sglang_runs as runs

    def measure(folder: Path) -> list[dict[str, Any]]:
        models = runs.make_models(folder)
        records = loads(runs, models, 1) + loads(runs, models, 2)
        return records if asked.no_servers else records + servers(runs, models, folder)

    return engine_report.report(asked, "benchmarks/engines_sglang.py", "sglang", measure)


if __name__ == "__main__":
    sys.exit(main())
