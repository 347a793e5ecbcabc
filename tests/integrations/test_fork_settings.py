"""Settings about running instances: what is taken, what is refused and how."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tensorlift.errors import OptionError
from tensorlift.integrations.fork_settings import ForkSettings, Publish, parse_forks
from tensorlift.integrations.settings import parse


@pytest.fixture(autouse=True)
def no_token(monkeypatch):
    monkeypatch.delenv("TENSORLIFT_TOKEN", raising=False)


def test_without_them_nothing_is_forked_or_published_and_no_torch_imported():
    assert parse({"backend": "MMAP"}, "engine").instances == ForkSettings()
    assert not ForkSettings().forks
    program = (
        "import sys; from tensorlift.integrations.settings import parse; "
        "parse({'seed': 'http://h:1'}, 'x'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_what_is_given_is_handed_on_and_null_is_not():
    given = {
        "seed": ["http://a:1", "http://b:2"],
        "registry": "http://r:3",
        "fallback": False,
        "token": "secret",
        "limit": "25%",
        "publish": {"host": "10.0.0.7", "port": 7000},
        "devices": ["mlx5_1"],
        "transports": "tcp",
    }
    found = parse(given, "engine").instances
    assert found.forks
    assert found.seed == ("http://a:1", "http://b:2")
    assert not found.fallback
    assert found.shared() == {
        "token": "secret",
        "registry": "http://r:3",
        "devices": ("mlx5_1",),
        "transports": ("tcp",),
    }
    assert found.publish == Publish("10.0.0.7", 7000)
    assert "secret" not in repr(found)
    assert parse(dict.fromkeys(given), "engine").instances == ForkSettings()
    assert parse_forks({"registry": ["http://a:1"]}).shared() == {"registry": ["http://a:1"]}


def test_a_token_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("TENSORLIFT_TOKEN", "from there")
    with pytest.raises(OptionError, match="TENSORLIFT_TOKEN"):
        parse({"publish": True}, "engine")
    monkeypatch.setenv("TENSORLIFT_TOKEN", "from-there")
    assert parse({"publish": {"host": "0.0.0.0"}}, "engine").instances.token == "from-there"
    assert parse({"backend": "MMAP"}, "engine").instances.token is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"registri": "x"}, "did you mean registry"),
        ({"seed": "h:1"}, "no URL of a seed"),
        ({"seed": []}, "seed is"),
        ({"seed": 3}, "expected a text, or a list"),
        ({"registry": 3}, "registry is 3"),
        ({"seed": "http://h:1", "fallback": "model/"}, "expected true or false"),
        ({"fallback": True}, "name a seed or a registry"),
        ({"transports": ["udp"]}, "transports is"),
        ({"token": ""}, "token is"),
        ({"publish": True, "limit": "fast"}, "limit is 'fast'"),
        ({"publish": "yes"}, "publish is 'yes'"),
        ({"publish": {"prt": 1}}, "did you mean port"),
        ({"publish": {"zzzzz": 1}}, "the known ones are host, port"),
        ({"publish": {"port": "7000"}}, "port is '7000'; expected a whole number"),
        ({"publish": {"port": True}}, "port is true"),
        ({"publish": {"port": 70000}}, "up to 65535"),
        ({"publish": {"host": "0.0.0.0"}}, "open to whoever reaches it"),
        ({"publish": {"front": "h"}}, "no URL of a seed"),
    ],
)
def test_what_cannot_be_followed_is_refused(given, says):
    with pytest.raises(OptionError, match=says) as caught:
        parse(given, "vLLM")
    assert "vLLM" in str(caught.value)


@pytest.mark.parametrize(
    ("publish", "front"),
    [
        (Publish(port=7), "http://127.0.0.1:7"),
        (Publish("0.0.0.0", 7), "http://127.0.0.1:7"),
        (Publish("::", 7), "http://[::1]:7"),
        (Publish("fe80::1", 7), "http://[fe80::1]:7"),
        (Publish("0.0.0.0", 7, front="http://10.0.0.1:7"), "http://10.0.0.1:7"),
    ],
)
def test_where_ranks_find_the_first(publish, front):
    assert publish.front_url == front


def test_ranks_have_to_know_a_port():
    ForkSettings().check_ranks(8)
    ForkSettings(publish=Publish()).check_ranks(1)
    ForkSettings(publish=Publish(port=7)).check_ranks(8)
    with pytest.raises(OptionError, match="with 8 ranks"):
        ForkSettings(publish=Publish()).check_ranks(8)
