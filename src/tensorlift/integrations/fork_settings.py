"""What an extra configuration says about running instances: whom to fork from, and whether to be a seed.

No torch in here, nor what needs it, unless one of these settings is given: this runs while arguments are
parsed. What a user can have got wrong is refused then: behind that, what fails is the surroundings' and has
files stand in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tensorlift.errors import OptionError, RequestError
from tensorlift.forking.keys import check_host, checked_token
from tensorlift.forking.throttle import parse_limit
from tensorlift.forking.tokens import token_of
from tensorlift.forking.urls import Endpoint, split_url
from tensorlift.format.nearest import nearest
from tensorlift.format.quoting import kinds, quote, without_secrets
from tensorlift.options import parse_count, parse_port, parse_seconds, parse_switch

__all__ = ["NAMES", "ForkSettings", "Publish", "parse_forks", "unknown"]


@dataclasses.dataclass(frozen=True, slots=True)
class Publish:
    """Where this instance offers its weights."""

    host: str = "127.0.0.1"
    port: int = 0
    insecure: bool = False
    """Others may reach it without a token."""
    front: str = ""
    """The URL under which rank 0 is reached by the other ranks, where that is not ``host``."""
    readers: int | None = None
    """Forks at once."""
    tls: tuple[str, ...] | None = None
    """Files of certificates and of their key."""

    @property
    def front_url(self) -> str:
        """What the other ranks join."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return self.front or Endpoint("http" if self.tls is None else "https", host, self.port).url


@dataclasses.dataclass(frozen=True, slots=True)
class ForkSettings:
    """All of it, checked."""

    seed: tuple[str, ...] = ()
    # Passwords may be in it: see ``where``.
    registry: str | tuple[str, ...] | None = dataclasses.field(default=None, repr=False)
    fallback: bool = True
    """What a fork cannot bring is loaded from files; without, it ends the start."""
    token: str | None = dataclasses.field(default=None, repr=False)
    ca: str | None = None
    """The file of whom seeds and registries at https:// are trusted by."""
    limit: str | None = None
    publish: Publish | None = None
    devices: tuple[str, ...] | None = None
    transports: tuple[str, ...] | None = None
    protocol: str | None = None
    place: str | None = None
    wait: float | None = None
    seeds: int | None = None

    @property
    def forks(self) -> bool:
        """Whether weights come from a running instance, where there is one."""
        return bool(self.seed) or self.registry is not None

    @property
    def asks(self) -> bool:
        """Whether a registry says from which; else it is for announcing this instance alone."""
        return self.registry is not None and not self.seed

    @property
    def where(self) -> str:
        """Whom a fork asks, for messages."""
        registry = [self.registry] if isinstance(self.registry, str) else self.registry or ()
        return ", ".join(self.seed) or f"the registry {', '.join(map(without_secrets, registry))}"

    def to_fork(self) -> dict[str, Any]:
        """Arguments of ``tensorlift.fork``, as far as they were given."""
        whom = (
            {"registry": self._registry, "place": self.place, "wait": self.wait, "seeds": self.seeds}
            if self.asks
            else {"source": list(self.seed)}
        )
        # A share is one of NICs here, and a seed's is of the network's rate where there are none.
        limit = None if _is_share(self.limit) and not _with_nics(self.transports) else self.limit
        return _given({**whom, **self._shared(), "ca": self.ca, "limit": limit})

    def to_seed(self, publish: Publish, join: str | None) -> dict[str, Any]:
        """Arguments of ``tensorlift.seed``, as far as they were given, but its ``port``.

        join: the URL of rank 0's, for another one.
        """
        joins = {"join": join, "ca": self.ca if join and join.startswith("https:") else None}
        known = self._announced()
        own = {name: getattr(publish, name) for name in ("host", "insecure", "readers", "tls")}
        return _given({**joins, **known, **own, **self._shared(), "limit": self.limit})

    @property
    def _registry(self) -> str | list[str] | None:
        return list(self.registry) if isinstance(self.registry, tuple) else self.registry

    def _announced(self) -> dict[str, Any]:
        """Nothing where the registry is a list of seeds: that is for forks alone."""
        from tensorlift.fleet.registry_urls import is_list

        if self.registry is None or is_list(self.registry):
            return {}
        ca = self.ca if str(self.registry).startswith("https:") else None
        return {"registry": self.registry, "place": self.place, "registry_ca": ca}

    def _shared(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("token", "devices", "transports", "protocol")}

    def check_engine(
        self, engine: str, arguments: Any, ranks: int, alone: Iterable[tuple[str, object]]
    ) -> None:
        """OptionError for what cannot be offered with these arguments of an engine.

        alone: arguments with which weights move between ranks or are there more than once, and their values
        without.
        """
        if self.publish is None:
            return
        if ranks > 1 and not self.publish.port:
            raise OptionError(
                f"publish: with {ranks} ranks the others have to know where rank 0 is: give a port, such as "
                '{"port": 7000}'
            )
        for name, without in alone:
            if getattr(arguments, name, without) not in (without, None):
                raise OptionError(
                    f"{engine}: publish does not go with {name}: leave one of the two out (weights move "
                    "between replicas while they serve, or are there more than once)"
                )


