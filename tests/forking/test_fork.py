"""Forks out of running seeds: right, or an error; whatever becomes of the seeds meanwhile."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec
import pytest
import torch

from support import leaks
from support.ports import nobody
from support.waiting import when
from tensorlift.engine.abi_fork import Outcome
from tensorlift.errors import ForkError, ManifestError, OptionError, RequestError, SeedError
from tensorlift.forking import shm, transports
from tensorlift.forking.client import SeedClient
from tensorlift.forking.connection import SocketConnection
from tensorlift.forking.fork import fork_into
from tensorlift.forking.manifest import Layout, ModelKey, Offer, encode
from tensorlift.forking.seed import Seed
from tensorlift.forking.shared_memory import shared_tensors
from tensorlift.forking.tcp import TcpConnection
from tensorlift.forking.transports import Served

KEY = ModelKey(model="org/model")
SMALL: dict[str, Any] = {"chunk_bytes": 4000, "patience": 20.0}


class Model(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(40, 50, device="meta") for _ in range(8))
        for layer in self.layers:
            for name, parameter in layer.named_parameters():
                setattr(layer, name, torch.nn.Parameter(torch.rand(parameter.shape, generator=generator)))
        self.tied = torch.nn.Linear(40, 50, bias=False)
        self.tied.weight = self.layers[3].weight
        self.register_buffer("steps", torch.tensor(seed), persistent=False)
        self.scale = torch.rand(7, generator=generator)


def same(one: Model, other: Model) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    equal = all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)
    return equal and torch.equal(one.scale, other.scale) and torch.equal(one.steps, other.steps)


@pytest.fixture
def seed() -> Iterator[Seed]:
    with leaks.nothing_left():
        made = Seed(Model(1), KEY)
        yield made
        made.close()


def test_a_fork(seed: Seed) -> None:
    model, told = Model(2), list[tuple[int, int]]()
    result = fork_into(
        model, seed.url, key=KEY, progress=lambda done, total: told.append((done, total)), **SMALL
    )
    assert same(model, Model(1))
    assert result.by_source == {seed.url: result.bytes}
    assert result.moved_bytes == result.bytes
    assert result.left == ()
    assert result.transports == {seed.url: "shm (process_vm_readv)"}
    assert told == sorted(told)
    assert seed.stats()["readers"] == 0


def test_transports_are_chosen_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with Seed(Model(1), KEY, transports=["memory", "shm", "tcp"]) as seed:

        def taken(*only: str) -> str:
            model = Model(2)
            found = fork_into(model, seed.url, **SMALL, **({"transports": only} if only else {}))
            assert same(model, Model(1))
            return found.transports[seed.url]

        assert taken() == "memory"
        assert taken("tcp", "shm") == "shm (process_vm_readv)"
        assert taken("tcp") == "tcp"
        monkeypatch.setattr(shm, "host_id", lambda: "0" * 32)
        assert taken("tcp", "shm").startswith("tcp; not shm: the seed is on another host")
        with pytest.raises(ForkError, match=r"no transport can be had: not shm: the seed is on another host"):
            taken("shm")
    with Seed(Model(1), KEY, transports=["tcp"]) as seed:
        with pytest.raises(ForkError, match=r"offers no transport that this fork takes: shm"):
            fork_into(Model(2), seed.url, transports=["shm"])
        with pytest.raises(OptionError, match=r"transports is \['rdma'\]"):
            fork_into(Model(2), seed.url, transports=["rdma"])


def test_weights_in_shared_memory() -> None:
    layouts = [Layout(f"t{k}", "float32", (30, 50), (50, 1)) for k in range(5)]
    offered = shared_tensors(layouts)
    for number, tensor in enumerate(offered.values()):
        tensor.fill_(number)
    with Seed(offered, KEY) as seed:
        mine = {layout.name: torch.empty(layout.shape) for layout in layouts}
        result = fork_into(mine, seed.url, **SMALL)
        assert result.transports == {seed.url: "shm (memfd)"}
        assert [int(tensor.unique()) for tensor in mine.values()] == list(range(5))


def test_progress_by_source() -> None:
    """For who asks for it by name, as it comes; one that does not is told of all together."""
    told: list[tuple[int, int, dict[str, int]]] = []

    def progress(done: int, total: int, by_source: dict[str, int]) -> None:
        told.append((done, total, dict(by_source)))

    with Seed(Model(1), KEY, weights="1") as one, Seed(Model(1), KEY, weights="1") as other:
        result = fork_into(Model(2), [one.url, other.url], progress=progress, **SMALL)
    assert told[-1] == (result.bytes, result.bytes, result.by_source)
    assert all(done == sum(came.values()) for done, _, came in told)
    assert all(set(came) <= {one.url, other.url} for _, _, came in told)


def test_a_part_of_what_was_seen(seed: Seed) -> None:
    seen = {seed.url: SeedClient(seed.url).manifest()}
    wanted = Model(1).state_dict()
    part = {name: torch.zeros_like(wanted[name]) for name in ("layers.2.bias", "tied.weight")}
    result = fork_into(part, seed.url, part_of=seen, **SMALL)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in part.items())
    assert result.bytes == sum(tensor.nbytes for tensor in part.values())
    with pytest.raises(ForkError, match="'other' is not in the seed"):
        fork_into(part | {"other": torch.ones(3)}, seed.url, part_of=seen, **SMALL)
    with seed.updating(timeout=0):
        pass
    with pytest.raises(ForkError, match="the weights have changed, or it is another instance"):
        fork_into(part, seed.url, part_of=seen, **SMALL)


def test_a_fork_is_a_seed(seed: Seed) -> None:
    with contextlib.ExitStack() as open_seeds:
        url = seed.url
        for _ in range(3):
            model = Model(5)
            fork_into(model, url, **SMALL)
            url = open_seeds.enter_context(Seed(model, KEY)).url
        assert same(model, Model(1))


def test_several_seeds_share_the_work() -> None:
    with (
        Seed(Model(1), KEY, limit="40KB/s", weights="1") as one,
        Seed(Model(1), KEY, limit="40KB/s", weights="1") as other,
    ):
        model = Model(2)
        result = fork_into(model, [one.url, other.url], **SMALL)
        assert same(model, Model(1))
        assert set(result.by_source) == {one.url, other.url}
        assert result.moved_bytes == result.bytes == sum(result.by_source.values())


def test_a_seed_that_ends_in_the_middle() -> None:
    dying, other = (Seed(Model(1), KEY, limit="30KB/s", weights="1") for _ in range(2))
    model = Model(2)
    with when(lambda: dying.stats()["sent_chunks"] >= 3, dying.close):
        result = fork_into(model, [dying.url, other.url], **SMALL)
    other.close()
    assert same(model, Model(1))
    assert sum(result.by_source.values()) == result.bytes
    assert result.left[0].startswith(f"{dying.url}: the connection is lost: ")
    assert result.by_source[dying.url] > 0
    # What was right is not moved again: a chunk for each connection may be.
    assert result.moved_bytes <= result.bytes + 2 * 4000


def test_the_only_seed_ends_in_the_middle() -> None:
    dying = Seed(Model(1), KEY, limit="30KB/s")
    with (
        leaks.nothing_left(),
        when(lambda: dying.stats()["sent_chunks"] >= 3, dying.close),
        pytest.raises(ForkError, match=r"of [0-9,]+ bytes could not be had: http://") as caught,
    ):
        fork_into(Model(2), dying.url, **SMALL)
    assert "the tensors here are not complete" in str(caught.value)


def test_weights_that_change_are_read_again() -> None:
    model, offered = Model(2), Model(1)
    with Seed(offered, KEY, limit="30KB/s") as seed:

        def change() -> None:
            # Its readers hold their leases for 30 s: it does not wait for them.
            with seed.updating(timeout=0, weights="v2"), torch.no_grad():
                for parameter in offered.parameters():
                    parameter.add_(1)

        with when(lambda: seed.stats()["sent_chunks"] >= 3, change):
            result = fork_into(model, seed.url, **SMALL)
        assert result.weights == "v2"
        assert same(model, offered)
        assert result.moved_bytes > result.bytes
        assert result.left == ()


def test_another_model(seed: Seed) -> None:
    with pytest.raises(ForkError, match=r"does not have 'b' \(target\); there is 'org/model' \(target\)"):
        fork_into(Model(2), seed.url, key="b")
    before = Model(2)
    model = Model(2)
    model.scale = torch.rand(8)
    with pytest.raises(
        ForkError,
        match=r"other weights than the model here: 'scale': shape \[8\] here, \[7\] in the seed; make it",
    ):
        fork_into(model, seed.url)
    assert torch.equal(model.layers[0].weight, before.layers[0].weight)


def test_who_is_not_there(seed: Seed) -> None:
    away = nobody()
    with pytest.raises(SeedError, match=r"cannot be reached: "):
        fork_into(Model(2), away)
    model = Model(2)
    result = fork_into(model, [away, seed.url], **SMALL)
    assert same(model, Model(1))
    assert result.left[0].startswith(f"{away}: cannot be reached: ")
    with pytest.raises(ForkError, match=r"^none of 2 seeds can be read: .* cannot be reached: .*; http.*'b'"):
        fork_into(model, [away, seed.url], key="b")
    with pytest.raises(SeedError, match="none of 2 seeds"):
        fork_into(model, [away, nobody()])
    with pytest.raises(RequestError, match=r"there is no seed to fork from"):
        fork_into(Model(2), [])


def test_seeds_of_other_weights_are_left_behind(seed: Seed) -> None:
    other = Model(1)
    other.scale = torch.rand(8)
    with Seed(other, KEY) as unlike, Seed(Model(1), KEY, weights="v9") as newer:
        model = Model(2)
        result = fork_into(model, [seed.url, unlike.url, newer.url], **SMALL)
    assert same(model, Model(1))
    assert set(result.by_source) == {seed.url}
    assert "has other weights than the model here" in result.left[0]
    assert (
        result.left[1]
        == f"{newer.url}: it has other weights than the first seed, or has them in other regions"
    )


def test_instances_whose_weights_have_no_version_are_not_mixed() -> None:
    """Nobody says that they are the same; one instance under two URLs is."""
    with Seed(Model(1), KEY) as one, Seed(Model(3), KEY) as other:
        model = Model(2)
        again = one.url.replace("127.0.0.1", "localhost")
        result = fork_into(model, [one.url, other.url, again], **SMALL)
        assert same(model, Model(1))
    assert other.url not in result.by_source
    (left,) = result.left
    assert left.startswith(f"{other.url}: it has other weights than the first seed, or ")
    assert 'neither says a version: give seeds of the same weights the same weights=, such as "v1"' in left


def test_a_manifest_that_offers_what_is_no_address(seed: Seed) -> None:
    offers = (Offer("tcp", "somewhere"),)
    lying = msgspec.structs.replace(SeedClient(seed.url).manifest(), transports=offers)
    seed._manifest = encode(lying)
    with pytest.raises(ManifestError, match="offers tcp where nobody can be: 'http://somewhere' is no URL"):
        fork_into(Model(2), seed.url)


def test_a_seed_that_is_named_twice_is_one() -> None:
    """It took two leases, and waited for room that it had taken itself."""
    with Seed(Model(1), KEY, readers=1) as seed:
        assert fork_into(Model(0), [seed.url] * 3).left == ()
        assert seed.stats()["granted_leases"] == 1


def test_tokens() -> None:
    with Seed(Model(1), KEY, token="right") as seed:
        with pytest.raises(SeedError, match="does not take this token"):
            fork_into(Model(2), seed.url, token="wrong")
        model = Model(2)
        fork_into(model, seed.url, token="right", **SMALL)
        assert same(model, Model(1))


def test_a_token_that_nobody_asks_for(seed: Seed) -> None:
    with pytest.raises(ForkError, match="a seed without a token wants none: leave it out"):
        fork_into(Model(2), seed.url, token="unasked")


def test_more_forks_than_a_seed_takes() -> None:
    """They wait for one another, as long as they are patient."""
    with Seed(Model(1), KEY, readers=1) as seed:
        held = seed.grant(0.5)
        model = Model(2)
        fork_into(model, seed.url, patience=60.0)
        assert same(model, Model(1))
        held = seed.grant(50)
        with pytest.raises(ForkError, match=r"it has as many readers as it takes; ask again in"):
            fork_into(Model(2), seed.url, patience=20.0)
        seed.release(held.id)


def test_a_seed_without_room_is_not_waited_for_where_another_has_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, real = list[str](), SeedClient.lease
    monkeypatch.setattr(
        SeedClient, "lease", lambda self, *given: asked.append(self.url) or real(self, *given)
    )
    with Seed(Model(1), KEY, weights="1", readers=1) as full, Seed(Model(1), KEY, weights="1") as other:
        held, model = full.grant(500), Model(2)
        came = fork_into(model, [full.url, other.url], patience=60.0)
        assert same(model, Model(1))
        assert set(came.by_source) == {other.url}
        assert asked == [full.url, other.url]
        assert [why.partition(";")[0] for why in came.left] == [
            f"{full.url}: it has as many readers as it takes"
        ]
        full.release(held.id)


class Lying(TcpConnection):
    """A connection whose chunks come wrong, each for the first times."""

    times: ClassVar[int] = 1
    wrong: ClassVar[dict[object, int]] = {}

    def fetch(self, chunk: Any, *given: Any, **more: Any) -> Any:
        came = super().fetch(chunk, *given, **more)
        Lying.wrong[chunk] = Lying.wrong.get(chunk, 0) + 1
        if Lying.wrong[chunk] <= Lying.times:
            came.outcome = Outcome.WRONG
        return came


@pytest.mark.parametrize("times", [1, 2])
def test_chunks_that_come_wrong(seed: Seed, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    monkeypatch.setattr(transports, "_CONNECTIONS", {"tcp": Lying})
    monkeypatch.setattr(Lying, "times", times)
    monkeypatch.setattr(Lying, "wrong", {})
    model = Model(2)
    if times == 1:
        result = fork_into(model, seed.url, transports=["tcp"], **SMALL)
        assert same(model, Model(1))
        assert result.moved_bytes == 2 * result.bytes
    else:
        with pytest.raises(ForkError, match="what it sends does not have the digest that comes with it"):
            fork_into(model, seed.url, transports=["tcp"], **SMALL)


def test_a_failure_of_our_own_is_not_the_seeds(seed: Seed, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(SocketConnection, "fetch", fail)
    with pytest.raises(MemoryError, match="no memory"):
        fork_into(Model(2), seed.url, **SMALL)


def test_ctrl_c_ends_a_fork(seed: Seed) -> None:
    def tick(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fork_into(Model(2), seed.url, progress=tick, **SMALL)
    assert seed.stats()["readers"] == 0


def test_a_seed_that_stops_answering(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that is stopped: it is left behind after the patience, and another one brings what it held."""
    silent, served = socket.create_server(("127.0.0.1", 0)), list[socket.socket]()

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = silent.accept()
                served.append(peer)

    thread = threading.Thread(target=serve)
    thread.start()
    address = f"127.0.0.1:{silent.getsockname()[1]}"
    with (
        Seed(Model(1), KEY, transports=["tcp"], weights="1") as stopped,
        Seed(Model(1), KEY, weights="1") as other,
    ):
        offers = (Offer("tcp", address),)
        monkeypatch.setattr(Served, "offers", property(lambda served: offers))
        stopped._publish({})
        model = Model(2)
        result = fork_into(model, [stopped.url, other.url], chunk_bytes=4000, patience=5.0)
        assert same(model, Model(1))
        assert set(result.by_source) == {other.url}
        assert result.left == (f"{stopped.url}: the connection is lost: timed out",)
    silent.shutdown(socket.SHUT_RDWR)
    silent.close()
    thread.join()
    for peer in served:
        peer.close()
