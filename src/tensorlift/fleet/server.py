"""The registry as a server: what seeds and forks ask it over HTTP, a page for people, metrics.

    POST   /v1/seeds           an Announcement -> {"seconds"}
    POST   /v1/seeds/INSTANCE  a Load -> {"seconds"}; 0: it is not known, and has to announce itself
    DELETE /v1/seeds/INSTANCE
    POST   /v1/candidates      {"key", "near", "count", "without"} -> {"urls"}
    POST   /v1/forks           a ForkReport -> {"seconds"}
    GET    /                   the page
    GET    /events             what is new on it, as server-sent events
    GET    /metrics            for Prometheus

With a token every request has to have it: Authorization: Bearer, or, for what is only looked at, Basic, which
browsers ask a person for, with any name. Whoever lacks it is told 401 and nothing else, whatever he asks
for, and sent away (400 for what is no HTTP, 503 where too many are connected). 404: no such seeds; 503: none
has room, or this registry cannot write; 507: it has no room to write; 409: that cannot be announced; 421:
asked on loopback by a name, without a token. All have {"reason", "retry_seconds"} in their body.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hmac
import resource
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from tensorlift.errors import RequestError, SeedError
from tensorlift.fleet import page, registry_metrics
from tensorlift.fleet.contract import (
    LONGEST_BODY,
    Announcement,
    Candidates,
    ForkReport,
    Load,
    Registry,
    Told,
    View,
    Wanted,
)
from tensorlift.fleet.registry_client import front_of
from tensorlift.fleet.store import NotWrittenError
from tensorlift.forking.control import NOT_BY_NAME, RefusedAnswer
from tensorlift.forking.encryption import Tls, seed_context
from tensorlift.forking.keys import check_host, checked_token
from tensorlift.forking.urls import Endpoint, is_rebound, placed

__all__ = ["RegistryServer"]

_HEAD_SECONDS = _BODY_SECONDS = 10.0
_PAGE_SECONDS = 1.0
# A proxy in between may end what says nothing for long.
_SILENT_SECONDS = 15.0
_MOST_CONNECTIONS = 4096
# Who has not shown that he knows the token; and of the descriptors that this process may have.
_MOST_STRANGERS, _STRANGERS_SHARE = 256, 1 / 4
_MOST_PAGES = 64
_GRACE_SECONDS = 2
_T = TypeVar("_T")


class _Strangers(dict[object, asyncio.Transport]):
    """Connections that nobody known has asked by, by whose they are. For one more the oldest goes: else some
    that say nothing would keep all others out.
    """

    def __init__(self) -> None:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = _MOST_STRANGERS
        if limit > 0:  # else there is none
            self._most = min(self._most, int(limit * _STRANGERS_SHARE))

    def come(self, whose: object, transport: asyncio.Transport) -> None:
        """One more."""
        self[whose] = transport
        if len(self) > self._most:
            self.pop(next(iter(self))).close()


class _Protocol(H11Protocol):
    """Who connects and asks nothing is sent away, and who asks nothing whole behind an answer."""

    strangers: ClassVar[_Strangers]
    """Of one server."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.strangers.come(self.client, transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self.strangers.pop(self.client, None)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        # Before what has been asked already begins.
        self._expect_head()
        super().on_response_complete()

    def _expect_head(self) -> None:
        self.loop.call_later(_HEAD_SECONDS, self._look, self.cycle)

    def _look(self, before: object) -> None:
        # Each request is another one.
        if self.cycle is before:
            self.transport.close()


class _Rendered(Generic[_T]):
    """What is made of a view: by a thread, once in so many seconds, and for all who ask meanwhile."""

    def __init__(self, make: Callable[[], _T]) -> None:
        self._make = make
        self._making: asyncio.Task[_T] | None = None
        self._until = 0.0

    async def get(self) -> _T:
        """It, or why there is none."""
        if self._making is None or (self._making.done() and time.monotonic() >= self._until):
            self._making = asyncio.create_task(self._run())
        # Who asked first may leave before the others.
        return await asyncio.shield(self._making)

    async def _run(self) -> _T:
        try:
            return await run_in_threadpool(self._make)
        finally:
            self._until = time.monotonic() + _PAGE_SECONDS


class Viewable(Registry, Protocol):
    """A registry that can be looked at."""

    def view(self) -> View:
        """All that it knows."""


