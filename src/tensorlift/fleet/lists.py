"""Seeds that somebody has listed: URLs, a file, a name in DNS. Nobody announces anything there."""

from __future__ import annotations

import os
import random
import socket
import stat
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec

from tensorlift.errors import RequestError, SeedError
from tensorlift.fleet.choosing import Seen, chosen
from tensorlift.fleet.contract import LEASE_SECONDS, Announcement, ForkReport, Load, Near
from tensorlift.forking.keys import key_of, told_key
from tensorlift.forking.manifest import ModelKey
from tensorlift.forking.urls import Endpoint, split_url
from tensorlift.format.quoting import clean, plural, quote

__all__ = ["Listed", "Lists", "listed_names", "listed_seeds", "listed_urls"]

_LONGEST_FILE = 8 << 20
# A list does not know how many read; seeds that have no room say so themselves.
_MANY = 1 << 20


class Listed(NamedTuple):
    """A seed of a list."""

    url: str
    place: str = ""
    key: ModelKey | None = None
    """What it has, where the list says so."""


class Lists:
    """A Registry of what ``read`` finds each time: its seeds by nearness, and by chance."""

    def __init__(self, read: Callable[[], Sequence[Listed]]) -> None:
        """``read``: raises SeedError where there is no list now."""
        self._read = read

    def announce(self, seed: Announcement) -> float:
        """See Registry: a list takes no notice."""
        return LEASE_SECONDS

    def renew(self, instance: str, load: Load) -> float | None:
        """See Registry."""
        return LEASE_SECONDS

    def withdraw(self, instance: str) -> None:
        """See Registry."""

    def candidates(
        self, key: ModelKey, near: Near, count: int = 1, without: Collection[str] = ()
    ) -> list[str]:
        """See Registry."""
        seeds = [
            Seen("", one.url, "", Near("", one.place), 0, _MANY)
            for one in self._read()
            if one.key is None or one.key == key
        ]
        try:
            return [one.url for one in chosen(seeds, near, count, without, random.random)]
        except SeedError as error:
            raise SeedError(f"{told_key(key)}: the list of seeds is no help: {error}") from None

    def report(self, fork: ForkReport) -> float:
        """See Registry."""
        return LEASE_SECONDS

    def close(self) -> None:
        """See Registry."""


def listed_urls(urls: Sequence[str]) -> Lists:
    """Of URLs. Raises RequestError for what is none."""
    seeds = [Listed(split_url(url).url) for url in urls]
    if not seeds:
        raise RequestError("the list of seeds is empty; name at least one: http://host:port")
    return Lists(lambda: seeds)


def listed_seeds(path: str) -> Lists:
    """Of a file, {"seeds": ["http://...", {"url":, "place":, "key":}]}, read again when it changes."""
    return Lists(_File(path).read)


class _Row(msgspec.Struct, forbid_unknown_fields=True):
    url: Annotated[str, msgspec.Meta(max_length=200)]
    place: str = ""
    # Not as a ModelKey, of which a field that is misspelled would stand for more weights than are meant.
    key: dict[str, Any] | None = None

    def listed(self) -> Listed:
        """Raises RequestError."""
        split_url(self.url)
        return Listed(self.url, self.place, None if self.key is None else key_of(self.key))


class _Content(msgspec.Struct, forbid_unknown_fields=True):
    seeds: list[str | _Row]


def _without_waiting(path: str, flags: int) -> int:
    """Opening a named pipe would wait for a writer."""
    return os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)


class _File:
    def __init__(self, path: str) -> None:
        self._path = path
        self._seen: tuple[object, list[Listed]] | None = None

    def read(self) -> list[Listed]:
        where = f"the list of seeds {quote(self._path, 300)}"
        try:
            with open(self._path, "rb", opener=_without_waiting) as opened:
                facts = os.fstat(opened.fileno())
                if not stat.S_ISREG(facts.st_mode):
                    raise OSError("it is no regular file")
                tag = (facts.st_ino, facts.st_size, facts.st_mtime_ns)
                if self._seen is not None and self._seen[0] == tag:
                    return self._seen[1]
                text = opened.read(_LONGEST_FILE + 1)
        except (OSError, ValueError) as error:  # ValueError: of a name that no file has
            why = getattr(error, "strerror", None) or clean(str(error))
            raise SeedError(f"{where} cannot be read: {why}") from None
        if len(text) > _LONGEST_FILE:
            raise SeedError(
                f"{where} has more than {_LONGEST_FILE:,} bytes; expected a list of seeds in JSON"
            )
        try:
            content = msgspec.json.decode(text, type=_Content).seeds
            seeds = [(_Row(one) if isinstance(one, str) else one).listed() for one in content]
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, RequestError) as error:
            raise SeedError(
                f'{where} is none: {clean(str(error))}; expected {{"seeds": ["http://host:port", ...]}}'
            ) from None
        self._seen = tag, seeds
        return seeds


def listed_names(name: Endpoint) -> Lists:
    """Of all addresses that a name in DNS has when it is asked for."""

    def read() -> list[Listed]:
        try:
            found = socket.getaddrinfo(name.host, name.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise SeedError(
                f"{quote(name.host)} has no address in DNS: {clean(str(error))}; {plural(0, 'seed')}",
                answered=False,
            ) from None
        hosts = dict.fromkeys(str(address[0]) for *_, address in found)
        return [Listed(name._replace(host=host).url) for host in hosts]

    return Lists(read)
