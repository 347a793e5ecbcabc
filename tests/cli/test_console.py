"""Exit codes and errors as the command line shows them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from support.checkpoints import write_safetensors
from tensorlift import errors
from tensorlift.cli import console


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.HeaderError("x"), 1),
        (errors.CheckpointNotFoundError("x"), 1),
        (errors.OptionError("x"), 2),
        (errors.TensorNotFoundError("x"), 2),
        (errors.ReadError("x"), 3),
        (errors.ForkError("x"), 4),
        (errors.SeedError("x"), 4),
        (errors.OutOfMemoryError("x"), 3),
        (errors.LibraryError("x"), 3),
        (RuntimeError("x"), 70),
        (KeyboardInterrupt(), 130),
        (BrokenPipeError(), 141),
    ],
)
def test_exit_code_of_an_error(error: BaseException, code: int) -> None:
    assert console.exit_code(error) == code
    assert code in console.EXIT_CODES


def test_error_is_one_block_without_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TENSORLIFT_DEBUG", raising=False)

    @console.guarded
    def verb() -> None:
        raise errors.HeaderError("a.safetensors: bad\nhint: download it again")

    with pytest.raises(typer.Exit) as leaving:
        verb()
    assert leaving.value.exit_code == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "error: HeaderError\n  a.safetensors: bad\n  hint: download it again\n"


def test_debug_shows_the_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORLIFT_DEBUG", "1")

    @console.guarded
    def verb() -> None:
        raise errors.HeaderError("bad")

    with pytest.raises(typer.Exit):
        verb()
    assert "Traceback" in capsys.readouterr().err


def test_unexpected_error_asks_for_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    @console.guarded
    def verb() -> None:
        raise ZeroDivisionError("oops")

    with pytest.raises(typer.Exit) as leaving:
        verb()
    assert leaving.value.exit_code == 70
    assert "bug of tensorlift" in capsys.readouterr().err


def test_returned_code_is_the_exit_code() -> None:
    with pytest.raises(typer.Exit) as leaving:
        console.guarded(lambda: 3)()
    assert leaving.value.exit_code == 3


def run(
    *arguments: str, streams: str = "", encoding: str = "utf-8:strict"
) -> subprocess.CompletedProcess[bytes]:
    """The command line as a process; ``streams``: redirections of a shell."""
    command = ["sh", "-c", f'exec "$@" {streams}', "sh", sys.executable, "-m", "tensorlift", *arguments]
    environ = {**os.environ, "PYTHONIOENCODING": encoding}
    return subprocess.run(command, env=environ, capture_output=True, timeout=60)


def test_what_the_encoding_lacks_is_escaped(tmp_path: Path) -> None:
    file = tmp_path / os.fsdecode(b"\xff.safetensors")
    write_safetensors(file, {"a.b.c.d.e": ("F32", (2,), bytes(8))})
    shown = run("show", str(file), encoding="latin-1")
    assert (shown.returncode, shown.stderr) == (0, b"")
    assert b"a.b.c.d.\\u2026" in shown.stdout
    digested = run("digest", str(file))
    assert (digested.returncode, digested.stderr) == (0, b"")
    assert digested.stdout.startswith(os.fsencode(tmp_path) + b"/\\udcff.safetensors.digests.json: 1 tensor")


@pytest.mark.parametrize("streams", ["<&- >&- 2>&-", ">&-"])
def test_closed_streams(tmp_path: Path, streams: str) -> None:
    write_safetensors(tmp_path / "a.safetensors", {"a": ("F32", (2,), bytes(8))})
    done = run("show", str(tmp_path / "a.safetensors"), streams=streams)
    assert (done.returncode, done.stderr) == (0, b"")
    assert run("show", str(tmp_path / "b.safetensors"), streams=streams).returncode == 1
