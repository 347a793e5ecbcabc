"""Seeds that drip are left behind; what is checked of chunks; what is counted."""

from __future__ import annotations

import contextlib
import errno
import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from support import leaks
from support.proxies import Dripping
from tensorlift.engine.abi_fork import Outcome
from tensorlift.errors import ForkError, OptionError, OutOfMemoryError, SeedError
from tensorlift.forking import reader
from tensorlift.forking import seed as seeds
from tensorlift.forking.chunks import Chunk
from tensorlift.forking.client import SeedClient
from tensorlift.forking.connection import NotHereError, SocketConnection
from tensorlift.forking.fork import fork_into
from tensorlift.forking.manifest import Manifest, ModelKey, Offer
from tensorlift.forking.nics import Choice
from tensorlift.forking.seed import Seed
from tensorlift.forking.throttle import Pacer
from tensorlift.forking.topology import Nic

pytestmark = pytest.mark.usefixtures("clean")

KEY = ModelKey(model="org/model")
CHUNK = 8000


def weights(version: int) -> dict[str, torch.Tensor]:
    return {f"t{at}": torch.arange(1000) + 1000 * at + 100_000 * version for at in range(30)}


def same(found: dict[str, torch.Tensor], version: int) -> bool:
    return all(torch.equal(found[name], tensor) for name, tensor in weights(version).items())


@contextlib.contextmanager
def dripping(
    seed: Seed, monkeypatch: pytest.MonkeyPatch, fast_bytes: int = 60_000, pause: float = 0.05
) -> Iterator[None]:
    """The seed's bytes drip, once some have come."""
    real = SeedClient.manifest
    proxies: list[Dripping] = []

    def manifest(client: SeedClient) -> Manifest:
        found = real(client)
        if client.url != seed.url:
            return found
        proxies.append(Dripping(found.transports[0].address, fast_bytes, pause))
        return msgspec.structs.replace(found, transports=(Offer("tcp", proxies[-1].address),))

    monkeypatch.setattr(SeedClient, "manifest", manifest)
    try:
        yield
    finally:
        for proxy in proxies:
            proxy.close()


