"""File systems mounted for one test: slow, picky, broken or stacked; skips it where one cannot be mounted.

All need the right to mount (root, mostly); each is gone at the end of its ``with``.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.native_build import build

_NOT_ALLOWED = 77


class Mirror:
    """A FUSE file system that shows the files of a folder; see native/tests/mirror_fs.cpp."""

    def __init__(self, folder: Path, process: subprocess.Popen[str]) -> None:
        self.folder = folder
        self._process = process

    def counts(self) -> dict[str, int]:
        """What reads there were since this was asked last."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        counts: dict[str, int] = json.loads(self._process.stdout.readline())
        return counts


@contextmanager
def mirror(folder: Path, point: Path, **options: object) -> Iterator[Mirror]:
    """Shows the files that ``folder`` has now below ``point``, with the given options of mirror_fs.cpp."""
    point.mkdir()
    program = build("plain", target="mirror_fs") / "native" / "tests" / "mirror_fs"
    settings = [f"{name}={value}" for name, value in options.items()]
    with subprocess.Popen(
        [str(program), str(folder), str(point), *settings],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        if process.stdout.readline() != "ready\n":
            said = process.stderr.read().strip()
            if process.wait() == _NOT_ALLOWED:
                pytest.skip(said)
            pytest.fail(f"mirror_fs ended with {process.returncode}: {said}")
        try:
            yield Mirror(point, process)
        finally:
            process.stdin.close()
            process.wait()


@contextmanager
def _mounted(command: list[str], point: Path, kind: str) -> Iterator[Path]:
    program = shutil.which(command[0])
    if program is None:
        pytest.skip(f"{command[0]} is not installed: no {kind} here")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no {kind} can be mounted here: {done.stderr.strip()}")
    try:
        yield point
    finally:
        subprocess.run(["umount", "--lazy", str(point)], check=True, capture_output=True)


@contextmanager
def overlay(folder: Path) -> Iterator[tuple[Path, Path, Path]]:
    """(lower folder, upper folder, both as one) of an overlayfs below ``folder``."""
    lower, upper, work, point = (folder / name for name in ("lower", "upper", "work", "merged"))
    for made in (lower, upper, work, point):
        made.mkdir()
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    command = ["mount", "-t", "overlay", "overlay", "-o", options, str(point)]
    with _mounted(command, point, "overlayfs") as merged:
        yield lower, upper, merged


@contextmanager
def bindfs(folder: Path, point: Path) -> Iterator[Path]:
    """``folder`` through bindfs, a FUSE file system of its own right."""
    point.mkdir()
    with _mounted(["bindfs", str(folder), str(point)], point, "bindfs") as mounted:
        yield mounted


@contextmanager
def small(point: Path, nbytes: int) -> Iterator[Path]:
    """A tmpfs with room for so much."""
    point.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(point)]
    with _mounted(command, point, "tmpfs") as mounted:
        yield mounted
