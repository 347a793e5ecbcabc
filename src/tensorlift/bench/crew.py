"""Processes that are started once and do what they are told: the ranks of a group, each with a device.

The parent sends functions, which every process calls with its Member first; answers, and errors as text, come
back. A process that dies or is silent for too long costs what was asked: the parent kills all of them, and
starts new ones when it asks again.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import IO, Any

from tensorlift.bench.crew_member import ANSWER, ERROR, STOP, begin
from tensorlift.bench.samples import say
from tensorlift.errors import MachineError

__all__ = ["Crew", "Outcome"]

Function = Callable[..., Any]

# Starting torch and a device's context takes ten seconds, and W processes do it at once.
_STARTING = 180.0
_LONGEST = 64 << 10
# Multicast over NVLink may leave GPUs that others share out of service.
_ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


@dataclass(slots=True)
class Outcome:
    """What came of an order in one process."""

    value: Any = None
    error: str = ""
    """Type and text; "" where it returned."""
    told: list[Any] = field(default_factory=list)
    """What it said before."""


@dataclass(slots=True)
class _Process:
    process: subprocess.Popen[bytes]
    connection: Connection
    log: IO[bytes]

    def ending(self) -> str:
        """How one that is gone ended, and its last words."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        code = self.process.poll()
        how = f"exit code {code}" if code is None or code >= 0 else f"killed by {signal.Signals(-code).name}"
        lines = self.last_words(1)
        return f"{how}; it said last: {lines[:300]}" if lines else how

    def last_words(self, count: int) -> str:
        """The last lines of what it has printed."""
        # Its offset is the process's own too, and must not be moved.
        end = os.fstat(self.log.fileno()).st_size
        said = os.pread(self.log.fileno(), _LONGEST, max(0, end - _LONGEST)).decode("utf-8", "replace")
        return "\n".join(said.strip().splitlines()[-count:])

    def close(self) -> None:
        """Kills it, and forgets what it said."""
        self.process.kill()
        self.process.wait()
        self.connection.close()
        self.log.close()


class Crew:
    """One process for each of ``devices``; a context manager."""

    def __init__(self, devices: Sequence[str], backend: str) -> None:
        """Nothing is started yet. ``backend``: of their group, nccl or gloo."""
        self.devices, self.backend = tuple(devices), backend
        self._processes: list[_Process] = []
        self.starts = 0

    def __enter__(self) -> Crew:
        """Itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self.devices)

    def start(self, seconds: float = _STARTING) -> None:
        """Has all processes running, in one group. Raises MachineError where that fails."""
        if self._processes:
            return
        self.starts += 1
        try:
            for rank in range(len(self)):
                self._processes.append(self._started(rank))
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            self._ask(begin, seconds, {"backend": self.backend, "port": port})
        except BaseException:
            self.close()
            raise

    def ask(self, function: Function, seconds: float, **about: Any) -> list[Any]:
        """``function(member, **about)`` in all at once: what it returned, by rank.

        Raises MachineError where one failed, died or took longer; all are killed then, for the others may
        wait for it.
        """
        self.start()
        return self._ask(function, seconds, about)

    def _ask(self, function: Function, seconds: float, about: dict[str, Any]) -> list[Any]:
        for rank in range(len(self)):
            self.send(rank, function, **about)
        outcomes = self.receive(range(len(self)), seconds)
        failed = [f"rank {rank}: {one.error}" for rank, one in enumerate(outcomes) if one.error]
        if failed:
            for rank, one in enumerate(outcomes):
                if one.error:
                    say(f"rank {rank} said last:\n{self._processes[rank].last_words(40)}")
            self.close()
            # The first to fail is the cause more often than the others' reaction to it.
            raise MachineError("; ".join(failed))
        return [one.value for one in outcomes]

    def send(self, rank: int, function: Function, **about: Any) -> None:
        """An order to one of them, whose outcome is to be received; they have to be started."""
        with contextlib.suppress(OSError):  # it is gone, which shows when it is heard
            self._processes[rank].connection.send_bytes(pickle.dumps((function, about)))

    def stop(self, rank: int) -> None:
        """``member.stop`` is set there, until its next order."""
        with contextlib.suppress(OSError):
            self._processes[rank].connection.send_bytes(STOP)

    def receive(self, ranks: Iterable[int], seconds: float) -> list[Outcome]:
        """The outcomes of orders that were sent; one that did not come in time or at all is an error."""
        deadline = time.monotonic() + seconds
        return [self._heard(self._processes[rank], deadline, seconds) for rank in ranks]

    def close(self) -> None:
        """Kills them; the next order starts others."""
        processes, self._processes = self._processes, []
        for one in processes:
            one.close()

    def _heard(self, process: _Process, deadline: float, seconds: float) -> Outcome:
        outcome = Outcome()
        try:
            while process.connection.poll(max(0.0, deadline - time.monotonic())):
                kind, value = process.connection.recv()
                if kind == ANSWER:
                    outcome.value = value
                    return outcome
                if kind == ERROR:
                    outcome.error = value
                    return outcome
                outcome.told.append(value)
            outcome.error = f"no answer within {seconds:.0f} s"
            # It writes down where its threads are.
            process.process.send_signal(signal.SIGUSR1)
            time.sleep(0.3)
        except (EOFError, OSError):
            outcome.error = f"gone: {process.ending()}"
        return outcome

    def _started(self, rank: int) -> _Process:
        ours, theirs = socket.socketpair()
        log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        try:
            command = [sys.executable, "-m", "tensorlift.bench.crew_member", str(theirs.fileno())]
            process = subprocess.Popen(
                [*command, str(rank), str(len(self)), self.devices[rank]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **_ENVIRONMENT},
            )
        except BaseException:
            ours.close()
            log.close()
            raise
        finally:
            theirs.close()
        return _Process(process, Connection(ours.detach()), log)
