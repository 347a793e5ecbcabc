"""The program ``tensorlift``: verbs and their help."""

from __future__ import annotations

import _thread
import contextlib
import importlib.metadata
import os
import signal
import sys
import time
from typing import TYPE_CHECKING

import typer

from tensorlift.cli import bench, digest, doctor, fork, load, plan, registry, seed, show, synth, tune, verify
from tensorlift.cli.console import EXIT_CODES, keep_streams

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

__all__ = ["app", "main"]

_EPILOG = "Exit codes: " + "; ".join(f"{code} {text}" for code, text in EXIT_CODES.items()) + "."

# Plain help and plain errors: the same text in a terminal, a log and a pipe.
app = typer.Typer(
    name="tensorlift",
    help="Model weights into memory at the speed of the hardware.",
    epilog=_EPILOG,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("load")(load.command)
app.command("show")(show.command)
app.command("plan")(plan.command)
app.command("doctor")(doctor.command)
app.command("digest")(digest.command)
app.command("verify")(verify.command)
app.command("seed")(seed.command)
app.command("fork")(fork.command)
app.command("registry")(registry.command)
app.command("synth")(synth.command)
app.command("tune")(tune.command)
app.command("bench")(bench.command)


def _version(wanted: bool) -> None:
    if wanted:
        print(importlib.metadata.version("tensorlift"))
        raise typer.Exit


@app.callback()
def _common(
    version: bool = typer.Option(
        False, "--version", help="Print the version.", callback=_version, is_eager=True
    ),
) -> None:
    """Model weights into memory at the speed of the hardware."""


def _interrupt_again(lost: UnraisableHookArgs) -> None:
    """Ctrl-C that met a finaliser, where Python drops exceptions: sent once more, a moment later."""
    if issubclass(lost.exc_type, KeyboardInterrupt):
        with contextlib.suppress(RuntimeError):  # no thread can be started, or the process ends anyway
            _thread.start_new_thread(_send_soon, ())
    else:
        sys.__unraisablehook__(lost)


def _send_soon() -> None:
    time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)


def main() -> None:
    """Runs the command line; ends the process."""
    keep_streams()
    sys.unraisablehook = _interrupt_again
    app()


if __name__ == "__main__":
    main()
