"""What a fork asks a seed over HTTP."""

from __future__ import annotations

import functools
import http.client
import io
import socket
import ssl
import time
from typing import Any, TypeVar

import msgspec

from tensorlift.errors import ForkError, ManifestError, OptionError, RequestError, SeedError
from tensorlift.forking.control import LeaseAnswer, LeaseRequest, RefusedAnswer, StateAnswer
from tensorlift.forking.encryption import Ca, fork_context
from tensorlift.forking.keys import told_key, what_is_there
from tensorlift.forking.manifest import LONGEST_MANIFEST, Manifest, ModelKey, Offer, decode
from tensorlift.forking.pace import STILL_RATE
from tensorlift.forking.ranks import JoinAnswer, JoinRequest, Rank, RanksAnswer
from tensorlift.forking.urls import followed, reached, split_url
from tensorlift.format.quoting import clean, plural, quote

__all__ = ["SeedClient"]

_LONGEST_ANSWER, _LONGEST_RANKS = 1 << 20, 8 << 20
_WHY = {
    "full": "it has as many readers as it takes",
    "updating": "it updates its weights",
    "closed": "it ends",
    "lapsed": "the lease has lapsed, or the weights have changed since",
}
# Transports that are offered at host:port.
_ADDRESSED = ("tcp", "mooncake", "nixl")
_T = TypeVar("_T")


class _Timed(io.RawIOBase):
    """A socket's bytes, so many seconds long, and longer only for as long as more than STILL_RATE come."""

    def __init__(self, peer: socket.socket, kept: io.IOBase, seconds: float) -> None:
        """``kept``: holds the socket open, to close() of this."""
        self._peer, self._kept, self._seconds = peer, kept, seconds
        self._begin, self._came = time.monotonic(), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._begin + self._seconds + self._came / STILL_RATE - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"only {plural(self._came, 'byte')} of an answer came in {self._seconds:g} s")
        self._peer.settimeout(min(left, self._seconds))
        came = self._peer.recv_into(buffer)
        self._came += came
        return came

    def close(self) -> None:
        super().close()
        self._kept.close()


class _Answer(http.client.HTTPResponse):
    """One that is not waited for for ever, however it comes."""

    def __init__(self, seconds: float, peer: socket.socket, *more: Any, **named: Any) -> None:
        super().__init__(peer, *more, **named)
        self.fp = io.BufferedReader(_Timed(peer, self.fp, seconds))


