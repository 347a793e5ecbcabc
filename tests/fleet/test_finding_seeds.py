"""Forks that ask a registry: whom they get, what they wait for, what they do when all are gone."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import tensorlift
from support.ports import nobody
from support.registries import KEY, announced, serving
from support.waiting import until, when
from tensorlift.errors import ForkError, OptionError, SeedError
from tensorlift.fleet import finding_seeds, heartbeat, table
from tensorlift.fleet.contract import Load, near_of
from tensorlift.fleet.registry_urls import registry_of
from tensorlift.fleet.server import RegistryServer
from tensorlift.forking.manifest import ModelKey

pytestmark = pytest.mark.usefixtures("clean")

NBYTES = 8000


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding_seeds, "_DOWN_SECONDS", 0.3)
    monkeypatch.setattr(finding_seeds, "_DOWN_REST", 0.05)
    monkeypatch.setattr(finding_seeds, "_FULL_REST", 0.05)
    monkeypatch.setattr(heartbeat, "_SHORTEST_REST", 0.05)
    # What is looked at behind an end has to have been said.
    monkeypatch.setattr(heartbeat, "GOODBYE_SECONDS", 60.0)


@pytest.fixture
def server(clean: None) -> Iterator[RegistryServer]:
    with serving() as made:
        yield made


def weights() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(1000)}


def seeding(server: RegistryServer, **more: Any) -> tensorlift.Seed:
    made = tensorlift.seed(weights(), key=KEY, registry=server.url, **more)
    until(lambda: made.url in {one.url for one in view(server).seeds})
    return made


def view(server: RegistryServer) -> Any:
    return server._registry.view()


def loads(server: RegistryServer) -> dict[str, tuple[int, int]]:
    """(readers, leases so far) by URL."""
    return {seed.url: (seed.load.readers, seed.load.leases) for seed in view(server).seeds}


def forked(registry: Any, **more: Any) -> tensorlift.Forked:
    into = {"a": torch.zeros(1000, dtype=torch.int64)}
    found = tensorlift.fork(registry=registry, into=into, **({"key": KEY} | more))
    assert torch.equal(into["a"], weights()["a"])
    return found


def test_a_fork_is_sent_to_a_seed_and_tells_of_it(server: RegistryServer) -> None:
    with seeding(server) as seed:
        assert forked(server.url).by_source == {seed.url: NBYTES}
        assert view(server).ended == {(KEY, "done"): 1}
        ((report, state),) = view(server).recent
        assert (state, report.done_bytes, report.total_bytes, report.seeds) == (
            "done",
            NBYTES,
            NBYTES,
            (seed.url,),
        )


@pytest.mark.parametrize("how", ["registry", "list"])
def test_a_seed_that_has_no_room_is_waited_for_no_longer_than_asked(
    server: RegistryServer, how: str, tmp_path: Path
) -> None:
    """Also where the registry goes on to name it; files may stand in then."""
    save_file(weights(), tmp_path / "model.safetensors")
    with seeding(server) as seed, seed.updating(timeout=0):
        registry = server.url if how == "registry" else [seed.url]
        with pytest.raises(SeedError, match="waited for long enough"):
            forked(registry, wait=0.3, patience=0.1)
        assert forked(registry, wait=0.3, patience=0.1, fallback=tmp_path).by_source == {"files": NBYTES}


def test_forks_are_spread_and_many_are_read_at_once(server: RegistryServer) -> None:
    with seeding(server, weights="1") as one, seeding(server, weights="1") as other:
        lease = one.grant(50)
        until(lambda: loads(server)[one.url] == (1, 1))
        for number in range(3):
            # The registry knows that those before have come, and have ended.
            until(lambda number=number: loads(server)[other.url] == (0, number))
            assert set(forked(server.url).by_source) == {other.url}
        one.release(lease.id)
        both = forked(server.url, seeds=2, chunk_bytes=8, connections=1)
        assert set(both.transports) == {one.url, other.url}


def test_a_dead_seed_is_passed_over(server: RegistryServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "SENT_SECONDS", 0.0)
    gone, left = nobody(), list[str]()
    server._registry.announce(announced(1, url=gone, at=near_of().host))
    with seeding(server) as seed:

        def was_tried() -> bool:
            found = forked(server.url)
            assert found.by_source == {seed.url: NBYTES}
            left.extend(found.left)
            return bool(left)

        # Both are as near and idle: by chance it comes first.
        until(was_tried)
    assert left[0].startswith(f"{gone}: cannot be reached")


def test_all_are_gone(server: RegistryServer, tmp_path: Path) -> None:
    gone = nobody()
    server._registry.announce(announced(1, url=gone))
    with pytest.raises(
        SeedError, match=r"cannot be reached.*; and then http.*it knows no other than the 1 seed that failed"
    ):
        forked(server.url)
    ((report, state),) = view(server).recent
    assert (state, gone in report.reason) == ("failed", True)
    save_file(weights(), tmp_path / "model.safetensors")
    assert forked(server.url, fallback=tmp_path).by_source == {"files": NBYTES}


def test_weights_that_nobody_has(server: RegistryServer, tmp_path: Path) -> None:
    with seeding(server):
        with pytest.raises(
            SeedError, match=r"'other' \(target\): it knows none; there is 'org/model' \(target\)"
        ):
            forked(server.url, key="other")
        save_file(weights(), tmp_path / "model.safetensors")
        assert forked(server.url, key="other", fallback=tmp_path).by_source == {"files": NBYTES}


def test_of_several_keys_the_next_where_nobody_has_one(server: RegistryServer) -> None:
    """A seed that failed for one key may do for the next; without any there is one reason, not one a key."""
    wanted = [ModelKey(model="other"), KEY]
    with (
        seeding(server) as seed,
        finding_seeds.SeedFinder(registry_of(server.url), wanted, near_of(), 1, 5.0) as asked,
    ):
        assert (asked.seeds(), asked.key) == ((seed.url,), KEY)
        with pytest.raises(SeedError, match="it knows no other than the 1 seed that failed") as none:
            asked.seeds(ForkError("it failed"))
    assert str(none.value).count("it knows no") == 1


def test_other_weights_than_the_model_here(server: RegistryServer) -> None:
    with seeding(server), pytest.raises(ForkError, match="has other weights than the model here"):
        tensorlift.fork(registry=server.url, key=KEY, into={"b": torch.zeros(3)})


def test_a_seed_on_all_addresses_that_failed_is_not_asked_again(server: RegistryServer) -> None:
    """The registry names it by another URL than the fork went to."""
    with seeding(server, host="0.0.0.0", insecure=True) as seed:
        with pytest.raises(ForkError, match="it knows no other than the 1 seed that failed"):
            tensorlift.fork(registry=server.url, key=KEY, into={"b": torch.zeros(3)}, wait=5)
        # It has been sent one fork, and no more.
        (known,) = server._registry._seeds.values()
        assert (known.seed.url, len(known.sent)) == (seed.url, 1)


def test_a_registry_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SeedError, match=r"cannot be reached: .*look whether the registry runs"):
        forked(nobody())
    save_file(weights(), tmp_path / "model.safetensors")
    assert forked(nobody(), fallback=tmp_path).by_source == {"files": NBYTES}


def test_a_registry_that_is_begun_again_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding_seeds, "_DOWN_SECONDS", 60)
    with serving() as first, seeding(first) as seed:
        first.close()
        port = int(first.url.rpartition(":")[2])
        with serving(port=port) as second:
            second._registry.announce(announced(1, url=seed.url))
            assert forked(second.url).by_source == {seed.url: NBYTES}


def test_a_fork_waits_for_room(server: RegistryServer) -> None:
    with seeding(server, readers=1) as seed:
        lease = seed.grant(50)
        server._registry.renew(seed.instance, Load(readers=1))

        def waits() -> bool:
            return any(fork.state == "waiting" for fork in view(server).forks)

        def leave() -> None:
            seed.release(lease.id)
            server._registry.renew(seed.instance, Load(readers=0))

        with when(waits, leave):
            assert forked(server.url).by_source == {seed.url: NBYTES}


def test_a_fork_does_not_wait_for_ever(server: RegistryServer, tmp_path: Path) -> None:
    with seeding(server, readers=1) as seed:
        lease = seed.grant(50)
        until(lambda: loads(server)[seed.url] == (1, 1))
        with pytest.raises(SeedError, match="1 seed of it, all with as many readers as they take") as full:
            forked(server.url, wait=0.5)
        assert full.value.retry_seconds is not None
        save_file(weights(), tmp_path / "model.safetensors")
        assert forked(server.url, wait=0.5, fallback=tmp_path).by_source == {"files": NBYTES}
        seed.release(lease.id)


def test_a_seed_that_the_registry_thinks_has_room(
    server: RegistryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease is refused; it is asked again, not passed over."""
    monkeypatch.setattr(table, "SENT_SECONDS", 0.1)
    with seeding(server, readers=1) as seed:
        lease = seed.grant(50)

        def refused() -> bool:
            return seed.stats()["refused_leases"] >= 2

        with when(refused, lambda: seed.release(lease.id)):
            server._registry.renew(seed.instance, Load(readers=0))
            stop = threading.Event()

            def hopeful() -> None:
                while not stop.wait(0.02):
                    server._registry.renew(seed.instance, Load(readers=0))

            thread = threading.Thread(target=hopeful)
            thread.start()
            try:
                assert forked(server.url, patience=0.5).by_source == {seed.url: NBYTES}
            finally:
                stop.set()
                thread.join()


