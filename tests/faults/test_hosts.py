"""Ranks on several hosts: what crosses the network, and a host, a rank or a link that goes.

The hosts are network namespaces; ranks are made to believe that the others' processes cannot be seen.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import tensorlift
from support import hosts, ranks
from support.checkpoints import random_row, write_safetensors

KIB, MIB = 1 << 10, 1 << 20
PEER_TIMEOUT = 3.0
NBYTES = 32 * 256 * KIB
PADDING = 256 * KIB  # of shares, whole pages, in a few arenas
ARENA: dict[str, Any] = {"arena_size": 256 * KIB, "buffer_size": 512 * KIB, "exchange": "gather"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """32 tensors, an arena each."""
    rows = {f"t{k:02}": random_row("U8", [256 * KIB], k) for k in range(32)}
    return str(write_safetensors(tmp_path_factory.mktemp("hosts") / "model.safetensors", rows))


def far_apart(rank: int) -> None:
    """Ranks 0 and 1 on one host, 2 and 3 on another, as far as they know."""
    from tensorlift.distributed import ranks as package_ranks
    from tensorlift.distributed import watch

    plain, host = watch.this_process, f"host {rank // 2}"
    watch.this_process = lambda: type(plain())(host, os.getpid(), plain().started)  # type: ignore[assignment]
    package_ranks.machine = lambda: host  # type: ignore[assignment]


def crossing(rank: int, path: str) -> Any:
    far_apart(rank)
    nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    plain = {name: tensor.clone() for name, tensor in tensorlift.load(path).items()}
    # What is begun once.
    tensorlift.load(path, process_group="world", exchange="gather")
    tensorlift.load(path, process_group=nodes[rank // 2], exchange="gather")
    found = []
    for group in ("world", nodes[rank // 2]):
        dist.barrier()
        before = hosts.received()
        state = tensorlift.load(path, process_group=group, arena_size=MIB, exchange="gather")
        dist.barrier()
        crossed = hosts.received() - before
        assert list(state) == list(plain)
        assert all(bool((state[name] == plain[name]).all()) for name in plain)
        found.append([crossed, sum(state.stats.readers.values()), state.stats.received_bytes])
    slow = 0
    for _ in tensorlift.open(path, process_group="world", peer_timeout=1, **ARENA):
        slow += 1
        if rank == 2 and slow == 5:
            time.sleep(3)
    # What auto rests on: a machine is what ranks share, wherever they are.
    auto = tensorlift.load(path, process_group="world").stats.prediction
    return [found, slow, auto["ranks_per_host"]]


def test_what_crosses_the_network(path: str) -> None:
    """A gather over all brings each host what it lacks; a group a node nothing. Who is slow is not dead."""
    for found, slow, per_host in ranks.values(crossing, 4, path, on_hosts=2):
        (all_crossed, all_read, all_received), (crossed, read, received) = found
        assert abs(all_read - NBYTES // 4) <= PADDING
        assert abs(all_received - NBYTES * 3 // 4) <= PADDING
        # At least the half that the host lacks; gloo's ring brings it the other rank's part once more.
        assert NBYTES // 2 <= all_crossed <= NBYTES
        assert abs(read - NBYTES // 2) <= PADDING
        assert abs(received - NBYTES // 2) <= PADDING
        assert crossed <= NBYTES // 32
        assert slow == 32
        assert per_host == 2


def going(rank: int, path: str, what: str) -> int:
    far_apart(rank)
    count = 0
    for _ in tensorlift.open(path, process_group="world", peer_timeout=PEER_TIMEOUT, **ARENA):
        count += 1
        if count == 5 and what == "the link" and rank == 2:
            hosts.cut()
        elif count == 5 and what in ("SIGKILL", "SIGSTOP") and rank == 3:
            # One that is stopped is ended long after the others must have noticed.
            subprocess.Popen(["sh", "-c", f"sleep {2 * PEER_TIMEOUT}; kill -9 {os.getpid()}"])
            os.kill(os.getpid(), getattr(signal, what))
    return count


@pytest.mark.parametrize("what", ["SIGKILL", "SIGSTOP", "the link"])
def test_what_goes_on_another_host(path: str, what: str) -> None:
    """Rank 3, or the host of ranks 2 and 3."""
    outcomes = ranks.run(going, 4, path, what, on_hosts=2, seconds=30)
    left = {0, 1} if what == "the link" else {0, 1, 2}
    for rank in range(4):
        outcome = outcomes[rank]
        if rank in left:
            names = ("rank 2", "rank 3") if what == "the link" else ("rank 3",)
            assert outcome.error == "PeerError", (rank, outcome)
            assert any(f"{name} is gone" in outcome.message for name in names), outcome.message
            assert what == "SIGKILL" or "it gave no sign for" in outcome.message, outcome.message
        elif what == "the link":
            assert outcome.error == "PeerError", (rank, outcome)
            assert "the store of the process group does not answer" in outcome.message
        else:
            assert outcome.status == -signal.SIGKILL
            continue
        assert outcome.seconds < 2 * PEER_TIMEOUT, (rank, outcome)


def test_nothing_is_left_of_hosts() -> None:
    if reason := hosts.why_not():
        pytest.skip(reason)
    assert not [name for name in os.listdir("/sys/class/net") if name.startswith("tl")]
    assert not Path("/run/netns").exists() or not any(Path("/run/netns").glob("tl*"))
