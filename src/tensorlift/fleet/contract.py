"""What a registry is asked and told, whatever stands behind it.

Everything here comes from other processes: sizes are bounded, and what is no text of Unicode is refused.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Literal, NamedTuple, Protocol

import msgspec

from tensorlift.errors import OptionError, RequestError
from tensorlift.forking.host import host_id
from tensorlift.forking.manifest import LONGEST_NAME, ModelKey, is_sendable, rank_problem
from tensorlift.forking.urls import split_url
from tensorlift.format.bounds import Count
from tensorlift.format.quoting import quote

__all__ = [
    "LEASE_SECONDS",
    "LONGEST_BODY",
    "MOST_CANDIDATES",
    "MOST_WITHOUT",
    "PLACE_VARIABLE",
    "RECENT",
    "SENT_SECONDS",
    "WAIT_SECONDS",
    "Announcement",
    "Candidates",
    "ForkReport",
    "Load",
    "Near",
    "Registry",
    "State",
    "Told",
    "View",
    "Wanted",
    "check_announcement",
    "check_report",
    "lease_seconds",
    "near_of",
]

LONGEST_BODY = 16_384
"""Bytes of anything that a registry is told."""
WAIT_SECONDS = 300.0
"""For a seed that has room, where a fork says nothing else."""
MOST_CANDIDATES = 64
MOST_WITHOUT = 100
LEASE_SECONDS = 15.0
"""How long a seed is known that says nothing more."""
PLACE_VARIABLE = "TENSORLIFT_PLACE"

RECENT = 50
"""Forks that are shown when they have ended."""
SENT_SECONDS = 10.0
"""How long a fork counts that was sent to a seed and has not come."""

# So many says a second does a registry want to hear, each seed and fork saying three in a lease.
_MOST_SAYS = 150
_LONGEST_PLACE = 200

State = Literal["waiting", "reading", "done", "failed"]

_Id = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$", max_length=32)]
_Url = Annotated[str, msgspec.Meta(max_length=200)]
_Urls = Annotated[tuple[_Url, ...], msgspec.Meta(max_length=MOST_CANDIDATES)]
_Text = Annotated[str, msgspec.Meta(max_length=LONGEST_NAME)]
_Real = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
_Readers = Annotated[int, msgspec.Meta(ge=1, le=2**20)]


class Near(msgspec.Struct, frozen=True):
    """Where somebody is."""

    host: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """Equal where one host's memory can be shared; "" is nobody's."""
    place: Annotated[str, msgspec.Meta(max_length=_LONGEST_PLACE)] = ""
    """From the widest to the nearest, such as zone-1/row-3/rack-12."""


class Load(msgspec.Struct, frozen=True):
    """What a seed does now."""

    readers: Count = 0
    sent_bytes: Count = 0
    rate: _Real = 0.0
    """Bytes a second, since it said so last."""
    leases: Count = 0
    """That it has given so far: of the forks that were sent to it, so many more have come."""


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """A seed, as it announces itself."""

    instance: _Id
    key: ModelKey
    weights: _Text = ""
    url: _Url
    most_readers: _Readers
    near: Near = Near()
    load: Load = Load()


class ForkReport(msgspec.Struct, frozen=True, kw_only=True):
    """A fork, as it tells of itself."""

    fork: _Id
    key: ModelKey
    state: State
    near: Near = Near()
    done_bytes: Count = 0
    total_bytes: Count = 0
    seconds: _Real = 0.0
    seeds: _Urls = ()
    reason: _Text = ""

    @property
    def has_ended(self) -> bool:
        """It says nothing more."""
        return self.state in ("done", "failed")


class Wanted(msgspec.Struct, frozen=True):
    """What a fork asks for."""

    key: ModelKey
    near: Near = Near()
    count: Annotated[int, msgspec.Meta(ge=1, le=MOST_CANDIDATES)] = 1
    without: Annotated[tuple[_Url, ...], msgspec.Meta(max_length=MOST_WITHOUT)] = ()
    """Seeds that it does not want to read from."""


class Candidates(msgspec.Struct, frozen=True):
    """Seeds, the best first."""

    urls: _Urls


class Told(msgspec.Struct, frozen=True):
    """For how long it is known; it should say the same again in a third of that."""

    seconds: _Real


class View(NamedTuple):
    """All that a registry knows, for a page and for metrics."""

    seeds: Sequence[Announcement]
    forks: Sequence[ForkReport]
    """Under way."""
    ended: Mapping[tuple[ModelKey, str], int]
    """How many forks of a key are "done", "failed", or "lost": those that stopped telling."""
    recent: Sequence[tuple[ForkReport, str]]
    """The last that ended, the latest first, each with how."""


class Registry(Protocol):
    """Where seeds announce themselves and forks ask for them. Threads may call at once.

    Where it cannot be reached or cannot do it, SeedError is raised; ``retry_seconds`` says when asking again
    may help.
    """

    def announce(self, seed: Announcement) -> float:
        """The seed is known for so many seconds; before they are over it renews."""

    def renew(self, instance: str, load: Load) -> float | None:
        """For so many more; None where it is not known (any more): it has to announce itself again."""

    def withdraw(self, instance: str) -> None:
        """The seed ends; one that is not known is none any more."""

    def candidates(
        self, key: ModelKey, near: Near, count: int = 1, without: Collection[str] = ()
    ) -> list[str]:
        """URLs of at most ``count`` seeds of one version of these weights, the best first, but for some.

        SeedError where there is none, with ``retry_seconds`` where those that are there have no room now.
        """

    def report(self, fork: ForkReport) -> float:
        """What a fork does; it should be told again in a third of so many seconds."""

    def close(self) -> None:
        """What it holds is given back; seeds stay known."""


def lease_seconds(known: int, least: float = LEASE_SECONDS) -> float:
    """How long somebody is known of so many: longer where all together would say too much."""
    return max(least, 3 * known / _MOST_SAYS)


def near_of(place: str | None = None) -> Near:
    """Where this process is; without a ``place``, TENSORLIFT_PLACE. Raises OptionError."""
    text = os.environ.get(PLACE_VARIABLE, "") if place is None else place
    fine = isinstance(text, str) and len(text) <= _LONGEST_PLACE and text.isprintable()
    if not fine or (text and not all(part.strip() for part in text.split("/"))):
        raise OptionError(
            f"place is {quote(text, 300)}; expected names from the widest to the nearest, such as "
            f'"zone-1/rack-12", of at most {_LONGEST_PLACE} characters'
        )
    try:
        return Near(host_id(), text)
    except OSError:  # a host that does not say who it is is nobody's
        return Near("", text)


def _check(key: ModelKey, texts: Sequence[str]) -> None:
    if problem := rank_problem(key):
        raise RequestError(f"its key has {problem}")
    for text in (key.model, key.revision, key.role, key.dtype, key.quantization, key.engine, *texts):
        if not is_sendable(text):
            raise RequestError(f"{quote(text)} is no text that can be sent on")


def check_announcement(seed: Announcement) -> None:
    """Raises RequestError for what the types alone do not say."""
    split_url(seed.url)
    _check(seed.key, (seed.weights, seed.near.host, seed.near.place))


def check_report(fork: ForkReport) -> None:
    """Raises RequestError for what the types alone do not say."""
    _check(fork.key, (fork.near.host, fork.near.place, fork.reason, *fork.seeds))
