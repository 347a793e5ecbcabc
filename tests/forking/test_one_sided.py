"""The transport of engines, with a stand-in for one: what it reads, what it leaves alone, when it fails."""

from __future__ import annotations

import mmap
import socket
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from support import one_sided as support
from support.standin_fabric import World
from support.waiting import until
from tensorlift.errors import ForkError
from tensorlift.forking import one_sided
from tensorlift.forking.client import SeedClient
from tensorlift.forking.fabrics import FabricError, Shared
from tensorlift.forking.fork import fork_into
from tensorlift.forking.seed import Seed

ITEMS, CHUNK = 300_000, 256 << 10
State = dict[str, torch.Tensor]


def weights(version: int = 1) -> State:
    """Four regions, one of them of two tensors side by side, and one of no bytes."""
    block = torch.arange(2 * ITEMS, dtype=torch.int32) * version
    return {
        "a": block[:ITEMS],
        "b": block[ITEMS:],
        "c": torch.arange(ITEMS, dtype=torch.int64) - version,
        "d": torch.full((7,), version),
        "e": torch.zeros(0),
    }


def empty() -> State:
    return {name: torch.full_like(tensor, -1) for name, tensor in weights().items()}


def is_version(found: State, version: int = 1) -> bool:
    return all(torch.equal(found[name], tensor) for name, tensor in weights(version).items())


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World()
    monkeypatch.setattr(one_sided, "_MAKERS", {"mooncake": made.make, "nixl": made.make})
    monkeypatch.setattr(one_sided, "check_there", lambda kind: None)
    monkeypatch.setattr("tensorlift.forking.transports.check_there", lambda kind: None)
    # A seed and a fork of one process would share an engine.
    monkeypatch.setattr(one_sided, "_address", lambda host: "127.0.0.2")
    with support.nothing_left():
        yield made
    assert all(one.is_closed and not one.registered for one in made.made)


def seed(state: State, **more: Any) -> Seed:
    return Seed(state, "k", **{"transports": ["mooncake"], **more})


def fork(url: str | list[str], into: State, **more: Any) -> Any:
    return fork_into(
        into, url, **{"transports": ["mooncake"], "chunk_bytes": CHUNK, "patience": 60.0, **more}
    )


def test_bytes(world: World) -> None:
    into = empty()
    with seed(weights()) as running:
        came = fork(running.url, into)
        assert is_version(into)
        assert came.transports == {running.url: "mooncake (stand-in)"}
        assert came.planning_seconds > 0
        assert came.registering_seconds > 0
        stats = running.stats()
        assert stats["registered_bytes"] == 16 * ITEMS + 56
        assert stats["registering_us"] >= 0
    # A connection that begins behind the end of the other one has an engine of its own.
    theirs, *ours = world.made
    assert len(theirs.calls) == 1
    # A place for each connection, whatever the model has.
    calls = [len(call) for one in ours for call in one.calls]
    assert calls in ([1], [1, 1])


def test_tensors_are_never_written_to_by_an_engine(world: World) -> None:
    """So late bytes of a failed read find none of them."""
    into = empty()
    with seed(weights()) as running:
        fork(running.url, into)
    mine = [(one.data_ptr(), one.data_ptr() + one.nbytes) for one in into.values()]
    for _, parts in world.made[1].reads:
        for part in parts:
            assert not any(start < part.local + part.nbytes and part.local < stop for start, stop in mine)


def test_what_is_read_comes_to_the_begin_of_a_page(world: World) -> None:
    """A few bytes behind it the kernel takes twice as long to bring it there."""
    with seed(weights()) as running:
        fork(running.url, empty())
    assert {part.local % mmap.PAGESIZE for one in world.made for _, (part,) in one.reads} == {0}


def test_chunks_larger_and_smaller_than_the_first(world: World) -> None:
    into = empty()
    with seed(weights()) as running:
        fork(running.url, into, chunk_bytes="1GiB", connections=1)
    assert is_version(into)


def test_one_engine_for_target_and_draft(world: World) -> None:
    with seed(weights()) as target, seed(weights(2)) as draft:
        assert len(world.made) == 1
        into, other = empty(), empty()
        fork(target.url, into)
        fork(draft.url, other)
        assert is_version(into)
        assert is_version(other, 2)


