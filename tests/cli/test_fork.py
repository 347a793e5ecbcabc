"""``fork`` on the command line: a seed's tensors as files, whole or not at all."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tensorlift
from support import one_sided as support
from support.checkpoints import Written, random_checkpoint
from support.command_line import run
from support.ports import nobody
from support.tensors import assert_state
from support.waiting import until, when
from tensorlift.cli import fork as verb
from tensorlift.forking.manifest import ModelKey
from tensorlift.forking.seed import Seed
from tensorlift.sources import writing

KEY = ModelKey(model="org/model", processed=False)


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return random_checkpoint(tmp_path / "model", tensors=40)


@pytest.fixture
def url(written: Written) -> Iterator[str]:
    with Seed(tensorlift.load(written.path), KEY, weights="1") as seed:
        yield seed.url


def test_one_file(url: str, written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb, "_TOGETHER_BYTES", 5000)
    code, out, err = run("fork", url, "--out", tmp_path / "new" / "out", "--json")
    assert (code, err) == (0, "")
    facts = json.loads(out)
    assert facts["files"] == ["model.safetensors"]
    assert facts["by_source"] == {url: facts["bytes"]}
    assert_state(tensorlift.load(tmp_path / "new" / "out"), written.tensors, ordered=False)
    assert [path.name for path in (tmp_path / "new" / "out").iterdir()] == facts["files"]


def test_several_files(url: str, written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "SHARD_BYTES", 20_000)
    code, out, _ = run("fork", url.replace("http", "tensorlift") + "/org/model", "--out", tmp_path / "out")
    assert code == 0
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1
    assert f"{len(written.tensors)} tensors of org/model, " in out
    assert f"{len(files)} files\n" in out
    assert f" from {url} in " in out
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    assert_state(tensorlift.load(tmp_path / "out"), written.tensors, ordered=False)


def test_several_seeds(url: str, written: Written, tmp_path: Path) -> None:
    """What came of which is said; so is who was left, and why."""
    with Seed(tensorlift.load(written.path), KEY, weights="1") as other:
        urls = [url, other.url.replace("http", "tensorlift") + "/org/model", nobody()]
        code, out, err = run("fork", *urls, "--out", tmp_path / "out", "--json")
        assert (code, err) == (0, "")
        facts = json.loads(out)
        assert set(facts["by_source"]) <= {url, other.url}
        assert sum(facts["by_source"].values()) == facts["bytes"]
        assert facts["left"][0].startswith(f"{urls[2]}: cannot be reached: ")
        code, out, err = run("fork", *urls, "--out", tmp_path / "out", "--force", "--progress")
    assert code == 0
    assert f"left behind: {urls[2]}: cannot be reached: " in out
    assert "from 3 seeds" in err
    assert_state(tensorlift.load(tmp_path / "out"), written.tensors, ordered=False)


def test_the_library_reads_what_was_written(tmp_path: Path) -> None:
    """Of any layout, tied ones under both names, from an engine's weights and a rank's too."""
    base = torch.arange(60.0)
    offered = {
        "z": torch.ones(3, dtype=torch.uint8), "a": base.reshape(6, 10), "tied": base.reshape(6, 10),
        "turned": base.reshape(6, 10).t(), "expanded": base[:1].expand(5), "b": torch.ones(5).bfloat16(),
    }  # fmt: skip
    with Seed(offered, ModelKey(model="m", tp=(0, 2))) as seed:
        assert run("fork", seed.url, "--out", tmp_path)[0] == 0
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == offered.keys()
    for name, tensor in offered.items():
        assert torch.equal(found[name], tensor), name


def test_what_is_there_is_kept_unless_forced(url: str, tmp_path: Path, written: Written) -> None:
    (tmp_path / "out").mkdir()
    old = tmp_path / "out" / "model.safetensors"
    old.write_bytes(b"old")
    code, out, err = run("fork", url, "--out", tmp_path / "out")
    assert (code, out) == (2, "")
    assert "holds a checkpoint already: model.safetensors; name another folder or remove it; --force" in err
    assert old.read_bytes() == b"old"
    assert run("fork", url, "--out", tmp_path / "out", "--force")[0] == 0
    assert_state(tensorlift.load(tmp_path / "out"), written.tensors, ordered=False)


def test_nothing_is_left_of_a_fork_that_fails(tmp_path: Path) -> None:
    offered = {"a": torch.ones(1000), "b": torch.ones(3_000_000)}
    seed = Seed(offered, KEY, limit="50KB/s")
    with when(lambda: seed.stats()["connections"], seed.close):
        code, out, err = run("fork", seed.url, "--out", tmp_path / "new" / "out")
    assert (code, out) == (4, "")
    assert err.startswith("error: ForkError\n  ")
    assert "bytes could not be had" in err
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Seed({"b": torch.ones(3_000_000)}, KEY, limit="50KB/s") as seed:
            command = [sys.executable, "-m", "tensorlift", "fork", seed.url, "--out", str(tmp_path / "out")]
            with subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            ) as child:
                until(lambda: seed.stats()["connections"])
                child.send_signal(signal.SIGINT)
                out, err = child.communicate(timeout=60)
            assert (child.returncode, out, err) == (130, "", "interrupted\n")
    finally:
        signal.signal(signal.SIGINT, before)
    assert list(tmp_path.iterdir()) == []


def test_tokens_and_who_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("right")
    (tmp_path / "wrong").write_text("wrong")
    with Seed({"a": torch.ones(3)}, KEY, token="right") as seed:
        for given, says in (
            ([], "wants a token, and none was given"),
            (["--token-file", tmp_path / "wrong"], "does not take this token"),
        ):
            code, _, err = run("fork", seed.url, "--out", tmp_path / "out", *given)
            assert (code, says in err) == (4, True)
            assert "wrong" not in err
        url = seed.url
        assert run("fork", url, "--out", tmp_path / "out", "--token-file", tmp_path / "token")[0] == 0
    code, _, err = run("fork", url, "--out", tmp_path / "other")
    assert (code, "cannot be reached" in err) == (4, True)
    code, _, err = run("fork", "ftp://h", "--out", tmp_path / "other")
    assert (code, "it looks like tensorlift://host:port" in err) == (2, True)
    assert "takes http://host:port and https://host:port too" in err
    assert not (tmp_path / "other").exists()


def test_the_bar_names_the_source(url: str, tmp_path: Path) -> None:
    code, _, err = run("fork", url, "--out", tmp_path / "out", "--progress")
    assert code == 0
    assert f"from {url}" in err


def test_by_which_transport_is_said(url: str, tmp_path: Path) -> None:
    """And why by none that is better, of those that were named."""
    support.need("mooncake")
    given = ("fork", url, "--transports", "mooncake,tcp", "--protocol", "tcp", "--out", tmp_path / "out")
    how = "tcp; not mooncake: the seed does not offer it"
    code, out, err = run(*given)
    assert (code, err, f"\n{url}: by {how}\n" in out) == (0, "", True)
    code, out, _ = run(*given, "--force", "--json")
    assert (code, json.loads(out)["transports"]) == (0, {url: how})


def test_others_behind_a_url(tmp_path: Path) -> None:
    """By the whole key, or by the name of a model: what a checkpoint has, else what an engine holds."""
    rank = ModelKey(model="org/model", tp=(1, 2))
    seeds = {
        '{"model": "org/model", "tp": [1, 2]}': (rank, 1),
        "org/draft": (ModelKey(model="org/draft", processed=False), 2),
        "org/held": (ModelKey(model="org/held"), 3),
    }
    with contextlib.ExitStack() as stack:
        front = stack.enter_context(Seed({"a": torch.zeros(3)}, KEY)).url
        for key, value in seeds.values():
            stack.enter_context(Seed({"a": torch.full((3,), float(value))}, key, join=front))
        for text, (_, value) in seeds.items():
            out = tmp_path / str(value)
            assert run("fork", front, "--key", text, "--out", out)[0] == 0
            assert load_file(out / "model.safetensors")["a"].tolist() == [value] * 3
        code, _, err = run("fork", front, "--key", "other", "--out", tmp_path / "none")
        assert code == 4
        assert "does not have 'other' (target, not processed); there is 'org/model'" in err
        code, _, err = run("fork", front, "--place", "z", "--out", tmp_path / "none")
        assert (code, "place, seeds and wait are for a registry" in err) == (2, True)
    code, _, err = run("fork", front, "--key", "org/draft", "--out", tmp_path / "none")
    assert (code, err.count("cannot be reached")) == (4, 1)
