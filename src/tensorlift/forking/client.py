"""What a fork asks a seed over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from tensorlift.errors import ForkError, ManifestError, RequestError, SeedError
from tensorlift.forking.control import LeaseAnswer, LeaseRequest, StateAnswer
from tensorlift.forking.http_client import HttpClient
from tensorlift.forking.keys import told_key, what_is_there
from tensorlift.forking.manifest import LONGEST_MANIFEST, ONE_SIDED, Manifest, ModelKey, Offer, decode
from tensorlift.forking.ranks import JoinAnswer, JoinRequest, Rank, RanksAnswer
from tensorlift.forking.urls import followed, reached

__all__ = ["SeedClient", "clients_of"]

_LONGEST_RANKS = 8 << 20
_SHORTEST_PATIENCE = 1.0
# Transports that are offered at host:port.
_ADDRESSED = ("tcp", *ONE_SIDED)


class SeedClient(HttpClient):
    """One seed."""

    def manifest(self) -> Manifest:
        """What it offers now. Raises SeedError, ManifestError."""
        found = decode(self.ask("GET", "/v1/manifest", longest=LONGEST_MANIFEST), self.url)
        offers = tuple(self._reached(offer) for offer in found.transports)
        return msgspec.structs.replace(found, transports=offers)

    def _reached(self, offer: Offer) -> Offer:
        """A seed that listens on all addresses does not know by which it is reached."""
        if offer.kind not in _ADDRESSED:
            return offer
        try:
            return Offer(offer.kind, reached(offer.address, self._endpoint.host))
        except RequestError as error:
            raise ManifestError(
                f"{self.url}: the manifest offers {offer.kind} where nobody can be: {error}"
            ) from None

    def peer(self, key: ModelKey) -> SeedClient:
        """The seed behind this URL that has the key: this one or another rank's. Raises ForkError, SeedError.

        The token goes to no host that somebody named who does not know it: see urls.placed().
        """
        ranks = self.decoded(self.ask("GET", "/v1/ranks", longest=_LONGEST_RANKS), RanksAnswer).ranks
        for rank in ranks:
            if rank.key == key:
                return self._followed(rank) if rank.url else self
        there = what_is_there([rank.key for rank in ranks], key) or "nothing"
        raise ForkError(f"{self.url} does not have {told_key(key)}; there is {there}")

    def _followed(self, rank: Rank) -> SeedClient:
        try:
            found = SeedClient(followed(rank.url, self.url), self._token, self._seconds, self._context)
        except RequestError as error:
            raise SeedError(f"{self.url} names a seed that is not gone to: {error}") from None
        found._named = f" ({self.url} names it for {told_key(rank.key)})"
        return found

    def join(self, rank: JoinRequest) -> JoinAnswer:
        """A rank stands behind this URL from now on. Raises SeedError."""
        return self.decoded(self.ask("POST", "/v1/ranks", msgspec.json.encode(rank)), JoinAnswer)

    def leave(self, instance: str) -> None:
        """It does no more. Raises SeedError."""
        self.ask("DELETE", f"/v1/ranks/{instance}")

    def state(self) -> StateAnswer:
        """Which instance it is, and at which epoch. Raises SeedError."""
        return self.decoded(self.ask("GET", "/v1/state"), StateAnswer)

    def lease(self, seconds: float) -> LeaseAnswer:
        """Raises SeedError, with the time to ask again where that may help."""
        asked = msgspec.json.encode(LeaseRequest(seconds))
        # One that comes later is over soon, and so are those that somebody else gave before it.
        patience = min(self._seconds, max(seconds / 3, _SHORTEST_PATIENCE))
        return self.decoded(self.ask("POST", "/v1/leases", asked, seconds=patience), LeaseAnswer)

    def renew(self, lease: str, seconds: float, patience: float | None = None) -> LeaseAnswer:
        """The same for longer; ``patience``: seconds that the answer may take. Raises SeedError."""
        asked = msgspec.json.encode(LeaseRequest(seconds))
        return self.decoded(self.ask("POST", f"/v1/leases/{lease}", asked, seconds=patience), LeaseAnswer)

    def release(self, lease: str, seconds: float | None = None) -> None:
        """Gives it back; ``seconds``: how long the answer may take. Raises SeedError."""
        self.ask("DELETE", f"/v1/leases/{lease}", seconds=seconds)


def clients_of(
    urls: Iterable[str], client: Callable[[str], SeedClient], left: dict[str, str]
) -> list[SeedClient]:
    """Of URLs that somebody else has named, without those that cannot be asked: they are ``left``, each with
    the reason. Raises SeedError where these are all.
    """
    found, problems = list[SeedClient](), list[str]()
    for url in urls:
        try:
            found.append(client(url))
        except RequestError as error:
            left[url] = str(error)
            problems.append(left[url])
    if problems and not found:
        raise SeedError("; ".join(problems))
    return found
