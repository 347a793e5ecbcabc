"""Seeds behind the URL of another one: found by key, gone when they end, back after the front was away."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support import leaks
from support.waiting import until
from tensorlift.errors import ForkError, SeedError
from tensorlift.forking import joining, ranks
from tensorlift.forking.client import SeedClient
from tensorlift.forking.fork import fork_into
from tensorlift.forking.manifest import ModelKey
from tensorlift.forking.ranks import JoinRequest
from tensorlift.forking.seed import Seed

TOKEN = "hush"


def key(rank: int, role: str = "target", size: int = 2) -> ModelKey:
    return ModelKey(model="m", role=role, tp=(rank, size))


def weights(value: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((100, 7), value, dtype=torch.int32), "b": torch.full((3,), -value)}


@pytest.fixture
def front() -> Iterator[Seed]:
    with leaks.nothing_left():
        made = Seed(weights(0), key(0), token=TOKEN)
        yield made
        made.close()


def behind(front: Seed, value: int, which: ModelKey, **more: Any) -> Seed:
    return Seed(weights(value), which, token=TOKEN, join=front.url, **more)


def test_a_fork_finds_its_own_peer(front: Seed) -> None:
    """Two ranks, and a draft in the front's own process."""
    places = [key(1), key(0, "draft"), key(1, "draft")]
    seeds = [behind(front, value, place) for value, place in enumerate(places, 1)]
    for value, (seed, place) in enumerate(zip([front, *seeds], [key(0), *places], strict=True)):
        into = weights(99)
        result = fork_into(into, front.url, token=TOKEN, key=place)
        assert (into["a"] == value).all()
        assert (result.key, set(result.by_source)) == (place, {seed.url})
    for seed in seeds:
        assert seed.stats()["sent_bytes"] == 700 * 4 + 3 * 8
        seed.close()
        seed.close()
    assert SeedClient(front.url, TOKEN).peer(key(0)).url == front.url


def test_a_rank_that_is_not_there(front: Seed) -> None:
    client = SeedClient(front.url, TOKEN)
    with behind(front, 1, key(1)):
        client.peer(key(1))
    with pytest.raises(
        ForkError,
        match=r"^http://[0-9.:]+ does not have 'm' \(target, tp 1 of 2\); there is 'm' \(target, tp 0 of 2",
    ):
        fork_into(weights(9), front.url, token=TOKEN, key=key(1))
    with pytest.raises(ForkError, match=r"its tp is 2, not 4, and a fork does not split weights anew$"):
        fork_into(weights(9), front.url, token=TOKEN, key=key(1, size=4))


def test_a_rank_that_has_died(front: Seed) -> None:
    """As long as the front has not noticed; another instance of the same weights has that rank too."""
    dead = JoinRequest("a" * 32, key(1), "http://127.0.0.1:9")
    SeedClient(front.url, TOKEN).join(dead)
    with pytest.raises(SeedError, match=r"^http://127.0.0.1:9 cannot be reached: .*names it for 'm'"):
        fork_into(weights(9), front.url, token=TOKEN, key=key(1))
    with Seed(weights(5), key(0), token=TOKEN) as other, behind(other, 6, key(1)) as rank:
        into = weights(9)
        result = fork_into(into, [front.url, other.url], token=TOKEN, key=key(1))
        assert (into["a"] == 6).all()
        assert set(result.by_source) == {rank.url}
        assert result.left[0].startswith("http://127.0.0.1:9: cannot be reached: ")


def test_who_cannot_join(front: Seed) -> None:
    with leaks.nothing_left():
        with pytest.raises(SeedError, match=r"'m' \(target, tp 0 of 2\) is here already, at the seed"):
            behind(front, 1, key(0))
        with pytest.raises(SeedError, match="does not take this token"):
            Seed(weights(1), key(1), token="wrong", join=front.url)
        front.close()
        with pytest.raises(SeedError, match=r"cannot be reached: .*; look whether the seed runs") as caught:
            behind(front, 1, key(1), join_timeout=0.5)
        assert type(caught.value) is SeedError
        assert not caught.value.answered


def test_a_front_that_begins_later(front: Seed) -> None:
    port = int(front.url.rpartition(":")[2])
    front.close()
    late: list[Seed] = []
    thread = threading.Timer(1, lambda: late.append(Seed(weights(0), key(0), token=TOKEN, port=port)))
    thread.start()
    with behind(front, 1, key(1), join_timeout=60) as rank:
        thread.join()
        assert SeedClient(front.url, TOKEN).peer(key(1)).url == rank.url
    late[0].close()