def test_forks_that_are_seeds(server: RegistryServer) -> None:
    """A roll-out in one process: each fork is announced when it has all."""
    seeds = [seeding(server, readers=2)]
    lock = threading.Lock()

    def instance() -> None:
        into = {"a": torch.zeros(1000, dtype=torch.int64)}
        came = tensorlift.fork(registry=server.url, key=KEY, into=into, patience=60)
        assert torch.equal(into["a"], weights()["a"])
        made = tensorlift.seed(into, key=came.key, weights=came.weights, registry=server.url, readers=2)
        with lock:
            seeds.append(made)

    threads = [threading.Thread(target=instance) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: len(view(server).seeds) == 7)
    assert view(server).ended == {(KEY, "done"): 6}
    assert sum(seed.stats()["sent_bytes"] for seed in seeds) == 6 * NBYTES
    for seed in seeds:
        seed.close()
    assert view(server).seeds == []


def test_a_list_of_seeds_is_a_registry_too() -> None:
    with (
        tensorlift.seed(weights(), key=KEY) as one,
        tensorlift.seed(weights(), key=ModelKey(model="other")) as front,
    ):
        assert forked([one.url]).by_source == {one.url: NBYTES}
        with tensorlift.seed(weights(), key=ModelKey(model="m", tp=(1, 2)), join=front.url) as rank:
            # A front in a list stands for its ranks.
            found = forked([front.url], key=ModelKey(model="m", tp=(1, 2)))
            assert found.by_source == {rank.url: NBYTES}
        assert forked([nobody(), one.url], seeds=2).by_source == {one.url: NBYTES}


