"""``synth`` on the command line: a summary on stdout, exit codes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.command_line import run
from tensorlift.bench import geometry
from tensorlift.bench.geometry import Model, Spec


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    def specs(layers: int) -> Iterator[Spec]:
        return (Spec(f"layers.{i}.weight", "BF16", (300, 100)) for i in range(layers))

    monkeypatch.setitem(geometry.MODELS, "tiny", Model("tiny", 4, "for tests", specs))


def test_writes_and_sums_up(tmp_path: Path) -> None:
    code, out, err = run("synth", tmp_path / "m", "--like", "tiny", "--layers", 3, "--shards", 2)
    assert (code, err) == (0, "")
    assert "like tiny, 3 of 4 layers, 0.00 billion parameters" in out
    assert "3 tensors, 180.33 kB, 2 files, seed 0" in out
    assert "1 tensor, 60.12 kB, 1 file, " in run("synth", tmp_path / "n", "--like", "tiny", "--layers", 1)[1]
    code, out, err = run("load", tmp_path / "m", "--json")
    assert json.loads(out)["runs"][0]["bytes"] == 180_000


def test_json_has_every_figure(tmp_path: Path) -> None:
    code, out, _ = run("synth", tmp_path, "--like", "tiny", "--seed", 7, "--json")
    facts = json.loads(out)
    assert (code, facts["parameters"], facts["tensors"], facts["bytes"]) == (0, 120_000, 4, 240_000)
    assert (facts["layers"], facts["seed"], facts["files"]) == (4, 7, ["model.safetensors"])
    assert facts["file_bytes"] == (tmp_path / "model.safetensors").stat().st_size


def test_overwriting_is_2_unless_forced(tmp_path: Path) -> None:
    assert run("synth", tmp_path, "--like", "tiny")[0] == 0
    code, out, err = run("synth", tmp_path, "--like", "tiny", "--layers", 1)
    assert (code, out) == (2, "")
    assert err.startswith("error: RequestError\n")
    assert "--force" in err
    assert run("synth", tmp_path, "--like", "tiny", "--layers", 1, "--force")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "--like"),
        (("--like", "gpt"), "there are qwen3-30b-a3b, deepseek-v3, llama-3-8b, nvfp4-moe"),
        (("--like", "tiny", "--layers", "5"), "tiny has 4 layers"),
        (("--like", "tiny", "--layers", "0"), "layers"),
        (("--like", "tiny", "--shards", "0"), "shards"),
    ],
)
def test_wrong_requests_are_2(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    code, out, err = run("synth", tmp_path / "m", *arguments)
    assert (code, out) == (2, "")
    assert says in err
    assert not (tmp_path / "m").exists()


def test_no_room_and_no_folder_are_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    assert run("synth", tmp_path / "file" / "m", "--like", "tiny")[0] == 3
    huge = Model("huge", 1, "for tests", lambda layers: iter([Spec("w", "U8", (1 << 60,))] * layers))
    monkeypatch.setitem(geometry.MODELS, "huge", huge)
    code, _, err = run("synth", tmp_path / "m", "--like", "huge")
    assert code == 3
    assert "are free" in err


def test_help_names_every_model() -> None:
    out = run("synth", "--help")[1]
    assert all(name in out for name in geometry.MODELS if name != "tiny")
