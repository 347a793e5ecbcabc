"""Processes that end, fork, spawn and are signalled while they load: an end, right bytes, nothing left."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest

from support import child, leaks
from support.checkpoints import Written, random_checkpoint, random_row, write_safetensors
from support.tensors import assert_state
from tensorlift import loading
from tensorlift.engine import abi
from tensorlift.options import HOST_BACKENDS

MIB = 1 << 20


@pytest.fixture
def big(tmp_path: Path) -> Path:
    """24 tensors of 1 MiB."""
    rows = {f"t{k}": random_row("U8", [MIB], k) for k in range(24)}
    return write_safetensors(tmp_path / "big" / "model.safetensors", rows)


EXITS = {
    "an open iterator": "it = iter(opened()); next(it)",
    "an iterator that was not begun": "it = iter(opened())",
    "an error in main": "for _ in opened(): raise ValueError('mine')",
    "sys.exit in a loop": "for _ in opened(): sys.exit(3)",
    "os._exit in a loop": "for _ in opened(): os._exit(3)",
    "a daemon that loads": "threading.Thread(target=ever, daemon=True).start(); time.sleep(0.3)",
    "daemons that load": """
for _ in range(6): threading.Thread(target=ever, daemon=True).start()
time.sleep(0.3)
""",
    "a daemon amid a pass": """
def slowly():
    for _ in opened(): time.sleep(0.05)
threading.Thread(target=slowly, daemon=True).start(); time.sleep(0.2)
""",
    "a thread that is waited for": """
weights = opened()
threading.Thread(target=lambda: [time.sleep(0.01) for _ in weights]).start()
""",
    "a load at exit": "import atexit; atexit.register(lambda: tensorlift.load(path)); tensorlift.load(path)",
    "a seed that is open": "seed = tensorlift.seed(dict(tensorlift.load(path)), key='m')",
    "a fork under way": """
seed = tensorlift.seed(dict(tensorlift.load(path)), key='m', limit='5MB/s')
def fork(): tensorlift.fork(seed.url, into=dict(tensorlift.load(path)))
threading.Thread(target=fork, daemon=True).start(); time.sleep(0.5)
""",
}
CODES = {"an error in main": 1, "sys.exit in a loop": 3, "os._exit in a loop": 3}
BEFORE = """
import os, sys, threading, time
import tensorlift
path = sys.argv[1]
def opened(): return tensorlift.open(path, arena_size="1MiB", buffer_size="2MiB")
def ever():
    while True: tensorlift.load(path)
"""


@pytest.mark.parametrize("how", EXITS)
def test_the_interpreter_ends_in_the_middle(big: Path, tmp_path: Path, how: str) -> None:
    before = sorted(tmp_path.rglob("*"))
    done = subprocess.run(
        [sys.executable, "-c", BEFORE + EXITS[how], str(big)], capture_output=True, text=True, timeout=100
    )
    said = [line for line in done.stderr.splitlines() if line]
    assert done.returncode == CODES.get(how, 0), done.stderr
    assert said[-1:] == (["ValueError: mine"] if how == "an error in main" else []), done.stderr
    assert sorted(tmp_path.rglob("*")) == before


def wait_for(pid: int) -> int:
    """The exit code of a child, which has a minute; -9 where it did not take that."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def loads_right(path: str, digest: str, **options: Any) -> int:
    """In a child of os.fork(): an exit code."""
    from support.loads import digest as digest_of

    try:
        return 0 if digest_of(loading.load(path, **options)) == digest else 1
    except BaseException:  # noqa: BLE001 - the code says it, the output why
        import traceback

        traceback.print_exc()
        return 2


def forked(path: str, count: int, threads: int) -> dict[str, Any]:
    """In a child: forks of its own that load, after loads and while threads load; what became of them."""
    import warnings

    import torch

    from support.loads import digest as digest_of

    torch.set_num_threads(1)  # torch's own pool does not outlive a fork
    warnings.simplefilter("ignore", DeprecationWarning)
    digest = digest_of(loading.load(path))
    held, stop, codes, wrong = leaks.held(), threading.Event(), [], [0]

    def ever() -> None:
        while not stop.is_set():
            wrong[0] += loads_right(path, digest)

    running = [threading.Thread(target=ever) for _ in range(threads)]
    for thread in running:
        thread.start()
    for number in range(count):
        pid = os.fork()
        if pid == 0:
            backend = HOST_BACKENDS[number % len(HOST_BACKENDS)]
            there = abi.library().backend_probe(backend, path) is None
            os._exit(loads_right(path, digest, backend=backend if there else "AUTO"))
        codes.append(wait_for(pid))
    stop.set()
    for thread in running:
        thread.join()
    return {"codes": codes, "wrong": wrong[0], "left": leaks.left(held)}


