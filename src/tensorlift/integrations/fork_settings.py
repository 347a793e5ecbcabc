"""What an extra configuration says about running instances: whom to fork from, and whether to be a seed.

No torch in here, nor what needs it, unless one of these settings is given: this runs while arguments are
parsed.
"""

from __future__ import annotations

import dataclasses
import urllib.parse
from collections.abc import Mapping
from typing import Any

from tensorlift.errors import OptionError, RequestError
from tensorlift.forking.keys import checked_token
from tensorlift.forking.throttle import parse_limit
from tensorlift.forking.tokens import token_of
from tensorlift.forking.urls import split_url
from tensorlift.format.nearest import nearest
from tensorlift.format.quoting import quote

__all__ = ["NAMES", "ForkSettings", "Publish", "parse_forks"]

NAMES = ("seed", "registry", "fallback", "token", "limit", "publish", "devices", "transports")
"""The settings of an extra configuration that are read here."""


@dataclasses.dataclass(frozen=True, slots=True)
class Publish:
    """Where this instance offers its weights."""

    host: str = "127.0.0.1"
    port: int = 0
    insecure: bool = False
    """Others may reach it without a token."""
    front: str = ""
    """The URL under which rank 0 is reached by the other ranks, where that is not ``host``."""

    @property
    def front_url(self) -> str:
        """What the other ranks join."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return self.front or f"http://{f'[{host}]' if ':' in host else host}:{self.port}"


@dataclasses.dataclass(frozen=True, slots=True)
class ForkSettings:
    """All of it, checked."""

    seed: tuple[str, ...] = ()
    # Passwords may be in it: see ``where``.
    registry: str | tuple[str, ...] | None = dataclasses.field(default=None, repr=False)
    fallback: bool = True
    """What a fork cannot bring is loaded from files; without, it ends the start."""
    token: str | None = dataclasses.field(default=None, repr=False)
    limit: str | None = None
    publish: Publish | None = None
    devices: tuple[str, ...] | None = None
    transports: tuple[str, ...] | None = None

    @property
    def forks(self) -> bool:
        """Whether weights come from a running instance, where there is one."""
        return bool(self.seed) or self.registry is not None

    @property
    def where(self) -> str:
        """Whom a fork asks, for messages."""
        registry = [self.registry] if isinstance(self.registry, str) else self.registry or ()
        return ", ".join(self.seed) or f"the registry {', '.join(map(_without_secrets, registry))}"

    def shared(self) -> dict[str, Any]:
        """What ``tensorlift.seed`` and ``tensorlift.fork`` both take, as far as it was given."""
        given = {
            "token": self.token,
            "registry": list(self.registry) if isinstance(self.registry, tuple) else self.registry,
            "devices": self.devices,
            "transports": self.transports,
        }
        return {name: value for name, value in given.items() if value is not None}

    def check_ranks(self, ranks: int) -> None:
        """OptionError where so many ranks cannot stand behind one URL."""
        if self.publish is not None and ranks > 1 and not self.publish.port:
            raise OptionError(
                f"publish: with {ranks} ranks the others have to know where rank 0 is: give a port, such as "
                '{"port": 7000}'
            )


def _without_secrets(url: str) -> str:
    """Scheme, host and port of a registry's URL; of what has none of them, the scheme alone."""
    try:
        parts = urllib.parse.urlsplit(url)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2], path="", query="", fragment="").geturl()
    except ValueError:
        return url.partition(":")[0]


def parse_forks(given: Mapping[str, Any]) -> ForkSettings:
    """The settings of NAMES in an extra configuration, without those that are null. Raises OptionError."""
    given = {name: given[name] for name in NAMES if given.get(name) is not None}
    if not given:
        return ForkSettings()
    try:
        return _parsed(given)
    except RequestError as error:
        raise OptionError(str(error)) from None


def _parsed(given: Mapping[str, Any]) -> ForkSettings:
    seed, registry = _texts(given, "seed") or (), given.get("registry")
    for url in seed:
        split_url(url)
    if registry is not None and not isinstance(registry, str):
        registry = _texts(given, "registry")
    fallback = given.get("fallback", True)
    if not isinstance(fallback, bool):
        raise OptionError(f"fallback is {quote(fallback)}; expected true or false: the files are the model's")
    if "fallback" in given and not seed and registry is None:
        raise OptionError("fallback is for a fork: name a seed or a registry")
    transports = _texts(given, "transports")
    if transports is not None:
        from tensorlift.forking.transports import check_transports

        transports = check_transports(transports)
    token = checked_token(given.get("token")) or token_of() or None
    limit = given.get("limit")
    parse_limit(limit, "limit", lambda: 1e9)
    publish = _publish(given.get("publish"))
    if publish is not None:
        from tensorlift.forking.keys import check_host

        check_host(publish.host, token or "", publish.insecure)
    return ForkSettings(seed, registry, fallback, token, limit, publish, _texts(given, "devices"), transports)


def _texts(given: Mapping[str, Any], name: str) -> tuple[str, ...] | None:
    value = given.get(name)
    if value is None:
        return None
    found = (value,) if isinstance(value, str) else value
    if not isinstance(found, list | tuple) or not found or not all(isinstance(one, str) for one in found):
        raise OptionError(f"{name} is {quote(value)}; expected a text, or a list of some")
    return tuple(found)


def _publish(value: object) -> Publish | None:
    if value is None or value is False:
        return None
    if value is True:
        return Publish()
    if not isinstance(value, Mapping):
        raise OptionError(
            f'publish is {quote(value)}; expected true, false, or an object such as {{"port": 7000}}'
        )
    known = {field.name: field.type for field in dataclasses.fields(Publish)}
    kinds = {"str": (str, "a text"), "int": (int, "a whole number"), "bool": (bool, "true or false")}
    for name, one in value.items():
        if name not in known:
            close = nearest(str(name), list(known), 1)
            hint = f"did you mean {close[0]}?" if close else f"the known ones are {', '.join(known)}"
            raise OptionError(f"publish: unknown setting {quote(name)}; {hint}")
        kind, told = kinds[str(known[name])]
        if not isinstance(one, kind) or (kind is int and isinstance(one, bool)):
            raise OptionError(f"publish: {name} is {quote(one)}; expected {told}")
    made = Publish(**value)
    if not 0 <= made.port <= 65535:
        raise OptionError(f"publish: port is {made.port}; expected a number up to 65535, or 0 for a free one")
    if made.front:
        split_url(made.front)
    return made
