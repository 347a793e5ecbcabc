"""Seeds and forks on a device that are killed and stopped: CUDA IPC maps memory of a process that is gone."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from support.device import NO_DEVICE
from support.seeds import KEY, is_version, running, weights
from support.waiting import until
from tensorlift.errors import ForkError
from tensorlift.forking.fork import Forked, fork_into

if not torch.cuda.is_available():
    pytest.skip(NO_DEVICE, allow_module_level=True)

FORK: dict[str, Any] = {"chunk_bytes": 40_000, "transports": ["shm"], "patience": 5.0}
SEED: dict[str, Any] = {"version": 1, "device": "cuda", "limit": "4MB/s"}


def empty() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor, device="cuda") for name, tensor in weights(1).items()}


def forked_until(share: float, act: Any, url: str, found: dict[str, torch.Tensor], **more: Any) -> Forked:
    """A fork under which something is done once, when so much is there."""
    left = [act]

    def tick(bytes_done: int, total: int) -> None:
        if left and bytes_done >= share * total:
            left.pop()()

    return fork_into(found, url, progress=tick, **FORK, **more)


@pytest.mark.parametrize("digests", ["full", "off"])
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_seed_ends_half_way(tmp_path: Path, how: str, digests: str) -> None:
    """Without files it is an error, with them they stand in; the device is as good as before."""
    save_file(weights(1), tmp_path / "model.safetensors")
    number = signal.SIGKILL if how == "killed" else signal.SIGSTOP
    with running("seed", **SEED) as seed:
        url = seed.said()
        found = empty()
        result = fork_into(found, url, digests=digests, **FORK)
        assert result.transports == {url: "shm (CUDA IPC)"}
        with pytest.raises(ForkError, match=r"of 8,006,912 bytes could not be had: http://"):
            forked_until(0.3, lambda: seed.signal(number), url, found, digests=digests)
    with running("seed", **SEED) as seed:
        url, found = seed.said(), empty()
        more = {"digests": digests, "fallback": str(tmp_path)}
        result = forked_until(0.3, lambda: seed.signal(number), url, found, **more)
        assert "files" in result.by_source
        assert is_version(found, 1)


@pytest.mark.parametrize("digests", ["full", "off"])
def test_forks_that_die_leave_the_seed_as_it_was(digests: str) -> None:
    more = {"lease": 5.0, "device": "cuda", "digests": digests, **FORK}
    with running("seed", **SEED) as seed:
        url = seed.said()
        for _ in range(3):
            with running("fork", urls=[url], **more) as fork:
                assert fork.said() == "ready"
                until(lambda: readers(seed) > 0)
                fork.kill()
        until(lambda: readers(seed) == 0)
        found = empty()
        assert fork_into(found, url, key=KEY, digests=digests, **FORK).transports == {url: "shm (CUDA IPC)"}
        assert is_version(found, 1)


def readers(seed: Any) -> int:
    seed.tell("stats")
    return int(seed.said()["readers"])
