"""Some fuzzing of what reads hostile input, from the corpus that is kept; `make fuzz` has a minute each."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

import fuzzing

SECONDS = 5
# The native programs are built first.
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, Future[fuzzing.Outcome]]]:
    with ThreadPoolExecutor(fuzzing.AT_A_TIME) as pool:
        yield {name: pool.submit(fuzzing.run, name, SECONDS) for name in fuzzing.TARGETS}


@pytest.mark.parametrize("name", fuzzing.TARGETS)
def test_nothing_is_found(name: str, runs: dict[str, Future[fuzzing.Outcome]]) -> None:
    try:
        outcome = runs[name].result()
    except fuzzing.MissingError as missing:
        pytest.skip(str(missing))
    shown = "\n".join(["", *map(str, outcome.found), outcome.output[-8000:]])
    assert outcome.is_clean, shown


def test_the_kept_corpus_is_small() -> None:
    files = [path for path in fuzzing.CORPUS.rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} == set(fuzzing.TARGETS)
    assert len(files) < 1000
    assert sum(path.stat().st_size for path in files) < 1_000_000


def fuzzed(folder: Path, line: str, seconds: float) -> fuzzing.Outcome:
    """What comes of a target of Python that does this with an input, ``content``."""
    pytest.importorskip("atheris", reason="atheris is not installed, which fuzzes Python")
    program = folder / "program.py"
    program.write_text(
        "import sys, time, atheris\n"
        "def one_input(content):\n"
        f"    {line}\n"
        "atheris.Setup(sys.argv, one_input)\n"
        "atheris.Fuzz()\n"
    )
    return fuzzing.fuzz("program", [sys.executable, str(program)], folder, seconds, 1, 10)


def test_an_input_that_breaks_something_is_kept_and_named(tmp_path: Path) -> None:
    outcome = fuzzed(tmp_path, "assert len(content) < 3, 'three'", 30)
    assert not outcome.is_clean
    assert "three" in outcome.output
    (found,) = outcome.found
    assert found.parent == tmp_path / "found"
    assert len(found.read_bytes()) >= 3


def test_what_waits_for_a_busy_machine_is_not_found(tmp_path: Path) -> None:
    outcome = fuzzed(tmp_path, "time.sleep(11)", 1)
    assert outcome.is_clean, outcome.output
