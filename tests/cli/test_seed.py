"""``seed`` on the command line, as a process: offers until it is told to end, and ends then."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path

import pytest
import trustme

import tensorlift
from support.checkpoints import Written, random_checkpoint
from support.command_line import run
from support.ports import nobody
from support.registries import serving
from support.serving import command, ended
from support.tensors import assert_state
from tensorlift.cli import seed as verb
from tensorlift.errors import SeedError

SECONDS = 60


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return random_checkpoint(tmp_path / "model", shards=2)


def test_a_seed_until_ctrl_c(written: Written) -> None:
    before = set(os.listdir("/dev/shm"))
    with command("seed", written.path) as (child, said):
        assert (said["key"], said["tensors"]) == ("model", len(written.tensors))
        assert said["source"] == said["url"].replace("http://", "tensorlift://") + "/model"
        assert_state(tensorlift.load(said["source"]), written.tensors)
        code, out, err = run("load", said["source"], "--json")
        assert (code, err) == (0, "")
        assert json.loads(out)["runs"][0]["bytes"] == said["bytes"]
        assert ended(child, signal.SIGINT) == (130, "interrupted\n")
    with pytest.raises(SeedError, match="cannot be reached"):
        tensorlift.load(said["source"])
    assert set(os.listdir("/dev/shm")) <= before


def test_sigterm_is_the_way_to_end_it(written: Written, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a-token\n")
    given = ("--token-file", tmp_path / "token", "--key", "org/a model", "--limit", "1GB/s", "--readers", 1)
    with command("seed", *written.files, *given) as (child, said):
        assert said["source"].endswith("/org/a%20model")
        code, out, err = run("load", said["source"])
        assert (code, out) == (4, "")
        assert err.startswith("error: SeedError\n  http://127.0.0.1:")
        assert "wants a token, and none was given" in err
        assert run("load", said["source"], TENSORLIFT_TOKEN="a-token")[0] == 0
        code, _, err = run("load", said["source"] + "x", TENSORLIFT_TOKEN="a-token")
        assert code == 4
        assert "the seed has 'org/a model', not 'org/a modelx'" in err
        with open(f"/proc/{child.pid}/cmdline") as shown:
            assert "a-token" not in shown.read()
        assert ended(child, signal.SIGTERM) == (0, "")


def test_two_seeds_of_one_checkpoint_are_one_version(written: Written, tmp_path: Path) -> None:
    """Of which one is announced, and one says why not; and only one can be read over TCP."""
    gone = nobody()
    with (
        serving() as server,
        command("seed", written.path, "--transports", "tcp", "--registry", server.url) as (one, first),
        command("seed", written.path, "--registry", gone, "--transports", "shm") as (other, second),
    ):
        assert (first["registry"], first["announced"]) == (server.url, True)
        assert [one.url for one in server._registry.view().seeds] == [first["url"]]
        assert (second["registry"], second["announced"]) == (gone, False)
        assert second["why_not"].startswith(f"{gone} cannot be reached")
        assert (first["transports"], second["transports"], first["off"]) == (["tcp"], ["shm"], {})
        urls = (first["url"], second["url"])
        code, out, _ = run("fork", *urls, "--out", tmp_path / "out", "--json", "--limit", "1GB/s")
        assert (code, json.loads(out)["left"]) == (0, [])
        assert json.loads(out)["weights"].startswith("checkpoint ")
        code, out, _ = run("fork", *urls, "--out", tmp_path / "tcp", "--json", "--transports", "tcp,memory")
        assert (code, list(json.loads(out)["by_source"])) == (0, [first["url"]])
        assert "offers no transport that this fork takes: memory, tcp" in json.loads(out)["left"][0]
        for child in (one, other):
            ended(child, signal.SIGTERM)


def test_a_seed_of_an_address_that_others_reach(written: Written) -> None:
    code, out, err = run("seed", written.path, "--host", "0.0.0.0")
    assert (code, out) == (2, "")
    assert "is open to whoever reaches it: give a token, or say insecure=True (--insecure)" in err
    with command("seed", written.path, "--host", "0.0.0.0", "--insecure") as (child, said):
        assert said["url"].startswith("http://0.0.0.0:")
        assert ended(child, signal.SIGTERM) == (0, "")


def test_a_seed_under_tls(written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = trustme.CA()
    made = authority.issue_cert("127.0.0.1")
    cert, key, ca = (tmp_path / name for name in ("cert.pem", "key.pem", "ca.pem"))
    cert.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
    made.private_key_pem.write_to_path(key)
    authority.cert_pem.write_to_path(ca)
    with command("seed", written.path, "--tls-cert", cert, "--tls-key", key) as (child, said):
        assert said["source"] == said["url"].replace("https://", "tensorlift+https://") + "/model"
        for number, url in enumerate((said["url"], said["source"])):
            code, out, err = run("fork", url, "--out", tmp_path / f"{number}", "--ca", ca)
            assert (code, err) == (0, "")
            assert f"from {said['url']} in" in out
            assert_state(tensorlift.load(tmp_path / f"{number}"), written.tensors, ordered=False)
        code, _, err = run("fork", said["url"], "--out", tmp_path / "no")
        assert (code, "a certificate that is not trusted here" in err, "(--ca" in err) == (4, True, True)
        code, _, err = run("fork", said["url"], "--out", tmp_path / "no", "--ca", tmp_path / "none")
        assert (code, "expected a file of certificates" in err) == (2, True)
        monkeypatch.setenv("SSL_CERT_FILE", str(ca))
        assert run("load", said["source"])[0] == 0
        assert ended(child, signal.SIGTERM) == (0, "")


def test_what_is_refused_before_a_load(
    written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, _, err = run("seed", "nowhere", "--port", taken.getsockname()[1])
    assert code == 3
    assert "error: MachineError\n  nobody can listen on '127.0.0.1', port " in err
    assert run("seed", "nowhere", "--host", "no.such.host.invalid", "--insecure")[0] == 3
    code, _, err = run("seed", "nowhere", "--limit", "fast")
    assert (code, "limit is 'fast'" in err) == (2, True)
    code, _, err = run("seed", "nowhere", "--limit", "25%")
    assert (code, "limit is '25%', but the kernel does not tell" in err) == (2, True)
    monkeypatch.setattr("tensorlift.forking.ways.link_rate", lambda host: 10**9)
    assert run("seed", "nowhere", "--limit", "25%")[0] == 1
    for wrong, message in (
        (("--registry", "nonsense"), "registry is 'nonsense'; expected http"),
        (("--registry", "file:/seeds.json"), "registry is a list of seeds, where nobody is announced"),
        (("--registry-ca", "a"), "--registry-ca and --place are for --registry, and none is given"),
        (("--place", "z"), "--registry-ca and --place are for --registry, and none is given"),
        (("--registry", "http://10.0.0.1:7", "--registry-ca", "a"), "registry_ca is for a registry at https"),
        (("--protocol", "tcp"), "protocol is 'tcp', but no transport here takes one"),
        (("--transports", "tcp,pigeons"), "transports is ['tcp', 'pigeons']; expected some of"),
        (("--devices", "mlx5_0"), "no transport here takes NICs"),
        (("--registry", "http://10.0.0.1:7", "--place", "/"), "place is '/'"),
        (("--key", ""), "--key is empty"),
        (("--key", "\udcff"), "key is no ModelKey that can be sent"),
        (("--readers", "5000"), "--readers is 5000; expected a whole number from 1 to 4096"),
    ):
        code, _, err = run("seed", "nowhere", *wrong)
        assert (code, message in err) == (2, True), (wrong, err)
    for given in (("--tls-cert", "a"), ("--tls-key", "a")):
        code, _, err = run("seed", "nowhere", *given)
        assert (code, "--tls-cert and --tls-key go together" in err) == (2, True)
    code, _, err = run("seed", "nowhere", "--tls-cert", "a", "--tls-key", "b")
    assert (code, "No such file or directory: 'a'" in err) == (2, True)
    assert run("seed", "nowhere", "--token-file", tmp_path / "none")[0] == 2
    assert run("seed", "nowhere", "--readers", 0)[0] == 2
    code, _, err = run("seed", "nowhere")
    assert (code, err.startswith("error: CheckpointNotFoundError")) == (1, True)


def test_signals_are_as_before(written: Written) -> None:
    assert run("seed", "nowhere")[0] == 1
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(
    ("paths", "key", "model"),
    [
        (["{0}"], None, ("model", "")),
        (["{0}/model-00001-of-00002.safetensors"], None, ("model", "")),
        (["{0}/.."], "mine", ("mine", "")),
        (["org/name"], None, ("org/name", "")),
        (["org/name@v1"], "mine", ("mine", "v1")),
    ],
)
def test_what_the_model_is_called(
    written: Written, paths: list[str], key: str | None, model: tuple[str, str]
) -> None:
    found = verb._key([path.format(written.path) for path in paths], key)
    assert (found.model, found.revision, found.processed) == (*model, False)


def test_text_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    facts = {
        "tensors": 1,
        "bytes": 2000,
        "key": "m",
        "seconds": 1.5,
        "url": "http://h:1",
        "source": "s://h:1/m",
        "off": {},
    }
    verb._print(facts, False)
    assert capsys.readouterr().out == (
        "1 tensor, 2.00 kB of m in host memory after 1.50 s; Ctrl-C ends it\nhttp://h:1\ns://h:1/m\n"
    )
    verb._print(
        facts | {"off": {"nixl": "no NIC"}, "registry": "http://r:1", "announced": True, "why_not": ""}, False
    )
    assert capsys.readouterr().out.endswith("s://h:1/m\nnot nixl: no NIC\nannounced at http://r:1\n")
    verb._print(facts | {"registry": "http://r:1", "announced": False, "why_not": "it sleeps"}, False)
    assert capsys.readouterr().out.endswith("\nnot announced at http://r:1: it sleeps\n")