def unknown(name: str, known: Iterable[str]) -> str:
    """For a message about a setting that there is not."""
    known = sorted(known)
    close = nearest(name, known, 1)
    hint = f"did you mean {close[0]}?" if close else f"the known ones are {', '.join(known)}"
    return f"unknown setting {quote(name)}; {hint}"


def parse_forks(given: Mapping[str, Any]) -> ForkSettings:
    """The settings of NAMES in an extra configuration, without those that are null. Raises OptionError."""
    if not (given := _given({name: given.get(name) for name in NAMES})):
        return ForkSettings()
    try:
        made = ForkSettings(**{name: _PARSERS[name](value, name) for name, value in given.items()})
        made = dataclasses.replace(made, token=made.token or token_of() or None)
        _check_use(made, given)
        _check_trust(made)
    except RequestError as error:
        raise OptionError(str(error)) from None
    return made


def _check_use(made: ForkSettings, given: Mapping[str, Any]) -> None:
    """OptionError for what would have no effect, or none but an error."""
    if "fallback" in given and not made.forks:
        raise OptionError("fallback is for a fork: name a seed or a registry")
    if not made.forks and made.publish is None:
        for name in ("token", "limit", "devices", "transports", "protocol"):
            if name in given:
                raise OptionError(
                    f"{name} is for a fork or a seed: name a seed or a registry, or publish, or leave it out"
                )
    if made.seed and made.registry is not None and made.publish is None:
        raise OptionError(
            "registry is for a fork for which seed names no instances, or for a seed to be announced: leave "
            "seed or registry out, or publish"
        )
    if made.place is not None and made.registry is None:
        raise OptionError("place is for a registry, and none is named")
    for name in ("wait", "seeds"):
        if name in given and not made.asks:
            raise OptionError(f"{name} is for a fork that asks a registry, and here {_whom(made)}")
    _check_ways(made)


def _check_ways(made: ForkSettings) -> None:
    """OptionError for what ``fork`` would refuse, and have files stand in, or ``seed``, behind the load."""
    transports, protocol = made.transports or ("shm", "tcp"), made.protocol or ""
    if protocol and not _with_nics(transports):
        raise OptionError(
            f"protocol is {quote(protocol)}, and no transport here ({', '.join(transports)}) takes one; name "
            "mooncake or nixl in transports, or leave protocol out"
        )
    if not (_with_nics(transports) or made.devices or _is_share(made.limit)):
        return
    from tensorlift.forking.ways import ways_of

    # Where there are no NICs a share is the seed's alone.
    if made.forks and (made.publish is None or _with_nics(transports)):
        ways_of(transports, made.devices, protocol, made.limit)
    if made.publish is not None:
        ways_of(transports, made.devices, protocol, made.limit, host=made.publish.host)


def _whom(made: ForkSettings) -> str:
    return "seed names instances" if made.seed else "none is named"


