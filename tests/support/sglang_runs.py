"""Runs of a real SGLang, which lies in an environment of its own: TENSORLIFT_TEST_SGLANG names its Python."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support import engines
from tensorlift.options import HOST_BACKENDS

PYTHON = engines.interpreter("sglang") or ""
MARKS = [
    pytest.mark.skipif(not PYTHON, reason="TENSORLIFT_TEST_SGLANG names no Python with SGLang"),
    pytest.mark.timeout(900),
]
MMAP = {"backend": "MMAP", "chunk_size": 8388608, "io_depth": 2}
CONFLICTING = {
    "TENSORLIFT_BACKEND": "PREAD",
    "TENSORLIFT_CHUNK_SIZE": "4096",
    "TENSORLIFT_IO_DEPTH": "7",
    "TENSORLIFT_THREADS": "1",
}
NORM = "model.norm.weight"


def engine_environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TENSORLIFT_")}
    own = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(engines.plugin(folder))}
    return kept | own


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def draft_of(model: Path, target: Path) -> Path:
    """An EAGLE draft: the first layer of a llama, and what takes hidden states in; no embedding, no head."""
    found = {
        name.removeprefix("model."): tensor
        for shard in model.glob("*.safetensors")
        for name, tensor in load_file(shard).items()
        if name.startswith("model.layers.0.") and "input_layernorm" not in name
    }
    found["fc.weight"] = torch.rand(64, 128).bfloat16()
    found["fc.bias"] = torch.rand(64).bfloat16()
    target.mkdir()
    save_file(found, target / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}
    (target / "config.json").write_text(json.dumps(config))
    return target


def make_models(folder: Path) -> Path:
    """The tiny checkpoints, a draft for the llama, and below "broken" copies of it that differ."""
    models = engines.tiny(PYTHON, folder)
    llama = models / "llama"
    draft_of(llama, models / "draft")
    engines.flipped(llama, "flipped", NORM)
    pickles = engines.copied(llama, "pickles")
    (pickles / engines.INDEX).unlink()
    for shard in pickles.glob("*.safetensors"):
        shard.rename(shard.with_suffix(".pt"))
    return models


def run_jobs(folder: Path, jobs: list[dict[str, Any]], ranks: int = 1) -> list[list[dict[str, Any]]]:
    """The results of each rank."""
    port = free_port()
    command = [PYTHON, str(engines.ENGINES / "sglang_jobs.py")]
    environ = engine_environment(folder / "plugin")
    if ranks > 1:
        environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(ranks)))
    given = folder / "jobs.json"
    given.write_text(json.dumps(jobs))
    children = []
    for rank in range(ranks):
        with given.open() as stdin, (folder / f"said-{rank}").open("wb") as said:
            arguments = [*command, str(rank), str(ranks), str(port)]
            children.append(
                subprocess.Popen(arguments, stdin=stdin, stdout=subprocess.PIPE, stderr=said, env=environ)
            )
    results = []
    try:
        for rank, child in enumerate(children):
            out, _ = child.communicate(timeout=600)
            assert child.returncode == 0, (folder / f"said-{rank}").read_text(errors="replace")[-6000:]
            results.append(json.loads(out))
    finally:
        for child in children:
            child.kill()
            child.wait()
    return results


class Results:
    """Jobs by name, run in one process."""

    def __init__(self, folder: Path, jobs: dict[str, dict[str, Any]], ranks: int = 1) -> None:
        outputs = run_jobs(folder, [{"do": "generate", **job} for job in jobs.values()], ranks)
        self.by_rank = [dict(zip(jobs, output, strict=True)) for output in outputs]

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
        "mmap": job(model, extra=MMAP),
        **{name: job(model, extra={"backend": name}) for name in HOST_BACKENDS},
        "conflicting": job(model, extra=MMAP, environ=CONFLICTING),
        "null": job(model, extra={"backend": None}, environ={"TENSORLIFT_BACKEND": "MMAP"}),
        "as text": job(model, extra=json.dumps(MMAP)),
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


class Server:
    """One that was started, and what it says."""

    def __init__(self, model: Path, log: Path, *arguments: str) -> None:
        self.port, self.log = free_port(), log
        with log.open("wb") as out:
            self.child = subprocess.Popen(
                [PYTHON, *SERVER, "--model-path", str(model), "--port", str(self.port), *arguments],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=engine_environment(log.parent / "plugin"),
                start_new_session=True,
            )

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                said = answer.read()
        except urllib.error.HTTPError as error:
            said = error.read()
            error.close()
        return json.loads(said) if said else None

    def wait(self, limit: float = 300.0) -> None:
        end = time.monotonic() + limit
        while time.monotonic() < end:
            assert self.child.poll() is None, self.text()[-6000:]
            with contextlib.suppress(OSError):
                self.ask("/health")
                return
            time.sleep(1)
        pytest.fail(f"not ready in {limit} s: {self.text()[-6000:]}")

    def generate(self) -> tuple[list[int], list[float]]:
        settings = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        body = {"text": "hello world the", "sampling_params": settings, "return_logprob": True}
        meta = self.ask("/generate", body)["meta_info"]
        pairs = meta["output_token_logprobs"]
        return [pair[1] for pair in pairs], [pair[0] for pair in pairs]

    def resident(self) -> int:
        """Bytes of memory that its processes hold, what they share counted once."""
        total = 0
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                fields = (place / "stat").read_text(errors="replace").rpartition(")")[2].split()
                if int(fields[2]) == self.child.pid:
                    found = re.search(r"^Pss:\s+(\d+) kB", (place / "smaps_rollup").read_text(), re.MULTILINE)
                    total += int(found[1]) * 1024 if found else 0
        return total

    def reload(self, model: Path) -> Any:
        return self.ask("/update_weights_from_disk", {"model_path": str(model)})

    def left(self, patience: float = 30.0) -> list[str]:
        """Its processes that still run, after some time to end; not those that wait to be collected."""
        end = time.monotonic() + patience
        while time.monotonic() < end:
            found = []
            for place in Path("/proc").glob("[0-9]*/stat"):
                with contextlib.suppress(OSError):
                    fields = place.read_text(errors="replace").rpartition(")")[2].split()
                    if int(fields[2]) == self.child.pid and fields[0] not in "ZX":
                        found.append(place.parent.name)
            if not found:
                break
            time.sleep(0.5)
        return found

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, 15)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, 9)
        self.child.wait(20)


@contextlib.contextmanager
def served(model: Path, log: Path, *arguments: str) -> Iterator[Server]:
    server = Server(model, log, *arguments)
    try:
        yield server
    finally:
        server.stop()
