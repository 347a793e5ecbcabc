"""One wheel for every Python: built from the tree as it is, looked into, loaded by another Python."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from support.tree import ROOT

OTHERS = ("python3.10", "python3.12", "python3.13", "python3.14")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for module in ("scikit_build_core", "cmake", "ninja"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"building a wheel needs {module} (pip install --group build)")
    folder = tmp_path_factory.mktemp("wheel")
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "-C", f"build-dir={folder / 'build'}", "-w", str(folder / "dist")]
    subprocess.run([*command, str(ROOT)], check=True, env=environment)
    (built,) = (folder / "dist").iterdir()
    return built


@pytest.mark.timeout(600)
def test_one_wheel_for_every_python(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert names.count("tensorlift/libtensorlift.so") == 1
    assert "tensorlift/py.typed" in names
    assert "tensorlift/bench/ceiling.c" in names
    tops = {name.split("/")[0].split("-")[0] for name in names}
    assert tops == {"tensorlift"}


@pytest.mark.timeout(600)
def test_library_needs_the_c_library_only(wheel: Path, tmp_path: Path) -> None:
    library = zipfile.ZipFile(wheel).extract("tensorlift/libtensorlift.so", tmp_path)
    out = subprocess.run(["objdump", "-p", library], check=True, capture_output=True, text=True).stdout
    needed = {line.split()[1] for line in out.splitlines() if "NEEDED" in line}
    assert needed <= {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "ld-linux-x86-64.so.2"}


@pytest.mark.timeout(600)
def test_another_python_loads_the_library(wheel: Path, tmp_path: Path) -> None:
    def runs(name: str) -> bool:
        # A version manager may put a name on the path that does not run.
        return (
            bool(shutil.which(name)) and not subprocess.run([name, "-c", ""], capture_output=True).returncode
        )

    here = f"python3.{sys.version_info[1]}"
    others = [name for name in OTHERS if name != here and runs(name)]
    if not others:
        pytest.skip(f"none of {', '.join(OTHERS)} is on this machine")
    library = zipfile.ZipFile(wheel).extract("tensorlift/libtensorlift.so", tmp_path)
    for other in others:
        code = f"import ctypes; print(ctypes.CDLL({library!r}).tl_abi_version())"
        done = subprocess.run([other, "-I", "-c", code], capture_output=True, text=True, check=True)
        assert int(done.stdout) >= 1
