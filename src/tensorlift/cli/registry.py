"""``tensorlift registry``: who has which weights, for seeds that announce themselves and forks that ask."""

from __future__ import annotations

import contextlib
import json
import resource
from typing import TYPE_CHECKING

import typer

from tensorlift.cli.console import guarded
from tensorlift.cli.interrupts import at_once, until_terminated
from tensorlift.cli.options import AS_JSON, HOST, INSECURE, TLS_CERT, TLS_KEY, TOKEN_FILE
from tensorlift.cli.serving import listening, rest, tls_context
from tensorlift.errors import RequestError
from tensorlift.forking.tokens import token_of

if TYPE_CHECKING:
    from tensorlift.fleet.on_redis import RedisRegistry
    from tensorlift.fleet.table import Table

__all__ = ["command"]


@guarded
def command(
    host: str = HOST,
    port: int = typer.Option(7700, min=0, max=65535, help="Of the URL; 0: one that is free."),
    token_file: str | None = TOKEN_FILE,
    insecure: bool = INSECURE,
    tls_cert: str | None = TLS_CERT,
    tls_key: str | None = TLS_KEY,
    database: str | None = typer.Option(
        None,
        metavar="PATH",
        help="A file that keeps what is known over a restart, or redis://...; else memory alone.",
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Keep a list of seeds by their weights, answer forks that ask for them, and show both on a page."""
    token = token_of(token_file)
    tls = tls_context(tls_cert, tls_key)
    with at_once():
        from tensorlift.fleet.registry_urls import MISSING

        try:
            from tensorlift.fleet.server import RegistryServer
        except ImportError as error:
            raise RequestError(MISSING.format(error.name or error)) from None
    _raise_files()
    with until_terminated():
        known = _known(database)
        try:
            with listening(host, port):
                server = RegistryServer(
                    known, host=host, port=port, token=token or None, insecure=insecure, tls=tls
                )
        except BaseException:
            known.close()
            raise
        with server:
            facts = {"url": server.url, "database": getattr(known, "url", database)}
            print(json.dumps(facts, indent=2) if as_json else f"{server.url}\nCtrl-C ends it", flush=True)
            rest()


def _known(database: str | None) -> Table | RedisRegistry:
    from tensorlift.fleet.registry_urls import is_redis, on_redis
    from tensorlift.fleet.store import Store
    from tensorlift.fleet.table import Table

    if database is not None and is_redis(database):
        return on_redis(database)
    return Table(Store(database))


def _raise_files() -> None:
    """A thousand seeds that renew at once are as many connections."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
