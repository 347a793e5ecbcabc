"""Each command on README and the pages runs as it stands; those of other programs, and long ones, are read.

Only devices, addresses and paths are others than a reader's.
"""

from __future__ import annotations

import functools
import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from support import pages
from support.serving import command
from support.tree import ROOT
from tensorlift.cli.main import app
from tensorlift.forking.tokens import TOKEN_VARIABLE
from tensorlift.integrations.settings import LOAD_FORMAT, parse

TOKEN = "not-so-secret"
SERVING = ("seed", "registry")
# They measure for minutes or write gigabytes; with small figures they run in tests/cli, bench and benchmarks.
LONG = ("bench", "tune", "synth")
SWAPS = {
    "cuda:0": "cpu",
    "7000": "0",
    "10.0.0.1": "127.0.0.1",
    "10.0.0.7": "127.0.0.1",
    "Qwen/Qwen3-30B-A3B": "model/",
    "/run/secrets/tensorlift": "token",
    "/var/lib/tensorlift/registry.db": "registry.db",
    "cluster.pem": "token",
}
SEEDS = ("http://10.0.0.7:7000", "http://host:7000")


def commands() -> list[tuple[str, tuple[str, ...]]]:
    """Where it stands, and its words."""
    found = []
    for block in pages.blocks("sh"):
        for line in block.text.replace("\\\n", " ").splitlines():
            found.append((str(block), tuple(shlex.split(line, comments=True))))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = pages.write_model(tmp_path_factory.mktemp("commands"))
    (folder / "token").write_text(TOKEN)
    return folder


@pytest.fixture(scope="module")
def seed(folder: Path) -> Iterator[str]:
    with command("seed", folder / "model", "--token-file", folder / "token") as (_, said):
        yield said["url"]


@pytest.mark.parametrize(("where", "words"), commands(), ids=[f"{w} {' '.join(c)}" for w, c in commands()])
def test_command(
    where: str, words: tuple[str, ...], folder: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    program, *rest = words
    if program == "make":
        subprocess.run(["make", "-n", *rest], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    elif program == "pip":
        check_requirements(rest[1:])
    elif program.startswith("python3."):
        pytest.skip("wants another Python")
    elif LOAD_FORMAT in rest or program.startswith("--"):
        check_engine(list(words))
    elif program == "python":
        check_options(("python", *rest[: 1 + (rest[0] == "-m")]), rest)
    elif rest[0] in LONG or any(word.startswith("https://") for word in rest):  # TLS: tests/cli/test_fork.py
        check_options(("tensorlift", rest[0]), rest)
    elif rest[0] in SERVING:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            serve([SWAPS.get(word, word) for word in rest])
    else:
        out = str(tmp_path / "copy")
        if rest[0] == "fork":
            url = request.getfixturevalue("seed")
            rest = [
                url if word in SEEDS else out if word == rest[rest.index("--out") + 1] else word
                for word in rest
            ]
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            runner = CliRunner(env={TOKEN_VARIABLE: TOKEN})
            done = runner.invoke(app, [SWAPS.get(word, word) for word in rest])
        assert done.exit_code == 0, done.output


def serve(words: list[str]) -> None:
    """Until it says where; Ctrl-C ends it."""
    if "--port" not in words:
        words += ["--port", "0"]
    with command(*words, **{TOKEN_VARIABLE: TOKEN}) as (child, said):
        assert said["url"].startswith("http://127.0.0.1:")
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 130


@functools.cache
def help_of(program: tuple[str, ...]) -> str:
    if program[0] == "tensorlift":
        return CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, [*program[1:], "--help"]).output
    line = [sys.executable, *program[1:], "--help"]
    done = subprocess.run(line, cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout


def check_options(program: tuple[str, ...], words: list[str]) -> None:
    """Its help knows each of them."""
    known = help_of(program)
    for word in words:
        assert not word.startswith("--") or f"{word} " in known, word


def check_requirements(words: list[str]) -> None:
    """What pip is to bring is a requirement of ours, of the same version where one is named."""
    listed = (ROOT / "pyproject.toml").read_text()
    for word in words:
        ours = word.startswith(("-", "tensorlift"))
        assert ours or f'"{word}"' in listed or (word.isalnum() and f'"{word}' in listed), word


def check_engine(words: list[str]) -> None:
    """What an engine is given for us is what we take."""
    option = "--model-loader-extra-config"
    if option in words:
        given = words[words.index(option) + 1]
        assert json.loads(given)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(TOKEN_VARIABLE, TOKEN)
            parse(given, "an engine")


def test_every_kind_of_command_is_there() -> None:
    """So that none of the ways above is dead."""
    assert {words[0] for _, words in commands()} >= {"make", "pip", "python", "tensorlift", "vllm"}
