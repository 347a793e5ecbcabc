"""Real engines in environments of their own: where they are, checkpoints for them, and runs in them.

An environment is named by a variable (``TENSORLIFT_TEST_VLLM=/path/to/venv/bin/python``). The package itself
is not installed there: a folder on PYTHONPATH has it, from this tree, with the entry points of its metadata.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.ports import free_port
from support.tree import ROOT

ENGINES = ROOT / "tests" / "engines"
INDEX = "model.safetensors.index.json"
EXTRA = {"backend": "MMAP", "chunk_size": 8388608, "io_depth": 2}
"""An extra configuration, and what in the environment it has to override."""
CONFLICT = {"TENSORLIFT_BACKEND": "AIO", "TENSORLIFT_CHUNK_SIZE": "4096", "TENSORLIFT_IO_DEPTH": "7"}
Started = TypeVar("Started", bound="Server")


def interpreter(engine: str) -> str | None:
    """The Python of an engine's environment; None where there is none."""
    return os.environ.get(f"TENSORLIFT_TEST_{engine.upper()}") or None


def plugin(folder: Path) -> Path:
    """A folder for PYTHONPATH with the package of this tree and its entry points."""
    # tomllib came with Python 3.11; the tables wanted here are plain enough.
    text = (ROOT / "pyproject.toml").read_text()
    lines: list[str] = []
    for part in text.split('[project.entry-points."')[1:]:
        group, _, rest = part.partition('"]\n')
        lines += [f"[{group}]", *(line.replace('"', "") for line in rest.split("\n\n")[0].splitlines())]
    about = folder / "tensorlift-0.1.0.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorlift\nVersion: 0.1.0\n")
    (about / "entry_points.txt").write_text("\n".join(lines) + "\n")
    link = folder / "tensorlift"
    if not link.is_symlink():
        link.symlink_to(ROOT / "src" / "tensorlift")
    return folder


def environment(folder: Path) -> dict[str, str]:
    """That of an engine's process: with the package of this tree, and the settings of ours cleared."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TENSORLIFT_")}
    return kept | {"PYTHONPATH": str(plugin(folder / "plugin")), "HF_HUB_OFFLINE": "1"}


def start(
    python: str,
    script: str,
    *arguments: object,
    folder: Path,
    said: Path,
    environ: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """A script of tests/engines in an engine's environment; what it prints goes to a file.

    A pipe that nobody reads yet would stop a rank that the others wait for.
    """
    command = [python, str(ENGINES / script), *map(str, arguments)]
    with said.open("wb") as out:
        return subprocess.Popen(
            command,
            env=environment(folder) | dict(environ or {}),
            cwd=folder,
            stdout=out,
            stderr=subprocess.STDOUT,
        )


class Server:
    """One that was started, and what it says; as a context manager it ends."""

    def __init__(self, model: Path, log: Path, *arguments: str) -> None:
        self.port, self.log = free_port(), log
        with log.open("wb") as out:
            self.child = subprocess.Popen(
                [*self.command(model), "--port", str(self.port), *arguments],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment(log.parent) | self.environ(),
                start_new_session=True,
            )

    def command(self, model: Path) -> list[str]:
        """What starts it, but for the port and the arguments of the test."""
        raise NotImplementedError

    def environ(self) -> dict[str, str]:
        """What it needs besides."""
        raise NotImplementedError

    def generate(self) -> tuple[list[int], list[float]]:
        """Tokens and their log-probabilities, always of one prompt."""
        raise NotImplementedError

    def __enter__(self: Started) -> Started:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

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

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, 15)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, 9)
        self.child.wait(20)


def tiny(python: str, folder: Path) -> Path:
    """The tiny checkpoints, written once a folder."""
    made = folder / "tiny"
    if not (made / "fp8").exists():
        said = folder / "tiny.log"
        assert start(python, "tiny.py", made, folder=folder, said=said).wait(300) == 0, said.read_text()
    return made


def run_ranks(
    python: str,
    script: str,
    jobs: Sequence[Mapping[str, Any]],
    ranks: int,
    folder: Path,
    environ: Mapping[str, str] | None = None,
    timeout: float = 900,
) -> list[tuple[list[dict[str, Any]], str]]:
    """Of each rank the results and all that it printed.

    Each is a process that runs the same jobs, with its ``rank`` added, and ``tp`` where a job has none.
    """
    running, done = [], []
    try:
        for rank in range(ranks):
            given, results, said = (folder / f"{what}-{rank}" for what in ("jobs", "results", "said"))
            given.write_text(json.dumps([{"tp": ranks, **job, "rank": rank} for job in jobs]))
            results.unlink(missing_ok=True)
            process = start(python, script, given, results, folder=folder, said=said, environ=environ)
            running.append((process, results, said))
        for process, results, said in running:
            process.wait(timeout)
            found = json.loads(results.read_text()) if results.exists() else []
            text = said.read_text(errors="replace")
            assert len(found) == len(jobs), f"{len(found)} of {len(jobs)} jobs ended:\n{text[-6000:]}"
            done.append((found, text))
    finally:
        for process, _, _ in running:
            process.kill()
            process.wait()
    return done


def run_jobs(
    python: str,
    script: str,
    jobs: Sequence[Mapping[str, Any]],
    folder: Path,
    environ: Mapping[str, str] | None = None,
    timeout: float = 900,
) -> tuple[list[dict[str, Any]], str]:
    """The results of jobs in one process, and all that it printed."""
    return run_ranks(python, script, jobs, 1, folder, environ, timeout)[0]


def left(session: int, patience: float = 30.0) -> list[str]:
    """Processes of a session that still run, after some time to end; not those that wait to be collected."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        found = []
        for place in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = place.read_text(errors="replace").rpartition(")")[2].split()
                if int(fields[3]) == session and fields[0] not in "ZX":
                    found.append(place.parent.name)
        if not found:
            break
        time.sleep(0.5)
    return found


