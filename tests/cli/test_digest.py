"""``tensorlift digest``: what it writes, where, and what it says."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from support.checkpoints import random_checkpoint
from support.command_line import run
from support.digests import digests_of


def test_a_folder(tmp_path: Path) -> None:
    written = random_checkpoint(tmp_path / "c", shards=2, tensors=5)
    code, out, err = run("digest", written.path)
    assert (code, err) == (0, "")
    assert "10 tensors" in out
    record = json.loads((written.path / "tensorlift.digests.json").read_text())
    assert {t["name"]: t["digest"] for t in record["tensors"]} == digests_of(written.tensors)
    assert [f["name"] for f in record["files"]] == [path.name for path in written.files]


def test_control_characters_of_a_path_are_shown_as_escapes(tmp_path: Path) -> None:
    written = random_checkpoint(tmp_path / "a\n\x1b[31m", tensors=1)
    code, out, _ = run("digest", written.path)
    assert (code, out.count("\n"), "a\\n\\x1b[31m" in out) == (0, 1, True)


def test_one_file_as_json(tmp_path: Path) -> None:
    written = random_checkpoint(tmp_path / "c", tensors=5)
    code, out, err = run("digest", written.files[0], "--json")
    assert (code, err) == (0, "")
    said = json.loads(out)
    assert (said["digests"], said["tensors"]) == (f"{written.files[0]}.digests.json", 5)
    assert said["bytes"] == sum(len(row[2]) for row in written.tensors.values())
    assert Path(said["digests"]).exists()


def test_out_and_errors(tmp_path: Path) -> None:
    written = random_checkpoint(tmp_path / "c", shards=2, tensors=2)
    code, _, err = run("digest", *written.files)
    assert code == 2
    assert "--out" in err
    assert run("digest", *written.files, "--out", tmp_path / "d.json")[0] == 0
    assert (tmp_path / "d.json").exists()
    code, _, err = run("digest", written.path, "--out", tmp_path / "none" / "d.json")
    assert code == 2
    assert "there is no folder" in err
    code, _, err = run("digest", tmp_path / "nothing")
    assert code == 1
    assert "nothing" in err


def test_what_is_there_is_not_lost(tmp_path: Path) -> None:
    written = random_checkpoint(tmp_path / "c", shards=2, tensors=2)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "link.json").symlink_to("target.json")
    (tmp_path / "hard").hardlink_to(written.files[0])
    os.mkfifo(tmp_path / "pipe")
    kept = {file: file.read_bytes() for file in [*written.path.iterdir(), tmp_path / "notes.txt"]}
    for out in [*kept, tmp_path / "hard", tmp_path / "pipe", tmp_path, "/dev/null", f"{tmp_path}/x/"]:
        code, said, err = run("digest", written.path, "--out", out)
        assert (code, said) == (2, ""), out
        assert "--out is" in err
    assert {file: file.read_bytes() for file in kept} == kept
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    # A link stays one, and digests may be made again.
    for _ in range(2):
        assert run("digest", written.path, "--out", tmp_path / "link.json")[0] == 0
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "target.json").exists()
    (written.path / "tensorlift.digests.json").write_text("mine too")
    code, _, err = run("digest", written.path)
    assert code == 2
    assert "--out names another" in err


def test_where_nothing_can_be_made_is_the_machine(tmp_path: Path) -> None:
    written = random_checkpoint(tmp_path / "c")
    code, _, err = run("digest", written.path, "--out", "/proc/d.json")
    assert code == 3
    assert "cannot be written there" in err
    assert run("digest", written.path, "--out", tmp_path / ("n" * 300))[0] == 3


def test_settings_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORLIFT_THREADS", "none")
    code, _, err = run("digest", random_checkpoint(tmp_path / "c").path)
    assert code == 2
    assert "TENSORLIFT_THREADS" in err
