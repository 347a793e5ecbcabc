"""Exit codes and errors as the command line shows them."""

from __future__ import annotations

import pytest
import typer

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
