"""What a limit is."""

from __future__ import annotations

import pytest

from tensorlift.errors import OptionError
from tensorlift.forking.throttle import parse_limit


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
