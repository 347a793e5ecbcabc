"""Ctrl-C during a load whose storage does not answer: out within two seconds, nothing left."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from support import child, leaks
from support.checkpoints import random_checkpoint, random_row, write_safetensors
from tensorlift import compat, loading
from tensorlift.engine import abi


def interrupted(kind: str, path: str) -> dict[str, Any]:
    """Loads with waits that never end, and gets SIGINT in the first one; how long until it is out."""
    loading.load(path)
    begun = threading.Event()
    real = abi.library().call["tl_engine_wait"]

    def pending(engine: int, ticket: int, timeout: int, error: object) -> int:
        begun.set()
        # The library's own sleep, for a ticket that is there; then as if it were not.
        real(engine, ticket, timeout, error)
        return abi.Status.PENDING

    abi.library().call["tl_engine_wait"] = pending
    sent: list[float] = []

    def send() -> None:
        begun.wait(30)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    def never_landed() -> property:
        return property(lambda self: -1)

    from tensorlift.engine.engine import Engine

    Engine.landed = never_landed()  # type: ignore[method-assign,assignment]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    state = {"t": loading.torch.zeros(1 << 20, dtype=loading.torch.uint8)}
    runs = {
        "load": lambda: loading.load(path),
        "open": lambda: list(loading.open(path)),
        "load_into": lambda: loading.load_into(state, path),
        "get_tensor": lambda: compat.safe_open(path, "pt", backend="PREAD").get_tensor("t"),
    }
    before = leaks.held()
    thread = threading.Thread(target=send)
    thread.start()
    try:
        runs[kind]()
        outcome = "no interrupt"
    except KeyboardInterrupt:
        outcome = "interrupted"
    took = time.monotonic() - sent[0]
    thread.join()
    return {"outcome": outcome, "took": took, "left": leaks.left(before)}


@pytest.mark.parametrize("kind", ["load", "open", "load_into", "get_tensor"])
def test_ctrl_c(kind: str, tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "m.safetensors", {"t": random_row("U8", [1 << 20])})
    answer = child.call(interrupted, kind, str(path))
    assert answer["outcome"] == "interrupted"
    assert answer["took"] < 2
    assert answer["left"] == [0, 0, 0]


def often_interrupted(folder: str, count: int) -> dict[str, Any]:
    """Small loads one after another, each moment of which an interrupt may meet; how many got lost."""
    loading.load(folder)
    before, fired, lost = leaks.held(), [0], 0
    rng = random.Random(3)

    def handler(*_: object) -> None:
        fired[0] += 1
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, handler)
    # An exception that meets a finaliser is told here and lost: Python has no other way.
    sys.unraisablehook = lambda _: None
    for _ in range(count):
        told = fired[0]
        try:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.0005, 0.006))
            while fired[0] == told:
                loading.load(folder)
            lost += 1
        except KeyboardInterrupt:
            pass
    return {"lost": lost, "left": leaks.left(before)}


def test_interrupts_at_any_moment_end_and_leave_nothing(tmp_path: Path) -> None:
    written = random_checkpoint(tmp_path, shards=3, tensors=8)
    answer = child.call(often_interrupted, str(written.path), 600, seconds=100)
    threads, descriptors, arenas = answer["left"]
    assert threads == 0
    # What a call has just given and nobody holds yet is lost: a few in hundreds of interrupts.
    assert descriptors + arenas <= 30
    assert answer["lost"] <= 30


@pytest.mark.parametrize("kind", ["load", "open", "load_into"])
def test_an_interrupt_while_the_engine_ends_leaves_no_memory(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_safetensors(tmp_path / "m.safetensors", {"t": random_row("U8", [1 << 20])})
    state = {"t": loading.torch.zeros(1 << 20, dtype=loading.torch.float32)}
    runs = {
        "load": lambda: loading.load(path),
        "open": lambda: [name for name, _ in loading.open(path)],
        "load_into": lambda: loading.load_into(state, path),
    }
    runs[kind]()
    for name in ("tl_engine_cancel", "tl_engine_destroy"):
        before = leaks.held()
        real, left = abi.library().call[name], [1]

        def then_interrupted(*given: Any, real: Any = real, left: list[int] = left) -> int:
            status: int = real(*given)
            if left:
                left.pop()
                raise KeyboardInterrupt
            return status

        monkeypatch.setitem(abi.library().call, name, then_interrupted)
        with pytest.raises(KeyboardInterrupt):
            runs[kind]()
        assert leaks.left(before) == [0, 0, 0]
