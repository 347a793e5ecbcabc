"""The command line before any file: help, versions, usage errors, options that come from LoadOptions."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from tensorlift.cli.main import app
from tensorlift.options import LoadOptions


def run(*arguments: str) -> tuple[int, str, str]:
    # A pipe has no width; help must not be cut by the width of the terminal that runs the tests.
    result = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def test_help_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "from tensorlift.cli.main import main\n"
        "sys.argv = ['tensorlift', 'load', '--help']\n"
        "try:\n    main()\nexcept SystemExit as leaving:\n    assert leaving.code == 0\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
        "assert 'numpy' not in sys.modules, 'numpy was imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_package_is_a_program() -> None:
    done = subprocess.run([sys.executable, "-m", "tensorlift", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip().count(".") == 2


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(LoadOptions) if f.metadata["cli"]])
def test_every_option_is_on_the_command_line(name: str) -> None:
    code, out, _ = run("load", "--help")
    assert code == 0
    assert "--" + name.replace("_", "-") in out
    assert "--own arena|tensor" in out


@pytest.mark.parametrize(
    ("verb", "usage"),
    [(verb, "PATH...") for verb in ("load", "show", "plan", "digest", "verify", "tune")]
    + [("doctor", "[PATH]")],
)
def test_usage_names_the_path_once(verb: str, usage: str) -> None:
    code, out, _ = run(verb, "--help")
    assert code == 0
    # How a required list is bracketed is typer's own and differs between its versions.
    assert out.splitlines()[0].replace("{", "").replace("}", "").endswith(f" {verb} [OPTIONS] {usage}")


def test_help_lists_exit_codes() -> None:
    out = " ".join(run("--help")[1].split())
    assert "Exit codes: 0 all well;" in out
    assert "130 interrupted by Ctrl-C" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("load",), "PATH"),
        (("load", "x", "--no-such-option"), "--no-such-option"),
        (("load", "x", "--repeat", "0"), "repeat"),
        (("show", "x", "--depth", "0"), "depth"),
        (("no-such-verb",), "no-such-verb"),
        (("load", "x", "--repeat", "9" * 400), "repeat"),
        (("plan", "x", "--ranks", "9" * 400), "ranks"),
        (("plan", "x", "--ranks", "2", "--group", "9" * 400), "group"),
        (("bench", "x", "--runs", "9" * 400), "runs"),
        (("bench", "x", "--results", ""), "expected a path, and it is empty"),
        (("bench", "x", "--plot", ""), "expected a path, and it is empty"),
        (("fork", "http://127.0.0.1:9", "--out", ""), "expected a path, and it is empty"),
        (("fork", "http://127.0.0.1:9", "--out", "x", "--key", ""), "--key is empty"),
        (("synth", "", "--like", "llama-3-8b"), "expected a path, and it is empty"),
    ],
)
def test_usage_error_is_2_and_on_stderr(arguments: tuple[str, ...], says: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert says in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--threads", "many"), "threads is 'many'"),
        (("--threads", ""), "threads is ''"),
        (("--chunk-size", "5"), "chunk_size is '5'"),
        (("--backend", "uring"), "the known back ends are AUTO, PREAD, URING, MMAP"),
        (("--backend", "URING", "--backend", "NO"), "'NO'"),
    ],
)
def test_bad_option_names_it_before_any_file(arguments: tuple[str, ...], says: str) -> None:
    code, out, err = run("load", "/nowhere/at/all", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: OptionError\n  ")
    assert says in err


def test_bad_variable_names_it() -> None:
    runner = CliRunner(env={"TENSORLIFT_IO_DEPTH": "deep"})
    result = runner.invoke(app, ["load", "/nowhere/at/all"])
    assert result.exit_code == 2
    assert "TENSORLIFT_IO_DEPTH is 'deep'" in result.stderr
