"""The script that measures memory: one child on a CPU, and what is made of the figures."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from support.programs import program_of
from tensorlift.bench.cases import Spec, write_shards


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return program_of("benchmarks/memory.py")


@pytest.mark.parametrize("loader", ["plain", "open", "load"])
@pytest.mark.parametrize("use", ["copied", "kept", "twice"])
def test_a_child(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loader: str, use: str
) -> None:
    specs = {
        name: [Spec(f"{k}", "BF16", (64, 2)) for k in range(41)] for name in ("target", "draft", "small")
    }
    monkeypatch.setattr(script, "models", lambda layers, embedding: specs)
    for name, parts in specs.items():
        write_shards(tmp_path / name, [parts])
    request = {
        "device": "cpu", "loader": loader, "use": use, "surroundings": "default", "layers": 1,
        "embedding": [1, 1], "folder": str(tmp_path), "rival_path": None,
    }  # fmt: skip
    found = script.child(request)
    assert list(found) == (["target", "draft"] if use == "twice" else ["loaded", "post"])
    if use != "twice":
        # 41 tensors of 256 bytes, and buffers of 64, 128 and 256 KiB.
        assert found["post"]["need"] == 41 * 256 + 7 * 65536


def test_what_is_more_than_the_plain_library_has(
    script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    def result(loader: str, reserved: int) -> dict[str, object]:
        found = {"post": {"reserved": reserved, "driver": reserved, "need": 0}}
        return {"surroundings": "default", "use": "copied", "loader": loader, "found": found}

    mib = script.MIB
    plain = result("plain", 4 * mib)
    assert script.judge([plain, result("open", 6 * mib), result("instanttensor", 900 * mib)])
    results = [plain, result("open", 7 * mib), {**plain, "loader": "load", "found": {"error": "a\nb"}}]
    assert not script.judge(results)
    script.show(results)
    printed = capsys.readouterr().out
    assert "NOT" in printed
    assert "3.0" in printed
