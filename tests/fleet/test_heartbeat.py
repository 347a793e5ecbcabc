"""A thread that says something again and again."""

from __future__ import annotations

import logging
import threading

import pytest

from support.waiting import until
from tensorlift.errors import SeedError
from tensorlift.fleet import heartbeat
from tensorlift.fleet.heartbeat import Heartbeat

pytestmark = pytest.mark.usefixtures("clean")


class Told:
    def __init__(self, *outcomes: float | None) -> None:
        """Seconds to rest, or None for what fails; the last one for ever."""
        self.times, self._outcomes = 0, outcomes

    def __call__(self) -> float:
        found = self._outcomes[min(self.times, len(self._outcomes) - 1)]
        self.times += 1
        if found is None:
            raise SeedError("nobody is there")
        return found


def test_in_time_and_at_once() -> None:
    often, seldom = Told(0.0), Told(600.0)
    one, other = Heartbeat(often, "a"), Heartbeat(seldom, "b")
    until(lambda: often.times >= 2 and seldom.times == 1)
    other.news()
    until(lambda: seldom.times == 2)
    assert other.was_heard
    one.close(lambda: None)
    other.close(lambda: None)
    before = often.times
    other.news()
    other.close(lambda: None)
    assert (often.times, seldom.times) == (before, 2)


def test_failures_are_told_once_and_news_do_not_hurry_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(heartbeat, "_FIRST_BACKOFF", 0.01)
    monkeypatch.setattr(heartbeat, "_LAST_BACKOFF", 0.02)
    told = Told(None, None, None, None, 600.0)
    with caplog.at_level(logging.WARNING, "tensorlift"):
        one = Heartbeat(told, "what")
        until(lambda: one.was_heard)
        one.close(lambda: None)
    assert caplog.messages == ["what: nobody is there; this is tried again", "what: it is heard again"]
    caplog.clear()
    with caplog.at_level(logging.WARNING, "tensorlift"):
        # Who says by himself what problem() was is told by the log of what comes behind that alone.
        one = Heartbeat(Told(None, None, 0.01, None, 600.0), "what", is_told=True)
        until(lambda: len(caplog.messages) == 3)
        one.close(lambda: None)
    heard, again = "what: it is heard again", "what: nobody is there; this is tried again"
    assert caplog.messages == [heard, again, heard]
    monkeypatch.setattr(heartbeat, "_FIRST_BACKOFF", 600.0)
    monkeypatch.setattr(heartbeat, "_LAST_BACKOFF", 600.0)
    down = Told(None)
    two = Heartbeat(down, "what")
    until(lambda: two.was_heard is False)
    for _ in range(20):
        two.news()
    assert not threading.Event().wait(0.05)
    assert down.times == 1
    two.close(lambda: None)


def test_what_nobody_expects_ends_nothing_either(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told once, with where it was."""
    monkeypatch.setattr(heartbeat, "_FIRST_BACKOFF", 0.01)
    outcomes = iter([ValueError("a defect"), RuntimeError("another")])

    def say() -> float:
        for error in outcomes:
            raise error
        return 600.0

    with caplog.at_level(logging.WARNING, "tensorlift"):
        one = Heartbeat(say, "what")
        until(lambda: one.was_heard)
        one.close(lambda: None)
    first = "what: ValueError: a defect; this is tried again"
    assert caplog.messages == [first, "what: it is heard again"]
    assert [record.exc_info is not None for record in caplog.records] == [True, False]


def test_a_rest_has_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "_LONGEST_REST", 0.01)
    endless = Told(float("inf"))
    one = Heartbeat(endless, "a")
    until(lambda: endless.times >= 1)
    one.close(lambda: None)


def test_why_it_was_not_heard() -> None:
    gate = threading.Event()

    def say() -> float:
        gate.wait()
        raise SeedError("nobody is there")

    one, other = Heartbeat(say, "a"), Heartbeat(Told(600.0), "b")
    assert one.problem(0.01) == "there is no answer in 0.01 s"
    gate.set()
    assert (one.problem(60), other.problem(60)) == ("nobody is there", "")
    one.close(lambda: None)
    other.close(lambda: None)


def test_the_last_is_said_once_behind_what_is_being_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """And whoever ends does not wait for it longer than a moment."""
    monkeypatch.setattr(heartbeat, "GOODBYE_SECONDS", 0.05)
    reached, gate, said = threading.Event(), threading.Event(), list[str]()

    def say() -> float:
        reached.set()
        gate.wait()
        said.append("first")
        return 600.0

    one = Heartbeat(say, "a")
    assert reached.wait(60)
    one.close(lambda: said.append("last"))
    one.close(lambda: said.append("again"))
    assert said == []
    gate.set()
    until(lambda: said == ["first", "last"])
