"""Finding and loading the native library."""

from __future__ import annotations

import ctypes.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tensorlift.engine import abi, library
from tensorlift.errors import LibraryError


def test_a_chosen_library_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.VARIABLE, "/no/such/library.so")
    with pytest.raises(LibraryError, match=r"TENSORLIFT_LIBRARY is '/no/such/library\.so'"):
        library.find_library()


def test_the_chosen_library_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    chosen = tmp_path / "mine.so"
    chosen.write_bytes(b"")
    monkeypatch.setenv(library.VARIABLE, str(chosen))
    assert library.find_library() == str(chosen)


def test_no_library_names_every_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(library.VARIABLE, raising=False)
    monkeypatch.setattr(library, "FILE_NAME", "libnothere.so")
    with pytest.raises(LibraryError, match=r"libnothere\.so was not found at .*pip install"):
        library.find_library()


@pytest.mark.parametrize("name", ["text.so", "b\udcff.so"])
def test_what_is_no_library(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("no library")
    with pytest.raises(LibraryError, match="does not load"):
        abi.Abi(str(path))


def test_a_library_of_something_else() -> None:
    name = ctypes.util.find_library("m")
    if name is None:
        pytest.skip("no libm.so to stand for a foreign library")
    with pytest.raises(LibraryError, match="has no tl_abi_version"):
        abi.Abi(name)


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abi, "ABI_VERSION", 9999)
    with pytest.raises(LibraryError, match="this package needs 9999"):
        abi.Abi(abi.library().path)


IMPORTS = """
import json, os, sys, threading
before = set(os.listdir("/proc/self/task"))
import tensorlift
with open("/proc/self/maps") as maps:
    library = "libtensorlift" in maps.read()
threads = set(os.listdir("/proc/self/task")) - before
print(json.dumps([library, "torch" in sys.modules, "numpy" in sys.modules, len(threads), tensorlift.__all__]))
tensorlift.load
print(json.dumps(["torch" in sys.modules, sys.modules["torch"].cuda.is_initialized()]))
"""


def test_importing_starts_nothing_and_loads_neither_torch_nor_the_library() -> None:
    # A new interpreter: in a fork of one that has imported, nothing would be seen.
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=100, check=True
    )
    at_import, at_use = map(json.loads, done.stdout.splitlines())
    assert at_import[:4] == [False, False, False, 0]
    assert at_import[4] == sorted(at_import[4])
    assert at_use == [True, False]
