"""A registry that answers over HTTP, as seeds and forks ask it."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from tensorlift.errors import RequestError, SeedError
from tensorlift.fleet.contract import (
    MOST_WITHOUT,
    Announcement,
    Candidates,
    ForkReport,
    Load,
    Near,
    Told,
    Wanted,
)
from tensorlift.forking.asking import HttpClient
from tensorlift.forking.encryption import Ca
from tensorlift.forking.manifest import ModelKey
from tensorlift.forking.urls import followed, split_url
from tensorlift.format.quoting import clean

__all__ = ["RegistryClient", "front_of", "gone_to"]


def front_of(registry: str, seed: str) -> str:
    """A registry's URL as urls.py wants it to judge a seed that it names: under TLS none without."""
    endpoint = split_url(registry)
    return registry if endpoint.scheme == "https" else endpoint._replace(scheme=split_url(seed).scheme).url


def gone_to(urls: Iterable[str], registry: str) -> dict[str, str]:
    """Where a fork goes for each of the URLs that a registry names, without those that it goes nowhere for:
    see urls.followed(). Raises SeedError where these are all.
    """
    found, problem = dict[str, str](), ""
    for url in urls:
        try:
            found[url] = followed(url, front_of(registry, url))
        except RequestError as error:
            problem = f"it names a seed that is not gone to: {clean(str(error))}"
    if problem and not found:
        raise SeedError(problem)
    return found


class RegistryClient(HttpClient):
    """A Registry behind a URL."""

    what = "registry"
    busy = (502, 503, 504)

    def __init__(self, url: str, token: str = "", seconds: float = 10.0, ca: Ca | None = None) -> None:
        """See HttpClient."""
        super().__init__(url, token, seconds, ca)
        self._named_as: dict[str, str] = {}
        """Where a fork goes for a URL that the registry has named."""

    def announce(self, seed: Announcement) -> float:
        """See Registry."""
        return self.decoded(self.ask("POST", "/v1/seeds", msgspec.json.encode(seed)), Told).seconds

    def renew(self, instance: str, load: Load) -> float | None:
        """See Registry."""
        answer = self.ask("POST", f"/v1/seeds/{instance}", msgspec.json.encode(load))
        return self.decoded(answer, Told).seconds or None

    def withdraw(self, instance: str) -> None:
        """See Registry."""
        self.ask("DELETE", f"/v1/seeds/{instance}")

    def candidates(
        self, key: ModelKey, near: Near, count: int = 1, without: Collection[str] = ()
    ) -> list[str]:
        """See Registry."""
        # The registry knows a seed that listens on all addresses by another URL than a fork goes to.
        named = [name for name, url in list(self._named_as.items()) if url in without]
        wanted = Wanted(key, near, count, tuple([*without, *named][-MOST_WITHOUT:]))
        asked = msgspec.json.encode(wanted)
        found = self.decoded(self.ask("POST", "/v1/candidates", asked), Candidates)
        try:
            where = gone_to(found.urls[:count], self.url)
        except SeedError as error:
            raise SeedError(f"{self.url}: {error}") from None
        self._named_as.update({url: to for url, to in where.items() if url != to})
        return list(where.values())

    def report(self, fork: ForkReport) -> float:
        """See Registry."""
        return self.decoded(self.ask("POST", "/v1/forks", msgspec.json.encode(fork)), Told).seconds

    def close(self) -> None:
        """Nothing is held between questions."""
