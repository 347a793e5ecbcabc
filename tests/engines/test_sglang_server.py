"""The load format in SGLang's server, on a CPU."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from support import engines
from support.engines import EXTRA
from support.sglang_runs import MARKS, Server, make_models

pytestmark = MARKS


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_models(tmp_path_factory.mktemp("sglang"))
    engines.broken(made)
    return made


def test_a_server_serves_and_reloads(models: Path, tmp_path: Path) -> None:
    model = models / "llama"
    with Server(model, tmp_path / "plain.log", "--load-format", "safetensors") as plain:
        plain.wait()
        expected = plain.generate()
        plain.reload(models / "broken" / "flipped")
        expected_flipped = plain.generate()
    extra = json.dumps(EXTRA)
    arguments = ["--load-format", "tensorlift", "--model-loader-extra-config", extra]
    with Server(model, tmp_path / "ours.log", *arguments) as ours:
        ours.wait()
        assert ours.generate() == expected
        assert ours.reload(models / "broken" / "flipped")["success"]
        assert ours.generate() == expected_flipped != expected
        refused = ours.reload(models / "broken" / "truncated")
        assert not refused["success"]
        assert "100 bytes missing" in refused["message"]
        assert ours.generate() == expected_flipped
        assert ours.reload(model)["success"]
        assert ours.generate() == expected
        lines = re.findall(r"tensorlift: rank 0: (\d+) bytes.*readers: MMAP", ours.text())
        assert lines == [str(engines.data_bytes(model))] * 3


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("no_up", [], "gate_up_proj.weight (part 2 of 2)"),
        ("missing_shard", [], "model-00002-of-00003.safetensors"),
        ("llama", ["--model-loader-extra-config", '{"chunk_sise": 4096}'], "did you mean chunk_size"),
    ],
)
def test_a_server_does_not_half_start(
    models: Path, tmp_path: Path, name: str, arguments: list[str], text: str
) -> None:
    model = models / name if name == "llama" else models / "broken" / name
    with Server(model, tmp_path / "log", "--load-format", "tensorlift", *arguments) as server:
        code = server.child.wait(300)
        assert code != 0
        assert text in server.text()
        assert engines.left(server.child.pid) == []
