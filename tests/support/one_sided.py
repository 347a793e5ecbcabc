"""Engines of one-sided reads in tests: which are there, over TCP, and what they may leave behind."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import threading
from collections.abc import Iterator

import pytest

from tensorlift.errors import OptionError
from tensorlift.forking import one_sided
from tensorlift.forking.fabrics import Shared, Wiring
from tensorlift.forking.manifest import ONE_SIDED

WAYS = ONE_SIDED
OVER_TCP = Wiring("tcp")


def need(kind: str) -> None:
    """Skips the test where that engine is not installed; nothing for what is no engine."""
    if kind in WAYS:
        try:
            one_sided.check_there(kind)
        except OptionError as error:
            pytest.skip(str(error))


def engines() -> list[Shared]:
    """Those of this process that have a user."""
    return [one for one in Shared._known.values() if one._users]


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Asserts that at the end no engine has a user or holds memory, and that none of our threads is left.

    What an engine keeps of its own for as long as the process lives is not ours to count.
    """
    before = {thread.name for thread in threading.enumerate()}
    yield
    assert not engines()
    assert not [one for one in Shared._known.values() if one._held]
    gc.collect()
    assert {thread.name for thread in threading.enumerate()} <= before


def said(child: subprocess.Popen[str]) -> str:
    """The line of JSON that a child says, behind what engines print."""
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith("["):
            return line
    raise AssertionError(f"the child ended with {child.wait()}")
