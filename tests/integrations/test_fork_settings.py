"""Settings about running instances: what is taken, what is refused and how."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys

import pytest
import trustme

from tensorlift.errors import OptionError
from tensorlift.forking.topology import Nic, Tree
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
        "limit": "2GB/s",
        "publish": {"host": "10.0.0.7", "port": 7000, "readers": 1},
        "transports": "tcp",
        "place": "zone-1/rack-12",
    }
    found = parse(given, "engine").instances
    assert found.forks
    assert not found.fallback
    assert found.publish == Publish("10.0.0.7", 7000, readers=1)
    both = {"token": "secret", "limit": "2GB/s", "transports": ("tcp",)}
    # The registry is for announcing, where seeds are named.
    assert found.to_fork() == {"source": ["http://a:1", "http://b:2"], **both}
    of_seed = {"host": "10.0.0.7", "insecure": False, "readers": 1}
    known = {"registry": "http://r:3", "place": "zone-1/rack-12"}
    assert found.to_seed(found.publish, None) == {**of_seed, **known, **both}
    assert found.to_seed(found.publish, "http://h:1")["join"] == "http://h:1"
    assert "secret" not in repr(found)
    assert parse(dict.fromkeys(given), "engine").instances == ForkSettings()


def test_a_fork_asks_a_registry_where_no_seed_is_named():
    given = {"registry": ["http://a:1"], "wait": 5, "seeds": 2, "place": "rack-1"}
    assert parse_forks(given).to_fork() == {**given, "wait": 5.0}


@pytest.mark.parametrize("registry", [["http://a:1"], "file:/seeds.json", "dns://seeds:1"])
def test_a_list_of_seeds_is_for_forks_alone(registry):
    """Nobody is announced there, and a seed takes none."""
    found = parse_forks({"registry": registry, "place": "rack-1", "publish": True})
    assert found.to_fork()["registry"] == registry
    assert {"registry", "place"}.isdisjoint(found.to_seed(found.publish, None))


def test_all_that_is_handed_on_is_taken(monkeypatch):
    from tensorlift import instances
    from tensorlift.forking.fork import fork_into
    from tensorlift.forking.seed import Seed

    full = ForkSettings(**{field.name: "x" for field in dataclasses.fields(ForkSettings)})
    publish = Publish(**{field.name: "x" for field in dataclasses.fields(Publish)})

    def names(*functions):
        return {name for function in functions for name in inspect.signature(function).parameters}

    for settings in (full, dataclasses.replace(full, seed=())):
        assert set(settings.to_fork()) < names(instances.fork, fork_into)
    assert set(full.to_seed(publish, "https://h:1")) < names(instances.seed, Seed)


def test_certificates_are_for_seeds_registries_and_ranks(tmp_path):
    authority, ca, certificate = trustme.CA(), str(tmp_path / "ca.pem"), str(tmp_path / "seed.pem")
    authority.cert_pem.write_to_path(ca)
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(certificate)
    found = parse_forks({"registry": "https://r:1", "ca": ca})
    assert found.to_fork() == {"registry": "https://r:1", "ca": ca}
    publish = {"port": 7, "tls": [certificate, certificate]}
    found = parse_forks({"publish": publish, "ca": ca})
    assert found.publish.front_url == "https://127.0.0.1:7"
    assert {"ca", "registry_ca"}.isdisjoint(found.to_seed(found.publish, None))
    assert found.to_seed(found.publish, found.publish.front_url)["ca"] == ca
    for given, says in (
        ({"seed": "http://h:1", "ca": ca}, "ca is for https://"),
        ({"publish": True, "ca": ca}, "none is named"),
        ({"publish": {**publish, "front": "http://h:1"}}, "front has to be https"),
    ):
        with pytest.raises(OptionError, match=says):
            parse_forks(given)


def test_devices_are_looked_for_at_once(monkeypatch):
    monkeypatch.setattr("tensorlift.forking.transports.check_there", lambda kind: None)
    found = [Tree((Nic("mlx5_0", rate=10**9),), (), {})]
    monkeypatch.setattr("tensorlift.forking.nics.tree_here", lambda: found[0])
    given = {"seed": "http://h:1", "transports": ["mooncake", "tcp"], "protocol": "rdma", "limit": "25%"}
    assert parse_forks(given).to_fork()["limit"] == "25%"
    with pytest.raises(OptionError, match="devices has 'no-such-nic', which this machine does not have"):
        parse_forks({**given, "devices": "no-such-nic"})
    for protocol in ("rdma, or tcp", "rmda"):
        with pytest.raises(OptionError, match=f"protocol is '{protocol}'; expected one of tcp, rdma, efa, "):
            parse_forks({**given, "protocol": protocol})
    # Of what has none, or of a network of no known rate, there is no share.
    with pytest.raises(OptionError, match="a fork's share is of its NICs: over tcp none is chosen"):
        parse_forks({**given, "protocol": "tcp"})
    with pytest.raises(OptionError, match="the kernel does not tell"):
        parse_forks({**given, "seed": None, "protocol": "tcp", "publish": True})
    found[0] = Tree((), (), {})
    with pytest.raises(OptionError, match="no RDMA device with an active port is here"):
        parse_forks(given)
    monkeypatch.setenv("MOONCAKE_DEVICE", "no-such-nic")
    with pytest.raises(OptionError, match="MOONCAKE_DEVICE is 'no-such-nic'"):
        parse_forks({"publish": True, "transports": ["mooncake"]})


def test_a_share_of_a_limit_is_the_seeds_where_there_are_no_nics(monkeypatch):
    rates = {"10.0.0.7": 10**9}
    monkeypatch.setattr("tensorlift.forking.ways.link_rate", rates.get)
    given = {"seed": "http://h:1", "limit": "25%", "publish": {"host": "10.0.0.7", "insecure": True}}
    found = parse_forks(given)
    assert "limit" not in found.to_fork()
    assert found.to_seed(found.publish, None)["limit"] == "25%"
    rates.clear()  # a virtual network, say
    with pytest.raises(OptionError, match="the kernel does not tell how fast the network here is"):
        parse_forks(given)


@pytest.mark.parametrize("name", ["seed", "registry"])
def test_no_message_shows_a_password(name):
    for value in (["redis://u:HUNTER2@h:1", None], ["http://u:HUNTER2@h:1/x", 5], "http://u:HUNTER2@h:1/x"):
        with pytest.raises(OptionError, match=r"a list of|no URL of a seed") as caught:
            parse_forks({name: value})
        assert "HUNTER2" not in str(caught.value)
    with pytest.raises(OptionError, match="publish: front is a list of str"):
        parse_forks({"publish": {"front": ["http://u:HUNTER2@h:1"]}})
    found = parse_forks({"seed": "http://h:1/"})
    assert found.where == "http://h:1"  # as it was understood


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
        ({"registry": "ftp://h:1"}, "registry is 'ftp"),
        ({"registry": "http://h"}, "no URL of a seed"),
        ({"registry": "redis://h:port"}, "no URL of a Redis|'tensorlift.fleet.'"),
        ({"registry": []}, "registry is"),
        ({"registry": "http://h:1", "place": "a//b"}, "place is 'a//b'"),
        ({"registry": "http://h:1", "wait": "long"}, "wait is 'long'"),
        ({"registry": "http://h:1", "seeds": 1000}, "seeds is 1000"),
        ({"registry": "https://h:1", "ca": "no such file"}, "ca is 'no such file'"),
        (
            {"seed": "http://h:1", "registry": "http://r:1", "publish": True, "wait": 5},
            "wait is for a fork that asks a registry, and here seed names",
        ),
        ({"seed": "http://h:1", "registry": "http://r:1"}, "leave seed or registry out, or publish"),
        ({"limit": "2GB/s"}, "limit is for a fork or a seed"),
        ({"token": "secret", "publish": False}, "token is for a fork or a seed"),
        ({"transports": ["tcp"], "publish": False}, "transports is for a fork or a seed"),
        ({"seed": "http://h:1", "transports": ["memory", "tcp"]}, "transports has memory"),
        ({"publish": True, "seeds": 2}, "and here none is named"),
        ({"publish": True, "place": "rack-1"}, "place is for a registry"),
        ({"seed": "http://h:1", "protocol": "rdma"}, "name mooncake or nixl in transports"),
        ({"seed": "http://h:1", "devices": ["mlx5_1"]}, "no transport here takes NICs"),
        ({"seed": "http://h:1", "devices": [5]}, "devices is"),
        ({"seed": "http://h:1", "limit": "25%"}, "a fork's share is of its NICs"),
        ({"publish": True, "limit": "25%"}, "it does not for loopback"),
        ({"publish": {"readers": 0}}, "publish: readers is 0"),
        ({"publish": {"tls": "certificate.pem"}}, "tls is"),
        ({"publish": {"front": "https://h:1"}}, "front has to be https:// with tls"),
        ({"publish": {"insecure": "maybe"}}, "publish: insecure is 'maybe'; expected true or false"),
        ({"publish": {"host": 5}}, "publish: host is 5; expected a text"),
        ({"publish": {"prt": 1}}, "did you mean port"),
        ({"publish": {"zzzzz": 1}}, "the known ones are front, host, insecure, port, readers"),
        ({"publish": {"port": "7000"}}, "port is '7000'; expected a whole number"),
        ({"publish": {"port": True}}, "port is True"),
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
        (Publish(port=7, tls=("certificate", "key")), "https://127.0.0.1:7"),
    ],
)
def test_where_ranks_find_the_first(publish, front):
    assert publish.front_url == front


def test_what_an_engine_may_have_beside_it():
    class Arguments:
        replicas, moves = 1, False

    def check(settings, ranks=1, **given):
        arguments = Arguments()
        vars(arguments).update(given)
        settings.check_engine("engine", arguments, ranks, [("replicas", 1), ("moves", False), ("new", 1)])

    check(ForkSettings(), 8, replicas=2, moves=True)
    check(ForkSettings(publish=Publish()))
    check(ForkSettings(publish=Publish(port=7)), 8, moves=None)
    with pytest.raises(OptionError, match="with 8 ranks"):
        check(ForkSettings(publish=Publish()), 8)
    for given in ({"replicas": 2}, {"moves": True}):
        with pytest.raises(OptionError, match=f"engine: publish does not go with {next(iter(given))}"):
            check(ForkSettings(publish=Publish()), **given)