class SeedClient:
    """One seed. Each question is a connection of its own, so threads may ask at once."""

    def __init__(self, url: str, token: str = "", seconds: float = 10.0, ca: Ca | None = None) -> None:
        """``token``: see checked_token(); ``seconds``: how long an answer may take; ``ca``: whom an https://
        seed is trusted by.

        Raises RequestError for what is no URL of a seed, OptionError.
        """
        self._place = split_url(url)
        self.url = self._place.url
        self._token, self._seconds = token, seconds
        self._named = ""
        self._context: ssl.SSLContext | None = None
        if self._place.scheme == "https":
            self._context = fork_context(ca)
        elif ca is not None:
            raise OptionError(f"ca is for https://, and {self.url} is read without TLS")

    def manifest(self) -> Manifest:
        """What it offers now. Raises SeedError, ManifestError."""
        found = decode(self._ask("GET", "/v1/manifest", longest=LONGEST_MANIFEST), self.url)
        offers = tuple(self._reached(offer) for offer in found.transports)
        return msgspec.structs.replace(found, transports=offers)

    def _reached(self, offer: Offer) -> Offer:
        """A seed that listens on all addresses does not know by which it is reached."""
        if offer.kind not in _ADDRESSED:
            return offer
        try:
            return Offer(offer.kind, reached(offer.address, self._place.host))
        except RequestError as error:
            raise ManifestError(
                f"{self.url}: the manifest offers {offer.kind} where nobody can be: {error}"
            ) from None

    def ask(self, path: str, longest: int) -> bytes:
        """What is answered to GET of another path than a seed's. Raises SeedError."""
        return self._ask("GET", path, longest=longest)

    def peer(self, key: ModelKey) -> SeedClient:
        """The seed behind this URL that has the key: this one or another rank's. Raises ForkError, SeedError.

        The token goes to no host that somebody named who does not know it: see urls.placed().
        """
        ranks = self._decoded(self._ask("GET", "/v1/ranks", longest=_LONGEST_RANKS), RanksAnswer).ranks
        for rank in ranks:
            if rank.key == key:
                return self._followed(rank) if rank.url else self
        there = what_is_there([rank.key for rank in ranks], key)
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
        return self._decoded(self._ask("POST", "/v1/ranks", msgspec.json.encode(rank)), JoinAnswer)

    def leave(self, instance: str) -> None:
        """It does no more. Raises SeedError."""
        self._ask("DELETE", f"/v1/ranks/{instance}")

    def state(self) -> StateAnswer:
        """Which instance it is, and at which epoch. Raises SeedError."""
        return self._decoded(self._ask("GET", "/v1/state"), StateAnswer)

    def lease(self, seconds: float) -> LeaseAnswer:
        """Raises SeedError, with the time to ask again where that may help."""
        asked = msgspec.json.encode(LeaseRequest(seconds))
        return self._decoded(self._ask("POST", "/v1/leases", asked), LeaseAnswer)

    def renew(self, lease: str, seconds: float, patience: float | None = None) -> LeaseAnswer:
        """The same for longer; ``patience``: seconds that the answer may take. Raises SeedError."""
        asked = msgspec.json.encode(LeaseRequest(seconds))
        return self._decoded(self._ask("POST", f"/v1/leases/{lease}", asked, seconds=patience), LeaseAnswer)

    def release(self, lease: str, seconds: float | None = None) -> None:
        """Gives it back; ``seconds``: how long the answer may take. Raises SeedError."""
        self._ask("DELETE", f"/v1/leases/{lease}", seconds=seconds)

    def _ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        longest: int = _LONGEST_ANSWER,
        seconds: float | None = None,
    ) -> bytes:
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        seconds = seconds or self._seconds
        connection = self._connection(seconds)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            found = answer.read(longest + 1)
        except ssl.SSLCertVerificationError as error:
            raise SeedError(
                f"{self.url} shows a certificate that is not trusted here: {clean(error.verify_message)}; "
                "give the file of who signed it as ca (--ca; SSL_CERT_FILE where there is no such option)"
            ) from None
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            said = clean(str(error)) or type(error).__name__
            scheme, other = ("http", "https") if self._context is None else ("https", "http")
            raise SeedError(
                f"{self.url} cannot be reached: {said}{self._named}; look whether the seed runs, listens on "
                f"an address that this host reaches (host=), and answers at {scheme}://, not {other}://",
                answered=False,
            ) from None
        finally:
            connection.close()
        if len(found) > longest:
            raise SeedError(f"{self.url} answers with more than {longest:,} bytes, which no seed does")
        if answer.status in (200, 204):
            return found
        raise self._refusal(answer.status, found)

    def _connection(self, seconds: float) -> http.client.HTTPConnection:
        _, host, port = self._place
        if self._context is None:
            made = http.client.HTTPConnection(host, port, timeout=seconds)
        else:
            made = http.client.HTTPSConnection(host, port, timeout=seconds, context=self._context)
        made.response_class = functools.partial(_Answer, seconds)  # type: ignore[assignment]
        return made

    def _refusal(self, status: int, body: bytes) -> SeedError:
        if status == 401:
            return SeedError(f"{self.url} does not take this token; give that of the seed")
        try:
            refused = msgspec.json.decode(body, type=RefusedAnswer)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return SeedError(
                f"{self.url} answers with status {status}: it is no seed of this version of tensorlift"
            )
        why = _WHY.get(refused.reason) or quote(refused.reason, 300)[1:-1]
        when = refused.retry_seconds
        return SeedError(
            f"{self.url}: {why}" + ("" if when is None else f"; ask again in {when:.1f} s"),
            retry_seconds=when,
        )

    def _decoded(self, body: bytes, kind: type[_T]) -> _T:
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise SeedError(
                f"{self.url} answers what no seed answers: {quote(body[:60].decode('utf-8', 'replace'))}"
            ) from None
