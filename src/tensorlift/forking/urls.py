"""URLs of seeds: what one looks like, and which one a seed may name to others as that of a rank."""

from __future__ import annotations

import ipaddress
import urllib.parse
from typing import NamedTuple

from tensorlift.errors import RequestError
from tensorlift.format.quoting import quote, shown, without_secrets

__all__ = ["Endpoint", "followed", "is_rebound", "placed", "reached", "split_url"]


class Endpoint(NamedTuple):
    """Where a seed answers."""

    scheme: str
    host: str
    """A name or an address, without brackets."""
    port: int

    @property
    def url(self) -> str:
        """In one text."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


def split_url(url: str) -> Endpoint:
    """Raises RequestError for what is no URL of a seed, and shows no secret of it."""
    if not isinstance(url, str):
        raise RequestError(f"{shown(url)} is no URL of a seed; it is a text like http://host:port")
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    whole = host and host.isprintable() and " " not in host and port
    if not whole or parts.scheme not in ("http", "https") or _has_more(parts):
        raise RequestError(
            f"{quote(without_secrets(url))} is no URL of a seed; it looks like http://host:port"
            + (", and who asks is known by a token, not by a user and a password" if "@" in url else "")
        )
    assert host is not None
    assert port is not None
    return Endpoint(parts.scheme, host, port)


def _has_more(parts: urllib.parse.SplitResult) -> bool:
    return bool(parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc)


def placed(url: str, front: str, seen: str, has_token: bool) -> str:
    """The URL under which a front names a rank that joins from the address ``seen``; RequestError.

    One that listens on all addresses is named by the address it came from, or, where that is this host, by
    the front's own. Whoever knows the token may name any address; without one only his own, so that a
    stranger cannot send forks elsewhere.
    """
    rank, own, peer = split_url(url), split_url(front), ipaddress.ip_address(seen)
    if rank.scheme != own.scheme:
        raise RequestError(
            f"a seed behind {own.scheme}:// has to be {own.scheme}:// too, not {rank.scheme}://"
        )
    address = _address(rank.host)
    if address is None:
        raise RequestError("a seed is named by its address, not by a name")
    if address.is_unspecified:
        return rank.url if peer.is_loopback else rank._replace(host=seen).url
    if address.is_loopback and not _is_loopback(own.host):
        raise RequestError("a seed on loopback cannot be reached by all forks that ask here: give it a host=")
    if not has_token and address != peer and not (address.is_loopback and peer.is_loopback):
        raise RequestError(f"it comes from {seen}; without a token it can name no other address")
    return rank.url


def followed(url: str, front: str) -> str:
    """Where a fork goes that a front has sent on to this URL; RequestError for where it does not go."""
    rank, own = split_url(url), split_url(front)
    if rank.scheme != own.scheme:
        raise RequestError(f"{quote(rank.url)} is not {own.scheme}://, as the seed is that names it")
    address = _address(rank.host)
    if address is None:
        raise RequestError(f"{quote(rank.host)} is a name, and seeds name addresses")
    if address.is_unspecified:
        return rank._replace(host=own.host).url
    if address.is_loopback and not _is_loopback(own.host):
        raise RequestError(f"{rank.url} is on the fork's own host, which another host cannot know")
    return rank.url


def reached(offered: str, host: str) -> str:
    """The host:port of an offer as whoever has reached its seed at ``host`` finds it; RequestError."""
    endpoint = split_url(f"http://{offered}")
    address = _address(endpoint.host)
    if address is None:
        raise RequestError(f"{quote(offered)} is no address")
    return (endpoint._replace(host=host) if address.is_unspecified else endpoint).url.removeprefix("http://")


def is_rebound(named: str, own: str) -> bool:
    """Whether a server on loopback, ``own``, was asked by a name that is not localhost.

    So a page of somebody else asks, in a browser that was led there by a name which changed its address; what
    asks no token would answer it. ``named``: the header Host.
    """
    try:
        name = urllib.parse.urlsplit(f"//{named}").hostname
    except ValueError:
        return True
    return _is_loopback(split_url(own).host) and name not in (None, "localhost") and _address(name) is None


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """None for a name, and for an address that is one on a single host only or has any text behind it."""
    try:
        return None if "%" in host else ipaddress.ip_address(host)
    except ValueError:
        return None


def _is_loopback(host: str) -> bool:
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback
