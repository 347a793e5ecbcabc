"""The load format in a real SGLang on a CPU, against its own loader; needs an environment that has both.

TENSORLIFT_TEST_SGLANG names its Python. Tests that start a server are marked so in their names; the others
share processes, for an import of SGLang takes longer than everything else.
"""

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

from tensorlift.options import HOST_BACKENDS

PYTHON = os.environ.get("TENSORLIFT_TEST_SGLANG", "")
HERE = Path(__file__).parent
pytestmark = [
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


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    command = [PYTHON, str(HERE / "tiny.py"), str(folder), "llama", "qwen2tied", "moe"]
    subprocess.run(command, check=True, env=engine_environment(), capture_output=True)
    return folder


@pytest.fixture(scope="session")
def broken(models: Path) -> Path:
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


def loading_jobs(model: Path) -> dict[str, dict[str, Any]]:
    return {
        "plain": job(model, "safetensors"),
        "defaults": job(model),
        "mmap": job(model, extra=MMAP),
        **{name: job(model, extra={"backend": name}) for name in HOST_BACKENDS},
        "conflicting": job(model, extra=MMAP, environ=CONFLICTING),
        "null": job(model, extra={"backend": None}, environ={"TENSORLIFT_BACKEND": "MMAP"}),
        "as text": job(model, extra=json.dumps(MMAP)),
    }


@pytest.fixture(scope="session")
def llama(models: Path, broken: Path) -> Results:
    model = models / "llama"
    wrong = {"flipped": job(broken / "flipped")}
    for name in ("no_gate", "no_norm", "no_values", "missing", "truncated", "bin", "pt"):
        wrong[name] = job(broken / name)
    return Results(
        {
            **loading_jobs(model),
            **wrong,
            "not strict": job(broken / "no_gate", extra={"strict": False}),
            "unknown key": job(model, extra={"chunk_sise": 1}),
            "engine's key": job(model, extra={"process_group": "world"}),
            "generic key": job(model, extra={"num_threads": 8}),
            "bad value": job(model, extra={"backend": "FAST"}),
            "moe plain": job(models / "moe", "safetensors", do="state"),
            "moe": job(models / "moe", do="state"),
            # From here on reloads, with the configuration of the start before them.
            "start": job(model, extra=MMAP),
            "reload": job(model, do="reload"),
            "reload truncated": job(broken / "truncated", do="reload"),
            "reload lacking": job(broken / "no_gate", do="reload"),
            "reload flipped": job(broken / "flipped", do="reload"),
        }
    )


@pytest.fixture(scope="session")
def qwen(models: Path) -> Results:
    return Results(loading_jobs(models / "qwen2tied"))


NAMES = ["defaults", "mmap", *HOST_BACKENDS, "conflicting", "null", "as text"]


@pytest.mark.parametrize("name", NAMES)
def test_llama_is_the_same(llama: Results, models: Path, name: str) -> None:
    same(llama[name], llama["plain"])
    assert llama[name]["state"] == llama["plain"]["state"]
    assert said_bytes(llama[name]) == data_bytes(models / "llama")


@pytest.mark.parametrize("name", NAMES)
def test_a_tied_model_is_the_same(qwen: Results, models: Path, name: str) -> None:
    same(qwen[name], qwen["plain"])
    assert qwen[name]["state"] == qwen["plain"]["state"]
    assert said_bytes(qwen[name]) == data_bytes(models / "qwen2tied")


@pytest.mark.parametrize("name", ["mmap", "conflicting", "null", "as text", "MMAP", "reload"])
def test_settings_arrive(llama: Results, name: str) -> None:
    """Explicit ones override the environment, null keeps it, a reload has those of the start."""
    assert "readers: MMAP " in llama[name]["log"]


def test_experts_are_the_same(llama: Results, models: Path) -> None:
    assert llama["moe"]["state"] == llama["moe plain"]["state"]
    assert said_bytes(llama["moe"]) == data_bytes(models / "moe")


def test_a_flipped_byte_changes_the_output(llama: Results) -> None:
    assert llama["flipped"]["logprobs"] != llama["plain"]["logprobs"]


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("no_gate", r"model\.layers\.0\.mlp\.gate_up_proj\.weight \(part 1 of 2\)"),
        ("no_norm", r"model\.norm\.weight"),
        ("no_values", r"model\.layers\.1\.self_attn\.qkv_proj\.weight \(part 3 of 3\)"),
    ],
)
def test_a_lacking_tensor_ends_the_start(llama: Results, name: str, parameter: str) -> None:
    assert re.search(f"^MismatchError: .*{parameter}", llama[name]["error"])


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
        ("missing", "model-00002-of-00003.safetensors"),
        ("truncated", "model-00003-of-00003.safetensors"),
        ("bin", "model-00001-of-00003.bin"),
        ("pt", "model-00001-of-00003.pt"),
    ],
)
def test_what_is_wrong_is_named(llama: Results, name: str, text: str) -> None:
    assert text in llama[name]["error"]


