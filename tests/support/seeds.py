"""Seeds and forks that are processes of their own, to be killed and stopped."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tensorlift import instances
from tensorlift.forking import reader
from tensorlift.forking.fork import fork_into
from tensorlift.forking.manifest import ModelKey

KEY = ModelKey(model="org/model")
TENSORS, ITEMS = 40, 25_000
NBYTES = TENSORS * ITEMS * 8


def weights(version: int) -> dict[str, torch.Tensor]:
    """8 MB whose every element says of which version, tensor and place it is."""
    return {
        f"t{at:02}": torch.arange(ITEMS) + at * ITEMS + version * TENSORS * ITEMS for at in range(TENSORS)
    }


def is_version(found: dict[str, torch.Tensor], version: int) -> bool:
    """Whether all of it is."""
    return all(torch.equal(found[name].cpu(), tensor) for name, tensor in weights(version).items())


class Process:
    """A process that says what it does in lines of JSON, and is told so."""

    def __init__(self, what: str, inside: Callable[[], object] | None = None, **more: Any) -> None:
        """``what``: seed or fork; ``inside``: called in it first; ``more``: its arguments."""
        tests = str(Path(__file__).resolve().parents[1])
        paths = os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "support.seeds", what, json.dumps(more)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": paths},
            preexec_fn=inside,
        )

    def said(self) -> Any:
        """The next line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the process ended with {self.process.wait()}"
        return json.loads(line)

    def tell(self, *words: Any) -> None:
        """One line."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()

    def signal(self, number: int) -> None:
        """Such as SIGSTOP."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """At once, stopped or not."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Whatever it does."""
        self.kill()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()


@contextlib.contextmanager
def running(what: str, inside: Callable[[], object] | None = None, **more: Any) -> Iterator[Process]:
    """One of them, ended behind it."""
    made = Process(what, inside, **more)
    try:
        yield made
    finally:
        made.close()


def _seed(version: int, device: str = "cpu", **more: Any) -> None:
    """Says its URL, then: ["update", version, timeout] and ["stats"]."""
    offered = {name: tensor.to(device) for name, tensor in weights(version).items()}
    with instances.seed(offered, key=KEY, weights=str(version), **more) as seed:
        print(json.dumps(seed.url), flush=True)
        for line in sys.stdin:
            what, *rest = json.loads(line)
            if what == "update":
                with seed.updating(timeout=rest[1], weights=str(rest[0])):
                    for name, tensor in weights(rest[0]).items():
                        offered[name].copy_(tensor)
            print(json.dumps(seed.stats()), flush=True)


def _fork(urls: list[str], lease: float, device: str = "cpu", **more: Any) -> None:
    """Forks again and again, until it is told to end; says how often, and whether a read was torn."""
    reader._LEASE_SECONDS = lease
    found = {name: torch.zeros_like(tensor, device=device) for name, tensor in weights(0).items()}
    counts = {"reads": 0, "refused": 0, "torn": 0, "again": 0}
    asked = False

    def end(*_: object) -> None:
        nonlocal asked
        asked = True

    signal.signal(signal.SIGTERM, end)
    print(json.dumps("ready"), flush=True)
    while not asked:
        try:
            result = fork_into(found, urls, **more)
        except Exception as error:  # noqa: BLE001 - counted; a torn read is none of them
            counts["refused"] += 1
            counts["last"] = f"{type(error).__name__}: {error}"  # type: ignore[assignment]
            continue
        counts["reads"] += 1
        counts["again"] += result.moved_bytes > result.bytes
        counts["torn"] += not is_version(found, int(result.weights))
    print(json.dumps(counts), flush=True)


if __name__ == "__main__":
    {"seed": _seed, "fork": _fork}[sys.argv[1]](**json.loads(sys.argv[2]))