def test_one_of_two_drips(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then, so that no wait for it ends: another seed brings what it holds."""
    with (
        Seed(weights(1), KEY, transports=["tcp"], weights="1") as slow,
        Seed(weights(1), KEY, limit="100KB/s", transports=["tcp"], weights="1") as other,
        dripping(slow, monkeypatch, fast_bytes=10_000),
    ):
        found = weights(0)
        result = fork_into(found, [slow.url, other.url], chunk_bytes=CHUNK, patience=20.0)
        assert same(found, 1)
        assert result.left[0].startswith(f"{slow.url}: it is slow: 8,000 bytes were not there after ")
        assert result.bytes <= result.moved_bytes <= result.bytes + 2 * (CHUNK + 100)
        assert sum(result.by_source.values()) == result.bytes


def test_the_only_one_drips(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(weights(1), path)
    with Seed(weights(1), KEY, transports=["tcp"]) as slow, dripping(slow, monkeypatch):
        found = weights(0)
        result = fork_into(found, slow.url, chunk_bytes=CHUNK, patience=3.0, fallback=path)
        assert same(found, 1)
        assert result.by_source == {"files": result.bytes}
        assert "it stands still: fewer than 3,072 bytes came in 3 s" in result.left[0]


def test_the_only_one_is_slow_and_works() -> None:
    """Though files are there: it brings more than nothing."""
    with Seed(weights(1), KEY, limit="60KB/s") as slow:
        found = weights(0)
        result = fork_into(found, slow.url, chunk_bytes=CHUNK, patience=2.0, fallback="/nowhere")
        assert same(found, 1)
        assert result.left == ()


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_limit_at_which_a_block_takes_longer_than_a_seed_may_do_nothing(transport: str) -> None:
    offered = {"t": torch.arange(30_000)}
    with Seed(offered, KEY, limit="50KB/s", transports=[transport]) as slow:
        found = {"t": torch.zeros_like(offered["t"])}
        fork_into(found, slow.url, patience=3.0)
        assert torch.equal(found["t"], offered["t"])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Chunk, bool]]:
    """Which chunks were fetched, and whether with digests."""
    found: list[tuple[Chunk, bool]] = []
    real = SocketConnection.fetch

    def fetch(
        self: SocketConnection, chunk: Chunk, epoch: int, places: Any, digest: bool, **more: Any
    ) -> Any:
        found.append((chunk, digest))
        return real(self, chunk, epoch, places, digest, **more)

    monkeypatch.setattr(SocketConnection, "fetch", fetch)
    return found


@pytest.mark.parametrize("digests", ["full", "sample", "off"])
def test_what_is_checked(asked: list[tuple[Chunk, bool]], digests: str) -> None:
    offered = {"a": torch.rand(10_000)}
    with Seed(offered, KEY) as seed:
        found = {"a": torch.zeros(10_000)}
        fork_into(found, seed.url, chunk_bytes=1000, digests=digests)
        assert torch.equal(found["a"], offered["a"])
    checked = sorted(chunk.offset for chunk, digest in asked if digest)
    if digests == "sample":
        assert {0, 39_000} <= set(checked)
        assert 2 <= len(checked) < 40
    else:
        assert len(checked) == (40 if digests == "full" else 0)


@pytest.mark.parametrize("digests", ["full", "sample", "off"])
def test_a_seed_that_makes_no_digests(monkeypatch: pytest.MonkeyPatch, digests: str) -> None:
    real = SocketConnection.fetch

    def fetch(
        self: SocketConnection, chunk: Chunk, epoch: int, places: Any, digest: bool, **more: Any
    ) -> Any:
        return real(self, chunk, epoch, places, False, **more)

    monkeypatch.setattr(SocketConnection, "fetch", fetch)
    with Seed(weights(1), KEY) as seed:
        found = weights(0)
        if digests == "off":
            fork_into(found, seed.url, chunk_bytes=CHUNK, digests=digests)
            assert same(found, 1)
        else:
            with pytest.raises(ForkError, match=r'cannot be checked; digests="off" takes it so'):
                fork_into(found, seed.url, chunk_bytes=CHUNK, digests=digests)


def test_epochs_are_compared_without_digests_too(monkeypatch: pytest.MonkeyPatch) -> None:
    offered, changed = weights(1), False
    real = SocketConnection.fetch

    def fetch(self: SocketConnection, *given: Any, **more: Any) -> Any:
        nonlocal changed
        if not changed:
            changed = True
            with seed.updating(timeout=0, weights="2"):
                for name, tensor in weights(2).items():
                    offered[name].copy_(tensor)
        return real(self, *given, **more)

    monkeypatch.setattr(SocketConnection, "fetch", fetch)
    with Seed(offered, KEY) as seed:
        found = weights(0)
        result = fork_into(found, seed.url, chunk_bytes=CHUNK, digests="off", connections=1)
        assert result.weights == "2"
        assert same(found, 2)


def test_a_lying_digest_and_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What it sends is not what it says: nothing of it stays that the files do not confirm."""
    path = tmp_path / "model.safetensors"
    save_file(weights(1), path)
    real = SocketConnection.fetch

    def fetch(self: SocketConnection, *given: Any, **more: Any) -> Any:
        came = real(self, *given, **more)
        came.outcome = Outcome.WRONG
        return came

    monkeypatch.setattr(SocketConnection, "fetch", fetch)
    with Seed(weights(9), KEY) as liar:
        found = weights(0)
        result = fork_into(found, liar.url, chunk_bytes=CHUNK, fallback=path)
        assert same(found, 1)
        assert result.by_source == {"files": result.bytes}
        assert "does not have the digest that comes with it" in result.left[0]


def test_no_such_digests() -> None:
    with pytest.raises(OptionError, match="digests is 'some'; expected one of 'full', 'sample', 'off'"):
        fork_into(weights(0), "http://127.0.0.1:1", digests="some")


def test_an_update_between_lease_and_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seed does not know the lease any more; it is asked again."""
    offered = weights(1)
    with Seed(offered, KEY) as seed:
        updates = iter([2])

        def connect(*given: Any) -> Any:
            for version in updates:
                with seed.updating(timeout=0, weights=str(version)):
                    for name, tensor in weights(version).items():
                        offered[name].copy_(tensor)
            return real(*given)

        real = reader.connect
        monkeypatch.setattr(reader, "connect", connect)
        found = weights(0)
        result = fork_into(found, seed.url, connections=1, chunk_bytes=CHUNK, patience=60.0)
        assert same(found, 2)
        assert (result.weights, result.left) == ("2", ())


def test_each_transport_that_could_not_be_had_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one begins, and turns out not to be of use; then the other one cannot be had."""
    real = SeedClient.manifest

    def manifest(client: SeedClient) -> Manifest:
        found = real(client)
        offers = [one if one.kind == "shm" else Offer("tcp", "127.0.0.1:1") for one in found.transports]
        return msgspec.structs.replace(found, transports=tuple(offers))

    def fetch(*_: object, **__: object) -> None:
        raise NotHereError("it has no such engine")

    monkeypatch.setattr(SeedClient, "manifest", manifest)
    monkeypatch.setattr(SocketConnection, "fetch", fetch)
    with Seed(weights(1), KEY) as seed, pytest.raises(ForkError) as told:
        fork_into(weights(0), seed.url)
    assert "not tcp: " in str(told.value)
    assert "not shm: it has no such engine" in str(told.value)


def test_progress_is_told_however_soon_all_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    real, told = reader._start, list[int]()

    def start(threads: Any) -> None:
        real(threads)
        for thread in threads:
            thread.join()

    monkeypatch.setattr(reader, "_start", start)
    with Seed(weights(1), KEY) as seed:
        fork_into(weights(0), seed.url, progress=lambda done, total: told.append(done))
    assert told == [240_000]


@pytest.mark.parametrize("lacking", [1, 3, 4])
def test_some_connections_cannot_be_had(monkeypatch: pytest.MonkeyPatch, lacking: int) -> None:
    """As where descriptors are few: those that can be had bring all, and without any the seed is left."""
    real, numbers, together = reader.connect, itertools.count(), threading.Barrier(4)

    def connect(*given: Any) -> Any:
        number = next(numbers)
        together.wait()
        if number < lacking:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(*given)

    monkeypatch.setattr(reader, "connect", connect)
    found = weights(0)
    with Seed(weights(1), KEY) as seed:
        if lacking < 4:
            result = fork_into(found, seed.url, connections=4, chunk_bytes=CHUNK)
            assert same(found, 1)
            assert result.left == ()
        else:
            with pytest.raises(ForkError, match=f"{seed.url}: .*Too many open files"):
                fork_into(found, seed.url, connections=4, chunk_bytes=CHUNK)


def test_a_lease_outlasts_the_seeds_that_are_asked_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three that give none, each takes less than a lease lasts, and all together more."""
    monkeypatch.setattr(reader, "_LEASE_SECONDS", 1.5)
    real, slow = SeedClient.lease, list[str]()

    def lease(client: SeedClient, seconds: float) -> Any:
        if client.url in slow:
            time.sleep(0.8)
            raise SeedError("it says nothing")
        return real(client, seconds)

    monkeypatch.setattr(SeedClient, "lease", lease)
    with contextlib.ExitStack() as stack:
        seeds = [stack.enter_context(Seed(weights(1), KEY, weights="1")) for _ in range(4)]
        slow += [seed.url for seed in seeds[1:]]
        found = weights(0)
        result = fork_into(found, [seed.url for seed in seeds], patience=60.0)
    assert same(found, 1)
    assert len(result.left) == 3


@pytest.fixture
def paced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """At which rates chunks were asked for, and how many bytes; nobody waits."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(Pacer, "wait", lambda _: 0.0)
    monkeypatch.setattr(
        Pacer, "asked", lambda self, nbytes: found.append((self.rate, nbytes)) if self.rate else None
    )
    return found


def test_a_forks_own_limit_is_of_all_seeds_together(paced: list[tuple[int, int]]) -> None:
    with Seed(weights(1), KEY, weights="1") as one, Seed(weights(1), KEY, weights="1") as other:
        found = weights(0)
        fork_into(found, [one.url, other.url], chunk_bytes=CHUNK, limit="40MB/s")
        assert same(found, 1)
        assert paced == [(40_000_000, CHUNK)] * 30


def test_a_limit_takes_its_time() -> None:
    """At least as long as all chunks but the last one do; and nobody is left for it."""
    with Seed(weights(1), KEY) as seed:
        found = weights(0)
        result = fork_into(found, seed.url, chunk_bytes=CHUNK, limit="400KB/s")
        assert same(found, 1)
        assert result.seconds >= 29 * CHUNK / 400_000
        assert result.left == ()


def test_limits_and_nics_that_cannot_be() -> None:
    for make, unknown in (
        (lambda **more: Seed(weights(1), KEY, **more), "the kernel does not tell how fast"),
        (lambda **more: fork_into(weights(0), "http://127.0.0.1:1", **more), "a fork's share is of its NICs"),
    ):
        with pytest.raises(OptionError, match="no transport here takes NICs"):
            make(devices=["mlx5_8"])
        with pytest.raises(OptionError, match=f"limit is '25%', but {unknown}"):
            make(limit="25%")
        with pytest.raises(OptionError, match="limit is 'fast'; expected"):
            make(limit="fast")


def test_a_share_of_the_nics_rate(monkeypatch: pytest.MonkeyPatch, paced: list[tuple[int, int]]) -> None:
    """Which are known by the GPU that the weights are on, and the rank of the key."""
    asked = []

    def chosen(*given: Any) -> Choice:
        asked.append(given)
        return Choice((Nic("mlx5_3", 50_000_000_000),), "a test")

    monkeypatch.setattr("tensorlift.forking.ways.chosen", chosen)
    key = ModelKey(model="m", tp=(3, 4))
    limits = []
    served = seeds.Served
    monkeypatch.setattr(
        seeds, "Served", lambda *given, **more: limits.append(more["limit"]) or served(*given, **more)
    )
    with Seed(weights(1), key, limit="25%", devices=["^mlx5_0"]) as seed:
        assert limits == [12_500_000_000]
        fork_into(weights(0), seed.url, key=key, chunk_bytes=CHUNK, limit="10%")
    assert paced == [(5_000_000_000, CHUNK)] * 30
    assert [(given[0], *given[2:4]) for given in asked] == [(("^mlx5_0",), 3, None), (None, 3, None)]


@pytest.mark.parametrize("most", [0, 1])
def test_no_more_threads(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """The error is that of engines that get none; threads that began end, and leases are given back."""
    real, started = threading.Thread.start, list[threading.Thread]()

    def start(thread: threading.Thread) -> None:
        if thread.name == "tensorlift-fork":
            if len(started) == most:
                raise RuntimeError("can't start new thread")
            started.append(thread)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    says = f"wants 2 threads, one for each connection, and {most} could be started: can't start new thread; "
    with leaks.nothing_left(), Seed(weights(1), KEY, limit="60KB/s") as seed:
        with pytest.raises(OutOfMemoryError, match=says):
            fork_into(weights(0), seed.url, chunk_bytes=CHUNK)
        assert not any(thread.is_alive() for thread in started)
        assert seed.stats()["readers"] == 0
