"""A seed that a registry knows: it announces itself, renews, and is withdrawn when it ends."""

from __future__ import annotations

import contextlib
import logging
import time

import msgspec

from tensorlift.fleet.contract import Announcement, Load, Near, Registry
from tensorlift.fleet.heartbeat import Heartbeat
from tensorlift.forking.seed import Seed

__all__ = ["Announced", "announce"]

_log = logging.getLogger("tensorlift")


def announce(seed: Seed, registry: Registry, near: Near, is_told: bool = False) -> Announced | None:
    """Announces a seed from now on to its end; None where forks would be sent to it in vain. ``is_told``: the
    caller says what problem() was at first, see Heartbeat.
    """
    if not seed.transports:
        _log.warning("a seed of %s is not announced: no transport is there", seed.key.model)
        registry.close()
        return None
    made = Announced(seed, registry, near, is_told)
    seed.follow(made)
    return made


class Announced:
    """From its beginning until close() the seed is announced, whenever the registry is there."""

    def __init__(self, seed: Seed, registry: Registry, near: Near, is_told: bool = False) -> None:
        """Waits for nobody: a registry that is down stops no seed. Closes the registry."""
        self._seed, self._registry, self._near = seed, registry, near
        self._known: Announcement | None = None
        self._sent, self._at = 0, time.monotonic()
        self._heartbeat = Heartbeat(self._say, f"{seed!r} is not announced", is_told)

    def changed(self) -> None:
        """The seed has something to tell: who waits for it waits no longer than he must."""
        self._heartbeat.news()

    def _say(self) -> float:
        load = self._load()
        seed = Announcement(
            instance=self._seed.instance, key=self._seed.key, weights=self._seed.weights, url=self._seed.url,
            most_readers=self._seed.most_readers, near=self._near,
        )  # fmt: skip
        if self._known == seed and (seconds := self._registry.renew(seed.instance, load)) is not None:
            return seconds / 3
        # Until it is told otherwise, it has not been heard.
        self._known = None
        seconds = self._registry.announce(msgspec.structs.replace(seed, load=load))
        self._known = seed
        return seconds / 3

    def _load(self) -> Load:
        stats, now = self._seed.stats(), time.monotonic()
        sent = stats["sent_bytes"]
        rate = max(0, sent - self._sent) / max(now - self._at, 0.001)
        self._sent, self._at = sent, now
        return Load(stats["readers"], sent, rate, stats["granted_leases"])

    def problem(self, seconds: float) -> str:
        """Why it is not announced now; "" where it is. See Heartbeat.problem()."""
        return self._heartbeat.problem(seconds)

    def close(self) -> None:
        """The registry is told, where it is there and listens; see Heartbeat.close()."""
        self._heartbeat.close(self._withdraw)

    def _withdraw(self) -> None:
        with contextlib.closing(self._registry):
            if self._heartbeat.was_heard:
                self._registry.withdraw(self._seed.instance)
