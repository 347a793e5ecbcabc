"""What a fork makes of the answers of a registry, also of one that says the same for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from support.registries import KEY
from tensorlift.errors import SeedError
from tensorlift.fleet.contract import MOST_CANDIDATES, MOST_WITHOUT, Candidates, Near, Wanted
from tensorlift.fleet.registry_client import RegistryClient

FRONT = "http://10.0.0.1:7700"
LOOPBACK, OTHER = "http://127.0.0.1:9", "http://10.0.0.7:7000"


class Told(RegistryClient):
    """One whose answers are said by a test."""

    def __init__(self, answer: Callable[[Wanted], list[str]]) -> None:
        super().__init__(FRONT)
        self.asked: list[Wanted] = []
        self._answer = answer

    def ask(self, method: str, path: str, body: bytes | None = None, *_: Any, **__: Any) -> bytes:
        assert body is not None
        self.asked.append(msgspec.json.decode(body, type=Wanted))
        return msgspec.json.encode(Candidates(tuple(self._answer(self.asked[-1]))))


def but(*urls: str) -> Callable[[Wanted], list[str]]:
    """As a registry does."""

    def answer(wanted: Wanted) -> list[str]:
        found = [url for url in urls if url not in wanted.without][: wanted.count]
        if not found:
            raise SeedError("it knows none")
        return found

    return answer


def test_a_registry_that_names_what_has_failed() -> None:
    client = Told(lambda wanted: [OTHER])
    assert client.candidates(KEY, Near()) == [OTHER]
    with pytest.raises(SeedError, match=f"{FRONT}: it names none but the 1 seed that failed") as none:
        client.candidates(KEY, Near(), 1, [OTHER])
    assert none.value.retry_seconds is None
    with pytest.raises(SeedError, match=r"it names none$"):
        Told(lambda wanted: []).candidates(KEY, Near())


def test_more_failed_seeds_than_it_is_told_of() -> None:
    urls = [f"http://10.0.1.{number}:7000" for number in range(MOST_WITHOUT + 20)]
    client = Told(but(*urls, OTHER))
    assert client.candidates(KEY, Near(), 1, urls) == [OTHER]
    assert [(one.count, len(one.without)) for one in client.asked] == [(21, MOST_WITHOUT)]
    with pytest.raises(SeedError, match="it names none but the 121 seeds that failed"):
        client.candidates(KEY, Near(), 1, [*urls, OTHER])
    many = [f"http://10.0.2.{number}:7000" for number in range(250)]
    assert Told(but(*many)).candidates(KEY, Near(), 1, many[:140]) == [many[140]]
    with pytest.raises(SeedError, match="it names none but"):
        Told(but(*many)).candidates(KEY, Near(), 1, many[: MOST_WITHOUT + MOST_CANDIDATES])


def test_each_seed_takes_one_place_of_those_that_failed() -> None:
    """Those on all addresses are known by two URLs."""
    names = [f"http://0.0.0.0:{number}" for number in range(1, MOST_WITHOUT + 2)]
    client = Told(but(*names))
    gone = client.candidates(KEY, Near(), 64) + [f"http://10.0.0.1:{number}" for number in range(65, 101)]
    client.candidates(KEY, Near(), 37, gone[:64])
    assert client.asked[-1].without == tuple(names[:64])
    assert client.candidates(KEY, Near(), 1, gone) == [f"http://10.0.0.1:{MOST_WITHOUT + 1}"]
    assert client.asked[-1].without == tuple(names[:MOST_WITHOUT])


def test_a_seed_that_is_not_gone_to_does_not_hide_the_others() -> None:
    client = Told(but(LOOPBACK, "http://[::1]:9", OTHER))
    for asked in (1, 2):
        with pytest.raises(SeedError, match=r"a seed that is not gone to: .*own host") as refused:
            client.candidates(KEY, Near())
        # It is asked again: what it has named is left out then.
        assert refused.value.retry_seconds is not None
        assert len(client.asked) == asked
    assert client.candidates(KEY, Near()) == [OTHER]
    with pytest.raises(SeedError, match="it knows none; it names a seed that is not gone to"):
        client.candidates(KEY, Near(), 1, [OTHER])


def test_a_registry_that_names_nothing_else_is_not_asked_for_ever() -> None:
    client = Told(lambda wanted: [LOOPBACK])
    found = []
    for _ in range(2):
        with pytest.raises(SeedError, match="not gone to") as refused:
            client.candidates(KEY, Near())
        found.append(refused.value.retry_seconds)
    assert found == [0.1, None]
