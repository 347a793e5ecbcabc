"""How long a fork asks a registry, by a clock of its own: what fails and who does not answer have ends."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from support.registries import KEY
from support.waiting import until
from tensorlift.errors import ForkError, SeedError
from tensorlift.fleet import finding_seeds, heartbeat
from tensorlift.fleet.contract import near_of
from tensorlift.fleet.registry_urls import registry_of

pytestmark = pytest.mark.usefixtures("clean")


class Clock:
    """In place of time, of the module alone."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(finding_seeds, "time", made)
    return made


def finder(registry: Any, wait: float) -> finding_seeds.SeedFinder:
    return finding_seeds.SeedFinder(registry, [KEY], near_of(), 1, wait)


def test_seeds_that_fail_are_not_asked_for_longer_than_is_waited(clock: Clock) -> None:
    registry = registry_of(["http://10.0.0.1:1", "http://10.0.0.2:1", "http://10.0.0.3:1"])
    with finder(registry, 30.0) as asked:
        asked.seeds()
        clock.now = 29.0
        asked.seeds(ForkError("it failed"))
        clock.now = 31.0
        with pytest.raises(SeedError, match="it failed; it was waited for long enough"):
            asked.seeds(ForkError("it failed"))


def test_a_seed_that_fails_after_a_long_while_of_bytes_is_replaced(clock: Clock) -> None:
    with finder(registry_of(["http://10.0.0.1:1", "http://10.0.0.2:1"]), 30.0) as asked:
        first = asked.seeds()
        clock.now = 29.0
        asked.progress(None)(1, 2, by_source={})
        clock.now = 1000.0
        assert asked.seeds(ForkError("it died")) != first


class Told:
    """A registry that is told what it likes."""

    closed = False

    def report(self, fork: Any) -> float:
        return 15.0

    def close(self) -> None:
        self.closed = True


def test_a_registry_that_wants_to_be_asked_again_at_once(clock: Clock) -> None:
    class Eager(Told):
        times = 0

        def candidates(self, *_: Any) -> list[str]:
            self.times += 1
            raise SeedError("ask again", 1e-9)

    eager = Eager()
    with finder(eager, 2.0) as asked, pytest.raises(SeedError, match="ask again"):
        asked.seeds()
    assert 10 < eager.times < 30


def test_a_registry_that_does_not_answer_does_not_hold_a_forks_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "GOODBYE_SECONDS", 0.05)
    reached, gate = threading.Event(), threading.Event()

    class Hanging(Told):
        def candidates(self, *_: Any) -> list[str]:
            return ["http://10.0.0.1:1"]

        def report(self, fork: Any) -> float:
            reached.set()
            gate.wait()
            return super().report(fork)

    hanging = Hanging()
    with finder(hanging, 2.0) as asked:
        asked.seeds()
        assert reached.wait(60)
    assert not hanging.closed
    gate.set()
    until(lambda: hanging.closed)
