"""A registry that answers over HTTP, as seeds and forks ask it."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from tensorlift.errors import RequestError, SeedError
from tensorlift.fleet.contract import (
    MOST_CANDIDATES,
    MOST_WITHOUT,
    Announcement,
    Candidates,
    ForkReport,
    Load,
    Near,
    Told,
    Wanted,
)
from tensorlift.forking.encryption import Ca
from tensorlift.forking.http_client import HttpClient
from tensorlift.forking.manifest import ModelKey
from tensorlift.forking.urls import followed, split_url
from tensorlift.format.quoting import clean, plural

__all__ = ["RegistryClient", "front_of", "gone_to"]

# Behind an answer of which no seed is gone to.
_NEXT_SECONDS = 0.1


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
        """Where a fork goes for a URL that the registry has named; "" for nowhere."""
        self._problem = ""

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
        named = dict(self._named_as)
        # The registry knows a seed that listens on all addresses by another URL than a fork goes to.
        gone = set(named.values())
        left = [url for url in without if url not in gone]
        left += [name for name, url in named.items() if not url or url in without]
        # It is told of no more than so many, and may name the others again.
        most = min(count + max(0, len(left) - MOST_WITHOUT), MOST_CANDIDATES)
        found = self._candidates(Wanted(key, near, most, tuple(left[-MOST_WITHOUT:])))
        try:
            where = gone_to(found, self.url)
        except SeedError as error:
            where, self._problem = {}, str(error)
        refused = dict.fromkeys((url for url in found if url not in where), "")
        self._named_as |= refused | where
        if urls := [url for url in dict.fromkeys(where.values()) if url not in without]:
            return urls[:count]
        # It may know others than those that it has not been told of yet.
        again = _NEXT_SECONDS if refused.keys() - named.keys() else None
        others = f" but the {plural(len(left), 'seed')} that failed" if left else ""
        why = self._problem if refused else f"it names none{others}"
        raise SeedError(f"{self.url}: {why}", again)

    def _candidates(self, wanted: Wanted) -> tuple[str, ...]:
        try:
            answer = self.ask("POST", "/v1/candidates", msgspec.json.encode(wanted))
        except SeedError as error:
            if not self._problem or not error.answered:
                raise
            raise SeedError(f"{error}; {self._problem}", error.retry_seconds) from None
        return self.decoded(answer, Candidates).urls[: wanted.count]

    def report(self, fork: ForkReport) -> float:
        """See Registry."""
        return self.decoded(self.ask("POST", "/v1/forks", msgspec.json.encode(fork)), Told).seconds

    def close(self) -> None:
        """Nothing is held between questions."""
