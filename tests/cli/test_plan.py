"""``tensorlift plan`` on files of holes: headers alone are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from support.checkpoints import write_raw
from tensorlift.bench.cases import in_shards, write_holes
from tensorlift.bench.geometry import MODELS
from tensorlift.cli.main import app

RATES = ("--storage", "5GB/s", "--link", "55GB/s", "--peer", "400GB/s")


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner(env={"NO_COLOR": "1"}).invoke(app, ["plan", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    return write_holes(folder, in_shards(MODELS["qwen3-30b-a3b"].specs(8), 2)).folder


def test_json_has_bytes_and_seconds_of_each_way(model: Path) -> None:
    code, out, err = run(model, "--ranks", 8, *RATES, "--tp", "--json")
    assert (code, err) == (0, "")
    facts = json.loads(out)
    nbytes = sum(spec.nbytes for spec in MODELS["qwen3-30b-a3b"].specs(8))
    ways = {way["way"]: way for way in facts["ways"]}
    assert list(ways) == ["all", "slices", "gather"]
    assert [way["exchange"] for way in ways.values()] == ["none", "none", "gather"]
    assert ways["all"]["read"] == nbytes == ways["gather"]["read"] + ways["gather"]["received"]
    assert ways["all"]["from_storage"] == 8 * nbytes
    assert nbytes / 8 < ways["slices"]["read"] < nbytes / 2
    assert facts["best"] == "gather"
    assert facts["assumed"] == ["host", "network"]
    assert facts["rates"]["peer"] == 400e9


def test_the_table_says_what_is_best_and_what_was_assumed(model: Path) -> None:
    code, out, err = run(model, "--ranks", 8, *RATES)
    assert (code, err) == (0, "")
    rows = {line.split()[0]: line for line in out.splitlines()}
    assert "storage" in rows["gather"]
    assert "slices" not in rows
    assert rows["best:"].startswith("best: gather: ")
    assert rows["given:"] == "given: storage 5.00 GB/s, link 55.00 GB/s, peer 400.00 GB/s"
    assert rows["assumed:"] == "assumed: host 60.00 GB/s, network 50.00 GB/s"


def test_hosts_groups_and_the_cache_count(model: Path) -> None:
    _, out, _ = run(model, "--ranks", 32, "--group", 8, "--json")
    facts = json.loads(out)
    assert facts["work"]["ranks_per_host"] == 8
    assert facts["ways"][-1]["from_storage"] == 4 * facts["work"]["nbytes"]
    _, out, _ = run(model, "--ranks", 32, "--ranks-per-host", 4, "--cached", 1, "--json")
    facts = json.loads(out)
    assert facts["work"]["ranks_per_host"] == 4
    assert {way["from_storage"] for way in facts["ways"]} == {0}


def test_one_rank_has_nobody_to_share_with(model: Path) -> None:
    code, out, _ = run(model, "--ranks", 1)
    assert code == 0
    assert "best: all: one rank has nobody to share with" in out


@pytest.mark.parametrize("rate", ["50GB", "fast", "0GB/s", "/s", "50GB/s/s", ""])
def test_a_rate_that_is_none_is_2_before_any_file(rate: str) -> None:
    code, out, err = run("/nowhere/at/all", "--ranks", 2, "--storage", rate)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: OptionError\n  --storage is {rate!r}; expected a rate")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "ranks"),
        (("--ranks", "0"), "ranks"),
        (("--ranks", "2", "--cached", "2"), "cached"),
        (("--ranks", "2", "--cached", "nan"), "cached"),
        (("--ranks", "2", "--group", "0"), "group"),
    ],
)
def test_usage_errors_are_2(arguments: tuple[str, ...], says: str) -> None:
    code, out, err = run("x", *arguments)
    assert (code, out) == (2, "")
    assert says in err


def test_files_that_are_not_there_or_broken_are_1(tmp_path: Path) -> None:
    assert run(tmp_path / "gone", "--ranks", 2)[0] == 1
    code, _, err = run(write_raw(tmp_path / "broken.safetensors", b'{"a": '), "--ranks", 2)
    assert code == 1
    assert err.startswith("error: HeaderError\n")
