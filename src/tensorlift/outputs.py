"""Files that we write: what may be replaced is checked before the work, and nothing is ever half there.

A load takes minutes, and a path with a slip in it may be that of weights. So `check_output` comes first and
refuses what is no regular file, what is being read, and what is there already and of another kind;
`write_output` writes beside the file and puts it in place once all is on disk.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from tensorlift.errors import MachineError, OptionError
from tensorlift.format.quoting import clean, quote

__all__ = ["Kind", "check_folder", "check_output", "write_output"]

# Marks stand at the beginning; a chart's may stand anywhere in its file, which is smaller than this.
_LOOKED_AT = 1 << 20


@dataclass(frozen=True, slots=True)
class Kind:
    """What is written: its name in messages, how such a file begins, and what stands in ours alone."""

    what: str
    begins: bytes
    mark: bytes

    def is_ours(self, head: bytes) -> bool:
        """Whether a file with this beginning is one that we wrote."""
        return head.startswith(self.begins) and self.mark in head


def check_output(path: str, kind: Kind, option: str, reading: Iterable[tuple[int, int]] = ()) -> str:
    """Where the bytes for ``path`` will go, symbolic links resolved.

    option: how messages call what the caller gave, such as "--out".
    reading: device and inode of each file that is being read.

    Raises OptionError for a path that must not be written to, MachineError where this machine refuses.
    """
    said = f"{option} is {quote(path, 300)}"
    expected = f"{said}; expected {kind.what} to write, in a folder that is there"
    try:
        target = os.path.realpath(path)
        facts = _facts(target)
        if facts is not None:
            _check_replaced(target, facts, kind, said, reading)
        folder = os.path.dirname(target)
        if not path or path.endswith("/") or not os.path.isdir(folder):
            raise OptionError(f"{expected}; there is no folder {quote(folder, 300)}")
        _check_folder(folder)
    except (ValueError, NotADirectoryError) as error:
        if isinstance(error, OptionError):
            raise
        raise OptionError(f"{expected}: {error.strerror if isinstance(error, OSError) else error}") from None
    except OSError as error:
        raise MachineError(
            f"{said}: {kind.what} cannot be written there: {error.strerror or error}"
        ) from None
    return target


def check_folder(path: str, option: str) -> None:
    """The same for a folder that files are written to, and that is made where it is not there."""
    above = os.path.realpath(path)
    try:
        while not _is_there(above):
            above = os.path.dirname(above)
        if not os.path.isdir(above):
            raise OptionError(
                f"{option} is {quote(path, 300)}; expected a folder, but {clean(above)} is none"
            )
        _check_folder(above)
    except OSError as error:
        raise MachineError(
            f"{option} is {quote(path, 300)}: cannot be written to: {error.strerror or error}"
        ) from None


def _is_there(path: str) -> bool:
    """OSError where that cannot be asked: a name that is too long can be none later either."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _facts(target: str) -> os.stat_result | None:
    try:
        return os.stat(target)
    except FileNotFoundError:
        return None


def _check_replaced(
    target: str, facts: os.stat_result, kind: Kind, said: str, reading: Iterable[tuple[int, int]]
) -> None:
    if not stat.S_ISREG(facts.st_mode):
        found = "a folder" if stat.S_ISDIR(facts.st_mode) else "no regular file"
        raise OptionError(f"{said}, which is {found}; expected {kind.what} to write")
    if (facts.st_dev, facts.st_ino) in set(reading):
        raise OptionError(f"{said}, which is one of the files that are read; name another file")
    if not os.access(target, os.W_OK):
        raise MachineError(
            f"{said}, a file that may not be written to; change its permissions or name another"
        )
    # An empty file has nothing to lose: mktemp and shells make such.
    if facts.st_size and not kind.is_ours(_head(target)):
        raise OptionError(
            f"{said}: a file is there already, and it is not {kind.what} that tensorlift wrote; name another "
            "file, or remove that one first"
        )


def _head(target: str) -> bytes:
    fd = os.open(target, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(fd, "rb", buffering=0) as file:
        return file.read(_LOOKED_AT) or b""


def _check_folder(folder: str) -> None:
    """OSError where no file can be made: tried, for permissions do not tell it all (/proc, quotas)."""
    with tempfile.TemporaryFile(dir=folder):
        pass


class _Raw(io.FileIO):
    """A file that keeps why it could not be written to."""

    refused: OSError | None = None

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.refused = error
            raise


@contextlib.contextmanager
def write_output(path: str, what: str) -> Iterator[BinaryIO]:
    """A file to write to; it takes the place of ``path`` at the end, or leaves it as it is after an error.

    Symbolic links stay, and so do the permissions of a file that is replaced. Raises MachineError where it
    cannot be written; any other error of the body, one of a file that it reads too, stays what it is.
    """
    raw, in_body = None, False
    try:
        target = os.path.realpath(path)
        fd, unfinished = tempfile.mkstemp(prefix=".tensorlift.", suffix=".tmp", dir=os.path.dirname(target))
        try:
            raw = _Raw(fd, "wb")
            with io.BufferedWriter(raw) as file:
                in_body = True
                yield file
                in_body = False
                file.flush()
                # mkstemp makes files for the owner alone; these are as readable as anything one writes.
                old = _facts(target)
                os.fchmod(fd, 0o666 & ~_umask() if old is None else stat.S_IMODE(old.st_mode))
                os.fsync(fd)
            os.replace(unfinished, target)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(unfinished)
            raise
    except OSError as error:
        if in_body and raw is not None and error is not raw.refused:
            raise
        raise MachineError(f"{what} {clean(path)} could not be written: {error.strerror or error}") from error


def _umask() -> int:
    """The process's mask, from proc(5): asking os.umask() would change it for other threads meanwhile."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            return next(int(line.split()[1], 8) for line in file if line.startswith("Umask:"))
    except (OSError, StopIteration):
        return 0o077
