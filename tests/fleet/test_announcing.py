"""Seeds that announce themselves: whenever a registry is there, and never at their own cost."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import Any

import pytest
import torch

import tensorlift
from support.ports import nobody
from support.registries import KEY, serving
from support.seeds import running
from support.waiting import until
from tensorlift.errors import OptionError, RequestError
from tensorlift.fleet import heartbeat
from tensorlift.fleet.announcing import announce
from tensorlift.fleet.contract import Announcement, Load, Near, near_of
from tensorlift.fleet.server import RegistryServer
from tensorlift.forking.fork import fork_into

pytestmark = pytest.mark.usefixtures("clean")


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "_FIRST_BACKOFF", 0.05)
    monkeypatch.setattr(heartbeat, "_LAST_BACKOFF", 0.05)
    monkeypatch.setattr(heartbeat, "_SHORTEST_REST", 0.05)
    # What is looked at behind an end has to have been said.
    monkeypatch.setattr(heartbeat, "GOODBYE_SECONDS", 60.0)


def known(server: RegistryServer) -> dict[str, Announcement]:
    return {seed.url: seed for seed in server._registry.view().seeds}


def seeding(registry: Any, **more: Any) -> tensorlift.Seed:
    return tensorlift.seed({"a": torch.arange(1000)}, key=KEY, registry=registry, **more)


def test_from_the_beginning_to_the_end() -> None:
    with serving() as server:
        with seeding(server.url, readers=3, weights="7", place="z/r") as seed:
            until(lambda: known(server))
            found = known(server)[seed.url]
            assert (found.key, found.weights, found.most_readers) == (KEY, "7", 3)
            assert (found.near, found.load) == (near_of("z/r"), Load())
        assert known(server) == {}


def test_what_it_does_is_told() -> None:
    with serving(lease=0.3) as server, seeding(server.url) as seed:
        until(lambda: known(server))
        fork_into({"a": torch.zeros(1000, dtype=torch.int64)}, seed.url)
        seen = []

        def told() -> bool:
            seen.extend(one.load for one in known(server).values())
            return any(load.rate > 0 for load in seen) and seen[-1].sent_bytes == 8000

        until(told)
        lease = seed.grant(10)
        until(lambda: any(one.load.readers == 1 for one in known(server).values()))
        seed.release(lease.id)


def test_a_new_version_is_announced_at_once() -> None:
    """With a lease that no test would wait for."""
    with serving(lease=3000) as server, seeding(server.url, weights="1") as seed:
        until(lambda: known(server))
        with seed.updating(weights="2"):
            pass
        until(lambda: known(server)[seed.url].weights == "2")


def test_a_registry_that_is_not_there(caplog: pytest.LogCaptureFixture) -> None:
    url = nobody()
    with caplog.at_level(logging.WARNING, "tensorlift"), seeding(url) as seed:
        fork_into({"a": torch.zeros(1000, dtype=torch.int64)}, seed.url)
        until(lambda: caplog.messages)
        with serving(port=int(url.rpartition(":")[2])) as server:
            until(lambda: known(server))
            until(lambda: len(caplog.messages) == 2)
    assert f"is not announced: {url} cannot be reached" in caplog.messages[0]
    assert caplog.messages[1].endswith("it is heard again")


def test_a_registry_that_has_forgotten_all() -> None:
    with contextlib.ExitStack() as stack:
        with serving(lease=0.3) as first:
            seed = stack.enter_context(seeding(first.url))
            until(lambda: known(first))
        with serving(port=int(first.url.rpartition(":")[2]), lease=0.3) as second:
            until(lambda: known(second))
            # And what it has is what the seed is now.
            assert known(second)[seed.url].instance == seed.instance
            stack.close()
            assert known(second) == {}


def test_a_registry_that_refuses(caplog: pytest.LogCaptureFixture) -> None:
    with serving(token="right") as server, seeding(server.url, token="wrong") as seed:
        until(lambda: caplog.messages)
        assert "does not take this token" in caplog.messages[0]
        assert not any("wrong" in one or "right" in one for one in caplog.messages)
        assert seed.stats()["readers"] == 0


def test_what_cannot_be_one_is_refused_at_once() -> None:
    for registry in ("nonsense", [], ["x"], "redis://host:port"):
        with pytest.raises(RequestError):
            seeding(registry)
    with pytest.raises(OptionError, match="place is"):
        seeding(nobody(), place="//")


def test_a_killed_seed_is_gone_from_the_answers() -> None:
    with serving(lease=2.0) as server, seeding(server.url, weights="1") as other:
        with running("seed", version=1, registry=server.url) as killed:
            url = killed.said()
            until(lambda: set(known(server)) == {url, other.url})
        until(lambda: set(known(server)) == {other.url})
        assert server._registry.candidates(KEY, Near(), 9) == [other.url]


def test_a_registry_that_does_not_answer_does_not_hold_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "GOODBYE_SECONDS", 0.05)
    reached, gate, said = threading.Event(), threading.Event(), list[str]()

    class Hanging:
        def announce(self, seed: Announcement) -> float:
            reached.set()
            gate.wait()
            return 15.0

        def withdraw(self, instance: str) -> None:
            said.append(instance)

        def close(self) -> None:
            said.append("closed")

    seed = tensorlift.seed({"a": torch.arange(1000)}, key=KEY)
    announce(seed, Hanging(), near_of())  # type: ignore[arg-type]
    assert reached.wait(60)
    seed.close()
    assert said == []
    gate.set()
    until(lambda: said == [seed.instance, "closed"])


def test_nobody_is_announced_in_a_list() -> None:
    for registry in (["http://10.0.0.1:1"], "file:/seeds.json", "dns://seeds:1", "dns+https://seeds:1"):
        with pytest.raises(OptionError, match="registry is a list of seeds, where nobody is announced"):
            seeding(registry)


def test_options_that_nothing_would_come_of() -> None:
    for given in ({"place": "z"}, {"registry_ca": "ca.pem"}):
        with pytest.raises(OptionError, match="place and registry_ca are for a registry, and none was given"):
            seeding(None, **given)
    for registry in ("http://10.0.0.1:1", "redis://10.0.0.1:1"):
        with pytest.raises(OptionError, match="registry_ca is for a registry at https://"):
            seeding(registry, registry_ca="ca.pem")