def test_a_region_is_read_while_the_next_is_being_registered(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the seed answers before any is."""
    monkeypatch.setattr("tensorlift.forking.registering._MOST_SPANS", 1)
    gate, make = threading.Semaphore(0), world.make

    def gated(wiring: Any, host: str) -> Any:
        made = make(wiring, host)
        if host == "127.0.0.2":
            made.may_register = gate
        return made

    monkeypatch.setattr(one_sided, "_MAKERS", {"mooncake": gated})
    monkeypatch.setattr(one_sided, "_WAIT_SECONDS", 0.05)
    into = empty()
    with seed(weights()) as running:
        thread = threading.Thread(target=fork, args=[running.url, into], kwargs={"connections": 1})
        thread.start()
        until(lambda: running.stats()["readers"] == 1)
        assert running.stats()["sent_bytes"] == 0
        gate.release()
        until(lambda: torch.equal(into["b"], weights()["b"]))
        assert running.stats()["registered_bytes"] == 8 * ITEMS
        gate.release(3)
        thread.join()
        assert is_version(into)


def test_a_read_that_fails_leaves_its_destination_to_the_engine(world: World) -> None:
    """The engine goes on writing to it; another seed brings the chunk, by a fresh engine."""
    into = empty()
    with (
        seed(weights(), weights="1") as first,
        # So that it does not bring all before the other one fails.
        seed(weights(), weights="1", transports=["tcp"], limit="4MB/s") as second,
    ):
        keeper = Shared.borrow(world.make, one_sided.Wiring(), "127.0.0.1")
        # The fork's engine, which a seed of this process might use too.
        spoilt = world.made[1]
        spoilt.fails = lambda parts: len(spoilt.reads) > 2
        came = fork([first.url, second.url], into, transports=["mooncake", "tcp"])
        assert is_version(into)
        assert any("the peer is gone (0 of" in why for why in came.left)
        spoilt.late_bytes()
        assert is_version(into)
        fresh = Shared.borrow(world.make, one_sided.Wiring(), "127.0.0.1")
        assert fresh is not keeper
        assert len(keeper._held) == len(spoilt.late) > 0
        fresh.give_back()
        keeper.give_back()
        assert spoilt.is_closed
        # What it still holds registered went with it.
        spoilt.registered.clear()


def test_a_seed_that_an_engine_takes_for_another_is_read_by_a_fresh_one(world: World) -> None:
    into = empty()
    with seed(weights()) as running:
        keeper = Shared.borrow(world.make, one_sided.Wiring(), "127.0.0.1")
        world.made[1].stale = {"0"}
        fork(running.url, into)
        assert is_version(into)
        assert not world.made[1].reads
        keeper.give_back()
        assert world.made[1].is_closed


def test_an_engine_that_does_not_begin_leaves_the_seed_alone(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.refused = "Mooncake was asked for rdma and has installed tcp"
    with seed(weights(), transports=["mooncake", "tcp"]) as running:
        manifest = SeedClient(running.url).manifest()
        assert [offer.kind for offer in manifest.transports] == ["tcp"]
        assert running.off == manifest.off == {"mooncake": world.refused}
        assert running.stats()["transports_off"] == 1
        assert f"a seed does without mooncake: {world.refused}" in caplog.text
        into = empty()
        came = fork(running.url, into, transports=["mooncake", "tcp"])
        assert came.transports[running.url] == "tcp; not mooncake: the seed does not offer it"
        with pytest.raises(ForkError, match="mooncake is off there: Mooncake was asked for rdma"):
            fork(running.url, into)
    with seed(weights()) as alone:
        assert SeedClient(alone.url).manifest().transports == alone.transports == ()


def test_an_engine_that_does_not_begin_in_a_fork(world: World) -> None:
    with seed(weights(), transports=["mooncake", "tcp"]) as running:
        world.refused = "no NIC here"
        into = empty()
        came = fork(running.url, into, transports=["mooncake", "tcp"])
        assert is_version(into)
        assert came.transports[running.url] == "tcp; not mooncake: no NIC here"
        with pytest.raises(ForkError, match="not mooncake: no NIC here"):
            fork(running.url, into)


def test_memory_that_cannot_be_registered(world: World) -> None:
    make = world.make

    def failing(wiring: Any, host: str) -> Any:
        made = make(wiring, host)
        made.fails_to_register = lambda memories: host == "127.0.0.2"
        return made

    one_sided._MAKERS["mooncake"] = failing  # type: ignore[index]
    with seed(weights(), transports=["mooncake", "tcp"]) as running:
        until(lambda: running.off)
        assert running.off == {"mooncake": "no more pages can be pinned"}
        into = empty()
        came = fork(running.url, into, transports=["mooncake", "tcp"])
        assert is_version(into)
        assert "not mooncake: the seed cannot register all of its memory" in came.transports[running.url]


@pytest.mark.parametrize("others", [["tcp"], []])
def test_memory_that_cannot_be_registered_behind_a_beginning(
    world: World, monkeypatch: pytest.MonkeyPatch, others: list[str]
) -> None:
    """The first region is known and read; what is left comes by what else the seed offers."""
    monkeypatch.setattr("tensorlift.forking.registering._MOST_SPANS", 1)
    monkeypatch.setattr(one_sided, "_WAIT_SECONDS", 0.05)
    gate, make = threading.Semaphore(0), world.make

    def failing(wiring: Any, host: str) -> Any:
        made = make(wiring, host)
        if host == "127.0.0.2":
            made.may_register = gate
            made.fails_to_register = lambda memories: bool(made.calls)
        return made

    monkeypatch.setattr(one_sided, "_MAKERS", {"mooncake": failing})
    into, kinds, came, left = empty(), ["mooncake", *others], list[Any](), list[ForkError]()
    with seed(weights(), transports=kinds) as running:

        def forking() -> None:
            try:
                came.append(fork(running.url, into, transports=kinds, connections=2))
            except ForkError as error:
                left.append(error)

        thread = threading.Thread(target=forking)
        thread.start()
        gate.release()
        until(lambda: torch.equal(into["b"], weights()["b"]))
        gate.release(9)
        thread.join()
    why = "not mooncake: the seed cannot register all of its memory: no more pages can be pinned"
    if others:
        assert is_version(into)
        assert came[0].transports == {running.url: f"tcp; {why}"}
        assert came[0].left == ()
    else:
        assert f"no transport can be had: {why}" in str(left[0])


@pytest.mark.parametrize("others", [["tcp"], []])
def test_a_place_to_read_to_that_cannot_be_registered(world: World, others: list[str]) -> None:
    """It is the fork's, and no reason to leave the seed where that offers something else."""
    make, into, kinds = world.make, empty(), ["mooncake", *others]

    def failing(wiring: Any, host: str) -> Any:
        made = make(wiring, host)
        made.fails_to_register = lambda memories: host != "127.0.0.2"
        return made

    one_sided._MAKERS["mooncake"] = failing  # type: ignore[index]
    with seed(weights(), transports=kinds) as running:
        why = "not mooncake: no more pages can be pinned"
        if others:
            came = fork(running.url, into, transports=kinds)
            assert is_version(into)
            assert (came.transports, came.left) == ({running.url: f"tcp; {why}"}, ())
        else:
            with pytest.raises(ForkError, match=f"no transport can be had: {why}"):
                fork(running.url, into)


def test_what_an_engine_cannot_revoke_stays_as_long_as_the_engine(world: World) -> None:
    with seed(weights()) as target:
        world.made[0].revokes = False  # type: ignore[misc]
        draft = seed(weights(2))
        named = draft._named
        draft.close()
        (engine,) = support.engines()
        assert engine._held == [named]
        assert target.stats()["transports_off"] == 0


@pytest.mark.parametrize("call", ["register", "unregister"])
def test_what_may_stay_registered_stays_as_long_as_the_engine(world: World, call: str) -> None:
    """Where the engine lasts, freed memory would be read as somebody else's."""
    with seed(weights()) as target:
        until(lambda: target.stats()["registered_bytes"] == 16 * ITEMS + 56)
        engine = world.made[0]

        def failing(memories: object) -> None:
            raise FabricError("half of it is done")

        before = getattr(engine, call)
        setattr(engine, call, failing)
        draft = seed(weights(2))
        named = draft._named
        draft.close()
        setattr(engine, call, before)
        (shared,) = support.engines()
        assert shared._held == [named]
        # Nobody takes it back.
        engine.registered = engine.registered[:3]


def test_weights_that_change_while_an_engine_reads(world: World) -> None:
    """The epoch is told behind the bytes: what was read of the old one is thrown away."""
    state, into, make = weights(), empty(), world.make
    with seed(state) as running:

        def change(parts: Any) -> bool:
            if running.stats()["epoch"] == 0 and running.stats()["sent_chunks"] > 2:
                with running.updating(timeout=0, weights="2"):
                    for name, tensor in weights(2).items():
                        state[name].copy_(tensor)
            return False

        def changing(wiring: Any, host: str) -> Any:
            made = make(wiring, host)
            made.fails = change
            return made

        one_sided._MAKERS["mooncake"] = changing  # type: ignore[index]
        came = fork(running.url, into)
        assert came.weights == "2"
        assert came.moved_bytes > came.bytes
        assert is_version(into, 2)


@pytest.mark.parametrize("said", [b"\xff" * 8, b"\2\0\0\0\0\0\0\0{}", b"\1\0\0\0\0\0\0\0["])
def test_a_table_that_is_none(said: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(said)
        with pytest.raises(ConnectionAbortedError, match="the seed says"):
            one_sided._learn(ours, 0)


def test_addresses_that_others_reach() -> None:
    assert one_sided._address("localhost") in ("127.0.0.1", "::1")
    assert one_sided._address("10.1.2.3") == "10.1.2.3"
    assert one_sided._address("0.0.0.0") != "0.0.0.0"


@pytest.mark.parametrize("changed", [{"places": ()}, {"session": "another"}])
def test_a_seed_whose_second_table_is_none_of_the_first(
    world: World, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]
) -> None:
    """It is left, as any that does not do what it should; the engine too."""
    learn, times, make = one_sided._learn, list[int](), world.make

    def learned(peer: socket.socket, region: int) -> Any:
        times.append(region)
        table = learn(peer, region)
        if len(times) == 1:
            return msgspec.structs.replace(table, places=(None,) * len(table.places))
        return msgspec.structs.replace(table, **changed)

    def particular(wiring: Any, host: str) -> Any:
        made = make(wiring, host)
        made.stale.add("another")
        return made

    monkeypatch.setattr(one_sided, "_learn", learned)
    one_sided._MAKERS["mooncake"] = particular  # type: ignore[index]
    with seed(weights()) as running, pytest.raises(ForkError, match=r"number of regions|for another one"):
        fork(running.url, empty(), connections=1)
    assert len(times) > 1
