"""What a fork asks a seed over HTTP."""

from __future__ import annotations

import http.client
import urllib.parse
from typing import TypeVar

import msgspec

from tensorlift.errors import RequestError, SeedError
from tensorlift.forking.control import LeaseAnswer, LeaseRequest, RefusedAnswer, StateAnswer
from tensorlift.forking.manifest import LONGEST_MANIFEST, Manifest, decode
from tensorlift.format.quoting import clean, quote

__all__ = ["SeedClient"]

_LONGEST_ANSWER = 1 << 20
_WHY = {
    "full": "it has as many readers as it takes",
    "updating": "it updates its weights",
    "closed": "it ends",
    "lapsed": "the lease has lapsed, or the weights have changed since",
}
_T = TypeVar("_T")


class SeedClient:
    """One seed. Each question is a connection of its own, so threads may ask at once."""

    def __init__(self, url: str, token: str = "", seconds: float = 10.0) -> None:
        """``seconds``: how long an answer may take. Raises RequestError for what is no URL of a seed."""
        parts = urllib.parse.urlsplit(url)
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if parts.scheme != "http" or not host or port is None or parts.path.strip("/"):
            raise RequestError(f"{quote(url)} is no URL of a seed; it looks like http://host:port")
        self.url = f"http://{parts.netloc.rpartition('@')[2]}"
        self._host, self._port, self._token, self._seconds = host, port, token, seconds

    def manifest(self) -> Manifest:
        """What it offers now. Raises SeedError, ManifestError."""
        return decode(self._ask("GET", "/v1/manifest", longest=LONGEST_MANIFEST), self.url)

    def state(self) -> StateAnswer:
        """Which instance it is, and at which epoch. Raises SeedError."""
        return self._decoded(self._ask("GET", "/v1/state"), StateAnswer)

    def lease(self, seconds: float) -> LeaseAnswer:
        """Raises SeedError, with the time to ask again where that may help."""
        asked = msgspec.json.encode(LeaseRequest(seconds))
        return self._decoded(self._ask("POST", "/v1/leases", asked), LeaseAnswer)

    def renew(self, lease: str, seconds: float) -> LeaseAnswer:
        """The same for longer. Raises SeedError."""
        asked = msgspec.json.encode(LeaseRequest(seconds))
        return self._decoded(self._ask("POST", f"/v1/leases/{lease}", asked), LeaseAnswer)

    def release(self, lease: str) -> None:
        """Gives it back. Raises SeedError."""
        self._ask("DELETE", f"/v1/leases/{lease}")

    def _ask(
        self, method: str, path: str, body: bytes | None = None, longest: int = _LONGEST_ANSWER
    ) -> bytes:
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._seconds)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            found = answer.read(longest + 1)
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            said = clean(str(error)) or type(error).__name__
            raise SeedError(f"{self.url} cannot be reached: {said}") from None
        finally:
            connection.close()
        if len(found) > longest:
            raise SeedError(f"{self.url} answers with more than {longest:,} bytes, which no seed does")
        if answer.status in (200, 204):
            return found
        raise self._refusal(answer.status, found)

    def _refusal(self, status: int, body: bytes) -> SeedError:
        if status == 401:
            return SeedError(f"{self.url} does not take this token; give that of the seed")
        try:
            refused = msgspec.json.decode(body, type=RefusedAnswer)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return SeedError(
                f"{self.url} answers with status {status}: it is no seed of this version of tensorlift"
            )
        why = _WHY.get(refused.reason, quote(refused.reason))
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
