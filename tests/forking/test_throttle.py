"""The token bucket under a clock of the test's."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorlift.errors import OptionError
from tensorlift.forking.throttle import Bucket, parse_limit


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


def test_a_full_bucket_lets_a_burst_go_and_then_its_rate() -> None:
    bucket = Bucket(100, burst=50, now=10.0)
    assert bucket.take(50, 10.0) == 0
    assert bucket.take(100, 10.0) == 0  # nothing is owed yet
    assert bucket.take(100, 10.0) == pytest.approx(1.0)
    assert bucket.take(1, 12.0) == 0


def test_what_is_not_taken_does_not_add_up() -> None:
    bucket = Bucket(100, burst=50, now=0.0)
    assert bucket.take(50, 1000.0) == 0
    assert bucket.take(10, 1000.0) == 0
    assert bucket.take(10, 1000.0) == pytest.approx(0.1)


def test_a_clock_that_goes_back_gives_nothing_away() -> None:
    bucket = Bucket(100, burst=0, now=100.0)
    assert bucket.take(100, 100.0) == 0
    assert bucket.take(1, 50.0) == pytest.approx(1.0)
    assert bucket.take(1, 101.0) == pytest.approx(0.01)


@settings(deadline=None)
@given(
    st.floats(1, 1e6),
    st.floats(0, 1e6),
    st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 10)), min_size=1, max_size=50),
)
def test_never_more_than_rate_and_burst(rate: float, burst: float, takes: list[tuple[int, float]]) -> None:
    """Each sender waits as long as it is told, then sends: what went out by any time is bounded."""
    bucket = Bucket(rate, burst, now=0.0)
    now, sent = 0.0, 0
    largest = max(nbytes for nbytes, _ in takes)
    for nbytes, pause in takes:
        now += pause
        now += bucket.take(nbytes, now)
        sent += nbytes
        assert sent <= (rate * now + burst + largest) * (1 + 1e-9) + 1e-6
