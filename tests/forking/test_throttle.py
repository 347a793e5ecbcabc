"""What a limit is, and how it is kept by who reads by chunks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorlift.errors import OptionError
from tensorlift.forking.throttle import Pacer, parse_limit


def test_limits() -> None:
    assert parse_limit(None, "limit", lambda: 1e9) is None
    assert parse_limit("2GB/s", "limit", lambda: 1e9) == 2_000_000_000
    assert parse_limit(" 25 % ", "limit", lambda: 1e9) == 250_000_000
    assert parse_limit("0.5%", "limit", lambda: 1e9) == 5_000_000
    assert parse_limit("0.000001%", "limit", lambda: 1.0) == 1


@pytest.mark.parametrize("value", ["2GB", "fast", "0%", "101%", "-1%", "0B/s", "%", 5, b"1GB/s", True])
def test_what_is_no_limit(value: object) -> None:
    with pytest.raises(OptionError, match=r"^limit is "):
        parse_limit(value, "limit", lambda: 1e9)


def test_a_share_of_what_nobody_knows() -> None:
    with pytest.raises(OptionError, match="does not tell how fast the network here is"):
        parse_limit("25%", "limit", lambda: None)


class Clock:
    """Stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@settings(deadline=None)
@given(
    rate=st.integers(1, 10**12),
    chunks=st.lists(st.integers(1, 1 << 30), min_size=1, max_size=50),
    idle=st.lists(st.floats(0, 100), min_size=50, max_size=50),
)
def test_no_more_is_asked_for_than_may_be(rate: int, chunks: list[int], idle: list[float]) -> None:
    """By who waits as long as it is told to: the next chunk comes when the time of the last one is over."""
    clock = Clock()
    pacer = Pacer(rate, clock)
    for nbytes, pause in zip(chunks, idle, strict=False):
        clock.now += pacer.wait()
        assert pacer.wait() < 1e-6 + 1 / rate
        begin = clock.now
        pacer.asked(nbytes)
        assert pacer.wait() == pytest.approx(nbytes / rate, rel=1e-6, abs=1e-6)
        clock.now += pause
        pacer.wait()
        left = max(0.0, begin + nbytes / rate - clock.now)
        assert pacer.wait() == pytest.approx(left, rel=1e-6, abs=1e-6)


def test_what_is_left_over_is_not_saved_up() -> None:
    clock = Clock()
    pacer = Pacer(100, clock)
    clock.now += 3600
    assert pacer.wait() == 0.0
    pacer.asked(50)
    pacer.asked(100)  # by another connection, at once
    assert pacer.wait() == 1.5


def test_a_rate_that_changes() -> None:
    clock = Clock()
    pacer = Pacer(0, clock)
    pacer.asked(1 << 40)
    assert pacer.wait() == 0.0
    pacer.rate = 100
    assert pacer.wait() == 0.0
    pacer.asked(200)
    clock.now += 1
    assert pacer.wait() == 1.0
    pacer.rate = 50  # from now on
    assert pacer.wait() == 2.0
    pacer.rate = 0
    assert pacer.wait() == 0.0
