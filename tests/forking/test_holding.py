"""Tensors of a seed that get other memory outside of updating(): who reads is not torn down with it."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from support import leaks
from tensorlift.errors import ForkError, RequestError, SeedError
from tensorlift.forking.client import SeedClient
from tensorlift.forking.fork import fork_into
from tensorlift.forking.holding import Holding
from tensorlift.forking.offering import named_tensors
from tensorlift.forking.seed import Seed
from tensorlift.forking.tcp import connected

ITEMS = 4 << 20  # the allocator gives so much back to the kernel at once: to read it is a signal


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    torch.ones(ITEMS)  # torch's own threads
    with leaks.nothing_left():
        yield


@pytest.fixture
def linear() -> torch.nn.Linear:
    made = torch.nn.Linear(ITEMS, 1, bias=False)
    made.weight.data = torch.ones(1, ITEMS)
    return made


def replaced(linear: torch.nn.Linear) -> StorageWeakRef:
    """What knows whether the memory that it had is freed."""
    before = StorageWeakRef(linear.weight.untyped_storage())  # type: ignore[no-untyped-call]
    linear.weight.data = torch.full((1, ITEMS), 2.0)
    return before


def is_freed(memory: StorageWeakRef) -> bool:
    return bool(memory.expired())  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("transport", ["tcp", "shm", "memory"])
def test_who_reads_reads_what_it_was(
    linear: torch.nn.Linear, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It was memory that is gone: the seed's process ended, or its fork had other bytes."""
    gone = list[StorageWeakRef]()

    def progress(done: int, total: int) -> None:
        if done and not gone:
            gone.append(replaced(linear))

    found = {"weight": torch.zeros(1, ITEMS)}
    with Seed(linear, "m", transports=[transport], limit="40MB/s") as seed:
        fork_into(found, seed.url, chunk_bytes=1 << 20, progress=progress)
        assert torch.equal(found["weight"], torch.ones(1, ITEMS))
        # Nobody holds a second copy for longer than somebody reads.
        assert leaks.comes_to_nothing(lambda: [one for one in gone if not is_freed(one)])
        assert len(gone) == 1
        refused(seed, caplog)


def refused(seed: Seed, caplog: pytest.LogCaptureFixture) -> None:
    told = list[str]()

    class Follower:
        def changed(self) -> None: ...

        def close(self) -> None:
            told.append("closed")

    seed.follow(Follower())
    with caplog.at_level(logging.WARNING, "tensorlift"), pytest.raises(ForkError, match="has other memory"):
        fork_into({"weight": torch.zeros(1, ITEMS)}, seed.url)
    assert "'weight' got other memory outside of updating()" in caplog.text
    assert leaks.comes_to_nothing(lambda: [] if told else ["the registry"])
    with pytest.raises(SeedError, match="begin that seed anew"):
        SeedClient(seed.url).lease(1.0)
    with pytest.raises(RequestError, match="this seed has ended, as the log says"), seed.updating():
        pass


def test_an_update_waits_for_no_memory(linear: torch.nn.Linear) -> None:
    """Inside of it what is replaced is freed at once, where nobody is connected."""
    with Seed(linear, "m") as seed:
        fork_into({"weight": torch.zeros(1, ITEMS)}, seed.url)
        assert leaks.comes_to_nothing(lambda: ["read"] if seed.stats()["connections"] else [])
        with pytest.raises(RequestError, match="'weight' has other memory"), seed.updating():
            assert is_freed(replaced(linear))


def test_who_is_connected_without_a_lease_is_no_danger(linear: torch.nn.Linear) -> None:
    with Seed(linear, "m", transports=["tcp"]) as seed:
        client = SeedClient(seed.url)
        lease = client.lease(60.0)
        with connected(client.manifest().transports[0].address, "", lease.id, 5.0) as peer:
            assert leaks.comes_to_nothing(lambda: [] if seed.stats()["connections"] else ["none"])
            client.release(lease.id)
            gone = replaced(linear)
            time.sleep(0.5)
            assert not is_freed(gone)
            peer.shutdown(socket.SHUT_RDWR)
        assert leaks.comes_to_nothing(lambda: [] if is_freed(gone) else ["held"])


def resized(tensor: torch.nn.Parameter) -> None:
    tensor.untyped_storage().resize_(0)


def elsewhere(tensor: torch.nn.Parameter) -> None:
    tensor.data = torch.ones_like(tensor)


def at_the_same_address(tensor: torch.nn.Parameter) -> None:
    """As an allocator gives it to the next one."""
    tensor.data = torch.from_numpy(tensor.detach().numpy())


@pytest.mark.parametrize("change", [resized, elsewhere, at_the_same_address])
def test_what_is_other_memory(change: Callable[[Any], None]) -> None:
    model = torch.nn.Linear(3, 3)
    holding = Holding(named_tensors(model), threading.Condition(), lambda: 0.0)
    assert holding.hold() == ""
    assert holding.is_held
    holding.let_go()
    change(model.bias)
    assert holding.hold() == "bias"
    assert not holding.is_held
