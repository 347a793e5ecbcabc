"""Runs a function of a test module as several ranks of a gloo group, each in a process of its own."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support import child, hosts
from support.checkpoints import random_row, write_safetensors
from support.ports import free_port

# Seconds after which a rank writes down where it is, for the message of a test that waits in vain.
STUCK = 40
# Seconds that a rank gets to leave its group when all ranks have answered: over a cut link it never does.
ENDING = 5
# With the file of even(): an arena for each tensor, and two of them ahead.
ARENA: dict[str, Any] = {"arena_size": 64 << 10, "buffer_size": 128 << 10, "exchange": "gather"}


@dataclass(frozen=True)
class Outcome:
    """How one rank ended."""

    status: int
    """Exit code, or minus the signal."""
    value: Any = None
    """What the function returned, by way of JSON."""
    error: str | None = None
    """Name of the exception that it raised."""
    message: str = ""
    trace: str = ""
    seconds: float = 0.0


def run(
    function: Callable[..., Any],
    world: int,
    *arguments: Any,
    store: str = "apart",
    on_hosts: int = 0,
    seconds: float = 60,
) -> list[Outcome]:
    """``function(rank, *arguments)`` in each rank, with torch.distributed initialised.

    ``store``: served by none of the ranks, as with torchrun; by "rank 0"; or a "file". ``on_hosts``: on so
    many hosts (see hosts), with links of 400 Mbit/s; the test is skipped where there can be none. What still
    runs after so many seconds is killed.
    """
    if on_hosts and (reason := hosts.why_not()):
        pytest.skip(reason)
    file, name = function.__code__.co_filename, function.__name__
    found = child.call(_world, file, name, world, arguments, store, on_hosts, seconds, seconds=seconds + 30)
    return [Outcome(**outcome) for outcome in found]


def even(folder: Path) -> str:
    """A file of 32 tensors of 64 KiB: with that capacity, an arena each."""
    rows = {f"t{k:02}": random_row("U8", [64 << 10], k) for k in range(32)}
    return str(write_safetensors(folder / "model.safetensors", rows))


def load(path: str, group: Any = "world") -> int:
    """In a rank: the number of tensors that all ranks load together."""
    import tensorlift

    return len(tensorlift.load(path, process_group=group, **ARENA))


def usable(group: Any = None) -> bool:
    """In a rank: whether a group, or the world, still does what it should; all its ranks call this."""
    import torch
    import torch.distributed as dist

    value = torch.ones(1)
    dist.all_reduce(value, group=None if isinstance(group, str) else group)
    return int(value) == dist.get_world_size()


def values(function: Callable[..., Any], world: int, *arguments: Any, **named: Any) -> list[Any]:
    """The same where every rank returns."""
    outcomes = run(function, world, *arguments, **named)
    for outcome in outcomes:
        assert outcome.status == 0, outcome.trace
        assert outcome.error is None, outcome.trace
    return [outcome.value for outcome in outcomes]


def _world(
    file: str, name: str, world: int, arguments: list[Any], store: str, on_hosts: int, seconds: float
) -> list[dict[str, Any]]:
    places = hosts.make(on_hosts, "400mbit") if on_hosts else []
    address = hosts.STORE if on_hosts else "127.0.0.1"
    port = free_port(address)
    with tempfile.TemporaryDirectory() as folder:
        pids = {}
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                place = places[rank * on_hosts // world] if places else None
                rendezvous = _Rendezvous(store, address, port, f"{folder}/store", world)
                _rank(file, name, rank, arguments, rendezvous, place, Path(folder, str(rank)))
            pids[pid] = rank
        held = None
        if store == "apart":
            import torch.distributed as dist

            # Only now: it has threads, which a fork would lose.
            held = dist.TCPStore(address, port, None, True, wait_for_workers=False)
        found: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + seconds
        while pids:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid in pids:
                rank = pids.pop(pid)
                answer = Path(folder, str(rank))
                said = Path(f"{answer}.said")
                outcome = json.loads(answer.read_text()) if answer.exists() else {"trace": said.read_text()}
                found[rank] = {"status": os.waitstatus_to_exitcode(status), **outcome}
                if all(Path(folder, str(left)).exists() for left in pids.values()):
                    deadline = min(deadline, time.monotonic() + ENDING)
            elif time.monotonic() > deadline:
                for left in pids:
                    os.kill(left, signal.SIGKILL)
                deadline = float("inf")
            else:
                time.sleep(0.01)
        del held
        return [found[rank] for rank in range(world)]


@dataclass(frozen=True)
class _Rendezvous:
    store: str
    address: str
    port: int
    path: str
    world: int

    def open(self, rank: int) -> Any:
        import torch.distributed as dist

        if self.store == "file":
            return dist.FileStore(self.path, self.world)
        return dist.TCPStore(
            self.address, self.port, None, self.store == "rank 0" and rank == 0, wait_for_workers=False
        )


def _rank(
    file: str,
    name: str,
    rank: int,
    arguments: list[Any],
    rendezvous: _Rendezvous,
    place: int | None,
    answer: Path,
) -> None:
    """In the fork; does not return."""
    import torch
    import torch.distributed as dist

    status = 1
    begin = time.monotonic()
    try:
        said = os.open(f"{answer}.said", os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(said, 1)
        os.dup2(said, 2)
        if place is not None:
            hosts.enter(place)
            os.environ["GLOO_SOCKET_IFNAME"] = hosts.INTERFACE
        torch.set_num_threads(1)
        faulthandler.dump_traceback_later(STUCK)
        spec = importlib.util.spec_from_file_location("child_module", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["child_module"] = module
        spec.loader.exec_module(module)
        store = rendezvous.open(rank)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=rendezvous.world)
        begin = time.monotonic()
        outcome: dict[str, Any] = {}
        try:
            outcome["value"] = getattr(module, name)(rank, *arguments)
        except Exception as error:  # noqa: BLE001 - told to the test
            outcome = {"error": type(error).__name__, "message": str(error), "trace": traceback.format_exc()}
        outcome["seconds"] = time.monotonic() - begin
        if rendezvous.store == "rank 0" and rank == 0:
            time.sleep(1)  # the others may want it still
        text = answer.with_suffix(".part")
        text.write_text(json.dumps(outcome))
        text.rename(answer)
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        status = 0
    except BaseException:  # noqa: BLE001 - told to the test by the output and the status
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
