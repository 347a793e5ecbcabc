"""The native sources' own tests: as they are, under sanitizers, against libraries with one fence left out."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from support.native_build import SANITIZERS, build, program, sanitized, sanitizer_environ
from support.tree import ROOT
from tensorlift.engine import abi, abi_fork
from tensorlift.engine.events import TRACE_EVENT
from tensorlift.plan.pieces import PIECE

PROGRAMS = [
    "abi",
    "bucket",
    "engine",
    "files",
    "lifetime",
    "device",
    "digests",
    "fences",
    "faults",
    "headers",
    "cufile",
    "keeper",
    "sender",
    "rows",
]
# One test of the program `fences` for each fence of native/src/mutants.hpp.
MUTANTS = {
    "NO_ARRIVAL_FENCE": "arrival_",
    "NO_CONSUMER_FENCE": "consumer_",
    "NO_HOST_FENCE": "straight_",
    "NO_SLOT_FENCE": "slot_",
    "NO_DRAIN": "drain_",
}

ARRAYS = {"tl_piece": PIECE, "tl_trace_event": TRACE_EVENT}

# A build comes first in each of these.
pytestmark = pytest.mark.timeout(900)


def run(
    path: Path, *arguments: str, folder: Path, seconds: float = 300, environ: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(path), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        env={**os.environ, **(environ or {})},
    )


def passes(done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode:
        pytest.fail(f"exit {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}", pytrace=False)


@pytest.mark.parametrize("name", PROGRAMS)
def test_native_program(name: str, tmp_path: Path) -> None:
    folder = build("plain")
    passes(run(program(folder, name), folder=tmp_path))


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_native_program_under_a_sanitizer(sanitizer: str, name: str, tmp_path: Path) -> None:
    folder = sanitized(sanitizer)
    passes(run(program(folder, name), folder=tmp_path, environ=sanitizer_environ(tmp_path)))


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_missing_fence_is_noticed(mutant: str, tmp_path: Path) -> None:
    build("plain")
    mutants = build("plain", target="mutants")
    passes(run(program(mutants, "fences"), MUTANTS[mutant], folder=tmp_path))
    done = run(program(mutants, f"fences_{mutant}"), MUTANTS[mutant], folder=tmp_path)
    assert f"FAILED {MUTANTS[mutant]}" in done.stdout, done


def test_every_fence_has_a_test() -> None:
    named = re.findall(r"#ifdef TL_MUTANT_(\w+)", (ROOT / "native/src/mutants.hpp").read_text())
    assert sorted(named) == sorted(MUTANTS)


def test_the_python_structures_lie_as_in_c(tmp_path: Path) -> None:
    done = run(program(build("plain"), "abi"), "--layout", folder=tmp_path)
    passes(done)
    structures = {
        "tl_error": abi.Error,
        "tl_options": abi.Options,
        "tl_stats": abi.Stats,
        "tl_file_info": abi.FileInfo,
        "tl_chunk": abi_fork.Chunk,
        "tl_origin": abi_fork.Origin,
        "tl_region": abi_fork._Region,
        "tl_sender_stats": abi_fork.SenderStats,
    }
    fields = 0
    for line in done.stdout.splitlines():
        name, *numbers = line.split()
        structure, _, field = name.partition(".")
        if structure in ARRAYS:
            continue
        twin = structures[structure]
        if field:
            assert [getattr(twin, field).offset, getattr(twin, field).size] == [int(n) for n in numbers], name
            fields += 1
        else:
            assert ctypes.sizeof(twin) == int(numbers[0]), name
    assert fields == sum(len(twin._fields_) for twin in structures.values())


@pytest.mark.parametrize("name", ARRAYS)
def test_the_arrays_lie_as_in_c(tmp_path: Path, name: str) -> None:
    dtype = ARRAYS[name]
    done = run(program(build("plain"), "abi"), "--layout", folder=tmp_path)
    lines = [line.split() for line in done.stdout.splitlines() if re.match(rf"{name}\b", line)]
    assert int(lines[0][1]) == dtype.itemsize
    assert [field.partition(".")[2] for field, *_ in lines[1:]] == list(dtype.names)
    for field, offset, size in lines[1:]:
        kind, at = dtype.fields[field.partition(".")[2]][:2]
        assert (at, kind.itemsize) == (int(offset), int(size)), field


def test_the_library_shows_exactly_the_functions_of_the_header() -> None:
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("nm (binutils) is not installed")
    listing = subprocess.run(
        [nm, "-D", "--defined-only", str(build("plain") / "libtensorlift.so")],
        capture_output=True,
        text=True,
        check=True,
    )
    shown = {line.split()[2].partition("@")[0] for line in listing.stdout.splitlines()} - {"TENSORLIFT_1"}
    header = "".join(path.read_text() for path in (ROOT / "native/include").glob("*.h"))
    declared = set(re.findall(r"^TL_API [^;(]*?\b(tl_\w+)\(", header, re.MULTILINE))
    assert len(declared) > 15
    assert shown == declared
    assert {*abi._FUNCTIONS, *abi_fork._FUNCTIONS} == declared
