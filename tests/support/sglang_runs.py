"""Runs of a real SGLang, which lies in an environment of its own: TENSORLIFT_TEST_SGLANG names its Python."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.checkpoints import Row, random_row, write_safetensors

PYTHON = os.environ.get("TENSORLIFT_TEST_SGLANG", "")
HERE = Path(__file__).parent.parent / "engines"
MARKS = [
    pytest.mark.skipif(
        not PYTHON, reason="TENSORLIFT_TEST_SGLANG names no Python with SGLang and tensorlift"
    ),
    pytest.mark.timeout(900),
]
MMAP = {"backend": "MMAP", "chunk_size": 8388608, "io_depth": 2}
CONFLICTING = {
    "TENSORLIFT_BACKEND": "PREAD",
    "TENSORLIFT_CHUNK_SIZE": "4096",
    "TENSORLIFT_IO_DEPTH": "7",
    "TENSORLIFT_THREADS": "1",
}
GATE, NORM, VALUES = (
    "model.layers.0.mlp.gate_proj.weight",
    "model.norm.weight",
    "model.layers.1.self_attn.v_proj.weight",
)


def engine_environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TENSORLIFT_")}
    return {**kept, "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def header_of(file: Path) -> tuple[dict[str, Any], int]:
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), 8 + length


def data_bytes(model: Path) -> int:
    return sum(file.stat().st_size - header_of(file)[1] for file in model.glob("*.safetensors"))


def shards(model: Path) -> list[Path]:
    return sorted(model.glob("*.safetensors"))


def without(model: Path, target: Path, name: str) -> Path:
    """A copy that lacks a tensor, in shard and index."""
    shutil.copytree(model, target)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    shard = target / index["weight_map"].pop(name)
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    header, begin = header_of(shard)
    data = shard.read_bytes()[begin:]
    out, kept = b"", {}
    for key, about in header.items():
        if key == name:
            continue
        if key != "__metadata__":
            first, last = about["data_offsets"]
            about = {**about, "data_offsets": [len(out), len(out) + last - first]}
            out += data[first:last]
        kept[key] = about
    text = json.dumps(kept).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + out)
    return target


def flipped(model: Path, target: Path) -> Path:
    """A copy with one byte changed: the sign and half of the exponent of an element of the final norm."""
    shutil.copytree(model, target)
    for shard in shards(target):
        header, begin = header_of(shard)
        if NORM in header:
            raw = bytearray(shard.read_bytes())
            raw[begin + header[NORM]["data_offsets"][0] + 1] ^= 0x81
            shard.write_bytes(raw)
    return target


def run_jobs(jobs: list[dict[str, Any]], ranks: int = 1) -> list[list[dict[str, Any]]]:
    """The results of each rank."""
    port = free_port()
    command = [PYTHON, str(HERE / "sglang_jobs.py")]
    children = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**engine_environment(), **({} if ranks == 1 else {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"})},
        )
        for rank in range(ranks)
    ]
    for child in children:
        assert child.stdin
        child.stdin.write(json.dumps(jobs))
        child.stdin.close()
        child.stdin = None
    outputs = []
    for child in children:
        out, err = child.communicate(timeout=600)
        assert child.returncode == 0, err[-6000:]
        outputs.append(json.loads(out))
    return outputs


def make_models(folder: Path) -> Path:
    """The tiny checkpoints, and a draft for the llama."""
    command = [PYTHON, str(HERE / "tiny.py"), str(folder), "llama", "qwen2tied", "moe", "fp8"]
    subprocess.run(command, check=True, env=engine_environment(), capture_output=True)
    draft_of(folder / "llama", folder / "draft")
    return folder


def draft_of(model: Path, target: Path) -> Path:
    """An EAGLE draft: the first layer of a llama, and what takes hidden states in; no embedding, no head."""
    found: dict[str, Row] = {
        "fc.weight": random_row("BF16", [64, 128]),
        "fc.bias": random_row("BF16", [64], 1),
    }
    for shard in shards(model):
        header, begin = header_of(shard)
        data = shard.read_bytes()[begin:]
        for name, about in header.items():
            if name.startswith("model.layers.0.") and "input_layernorm" not in name:
                first, last = about["data_offsets"]
                found[name.removeprefix("model.")] = (about["dtype"], about["shape"], data[first:last])
    target.mkdir()
    write_safetensors(target / "model.safetensors", found)
    config = json.loads((model / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}
    (target / "config.json").write_text(json.dumps(config))
    return target


def broken_models(models: Path) -> Path:
    """Copies of the llama with something wrong, by name."""
    llama, folder = models / "llama", models / "broken"
    flipped(llama, folder / "flipped")
    without(llama, folder / "no_gate", GATE)
    without(llama, folder / "no_norm", NORM)
    without(llama, folder / "no_values", VALUES)
    for name in ("missing", "truncated", "bin", "pt"):
        shutil.copytree(llama, folder / name)
    shards(folder / "missing")[1].unlink()
    last = shards(folder / "truncated")[-1]
    last.write_bytes(last.read_bytes()[:-100])
    for kind in ("bin", "pt"):
        for shard in shards(folder / kind):
            shard.rename(shard.with_suffix(f".{kind}"))
        (folder / kind / "model.safetensors.index.json").unlink()
    return folder


class Results:
    """Jobs by name, run in one process."""

    def __init__(self, jobs: dict[str, dict[str, Any]], ranks: int = 1) -> None:
        outputs = run_jobs([{"do": "generate", **job} for job in jobs.values()], ranks)
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
                env=engine_environment(),
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