class RegistryServer:
    """Answers at ``url`` from start() until close()."""

    def __init__(
        self,
        registry: Viewable,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        insecure: bool = False,
        tls: Tls | None = None,
    ) -> None:
        """Listens; closes the registry at its end.

        Raises RequestError for an address that others reach without a token, OptionError, OSError where
        nobody can listen there.
        """
        self._token = checked_token(token)
        check_host(host, self._token, insecure, "registry")
        encrypted = seed_context(tls)
        self._registry = registry
        self._content = _Rendered(lambda: page.content(registry.view()))
        self._exposed = _Rendered(lambda: registry_metrics.exposition(registry.view()))
        self._socket = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=1024
        )
        # For all that it accepts; asyncio does so only for sockets made in another way. An answer is two
        # writes, and the second would wait for the peer's word of the first, 40 ms on a kept connection.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        address, port = self._socket.getsockname()[:2]
        self.url = Endpoint("http" if encrypted is None else "https", address, port).url
        self._strangers = _Strangers()
        protocol = type("_Protocol", (_Protocol,), {"strangers": self._strangers})
        config = uvicorn.Config(
            self._app(), log_config=None, access_log=False, lifespan="off", ws="none", proxy_headers=False,
            server_header=False, http=protocol, loop="asyncio", limit_concurrency=_MOST_CONNECTIONS,
            timeout_graceful_shutdown=_GRACE_SECONDS,
        )  # fmt: skip
        config.load()
        config.ssl = encrypted
        self._server = uvicorn.Server(config)
        self._pages = 0
        self._thread = threading.Thread(
            target=self._server.run,
            kwargs={"sockets": [self._socket]},
            name="tensorlift-registry",
            daemon=True,
        )

    def start(self) -> None:
        """Answers from now on, on a thread of its own."""
        self._thread.start()

    def close(self) -> None:
        """Answers what was asked, and ends."""
        self._server.should_exit = True
        if self._thread.ident is not None:
            self._thread.join()
        self._socket.close()
        self._registry.close()

    def __enter__(self) -> RegistryServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _app(self) -> ASGIApp:
        told, seen = self._told, self._seen
        app = Starlette(
            routes=[
                Route("/v1/seeds", told(Announcement, self._announce), methods=["POST"]),
                Route("/v1/seeds/{instance}", told(Load, self._renew), methods=["POST"]),
                Route("/v1/seeds/{instance}", told(None, self._withdraw), methods=["DELETE"]),
                Route("/v1/candidates", told(Wanted, self._candidates), methods=["POST"]),
                Route("/v1/forks", told(ForkReport, self._report), methods=["POST"]),
                Route("/", seen(self._page), methods=["GET"]),
                Route("/events", seen(self._events), methods=["GET"]),
                Route("/metrics", seen(self._metrics), methods=["GET"]),
            ]
        )

        async def for_friends(scope: Scope, receive: Receive, send: Send) -> None:
            # Before anything else, so that a stranger does not learn what there is to ask for.
            request = Request(scope)
            answer = app if self._is_known(request) else _stranger()
            if answer is app:
                self._strangers.pop(scope["client"], None)
            if not self._token and is_rebound(request.headers.get("host", ""), self.url):
                answer = _json(421, RefusedAnswer(NOT_BY_NAME))
            await answer(scope, receive, send)

        return for_friends

    def _told(self, kind: Any, act: Callable[..., object]) -> Callable[[Request], Awaitable[Response]]:
        """For what changes something: on a thread, for it may wait for a disk."""

        async def answer(request: Request) -> Response:
            try:
                given = [] if kind is None else [msgspec.json.decode(await _body(request), type=kind)]
                found = await run_in_threadpool(act, *given, request)
            except Exception as error:  # noqa: BLE001 - what is none of these goes on
                return _refused(error)
            return Response(status_code=204) if found is None else _json(200, found)

        return answer

    def _seen(
        self, act: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """For what is only looked at."""

        async def answer(request: Request) -> Response:
            try:
                return await act(request)
            except Exception as error:  # noqa: BLE001 - what is none of these goes on
                return _refused(error)

        return answer

    def _is_known(self, request: Request) -> bool:
        """A page of somebody else can have a browser send what Basic has, so that it changes nothing."""
        if not self._token:
            return True
        scheme, _, given = request.headers.get("authorization", "").encode("latin-1").partition(b" ")
        is_basic = scheme == b"Basic" and request.method in ("GET", "HEAD")
        if is_basic:
            with contextlib.suppress(binascii.Error):
                given = base64.b64decode(given, validate=True).partition(b":")[2]
        # Browsers write it in UTF-8, what asks as seeds do in Latin-1.
        same = [hmac.compare_digest(given, self._token.encode(code)) for code in ("latin-1", "utf-8")]
        return (is_basic or scheme == b"Bearer") and any(same)

    def _announce(self, seed: Announcement, request: Request) -> Told:
        assert request.client is not None
        url = placed(seed.url, front_of(self.url, seed.url), request.client.host, bool(self._token))
        return Told(self._registry.announce(msgspec.structs.replace(seed, url=url)))

    def _renew(self, load: Load, request: Request) -> Told:
        return Told(self._registry.renew(request.path_params["instance"], load) or 0.0)

    def _withdraw(self, request: Request) -> None:
        self._registry.withdraw(request.path_params["instance"])

    def _candidates(self, wanted: Wanted, request: Request) -> Candidates:
        found = self._registry.candidates(wanted.key, wanted.near, wanted.count, wanted.without)
        return Candidates(tuple(found))

    def _report(self, fork: ForkReport, request: Request) -> Told:
        return Told(self._registry.report(fork))

    async def _page(self, request: Request) -> Response:
        return Response(page.whole(await self._content.get()), media_type="text/html", headers=page.HEADERS)

    async def _events(self, request: Request) -> Response:
        if self._pages >= _MOST_PAGES:
            return _json(503, RefusedAnswer(f"{_MOST_PAGES} pages are open already", 10.0))
        return StreamingResponse(
            self._news(request), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
        )

    async def _news(self, request: Request) -> AsyncIterator[str]:
        before, silent = "", 0.0
        self._pages += 1
        try:
            while not (self._server.should_exit or await request.is_disconnected()):
                # A registry behind this one that is down for a moment is no end.
                with contextlib.suppress(SeedError):
                    now = await self._content.get()
                    if now != before:
                        before, silent = now, 0.0
                        yield page.event(now)
                if silent >= _SILENT_SECONDS:
                    silent = 0.0
                    yield ":\n\n"
                silent += _PAGE_SECONDS
                await asyncio.sleep(_PAGE_SECONDS)
        finally:
            self._pages -= 1

    async def _metrics(self, request: Request) -> Response:
        text = await self._exposed.get()
        if text is None:
            return Response(registry_metrics.MISSING, 404, media_type="text/plain")
        return Response(text, headers={"Content-Type": registry_metrics.CONTENT_TYPE})


async def _body(request: Request) -> bytes:
    """Raises RequestError for one that is too long, or comes too slowly."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        # A page of somebody else cannot have a browser send this without asking first.
        raise RequestError("expected Content-Type: application/json")
    try:
        return await asyncio.wait_for(_read(request), _BODY_SECONDS)
    except asyncio.TimeoutError:
        raise RequestError(f"a body has to come in {_BODY_SECONDS:g} s") from None
    except ClientDisconnect:
        raise RequestError("the connection was closed") from None


async def _read(request: Request) -> bytes:
    found = b""
    async for part in request.stream():
        found += part
        if len(found) > LONGEST_BODY:
            raise RequestError(f"a body has at most {LONGEST_BODY:,} bytes")
    return found


def _refused(error: Exception) -> Response:
    """Raises what is a bug."""
    if isinstance(error, SeedError):
        when = error.retry_seconds
        return _json(404 if when is None else 503, RefusedAnswer(str(error), when))
    if isinstance(error, NotWrittenError):
        return _json(507 if error.full else 503, RefusedAnswer(str(error)))
    if isinstance(error, RequestError):
        return _json(409, RefusedAnswer(str(error)))
    if isinstance(error, (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)):
        return _json(400, RefusedAnswer(f"the body is not what is wanted here: {error}"))
    raise error


def _json(status: int, found: object, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(found), status, headers, "application/json")


def _stranger() -> Response:
    challenge = 'Basic realm="tensorlift registry: any name, and the token", charset="UTF-8"'
    return Response(status_code=401, headers={"WWW-Authenticate": challenge, "Connection": "close"})