def test_reloads(llama: Results, broken: Path) -> None:
    same(llama["reload"], llama["plain"])
    assert said_bytes(llama["reload"]) == data_bytes(broken.parent / "llama")
    assert llama["reload flipped"]["reload"][0]
    assert llama["reload flipped"]["logprobs"] == llama["flipped"]["logprobs"]


@pytest.mark.parametrize(
    ("name", "text"), [("truncated", "model-00003-of-00003.safetensors"), ("lacking", GATE)]
)
def test_a_reload_that_is_refused_leaves_the_weights(llama: Results, name: str, text: str) -> None:
    done, why = llama[f"reload {name}"]["reload"]
    assert not done
    assert text in why
    same(llama[f"reload {name}"], llama["plain"])


def test_two_ranks(models: Path) -> None:
    model = models / "llama"
    results = Results(
        {
            "plain": job(model, "safetensors"),
            "auto": job(model),
            "gather": job(model, extra={"exchange": "gather"}),
            "none": job(model, extra={"exchange": "none", **MMAP}),
            "reload": job(model, do="reload"),
            "moe plain": job(models / "moe", "safetensors", do="state"),
            "moe": job(models / "moe", do="state", extra={"exchange": "gather"}),
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
    first, second = results.by_rank
    assert first["plain"]["tokens"] == second["plain"]["tokens"]
    assert first["plain"]["state"] != second["plain"]["state"]  # each has its own part


# --- With the server ----------------------------------------------------------------------------------------

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


def test_a_server_serves_and_reloads(models: Path, broken: Path, tmp_path: Path) -> None:
    model = models / "llama"
    with served(model, tmp_path / "plain.log", "--load-format", "safetensors") as plain:
        plain.wait()
        expected = plain.generate()
        plain.reload(broken / "flipped")
        expected_flipped = plain.generate()
    extra = json.dumps(MMAP)
    arguments = ["--load-format", "tensorlift", "--model-loader-extra-config", extra]
    with served(model, tmp_path / "ours.log", *arguments) as ours:
        ours.wait()
        assert ours.generate() == expected
        assert ours.reload(broken / "flipped")["success"]
        assert ours.generate() == expected_flipped != expected
        refused = ours.reload(broken / "truncated")
        assert not refused["success"]
        assert "model-00003-of-00003.safetensors" in refused["message"]
        assert ours.generate() == expected_flipped
        assert ours.reload(model)["success"]
        assert ours.generate() == expected
        lines = re.findall(r"tensorlift: rank 0: (\d+) bytes.*readers: MMAP", ours.text())
        assert lines == [str(data_bytes(model))] * 3


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("no_gate", [], "gate_up_proj.weight (part 1 of 2)"),
        ("missing", [], "model-00002-of-00003.safetensors"),
        ("llama", ["--model-loader-extra-config", '{"chunk_sise": 4096}'], "did you mean chunk_size"),
    ],
)
def test_a_server_does_not_half_start(
    models: Path, broken: Path, tmp_path: Path, name: str, arguments: list[str], text: str
) -> None:
    model = models / name if name == "llama" else broken / name
    with served(model, tmp_path / "log", "--load-format", "tensorlift", *arguments) as server:
        code = server.child.wait(300)
        assert code != 0
        assert text in server.text()
        with pytest.raises(ProcessLookupError):  # nothing of it is left
            os.killpg(server.child.pid, 0)
