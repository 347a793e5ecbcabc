"""``doctor`` on machines with NICs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from support.pci import eight_and_one
from tensorlift.cli.main import app
from tensorlift.forking import topology
from tensorlift.forking.topology import Tree, read_tree


def doctor(*arguments: str) -> str:
    result = CliRunner(env={"NO_COLOR": "1", "COLUMNS": "200"}).invoke(app, ["doctor", *arguments])
    assert result.exit_code == 0, result.stderr
    return result.stdout


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    root = eight_and_one(tmp_path)
    (tmp_path / "sys/class/infiniband/mlx5_2/ports/1/state").write_text("1: DOWN\n")
    found = read_tree(root)
    monkeypatch.setattr(topology, "tree_here", lambda: found)
    return found


@pytest.mark.usefixtures("tree")
def test_nics_for_people() -> None:
    out = doctor()
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "mlx5_0 (12.50 GB/s) yes" in lines
    assert "mlx5_2 no no active port (DOWN)" in lines
    assert "GPU0 (0000:1a:00.0) takes mlx5_1: PIX to GPU0" in lines
    assert "GPU1 (0000:2a:00.0) takes mlx5_1: PHB to GPU1, one of 3 as near and as fast" in lines


@pytest.mark.usefixtures("tree")
def test_nics_for_programs() -> None:
    nics = json.loads(doctor("--json"))["nics"]
    assert [nic["name"] for nic in nics["there"]] == [f"mlx5_{at}" for at in range(9)]
    assert nics["there"][2] == {
        "name": "mlx5_2", "works": False, "port": None, "rate": None, "reason": "no active port (DOWN)",
    }  # fmt: skip
    assert nics["gpus"][7] == {
        "name": "GPU7", "address": "0000:8a:00.0", "takes": ["mlx5_8"], "ucx": "mlx5_8:1",
        "rate": 50_000_000_000, "why": "PIX to GPU7",
    }  # fmt: skip
    others = ["mlx5_0", *(f"mlx5_{at}" for at in (1, 3, 4, 5, 6, 7))]
    assert nics["mooncake_topology"]["cuda:7"] == [["mlx5_8"], others]


def test_a_machine_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "tree_here", lambda: Tree((), (), {}))
    assert "NICs: no RDMA device is here\n" in doctor()
    assert json.loads(doctor("--json"))["nics"] == {"there": [], "gpus": [], "mooncake_topology": {}}
