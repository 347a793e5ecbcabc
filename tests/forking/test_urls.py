"""Which URLs are a seed's, and where a fork goes that is sent on: nowhere a stranger could send it."""

from __future__ import annotations

import pytest

from tensorlift.errors import RequestError
from tensorlift.forking.urls import followed, placed, reached, split_url


def test_urls() -> None:
    assert split_url("http://Host:80/") == ("http", "host", 80)
    assert split_url("https://[::1]:8").url == "https://[::1]:8"
    for bad in (
        "",
        "host:1",
        "http://h",
        "http://h:0x",
        "http://h:0",
        "http://h:1/x",
        "http://h:1?x",
        "http://h:1#x",
        "file:///x",
    ):
        with pytest.raises(RequestError, match="is no URL of a seed"):
            split_url(bad)


@pytest.mark.parametrize("before", ["user:secret@", "user@", ":@", "@"])
def test_a_user_and_a_password_are_not_passed_over(before: str) -> None:
    with pytest.raises(RequestError, match=r"known by a token, not by a user and a password$") as refused:
        split_url(f"https://{before}10.0.0.7:8")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "front", "seen", "named"),
    [
        ("http://10.0.0.5:1", "http://10.0.0.4:9", "10.0.0.5", "http://10.0.0.5:1"),
        ("http://127.0.0.1:1", "http://127.0.0.1:9", "127.0.0.1", "http://127.0.0.1:1"),
        ("http://[::1]:1", "http://127.0.0.1:9", "127.0.0.1", "http://[::1]:1"),
        ("http://0.0.0.0:1", "http://0.0.0.0:9", "10.0.0.5", "http://10.0.0.5:1"),
        ("http://0.0.0.0:1", "http://0.0.0.0:9", "127.0.0.1", "http://0.0.0.0:1"),
        ("http://[::]:1", "http://[::]:9", "fd00::5", "http://[fd00::5]:1"),
        ("https://10.0.0.5:1", "https://10.0.0.4:9", "10.0.0.5", "https://10.0.0.5:1"),
    ],
)
def test_where_a_rank_is(url: str, front: str, seen: str, named: str) -> None:
    assert placed(url, front, seen, False) == named
    assert placed(url, front, seen, True) == named


def test_only_who_knows_the_token_names_other_addresses() -> None:
    assert placed("http://10.0.0.9:1", "http://10.0.0.4:9", "10.0.0.5", True) == "http://10.0.0.9:1"
    for url in ("http://10.0.0.9:1", "http://169.254.169.254:80"):
        with pytest.raises(RequestError, match=r"it comes from 10.0.0.5; without a token it can name no"):
            placed(url, "http://10.0.0.4:9", "10.0.0.5", False)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("https://10.0.0.5:1", "a seed behind http:// has to be http:// too, not https://"),
        ("http://node7:1", "a seed is named by its address"),
        ("http://127.0.0.1:1", "a seed on loopback cannot be reached by all forks"),
        ("http://10.0.0.5:1/x", "is no URL of a seed"),
    ],
)
def test_what_no_rank_may_say(url: str, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        placed(url, "http://10.0.0.4:9", "10.0.0.5", True)


def test_where_a_fork_goes() -> None:
    assert followed("http://10.0.0.5:1", "http://node4:9") == "http://10.0.0.5:1"
    assert followed("http://0.0.0.0:1", "http://node4:9") == "http://node4:1"
    assert followed("http://[::]:1", "http://[fd00::4]:9") == "http://[fd00::4]:1"
    assert followed("http://127.0.0.1:1", "http://localhost:9") == "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://10.0.0.5:1", "is not https://, as the seed is that names it"),
        ("https://evil.example:1", "'evil.example' is a name, and seeds name addresses"),
        ("https://127.0.0.1:1", "is on the fork's own host"),
        ("https://[fe80::1%25eth0]:1", "is a name, and seeds name addresses"),
        ("https://a:b", "is no URL of a seed"),
    ],
)
def test_where_a_fork_does_not_go(url: str, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        followed(url, "https://node4:9")


def test_offers() -> None:
    assert reached("0.0.0.0:7", "node4") == "node4:7"
    assert reached("[::]:7", "fd00::4") == "[fd00::4]:7"
    for other in ("10.0.0.4:7", "[fd00::4]:7"):
        assert reached(other, "node4") == other
    for bad in ("", "a name", "node4:7", "10.0.0.4", "10.0.0.4:99999", "[fe80::1%eth0]:7", "10.0.0.4:7/x"):
        with pytest.raises(RequestError, match="is no "):
            reached(bad, "node4")
