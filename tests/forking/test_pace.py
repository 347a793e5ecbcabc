"""Who is too slow, under a clock of the test's own: nobody who works, everybody who stands still."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorlift.forking.pace import FACTOR, FLOOR, STILL_RATE, Held, Pace

PATIENCE = 10.0
CHUNK = 16 << 20
LEAST = int(STILL_RATE * PATIENCE)


def looks(
    pace: Pace, seconds: float, held: list[Held], rates: dict[str, float], step: float = 0.2, begin: float = 0
) -> tuple[float, dict[str, str]]:
    """(when, who) of the first who are left; (seconds, {}) where nobody is."""
    count = int(seconds / step) + 1
    for at in range(count):
        now = begin + at * step
        left = pace.look(now, held, {name: int(rate * now) for name, rate in rates.items()})
        if left:
            return now, left
    return seconds, {}


def test_one_that_stands_still_is_left_also_alone() -> None:
    when, left = looks(Pace(PATIENCE), 60, [Held(0, "a", CHUNK, ())], {"a": 1.0})
    assert left == {"a": f"it stands still: fewer than {LEAST:,} bytes came in 10 s"}
    assert PATIENCE <= when <= PATIENCE + 0.5


def test_one_that_stands_still_after_it_has_worked() -> None:
    pace, held = Pace(PATIENCE), [Held(0, "a", CHUNK, ())]
    assert looks(pace, 30, held, {"a": 1e6})[1] == {}
    for at in range(200):
        left = pace.look(30 + at * 0.2, held, {"a": 30_000_000})
        if left:
            break
    assert left
    assert PATIENCE <= at * 0.2 <= PATIENCE + 0.5


@settings(deadline=None)
@given(
    st.floats(2 * STILL_RATE, 1e10),
    st.floats(0.5, 60),
    st.lists(st.floats(0.01, 30), min_size=1, max_size=99),
)
def test_alone_slowness_is_no_reason(rate: float, patience: float, steps: list[float]) -> None:
    """At any rate that is one, whenever somebody looks."""
    pace, now = Pace(patience), 0.0
    for step in steps:
        now += step
        assert pace.look(now, [Held(0, "a", CHUNK, ())], {"a": int(rate * now)}) == {}


@settings(deadline=None)
@given(st.floats(0, STILL_RATE / 2), st.lists(st.floats(0.01, 1), min_size=1, max_size=200))
def test_stillness_is_found_whenever_somebody_looks(rate: float, steps: list[float]) -> None:
    pace, now, left = Pace(PATIENCE), 0.0, dict[str, str]()
    begin = steps[0]
    for step in steps:
        now += step
        left |= pace.look(now, [Held(0, "a", CHUNK, ())], {"a": int(rate * now)})
    if now - begin > PATIENCE + 1:
        assert left
    if now - begin < PATIENCE:
        assert not left


def test_one_without_work_stands_not_still() -> None:
    pace = Pace(PATIENCE)
    for at in range(300):
        held = [Held(at, "a", CHUNK, ())] if at % 40 == 0 else []
        assert pace.look(at * 1.0, held, {"a": 0}) == {}


def test_a_fork_that_was_stopped_blames_nobody() -> None:
    pace, held = Pace(PATIENCE), [Held(0, "a", CHUNK, ("b",))]
    pace.look(0, held, {"a": 0, "b": 0})
    assert pace.look(1000, held, {"a": 0, "b": 0}) == {}
    assert pace.look(5000, held, {"a": 0, "b": 0}) == {}


def test_a_late_one_is_left_when_another_is_idle() -> None:
    fast = 0.5
    pace = Pace(PATIENCE)
    pace.brought("b", CHUNK, fast)
    rates = {"a": 1e6, "b": 0.0}
    assert looks(pace, 60, [Held(0, "a", CHUNK, ())], rates)[1] == {}
    when, left = looks(Pace(PATIENCE), 60, [Held(0, "a", CHUNK, ("b",))], rates)
    assert list(left) == ["a"]
    assert "another seed had nothing to do" in left["a"]
    assert PATIENCE / FLOOR <= when <= PATIENCE / FLOOR + 0.5


@settings(deadline=None)
@given(st.floats(0.01, 20), st.floats(1, 20))
def test_how_late(spent: float, patience: float) -> None:
    """Never below FACTOR times what the other takes, and soon after."""
    pace = Pace(patience)
    pace.brought("b", CHUNK, spent)
    due = max(patience / FLOOR, FACTOR * spent)
    when, left = looks(pace, due + 2, [Held(0, "a", CHUNK, ("b",))], {"a": 1e7, "b": 0.0})
    assert list(left) == ["a"]
    assert due - 1e-6 <= when <= due + 0.5


def test_the_fastest_of_those_that_are_idle_counts() -> None:
    pace = Pace(PATIENCE)
    pace.brought("b", CHUNK, 1.0)
    pace.brought("c", 2 * CHUNK, 10.0)
    rates = {"a": 1e7, "b": 0.0, "c": 0.0}
    assert looks(pace, 60, [Held(0, "a", CHUNK, ("b", "c"))], rates)[0] == pytest.approx(4, abs=0.5)
    pace = Pace(PATIENCE)
    pace.brought("b", CHUNK, 1.0)
    pace.brought("c", 2 * CHUNK, 10.0)
    assert looks(pace, 60, [Held(0, "a", CHUNK, ("c",))], rates)[0] == pytest.approx(20, abs=0.5)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.sets(st.integers(0, 3))), min_size=1, max_size=8),
    st.lists(st.integers(2 * LEAST, 10**9), min_size=4, max_size=4),
)
def test_there_is_always_somebody_left_who_works(
    given_: list[tuple[int, set[int]]], rates: list[int]
) -> None:
    """Sources that are late for one another's chunks are not all left."""
    held = [
        Held(number, str(holder), CHUNK, tuple(str(one) for one in sorted(others - {holder})))
        for number, (holder, others) in enumerate(given_)
    ]
    pace, gone = Pace(PATIENCE), set[str]()
    for at in range(100):
        now = [Held(n, s, b, tuple(o for o in i if o not in gone)) for n, s, b, i in held if s not in gone]
        moved = {str(one): at * rate for one, rate in enumerate(rates)}
        left = pace.look(at * 1.0, now, moved)
        for name in left:
            rescuers = {other for one in now if one.source == name for other in one.idle}
            assert rescuers - gone - left.keys()
        gone |= left.keys()
    assert len(gone) < 4
