"""A registry by its name, as options and configurations have it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tensorlift.errors import OptionError, RequestError
from tensorlift.fleet.contract import Registry
from tensorlift.fleet.lists import listed_names, listed_seeds, listed_urls
from tensorlift.fleet.registry_client import RegistryClient
from tensorlift.forking.encryption import Ca
from tensorlift.forking.urls import split_url
from tensorlift.format.quoting import kinds, quote, without_secrets

if TYPE_CHECKING:
    from tensorlift.fleet.on_redis import RedisRegistry

__all__ = ["FORMS", "MISSING", "announced_at", "is_list", "is_redis", "on_redis", "registry_of"]

FORMS = "http(s)://host:port, redis://host:port, file:/path.json, dns://name:port, or a list of seeds' URLs"
MISSING = "the packages of a registry are not there ({}): pip install 'tensorlift[fleet]'"

# A registry that does not answer must not keep a seed from its end, or a fork from its files.
_SECONDS = 5.0
_DNS = {"dns://": "http://", "dns+https://": "https://"}


def registry_of(text: str | Sequence[str], token: str = "", ca: Ca | None = None) -> Registry:
    """What stands behind a text, or behind a list of URLs of seeds.

    token: of the registry at http(s)://, see checked_token(); ca: whom https:// is trusted by. Asks nobody
    yet. Raises OptionError, RequestError.
    """
    if not isinstance(text, str):
        if not isinstance(text, Sequence) or not all(isinstance(one, str) for one in text):
            raise OptionError(f"registry is {kinds(text)}; expected {FORMS}")
        return listed_urls(text)
    if text.startswith("file:"):
        return listed_seeds(text.removeprefix("file://" if text.startswith("file://") else "file:"))
    for scheme, asked in _DNS.items():
        if text.startswith(scheme):
            return listed_names(split_url(asked + text.removeprefix(scheme)))
    if is_redis(text):
        return on_redis(text)
    if text.startswith(("http://", "https://")):
        return RegistryClient(text, token, _SECONDS, ca if text.startswith("https://") else None)
    raise OptionError(f"registry is {quote(without_secrets(text))}; expected {FORMS}")


def is_list(registry: str | Sequence[str]) -> bool:
    """Whether somebody else has to write down which seeds there are: nobody is announced there."""
    return not isinstance(registry, str) or registry.startswith(("file:", *_DNS))


def announced_at(registry: str | Sequence[str], token: str = "", ca: Ca | None = None) -> Registry:
    """Where a seed announces itself; see registry_of().

    Raises OptionError also for a list, and for a ``ca`` without a registry at https://; RequestError.
    """
    if ca is not None and not str(registry).startswith("https://"):
        raise OptionError("registry_ca is for a registry at https://, and registry names none")
    known = registry_of(registry, token, ca)
    if is_list(registry):
        raise OptionError(
            "registry is a list of seeds, where nobody is announced; expected http(s)://host:port or "
            "redis://host:port"
        )
    return known


def is_redis(text: str) -> bool:
    """Whether a text names a Redis."""
    return text.startswith(("redis://", "rediss://", "unix://"))


def on_redis(text: str) -> RedisRegistry:
    """What stands behind it. Raises RequestError, also where redis-py is not installed."""
    try:
        from tensorlift.fleet.on_redis import RedisRegistry
    except ImportError as error:
        raise RequestError(MISSING.format(error.name or error)) from None
    return RedisRegistry(text)