@pytest.mark.parametrize("threads", [0, 2])
def test_forks_after_loads_and_amid_loads_of_threads(big: Path, threads: int) -> None:
    count = 2 * len(HOST_BACKENDS)
    answer = child.call(forked, str(big), count, threads, seconds=110)
    assert answer == {"codes": [0] * count, "wrong": 0, "left": [0, 0, 0]}


def spawned(written: Written) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for state in pool.map_async(loading.load, [str(written.path)] * 4).get(100):
            assert_state(state, written.tensors)
        pool.close()
        pool.join()


def test_spawn(tmp_path: Path) -> None:
    written = random_checkpoint(tmp_path, shards=2, tensors=8)
    resource_tracker.ensure_running()  # it stays, with a pipe
    with leaks.nothing_left():
        spawned(written)


def test_threads_that_load_at_once(tmp_path: Path) -> None:
    written = random_checkpoint(tmp_path, shards=3, tensors=20)
    ways = usable(next(written.path.glob("*.safetensors")))

    def one(number: int) -> None:
        backend = ways[number % len(ways)]
        if number % 3:
            assert_state(loading.load(written.path, backend=backend), written.tensors)
        else:
            with loading.open(written.path, backend=backend, arena_size="1MiB") as weights:
                assert_state(dict(weights), written.tensors)

    loading.load(written.path)
    with leaks.nothing_left(), ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(10 * len(ways))))


def under_signals(path: str, number: int, backends: list[str]) -> dict[str, Any]:
    """In a child: loads in all ways while a signal with a handler comes all the time."""
    from support.loads import digest as digest_of

    expected = digest_of(loading.load(path))
    state = {name: tensor.clone() for name, tensor in loading.load(path).items()}
    held, came, stop = leaks.held(), [0], threading.Event()
    rng, main, wrong = random.Random(number), threading.main_thread().ident, 0

    def handler(*_: object) -> None:
        came[0] += 1

    def send() -> None:
        while not stop.is_set():
            if number == signal.SIGCHLD:
                subprocess.run(["true"], check=True)
            elif rng.random() < 0.5:
                os.kill(os.getpid(), number)
            else:
                signal.pthread_kill(main or 0, number)
            time.sleep(rng.uniform(0, 0.001))

    signal.signal(number, handler)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        for backend in backends:
            wrong += digest_of(loading.load(path, backend=backend)) != expected
            with loading.open(path, backend=backend, arena_size="1MiB", chunk_size="64KiB") as weights:
                wrong += digest_of(dict(weights)) != expected
            for tensor in state.values():
                tensor.zero_()
            loading.load_into(state, path, backend=backend)
            wrong += digest_of(state) != expected
    finally:
        stop.set()
        sender.join()
    return {"came": came[0] > 0, "wrong": wrong, "left": leaks.left(held)}


def usable(path: Path) -> list[str]:
    return [name for name in HOST_BACKENDS if abi.library().backend_probe(name, str(path)) is None]


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM", "SIGINT", "SIGCHLD"])
def test_signals_with_handlers_at_any_moment(big: Path, name: str) -> None:
    number = int(getattr(signal, name))
    answer = child.call(under_signals, str(big), number, usable(big), seconds=110)
    assert answer == {"came": True, "wrong": 0, "left": [0, 0, 0]}


STOPPED = """
import sys
import tensorlift
expected = {name: tensor.clone() for name, tensor in tensorlift.load(sys.argv[1]).items()}
print("ready", flush=True)
for _ in range(3):
    for backend in sys.argv[2].split(","):
        found = tensorlift.load(sys.argv[1], backend=backend)
        assert all(found[name].equal(tensor) for name, tensor in expected.items())
"""


def test_stopped_and_continued_at_any_moment(big: Path) -> None:
    rng = random.Random(4)
    command = [sys.executable, "-c", STOPPED, str(big), ",".join(usable(big))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        while process.poll() is None:
            process.send_signal(signal.SIGSTOP)
            time.sleep(rng.uniform(0, 0.01))
            process.send_signal(signal.SIGCONT)
            time.sleep(rng.uniform(0, 0.1))
    assert process.returncode == 0


SIGNALLED = """
import signal, sys
import tensorlift
print("ready", flush=True)
while True:
    with tensorlift.open(sys.argv[1], arena_size="1MiB", buffer_size="2MiB") as weights:
        for _ in weights: pass
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGKILL"])
def test_a_signal_without_a_handler_ends_the_process(big: Path, name: str) -> None:
    number = getattr(signal, name)
    with subprocess.Popen(
        [sys.executable, "-c", SIGNALLED, str(big)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(random.Random(number).uniform(0, 0.1))
        process.send_signal(number)
        assert process.wait(60) == -number
