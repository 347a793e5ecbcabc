"""Ctrl-C while the command line is imported: one word and the exit code, whatever is being imported."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.checkpoints import random_checkpoint
from tensorlift.cli import interrupts

INTERRUPTED = """
import os, signal, sys, time
signal.signal(signal.SIGINT, {handler})

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)

sys.meta_path.insert(0, Finder())
sys.argv = ["tensorlift", "load", {path!r}]
from tensorlift.__main__ import main
main()
"""


def run(module: str, path: Path, handler: str = "signal.default_int_handler") -> tuple[int, str]:
    code = INTERRUPTED.format(module=module, path=str(path), handler=handler)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return done.returncode, done.stderr


@pytest.mark.parametrize("module", ["typer", "rich.console", "tensorlift.cli.tune", "torch", "numpy"])
def test_ctrl_c_while_importing(module: str, tmp_path: Path) -> None:
    assert run(module, random_checkpoint(tmp_path).path) == (130, "interrupted\n")


def test_who_has_it_ignored_is_not_interrupted(tmp_path: Path) -> None:
    assert run("torch", random_checkpoint(tmp_path).path, "signal.SIG_IGN") == (0, "")


def test_handlers_of_others_stay() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with interrupts.at_once():
            assert signal.getsignal(signal.SIGINT) is interrupts._leave
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, mine := lambda *_: None)
        with interrupts.at_once():
            assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)
