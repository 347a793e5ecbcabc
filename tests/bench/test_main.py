"""The CPU table from the command line, with checkpoints that are tiny: what it leaves where it wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorlift.bench import __main__ as program
from tensorlift.bench.cases import Case, Spec, nvfp4_moe, write_shards
from tensorlift.errors import RequestError


def tiny(folder: Path, layers: int, shards: int) -> Case:
    return write_shards(folder, [[Spec(f"{at}.weight", "BF16", (64, 64))] for at in range(shards)])


@pytest.mark.parametrize("keep", [False, True])
def test_only_what_was_written_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    monkeypatch.setattr(program, "qwen3_moe", tiny)
    disk, tmpfs = tmp_path / "disk", tmp_path / "tmpfs"
    own = [disk / "own", disk / "large" / "own", tmpfs / "own"]
    for path in own:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("not the program's")
    given = ["--folder", disk, "--tmpfs", tmpfs, "--results", tmp_path / "results", "--runs", 1]
    given += ["--rows", "tmpfs,into", *(["--keep"] if keep else [])]
    program.main([str(word) for word in given])
    left = {path for path in (*disk.rglob("*"), *tmpfs.rglob("*")) if path.is_file()}
    assert set(own) <= left
    written = {str(path.parent.relative_to(tmp_path)) for path in left - set(own)}
    assert written == ({"disk/large"} if keep else set())


def test_folders_of_its_own_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "qwen3_moe", tiny)
    given = ["--folder", tmp_path / "a", "--tmpfs", tmp_path / "b", "--results", tmp_path / "results"]
    program.main([str(word) for word in (*given, "--runs", 1, "--rows", "tmpfs,into")])
    assert [path.name for path in tmp_path.iterdir()] == ["results"]


def test_a_checkpoint_that_was_there_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By no benchmark: all write what they measure in this way."""
    monkeypatch.setattr(program, "qwen3_moe", tiny)
    own = tmp_path / "large" / "model.safetensors"
    own.parent.mkdir()
    own.write_text("somebody's weights")
    given = ["--folder", tmp_path, "--tmpfs", tmp_path / "b", "--results", tmp_path, "--rows", "into"]
    with pytest.raises(
        RequestError, match=r"large holds a checkpoint already: model\.safetensors; name another"
    ):
        program.main([str(word) for word in given])
    with pytest.raises(RequestError, match="holds a checkpoint already"):
        nvfp4_moe(own.parent, 1, 1)
    assert own.read_text() == "somebody's weights"
    assert [path.name for path in own.parent.iterdir()] == ["model.safetensors"]