def _check_trust(made: ForkSettings) -> None:
    """OptionError, RequestError for whom a fork or a seed could not talk to, or should not."""
    token, ca, publish = made.token or "", made.ca, made.publish
    if made.forks or ca is not None:
        from tensorlift.fleet.contract import near_of
        from tensorlift.fleet.registry_urls import registry_of
        from tensorlift.forking.encryption import fork_context
        from tensorlift.forking.http_client import HttpClient

        context = None if ca is None else fork_context(ca)
        for url in made.seed:
            HttpClient(url, token, ca=context)
        if (registry := made._registry) is not None:
            near_of(made.place)
            registry_of(registry, token, context).close()
        elif not made.forks and not (publish and publish.front_url.startswith("https:")):
            raise OptionError("ca is for seeds and registries at https://, and none is named")
    if publish is not None:
        check_host(publish.host, token, publish.insecure)
        if (publish.tls is not None) != publish.front_url.startswith("https:"):
            raise OptionError("publish: front has to be https:// with tls, and http:// without")


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _is_share(limit: str | None) -> bool:
    return limit is not None and limit.strip().endswith("%")


def _with_nics(transports: Iterable[str] | None) -> bool:
    return any(kind not in ("memory", "shm", "tcp") for kind in transports or ())


def _text(value: object, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise OptionError(f"{name} is {kinds(value)}; expected a text")
    return value


def _texts(value: object, name: str) -> tuple[str, ...]:
    found = (value,) if isinstance(value, str) else value
    if not isinstance(found, list | tuple) or not found or not all(isinstance(one, str) for one in found):
        raise OptionError(f"{name} is {kinds(value)}; expected a text, or a list of some")
    return tuple(found)


def _seed(value: object, name: str) -> tuple[str, ...]:
    return tuple(split_url(one).url for one in _texts(value, name))


def _registry(value: object, name: str) -> str | tuple[str, ...]:
    return value if isinstance(value, str) else _texts(value, name)


def _transports(value: object, name: str) -> tuple[str, ...]:
    from tensorlift.forking.transports import check_transports

    if "memory" in (found := check_transports(_texts(value, name))):
        raise OptionError(f"{name} has memory, which is for a seed and a fork in one process; leave it out")
    return found


def _limit(value: object, name: str) -> str:
    parse_limit(value, name, lambda: 1e9)
    return str(value)


def _seeds(value: object, name: str) -> int:
    from tensorlift.fleet.contract import MOST_CANDIDATES

    return parse_count(value, name, MOST_CANDIDATES)


def _tls(value: object, name: str) -> tuple[str, ...]:
    from tensorlift.forking.encryption import seed_context

    found: Any = _texts(value, name)
    seed_context(found)
    return tuple(found)


def _publish(value: object, name: str) -> Publish | None:
    if isinstance(value, bool):
        return Publish() if value else None
    if not isinstance(value, Mapping):
        raise OptionError(
            f'{name} is {quote(value)}; expected true, false, or an object such as {{"port": 7000}}'
        )
    for one in value:
        if one not in _PUBLISH_PARSERS:
            raise OptionError(f"{name}: {unknown(str(one), _PUBLISH_PARSERS)}")
    return Publish(
        **{one: _PUBLISH_PARSERS[one](got, f"{name}: {one}") for one, got in _given(value).items()}
    )


_Parse = Callable[[object, str], Any]
_PUBLISH_PARSERS: Mapping[str, _Parse] = {
    "host": _text,
    "port": parse_port,
    "insecure": parse_switch,
    "front": lambda value, name: split_url(_text(value, name)).url,
    "readers": parse_count,
    "tls": _tls,
}
_PARSERS: Mapping[str, _Parse] = {
    "seed": _seed,
    "registry": _registry,
    "fallback": parse_switch,
    "token": lambda value, name: checked_token(value),  # type: ignore[arg-type]
    "ca": _text,
    "limit": _limit,
    "publish": _publish,
    "devices": _texts,
    "transports": _transports,
    "protocol": _text,
    "place": _text,
    "wait": parse_seconds,
    "seeds": _seeds,
}
NAMES = tuple(_PARSERS)
"""The settings of an extra configuration that are read here."""
