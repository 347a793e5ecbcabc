"""What is asked over HTTP: one question a connection, an answer that is not waited for for ever."""

from __future__ import annotations

import functools
import http.client
import io
import socket
import ssl
import time
from typing import Any, TypeVar

import msgspec

from tensorlift.errors import OptionError, SeedError
from tensorlift.forking.control import RefusedAnswer
from tensorlift.forking.encryption import Ca, fork_context
from tensorlift.forking.pace import STILL_RATE
from tensorlift.forking.urls import split_url
from tensorlift.format.quoting import clean, plural, quote

__all__ = ["HttpClient"]

_LONGEST_ANSWER = 1 << 20
# Of an answer that is not its body: http.client takes a hundred headers of 64 KiB.
_MOST_AROUND = 8 << 20
# How much longer than an answer may take one is waited for that is long, while it comes.
_MOST_TIMES = 30.0
_BUSY_SECONDS = 1.0
_LONGEST_SHOWN = 300
_WHY = {
    "full": "it has as many readers as it takes",
    "updating": "it updates its weights",
    "closed": "it ends",
    "moved": "one of its tensors has other memory than it offers: begin that seed anew",
    "lapsed": "the lease has lapsed, or the weights have changed since",
}
_T = TypeVar("_T")


class _Timed(io.RawIOBase):
    """A socket's bytes, so many seconds long, and up to ``times`` as long only for as long as more than
    STILL_RATE come; never more than ``most``, whatever they are: lines before an answer and behind it have no
    end of their own.
    """

    def __init__(self, peer: socket.socket, kept: io.IOBase, seconds: float, times: float, most: int) -> None:
        """``kept``: holds the socket open, to close() of this."""
        self._peer, self._kept, self._seconds, self._most = peer, kept, seconds, most
        self._begin, self._came, self._longest = time.monotonic(), 0, times * seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        given = min(self._seconds + self._came / STILL_RATE, self._longest)
        left = self._begin + given - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"only {plural(self._came, 'byte')} of an answer came in {given:.1f} s")
        if self._came > self._most:
            raise ConnectionAbortedError(f"an answer has more than {self._most:,} bytes around its body")
        self._peer.settimeout(min(left, self._seconds))
        came = self._peer.recv_into(buffer)
        self._came += came
        return came

    def close(self) -> None:
        super().close()
        self._kept.close()


class _Answer(http.client.HTTPResponse):
    """One that is not waited for for ever, however it comes."""

    def __init__(
        self, seconds: float, times: float, most: int, peer: socket.socket, *more: Any, **named: Any
    ) -> None:
        super().__init__(peer, *more, **named)
        self.fp = io.BufferedReader(_Timed(peer, self.fp, seconds, times, most))


class HttpClient:
    """One server. Each question is a connection of its own, so threads may ask at once."""

    what = "seed"
    """What answers there, for messages."""
    busy: tuple[int, ...] = ()
    """What the server says by itself, or what stands in front of it, where it has too much to do."""

    def __init__(self, url: str, token: str = "", seconds: float = 10.0, ca: Ca | None = None) -> None:
        """``token``: see checked_token(); ``seconds``: how long an answer may take; ``ca``: whom https:// is
        trusted by.

        Raises RequestError for what is no URL of a seed or registry, OptionError.
        """
        self._endpoint = split_url(url)
        self.url = self._endpoint.url
        self._token, self._seconds = token, seconds
        self._named = ""
        self._context: ssl.SSLContext | None = None
        if self._endpoint.scheme == "https":
            self._context = fork_context(ca)
        elif ca is not None:
            raise OptionError(f"ca is for https://, and {self.url} is read without TLS")

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        longest: int = _LONGEST_ANSWER,
        seconds: float | None = None,
    ) -> bytes:
        """The body of the answer, of at most ``longest`` bytes, in so many ``seconds``; one that may be
        longer than most, while it comes, in more of them. Raises SeedError.
        """
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        if body is not None:
            headers["Content-Type"] = "application/json"
        seconds = seconds or self._seconds
        # A few numbers are there at once or not at all, and who asks for them has others to look after.
        times = _MOST_TIMES if longest > _LONGEST_ANSWER else 1.0
        connection = self._connection(seconds, times, 2 * longest + _MOST_AROUND)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            found = answer.read(longest + 1)
            if answer.length and len(found) <= longest:
                raise ConnectionAbortedError(
                    f"the answer ends after {plural(len(found), 'byte')} of its body"
                )
        except ssl.SSLCertVerificationError as error:
            raise SeedError(
                f"{self.url} shows a certificate that is not trusted here: {clean(error.verify_message)}; "
                "give the file of who signed it as ca (--ca; SSL_CERT_FILE where there is no such option)"
            ) from None
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            # Of what is no HTTP the error has the first line, whole.
            said = quote(str(error), _LONGEST_SHOWN)[1:-1] or type(error).__name__
            scheme, other = ("http", "https") if self._context is None else ("https", "http")
            raise SeedError(
                f"{self.url} cannot be reached: {said}{self._named}; look whether the {self.what} runs, "
                f"listens on an address that this host reaches (host=, --host), and answers at {scheme}://, "
                f"not {other}://",
                answered=False,
            ) from None
        finally:
            connection.close()
        if len(found) > longest:
            raise SeedError(f"{self.url} answers with more than {longest:,} bytes, which no {self.what} does")
        if answer.status in (200, 204):
            return found
        raise self._refusal(answer.status, found)

    def _connection(self, seconds: float, times: float, most: int) -> http.client.HTTPConnection:
        _, host, port = self._endpoint
        if self._context is None:
            made = http.client.HTTPConnection(host, port, timeout=seconds)
        else:
            made = http.client.HTTPSConnection(host, port, timeout=seconds, context=self._context)
        made.response_class = functools.partial(_Answer, seconds, times, most)  # type: ignore[assignment]
        return made

    def _refusal(self, status: int, body: bytes) -> SeedError:
        if status == 401 and not self._token:
            return SeedError(
                f"{self.url} wants a token, and none was given: give that of the {self.what} as token "
                "(--token-file, TENSORLIFT_TOKEN)"
            )
        if status == 401:
            return SeedError(f"{self.url} does not take this token; give that of the {self.what}")
        try:
            refused = msgspec.json.decode(body, type=RefusedAnswer)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            busy = _BUSY_SECONDS if status in self.busy else None
            return SeedError(
                f"{self.url} answers with status {status}: it is no {self.what} of this version of tensorlift"
                + ("" if busy is None else ", or has too much to do"),
                retry_seconds=busy,
            )
        why = _WHY.get(refused.reason) or quote(refused.reason, _LONGEST_SHOWN)[1:-1]
        when = refused.retry_seconds
        return SeedError(
            f"{self.url}: {why}" + ("" if when is None else f"; ask again in {when:.1f} s"),
            retry_seconds=when,
        )

    def decoded(self, body: bytes, kind: type[_T]) -> _T:
        """An answer's body as what it has to be. Raises SeedError."""
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            shown = quote(body[:60].decode("utf-8", "replace"))
            raise SeedError(f"{self.url} answers what no {self.what} answers: {shown}") from None
