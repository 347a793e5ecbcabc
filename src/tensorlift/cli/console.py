"""What the verbs share: exit codes, errors as one readable block, where data goes.

Data goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import math
import os
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from typing import NoReturn, ParamSpec

import typer
from rich.console import Console

from tensorlift.cli.interrupts import raise_again
from tensorlift.errors import FileError, ForkError, MachineError, TensorliftError
from tensorlift.format.quoting import clean, plural
from tensorlift.progress import Report, bar

__all__ = [
    "EXIT_CODES",
    "MOST_SECONDS",
    "MOST_TIMES",
    "data_console",
    "exit_code",
    "guarded",
    "keep_streams",
    "matching",
    "named",
    "number",
    "print_error",
    "told",
]

EXIT_FILE = 1
EXIT_REQUEST = 2
EXIT_MACHINE = 3
EXIT_INSTANCE = 4
EXIT_BUG = 70
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

# 130 and 141 are 128 plus SIGINT and SIGPIPE, as shells report them; 70 is EX_SOFTWARE of sysexits(3).
EXIT_CODES = {
    0: "all well",
    EXIT_FILE: "a file or checkpoint is not what it should be, or not there",
    EXIT_REQUEST: "the request: usage, an unknown option, device, tensor or dtype",
    EXIT_MACHINE: "this machine: reading, memory, a driver, the native library, or room for output",
    EXIT_INSTANCE: "a running instance cannot be reached, refuses, ended, or has other weights",
    EXIT_BUG: "an error that tensorlift did not expect: please report it",
    EXIT_INTERRUPTED: "interrupted by Ctrl-C",
    EXIT_BROKEN_PIPE: "the reader of the output went away",
}

MOST_TIMES = 1_000_000
"""Of anything that is counted: ranks, runs."""
MOST_SECONDS = 1e6
"""More no verb takes: the kernel's and Python's waits overflow not far above."""

P = ParamSpec("P")

# Verbs write to stdout alone (doctor's small file has an error of its own), so that these are about it.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def keep_streams() -> None:
    """Has standard streams to read and write, whatever the caller gave.

    One that is closed leads nowhere, and no file of ours gets its number. What stdout's encoding lacks (names
    of tensors and files may be anything) is written as escapes, as Python does on stderr.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - for as long as the process lasts
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def exit_code(error: BaseException) -> int:
    """The code by which the process tells of an error."""
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    if isinstance(error, BrokenPipeError):
        return EXIT_BROKEN_PIPE
    if isinstance(error, FileError):
        return EXIT_FILE
    if isinstance(error, MachineError) or _is_full(error):
        return EXIT_MACHINE
    if isinstance(error, ForkError):
        return EXIT_INSTANCE
    return EXIT_REQUEST if isinstance(error, TensorliftError) else EXIT_BUG


def _is_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in _NO_ROOM


def number(value: float) -> float:
    """For options that are numbers: "nan" reads as one, and is in no range."""
    if math.isnan(value):
        raise typer.BadParameter("expected a number")
    return value


def named(paths: list[str]) -> str | list[str]:
    """What PATH... stands for: one may be a folder, an index or a Hub id, several are files."""
    return paths[0] if len(paths) == 1 else paths


def matching(count: int, digests: str) -> str:
    """What a verification says that found no difference."""
    return f"{plural(count, 'tensor')} match{'es' if count == 1 else ''} {clean(digests)}"


@contextlib.contextmanager
def told(progress: bool | None, what: str = "loading") -> Iterator[bool | Report | None]:
    """What a load's ``progress`` is for --progress and --no-progress, or neither: a bar on a terminal."""
    if progress is False:
        yield False
    elif progress is None and not sys.stderr.isatty():
        yield None  # nobody said: TENSORLIFT_PROGRESS may
    else:
        with bar(force=bool(progress), what=what) as report:
            yield report


def print_error(error: BaseException) -> None:
    """One block on stderr: the kind, then the message, indented. TENSORLIFT_DEBUG=1 adds the traceback."""
    if os.environ.get("TENSORLIFT_DEBUG") == "1":
        traceback.print_exception(error, file=sys.stderr)
    kind = type(error).__name__
    message = str(error) or "no message"
    if _is_full(error) and not isinstance(error, TensorliftError):
        message = f"the output could not be written: {message}\nMake room, or write it elsewhere."
    if exit_code(error) == EXIT_BUG:
        message += "\nThis is a bug of tensorlift. TENSORLIFT_DEBUG=1 shows where it happened."
    print(f"error: {kind}\n{textwrap.indent(message, '  ')}", file=sys.stderr)


def guarded(function: Callable[P, int | None]) -> Callable[P, None]:
    """Makes a verb of a function: what it returns or raises becomes the exit code, without a traceback."""

    @functools.wraps(function)
    def verb(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            raise_again()
            code = function(*args, **kwargs)
            sys.stdout.flush()
        except BrokenPipeError as error:
            _drop_output()
            _leave(error)
        except KeyboardInterrupt as error:
            print("interrupted", file=sys.stderr)
            _leave(error)
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except Exception as error:  # noqa: BLE001 - the end of the process: shown, and told by the exit code
            print_error(error)
            if _is_full(error):
                _drop_output()
            _leave(error)
        raise typer.Exit(code or 0)

    return verb


def _drop_output() -> None:
    """Python flushes stdout once more at its end; that must not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _leave(error: BaseException) -> NoReturn:
    raise typer.Exit(exit_code(error)) from None


class _Output(Console):
    def on_broken_pipe(self) -> None:
        """Says it as print() does: rich would end the process with 1, which stands for a bad file here."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def data_console() -> Console:
    """Where verbs print tables: stdout; a pipe has no width to fit into."""
    return _Output(highlight=False, markup=False, width=None if sys.stdout.isatty() else 200)
