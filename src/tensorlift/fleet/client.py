"""A registry that answers over HTTP, as seeds and forks ask it."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from tensorlift.errors import RequestError, SeedError
from tensorlift.fleet.contract import Announcement, Candidates, ForkReport, Load, Near, Told, Wanted
from tensorlift.forking.asking import HttpClient
from tensorlift.forking.manifest import ModelKey
from tensorlift.forking.urls import followed, split_url
from tensorlift.format.quoting import clean

__all__ = ["RegistryClient", "front_of"]


def front_of(registry: str, seed: str) -> str:
    """A registry's URL as urls.py wants it to judge a seed that it names: under TLS none without."""
    place = split_url(registry)
    return registry if place.scheme == "https" else place._replace(scheme=split_url(seed).scheme).url


class RegistryClient(HttpClient):
    """A Registry behind a URL."""

    what = "registry"
    busy = (502, 503, 504)

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
        """See Registry. A fork is sent to no URL that a registry may not name: see urls.followed()."""
        asked = msgspec.json.encode(Wanted(key, near, count, tuple(without)))
        found = self.decoded(self.ask("POST", "/v1/candidates", asked), Candidates)
        try:
            return [followed(url, front_of(self.url, url)) for url in found.urls[:count]]
        except RequestError as error:
            raise SeedError(f"{self.url} names a seed that is not gone to: {clean(str(error))}") from None

    def report(self, fork: ForkReport) -> float:
        """See Registry."""
        return self.decoded(self.ask("POST", "/v1/forks", msgspec.json.encode(fork)), Told).seconds

    def close(self) -> None:
        """Nothing is held between questions."""