def test_a_front_that_was_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows nobody when it comes back, until they say again that they are there."""
    monkeypatch.setattr(joining, "_SHORTEST_REST", 0.05)
    monkeypatch.setattr(ranks.RankTable.__init__, "__defaults__", (1024, 0.15))
    with Seed(weights(0), key(0), token=TOKEN) as first, behind(first, 1, key(1)) as rank:
        port = int(first.url.rpartition(":")[2])
        first.close()
        monkeypatch.setattr(ranks.RankTable.__init__, "__defaults__", (1024, 180.0))
        with Seed(weights(0), key(0), token=TOKEN, port=port) as again:
            until(lambda: len(again.ranks.ranks(time.monotonic())) == 2)
            assert SeedClient(again.url, TOKEN).peer(key(1)).url == rank.url


def test_idle_seeds_sleep(front: Seed) -> None:
    """No thread of theirs runs from one look to the next."""

    def runs() -> list[str]:
        found = list[str]()
        for thread in threading.enumerate():
            if thread.name.startswith("tensorlift-seed") and thread.name != "tensorlift-seed-talk":
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                    found += Path(f"/proc/self/task/{thread.native_id}/status").read_text().splitlines()
        return [line for line in found if "ctxt_switches" in line]

    with behind(front, 1, key(1)):
        fork_into(weights(9), front.url, token=TOKEN, key=key(1))
        before, end = runs(), time.monotonic() + 60
        while True:
            time.sleep(1)
            if (now := runs()) == before:
                break
            assert time.monotonic() < end
            before = now
        assert len(before) >= 2 * 7  # each accepts for HTTP, on this host and over TCP; one renews


def test_a_front_that_sends_forks_elsewhere(front: Seed) -> None:
    """Were it to: they do not go, and tell nobody the token."""
    front.ranks.put("a" * 32, ranks.Rank(key(1), "http://evil.example:80"), time.monotonic())
    with pytest.raises(SeedError, match=r"names a seed that is not gone to: 'evil.example' is a name"):
        fork_into(weights(9), front.url, token=TOKEN, key=key(1))


def test_ranks_on_all_addresses() -> None:
    """They are found by the address that the fork knows the front by."""
    with (
        Seed(weights(0), key(0), host="0.0.0.0", token=TOKEN) as wide,
        Seed(weights(1), key(1), host="0.0.0.0", token=TOKEN, join=here(wide)) as rank,
    ):
        result = fork_into(weights(9), here(wide), token=TOKEN, key=key(1))
        assert set(result.by_source) == {here(rank)}
        with pytest.raises(
            SeedError, match="a seed on loopback cannot be reached by all forks that ask here"
        ):
            Seed(weights(1), key(1, "draft"), token=TOKEN, join=here(wide))


def here(seed: Seed) -> str:
    return seed.url.replace("0.0.0.0", "127.0.0.1")


def test_addresses_of_version_six() -> None:
    try:
        wide = Seed(weights(0), key(0), host="::", token=TOKEN)
    except OSError:
        pytest.skip("no IPv6 here")
    front_url = wide.url.replace("[::]", "[::1]")
    with wide, Seed(weights(1), key(1), host="::", token=TOKEN, join=front_url) as rank:
        into = weights(9)
        result = fork_into(into, front_url, token=TOKEN, key=key(1))
        assert (into["a"] == 1).all()
        assert set(result.by_source) == {rank.url.replace("[::]", "[::1]")}


def test_an_open_front_takes_ranks_from_where_they_are() -> None:
    with Seed(weights(0), key(0)) as open_front:
        client = SeedClient(open_front.url)
        with pytest.raises(SeedError, match=r"it comes from 127.0.0.1; without a token it can name no"):
            client.join(JoinRequest("a" * 32, key(1), "http://10.0.0.9:1"))
        with pytest.raises(SeedError, match="answers with status 400"):
            client.join(JoinRequest("not an instance", key(1), "http://127.0.0.1:1"))
        client.join(JoinRequest("a" * 32, key(1), "http://127.0.0.1:1"))
        client.leave("a" * 32)
        with pytest.raises(SeedError, match="a request has a Content-Length of at most 4,096 bytes"):
            client.join(JoinRequest("a" * 32, ModelKey(model="m" * 4096), "http://127.0.0.1:1"))
        with pytest.raises(ForkError, match="does not have"):
            client.peer(key(1))


def test_a_front_that_does_not_answer_does_not_hold_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "GOODBYE_SECONDS", 0.05)
    gate, left = threading.Event(), list[str]()

    class Front:
        def join(self, rank: JoinRequest) -> ranks.JoinAnswer:
            return ranks.JoinAnswer(600.0)

        def leave(self, instance: str) -> None:
            gate.wait()
            left.append(instance)

    request = JoinRequest("a" * 32, key(1), "http://127.0.0.1:1")
    with leaks.nothing_left():
        joined = joining.Joined(Front(), request, 1.0)  # type: ignore[arg-type]
        joined.close()
        assert left == []
        gate.set()
        until(lambda: left == ["a" * 32])
        joined._thread.join()