def data_bytes(checkpoint: Path) -> int:
    """Bytes of all tensors: what a summary has to say was read."""
    total = 0
    for path in checkpoint.glob("*.safetensors"):
        with open(path, "rb") as file:
            total += path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")
    return total


def copied(checkpoint: Path, name: str) -> Path:
    """A copy to be broken."""
    target = checkpoint.parent / "broken" / name
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(checkpoint, target)
    return target


def without(checkpoint: Path, name: str, *tensors: str) -> Path:
    """A copy whose shards and index lack some tensors."""
    target = copied(checkpoint, name)
    for path in target.glob("*.safetensors"):
        save_file({key: t for key, t in load_file(path).items() if key not in tensors}, path)
    if (target / INDEX).exists():
        index = json.loads((target / INDEX).read_text())
        index["weight_map"] = {k: v for k, v in index["weight_map"].items() if k not in tensors}
        (target / INDEX).write_text(json.dumps(index))
    return target


def flipped(checkpoint: Path, name: str, tensor: str) -> Path:
    """A copy in which one bit of one tensor's first element differs: the lowest of a bfloat16's exponent."""
    target = copied(checkpoint, name)
    for path in target.glob("*.safetensors"):
        content = bytearray(path.read_bytes())
        begin = 8 + int.from_bytes(content[:8], "little")
        entry = json.loads(content[8:begin]).get(tensor)
        if entry:
            content[begin + entry["data_offsets"][0] + 1] ^= 0x08
            path.write_bytes(content)
            return target
    raise AssertionError(f"no tensor {tensor}")


def draft_of(model: Path, architecture: str) -> Path:
    """An EAGLE draft: the first layer of a llama, and what takes hidden states in; no embedding, no head."""
    found = {
        name.removeprefix("model."): tensor
        for shard in model.glob("*.safetensors")
        for name, tensor in load_file(shard).items()
        if name.startswith("model.layers.0.") and "input_layernorm" not in name
    }
    found["fc.weight"] = torch.rand(64, 128).bfloat16()
    found["fc.bias"] = torch.rand(64).bfloat16()
    target = model.parent / "draft"
    shutil.copytree(model, target, ignore=shutil.ignore_patterns("*.safetensors", INDEX))
    save_file(found, target / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    config |= {"architectures": [architecture], "num_hidden_layers": 1}
    (target / "config.json").write_text(json.dumps(config))
    return target


def broken(tiny_folder: Path) -> dict[str, tuple[Path, str]]:
    """Checkpoints that must not start, each with what the message has to say."""
    llama = tiny_folder / "llama"
    shard = "model-00002-of-00003.safetensors"
    missing, truncated, foreign = (copied(llama, name) for name in ("missing_shard", "truncated", "foreign"))
    (missing / shard).unlink()
    os.truncate(truncated / shard, (truncated / shard).stat().st_size - 100)
    (foreign / INDEX).unlink()
    for path in foreign.glob("*.safetensors"):
        path.rename(path.with_suffix(".bin"))
    layer = "model.layers.1."
    cases = {
        "missing_shard": (missing, shard),
        "truncated": (truncated, "100 bytes missing"),
        "foreign": (foreign, "takes .safetensors files only"),
    }
    for source, name, tensor, says in (
        ("llama", "no_up", layer + "mlp.up_proj.weight", "mlp.gate_up_proj.weight (part 2 of 2)"),
        ("llama", "no_k", layer + "self_attn.k_proj.weight", "self_attn.qkv_proj.weight (part 2 of 3)"),
        ("llama", "no_down", layer + "mlp.down_proj.weight", layer + "mlp.down_proj.weight"),
        ("llama", "no_norm", "model.norm.weight", "model.norm.weight"),
        ("llama", "no_head", "lm_head.weight", "lm_head.weight"),
        ("moe", "no_expert", layer + "mlp.experts.3.up_proj.weight", "w13_weight (local expert 3, half 2)"),
        ("fp8", "no_scale", layer + "mlp.up_proj.weight_scale", "gate_up_proj.weight_scale (part 2 of 2)"),
    ):
        cases[name] = (without(tiny_folder / source, name, tensor), says)
    return cases
