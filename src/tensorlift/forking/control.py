"""What a seed says over HTTP: its manifest, and leases. Weights never pass here.

    GET    /v1/manifest       gzip
    GET    /v1/state          {"instance", "epoch"}
    POST   /v1/leases         {"seconds"} -> {"id", "epoch", "seconds"}
    POST   /v1/leases/ID      the same, for longer
    DELETE /v1/leases/ID
    GET    /v1/ranks          {"ranks": [{"key", "url"}, ...]}: what is behind this URL; its own has no url
    POST   /v1/ranks          {"instance", "key", "url"} -> {"seconds"}: another rank's, known for so long
    DELETE /v1/ranks/INSTANCE
    GET    /metrics           for Prometheus
    GET    /get_remote_instance_transfer_engine_info?rank=N    for SGLang: see sglang_protocol_answer.py

With a token every request has to have it (Authorization: Bearer), and whoever lacks it is told 401 and
nothing else. 429: too many readers; 503: weights are being updated; both have a Retry-After. 410: the seed
ends, or the lease has lapsed; 409: that rank cannot stand behind this URL; 421: asked on loopback by a name,
without a token, as by a page of somebody else in a browser; 415: a POST that is not application/json, or
a GET as SGLang's, as such a page sends too. All six have {"reason", "retry_seconds"} in their body.
"""

from __future__ import annotations

import hmac
import http
import io
import math
import socket
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from tensorlift.errors import RequestError
from tensorlift.forking import metrics
from tensorlift.forking.leases import LeaseRefusedError
from tensorlift.forking.ranks import JoinAnswer, JoinRequest, Rank, RanksAnswer
from tensorlift.forking.sglang_protocol_answer import rank_of
from tensorlift.forking.urls import is_rebound, placed

if TYPE_CHECKING:
    from tensorlift.forking.seed import Seed

__all__ = ["NOT_BY_NAME", "LeaseAnswer", "LeaseRequest", "RefusedAnswer", "StateAnswer", "talk"]

# For all of a connection's first request, by whoever sends it, and between two.
_FIRST_SECONDS, _IDLE_SECONDS = 5.0, 30.0
_LONGEST_BODY = 4096
_LEASES, _RANKS = "/v1/leases", "/v1/ranks"
NOT_BY_NAME = "without a token it is asked on loopback by its address or as localhost, not by another name"
_STATUS = {"full": 429, "updating": 503, "closed": 410, "moved": 410, "lapsed": 410}


_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class LeaseRequest(msgspec.Struct):
    """What a fork asks for."""

    seconds: float = 60.0


class LeaseAnswer(msgspec.Struct):
    """What it gets."""

    id: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$", max_length=32)]
    epoch: int
    seconds: _Seconds


class RefusedAnswer(msgspec.Struct):
    """Why there is no lease; see LeaseRefusedError."""

    reason: str
    retry_seconds: _Seconds | None = None


class StateAnswer(msgspec.Struct):
    """What a seed is at."""

    instance: str
    epoch: int


def talk(peer: socket.socket, seed: Seed, known: Callable[[], None] = lambda: None) -> None:
    """One connection, to its end. ``known``: called when it is no stranger's."""
    _Handler(peer, peer.getpeername(), seed, known)