def test_what_is_asked_wrongly(server: RegistryServer) -> None:
    for given in ({}, {"source": "http://a:1", "registry": server.url}):
        with pytest.raises(OptionError, match="either the URL of a seed or a registry"):
            tensorlift.fork(into=weights(), key=KEY, **given)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="a registry is asked by a key"):
        tensorlift.fork(registry=server.url, into=weights())
    for wrong in ({"seeds": 0}, {"seeds": 65}, {"wait": 0}, {"place": "/"}, {"registry": "x"}):
        with pytest.raises(OptionError):
            tensorlift.fork(**({"registry": server.url, "into": weights(), "key": KEY} | wrong))  # type: ignore[arg-type]


def test_more_failed_seeds_than_a_registry_is_told_of(tmp_path: Path) -> None:
    """Each is asked once."""
    port = nobody().rpartition(":")[2]
    gone = [f"http://127.0.1.{number}:{port}" for number in range(1, 120)]
    save_file(weights(), tmp_path / "model.safetensors")
    came = forked(gone, fallback=tmp_path)
    assert came.by_source == {"files": NBYTES}
    assert len(came.left) == len(gone)


def test_a_seed_without_tls_where_some_are_trusted(tmp_path: Path) -> None:
    """It is left behind, not the fork."""
    save_file(weights(), tmp_path / "model.safetensors")
    trusted = ssl.create_default_context()
    with tensorlift.seed(weights(), key=KEY) as seed:
        with pytest.raises(SeedError, match=f"ca is for https://, and {seed.url} is read without TLS"):
            forked([seed.url], ca=trusted)
        came = forked([seed.url, nobody()], ca=trusted, fallback=tmp_path)
    assert came.by_source == {"files": NBYTES}
    assert any("ca is for https://" in one for one in came.left)
    with pytest.raises(OptionError, match=r"ca is .*none"):
        forked([nobody()], ca=tmp_path / "none", fallback=tmp_path)
