"""Files that we write: nothing of others is replaced, nothing is half there, everything is checked first."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import stat
from pathlib import Path

import pytest

from tensorlift.errors import MachineError, OptionError, ReadError
from tensorlift.outputs import Kind, check_folder, check_output, write_output

KIND = Kind("a list", b"{", b'"mine"')


def check(path: object, **more: object) -> str:
    return check_output(str(path), KIND, "--out", **more)  # type: ignore[arg-type]


def test_what_may_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(tmp_path / "new") == str(tmp_path / "new")
    (tmp_path / "empty").touch()
    (tmp_path / "ours").write_text('{"mine"')
    (tmp_path / "dangling").symlink_to("gone")
    assert check(tmp_path / "empty") == str(tmp_path / "empty")
    assert check(tmp_path / "ours") == str(tmp_path / "ours")
    assert check(tmp_path / "dangling") == str(tmp_path / "gone")
    monkeypatch.chdir(tmp_path)
    assert check("new") == str(tmp_path / "new")
    assert sorted(os.listdir(tmp_path)) == ["dangling", "empty", "ours"]


def test_what_may_not(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text('{"other"')
    (tmp_path / "loop").symlink_to("loop")
    ours = tmp_path / "ours"
    ours.write_text('{"mine"')
    facts = ours.stat()
    for path in (
        tmp_path,
        tmp_path / "theirs",
        tmp_path / "theirs" / "x",
        tmp_path / "gone" / "x",
        "/dev/full",
        "",
    ):
        with pytest.raises(OptionError, match="--out is"):
            check(path)
    with pytest.raises(OptionError, match="one of the files that are read"):
        check(ours, reading=[(facts.st_dev, facts.st_ino)])
    for path in (tmp_path / "loop", tmp_path / ("n" * 300), "/proc/x"):
        with pytest.raises(MachineError, match="--out is"):
            check(path)
    for path in ("a\0b", "half \ud800"):
        with pytest.raises(OptionError, match="--out is"):
            check(path)


def test_folders(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    check_folder(str(tmp_path / "new" / "newer"), "--results")
    with pytest.raises(OptionError, match="is none"):
        check_folder(str(tmp_path / "file" / "in"), "--results")
    with pytest.raises(MachineError, match="--results is '/proc/x'"):
        check_folder("/proc/x", "--results")
    with pytest.raises(MachineError, match="File name too long"):
        check_folder(str(tmp_path / ("x" * 300)), "--results")
    assert os.listdir(tmp_path) == ["file"]


def test_writing_keeps_links_and_permissions(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "file").chmod(0o640)
    (tmp_path / "link").symlink_to("file")
    with write_output(str(tmp_path / "link"), "it") as file:
        file.write(b"new")
        assert (tmp_path / "file").read_text() == "old"
    assert (tmp_path / "file").read_text() == "new"
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640
    assert (tmp_path / "link").is_symlink()
    with contextlib.suppress(KeyboardInterrupt), write_output(str(tmp_path / "file"), "it") as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert (tmp_path / "file").read_text() == "new"
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]
    lost = write_output(str(tmp_path / "gone" / "x"), "it")
    with pytest.raises(MachineError, match=r"it .* could not be written: No such file"):
        lost.__enter__()


def test_only_what_cannot_be_written_is_said_to_be(tmp_path: Path) -> None:
    """The body may read: what goes wrong with that is not the output's."""
    for error in (ReadError("a checkpoint cannot be read"), FileNotFoundError(2, "no font")):
        output = write_output(str(tmp_path / "out"), "it")
        output.__enter__().write(b"half")
        assert output.__exit__(type(error), error, None) is False
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with (
            pytest.raises(MachineError, match=r"it .* could not be written: File too large"),
            write_output(str(tmp_path / "out"), "it") as file,
        ):
            file.write(bytes(1 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert os.listdir(tmp_path) == []