class _Arriving(io.RawIOBase):
    """A peer's bytes, in as many seconds as it was given for all of them."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        self.give(_FIRST_SECONDS)

    def give(self, seconds: float) -> None:
        """From now on, so many."""
        self._end = time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("a request takes too long")
        self._peer.settimeout(left)
        return self._peer.recv_into(buffer)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "tensorlift", ""
    timeout = _IDLE_SECONDS
    # An answer is two writes, and the second would wait for the peer's word of the first, 40 ms on a kept
    # connection.
    disable_nagle_algorithm = True

    def __init__(self, peer: socket.socket, address: Any, seed: Seed, known: Callable[[], None]) -> None:
        self.seed, self._known = seed, known
        super().__init__(peer, address, None)  # type: ignore[arg-type]

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._arriving = _Arriving(self.connection)
        self.rfile = io.BufferedReader(self._arriving)

    def handle_one_request(self) -> None:
        super().handle_one_request()
        self._arriving.give(_IDLE_SECONDS)

    def log_message(self, *_: object) -> None:
        """Nothing: a request has the token in it, and a seed is somebody else's process."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """For what is no request: said before anybody could ask who sends it."""
        self._send(401 if self.seed.token else code, close=True)

    def handle_expect_100(self) -> bool:
        """A stranger is not asked to go on."""
        if self._is_known():
            return super().handle_expect_100()
        self._refuse()
        return False

    def do_GET(self) -> None:
        self._answered(self._get)

    def do_POST(self) -> None:
        self._answered(self._post)

    def do_DELETE(self) -> None:
        self._answered(self._delete)

    def _answered(self, answer: Any) -> None:
        if not self._is_known():
            self._refuse()
            return
        if not self.seed.token and is_rebound(self.headers.get("Host", ""), self.seed.url):
            self._send(421, msgspec.json.encode(RefusedAnswer(NOT_BY_NAME)), close=True)
            return
        self._known()
        try:
            answer()
        except LeaseRefusedError as refused:
            seconds = refused.retry_seconds
            more = {} if seconds is None else {"Retry-After": str(math.ceil(seconds))}
            body = msgspec.json.encode(RefusedAnswer(refused.reason, seconds))
            self._send(_STATUS[refused.reason], body, more)
        except RequestError as refused:
            self._send(409, msgspec.json.encode(RefusedAnswer(str(refused))))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self._send(400, b"the body is not what is wanted here", close=True)

    def _refuse(self) -> None:
        self._send(401, more={"WWW-Authenticate": "Bearer"}, close=True)

    def _is_known(self) -> bool:
        if not self.seed.token:
            return True
        given = self.headers.get("Authorization", "")
        return hmac.compare_digest(
            given.encode("utf-8", "replace"), b"Bearer " + self.seed.token.encode("utf-8")
        )

    def _get(self) -> None:
        if self.path == "/v1/state":
            self._send(200, msgspec.json.encode(self.seed.state()))
        elif self.path == "/v1/manifest":
            self._send(200, self.seed.manifest(), {"Content-Encoding": "gzip"})
        elif self.path == _RANKS:
            self._send(200, msgspec.json.encode(RanksAnswer(self.seed.ranks.ranks(time.monotonic()))))
        elif self.path == "/metrics":
            text = metrics.exposition(self.seed.key, self.seed.instance, self.seed.stats())
            if text is None:
                self._send(404, metrics.MISSING.encode())
            else:
                self._send(200, text, {"Content-Type": metrics.CONTENT_TYPE})
        elif (rank := rank_of(self.path)) is not None:
            self._sglang(rank)
        else:
            self._send(404)

    def _sglang(self, rank: int) -> None:
        if self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            # It is given a lease, and a page of somebody else can have a browser ask, for an image say.
            refused = RefusedAnswer("asked by a page of somebody else")
            self._send(415, msgspec.json.encode(refused), close=True)
            return
        found = self.seed.sglang(rank)
        if isinstance(found, str):
            self._send(307, more={"Location": f"{found}{self.path}"})
        elif found is None:
            error = {"error": {"message": f"there is no rank {rank} here that Mooncake offers"}}
            self._send(400, msgspec.json.encode(error))
        else:
            self._send(200, msgspec.json.encode(found), {"Content-Type": "application/json"})

    def _post(self) -> None:
        length = self.headers.get("Content-Length", "")
        # int() refuses what is too long in its own way.
        is_number = length.isascii() and length.isdigit() and len(length) < 10
        if not (is_number and int(length) <= _LONGEST_BODY):
            refused = RefusedAnswer(f"a request has a Content-Length of at most {_LONGEST_BODY:,} bytes")
            self._send(413, msgspec.json.encode(refused), close=True)
            return
        if self.headers.get_content_type() != "application/json":
            # A page of somebody else cannot have a browser send this without asking first.
            refused = RefusedAnswer("expected Content-Type: application/json")
            self._send(415, msgspec.json.encode(refused), close=True)
            return
        body = self.rfile.read(int(length))
        base, _, id = self.path.rpartition("/")
        if self.path == _RANKS:
            self._join(msgspec.json.decode(body, type=JoinRequest))
            return
        if self.path == _LEASES:
            answer = self.seed.grant(msgspec.json.decode(body, type=LeaseRequest).seconds)
        elif base == _LEASES:
            answer = self.seed.renew(id, msgspec.json.decode(body, type=LeaseRequest).seconds)
        else:
            self._send(404)
            return
        self._send(200, msgspec.json.encode(answer))

    def _join(self, asked: JoinRequest) -> None:
        url = placed(asked.url, self.seed.url, self.client_address[0], bool(self.seed.token))
        seconds = self.seed.ranks.put(asked.instance, Rank(asked.key, url), time.monotonic())
        self._send(200, msgspec.json.encode(JoinAnswer(seconds)))

    def _delete(self) -> None:
        base, _, id = self.path.rpartition("/")
        if base == _LEASES:
            self.seed.release(id)
        elif base == _RANKS:
            self.seed.ranks.drop(id)
        else:
            self._send(404)
            return
        self._send(204)

    def _send(
        self, status: int, body: bytes = b"", more: dict[str, str] | None = None, close: bool = False
    ) -> None:
        self.connection.settimeout(self.timeout)
        self.send_response(status, http.HTTPStatus(status).phrase)
        for name, value in (more or {}).items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        if close:
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        self.wfile.write(body)
