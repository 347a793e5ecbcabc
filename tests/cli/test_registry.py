"""``tensorlift registry`` as a process, and the verbs that name it."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import trustme

import tensorlift
from support.checkpoints import random_checkpoint
from support.command_line import run
from support.ports import nobody
from support.registries import KEY, announced, redis_server, serving
from support.serving import command, ended
from support.tensors import assert_state
from support.waiting import until, when
from tensorlift.fleet.contract import Near
from tensorlift.fleet.registry_client import RegistryClient
from tensorlift.fleet.server import RegistryServer
from tensorlift.forking.manifest import ModelKey

SECONDS = 60


def test_until_ctrl_c() -> None:
    with command("registry", "--port", 0) as (child, said):
        assert said == {"url": said["url"], "database": None}
        assert RegistryClient(said["url"]).announce(announced(1)) == 15
        assert ended(child, signal.SIGINT) == (130, "interrupted\n")


def test_with_a_token_and_a_redis(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a-token\n")
    with redis_server(tmp_path, "geheim") as url:
        given = ("--port", 0, "--token-file", tmp_path / "token", "--database", url, "--host", "0.0.0.0")
        with command("registry", *given) as (child, said):
            assert said["database"] == url.replace(":geheim@", "").removesuffix("/0")
            client = RegistryClient(said["url"].replace("0.0.0.0", "127.0.0.1"), "a-token")
            assert client.announce(announced(1, url="http://10.0.0.1:5")) == 15
            assert client.candidates(KEY, Near()) == ["http://10.0.0.1:5"]
            assert ended(child, signal.SIGTERM) == (0, "")


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = run("registry", "--host", "0.0.0.0", "--port", 0)
    assert (code, "a registry on 0.0.0.0 is open to whoever reaches it: give a token" in err) == (2, True)
    code, _, err = run("registry", "--tls-cert", "x", "--port", 0)
    assert (code, "--tls-cert and --tls-key go together" in err) == (2, True)
    (tmp_path / "text").write_text("something else " * 1000)
    code, _, err = run("registry", "--database", tmp_path / "text", "--port", 0)
    assert (code, "is no database; name another file" in err) == (1, True)
    with serving() as server:
        code, _, err = run("registry", "--port", server.url.rpartition(":")[2])
        assert (code, "nobody can listen on '127.0.0.1', port" in err) == (3, True)
    monkeypatch.delitem(sys.modules, "tensorlift.fleet.server")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    code, _, err = run("registry", "--port", 0)
    assert (code, "not there (uvicorn): pip install 'tensorlift[fleet]'" in err) == (2, True)


def test_the_registry_needs_no_torch() -> None:
    """It is one small process for a whole cluster."""
    text = "import sys, tensorlift.cli.main, tensorlift.fleet.server as s; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-W", "error", "-c", text], check=True, timeout=SECONDS)


def test_a_seed_and_a_fork_that_name_it(tmp_path: Path) -> None:
    written = random_checkpoint(tmp_path / "model")
    given = ["--key", "org/model", "--place", "z/r", "--json"]
    with serving() as server:
        command = [
            sys.executable,
            "-m",
            "tensorlift",
            "seed",
            str(written.path),
            "--registry",
            server.url,
            *given,
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            try:
                until(lambda: server._registry.view().seeds)
                (seed,) = server._registry.view().seeds
                assert (seed.key, seed.near.place) == (ModelKey(model="org/model", processed=False), "z/r")
                code, out, err = run(
                    "fork", "--registry", server.url, "--key", "org/model", "--out", tmp_path / "out"
                )
                assert (code, err) == (0, "")
                assert f"from {seed.url} in" in out
                assert_state(tensorlift.load(tmp_path / "out"), written.tensors, ordered=False)
                child.terminate()
                assert child.wait(SECONDS) == 0
                assert server._registry.view().seeds == []
            finally:
                child.kill()


def fork(server: RegistryServer, out: Path, key: str = "org/model", *more: object) -> tuple[int, str, str]:
    return run("fork", "--registry", server.url, "--key", key, "--out", out, *more)


@contextlib.contextmanager
def seeding(server: RegistryServer, key: ModelKey | str, **more: Any) -> Iterator[tensorlift.Seed]:
    with tensorlift.seed({"a": torch.arange(100)}, key=key, registry=server.url, **more) as seed:
        until(lambda: seed.url in {one.url for one in server._registry.view().seeds})
        yield seed


def test_forks_of_what_an_engine_holds(tmp_path: Path) -> None:
    with serving() as server, seeding(server, "org/model") as seed:
        # One that is not there is passed over.
        server._registry.announce(announced(1, ModelKey(model="org/model", processed=False), url=nobody()))
        code, out, err = fork(server, tmp_path / "out")
        assert (code, err, f"from {seed.url} in" in out) == (0, "", True)
        assert "left behind: http://127.0.0.1:" in out
        code, _, err = fork(server, tmp_path / "no", "other")
        assert (code, err.count("it knows none")) == (4, 1)
        assert "'other' (target): it knows none; there is 'org/model' (target" in err
        code, _, err = run("fork", "--registry", server.url, "--out", tmp_path / "no")
        assert (code, "a registry is asked by a key: give key (--key)" in err) == (2, True)


def test_a_fork_tells_the_registry_what_it_does(tmp_path: Path) -> None:
    with serving() as server, seeding(server, "org/model") as seed:
        assert fork(server, tmp_path / "out", "org/model", "--place", "z/r")[0] == 0
        ((report, state),) = server._registry.view().recent
        assert (state, report.done_bytes, report.total_bytes) == ("done", 800, 800)
        assert (report.key, report.near.place, report.seeds) == (KEY, "z/r", (seed.url,))
        assert fork(server, tmp_path / "no", "other")[0] == 4
        (report, state), _ = server._registry.view().recent
        assert (state, "it knows none" in report.reason) == ("failed", True)


def test_a_fork_waits_for_room(tmp_path: Path) -> None:
    with serving() as server, seeding(server, "org/model", readers=1) as seed:
        lease = seed.grant(50)
        until(lambda: server._registry.view().seeds[0].load.readers)
        code, _, err = fork(server, tmp_path / "no", "org/model", "--wait", 0.3)
        assert (code, "all with as many readers as they take" in err) == (4, True)

        def waits() -> bool:
            return any(one.state == "waiting" for one in server._registry.view().forks)

        with when(waits, lambda: seed.release(lease.id)):
            assert fork(server, tmp_path / "out")[0] == 0


def test_a_whole_key_and_several_seeds(tmp_path: Path) -> None:
    """Also a rank behind the front that a list names."""
    key = ModelKey(model="m", engine="vllm 9", dtype="bfloat16", revision="main", tp=(1, 2))
    text = json.dumps(
        {"model": "m", "engine": "vllm 9", "dtype": "bfloat16", "revision": "main", "tp": [1, 2]}
    )
    with (
        serving() as server,
        seeding(server, "front") as front,
        seeding(server, key, weights="1", join=front.url) as one,
        seeding(server, key, weights="1") as other,
    ):
        code, _, err = fork(server, tmp_path / "no", "m")
        there = "there is 'front' (target), 'm' (target, main, bfloat16, vllm 9, tp 1 of 2)"
        assert (code, there in err) == (4, True)
        code, out, _ = fork(server, tmp_path / "out", text, "--seeds", 2, "--json")
        assert (code, set(json.loads(out)["by_source"]) <= {one.url, other.url}) == (0, True)
        (tmp_path / "list.json").write_text(json.dumps({"seeds": [front.url]}))
        given = ("--registry", f"file:{tmp_path}/list.json", "--key", text, "--json")
        code, out, _ = run("fork", *given, "--out", tmp_path / "rank")
        assert (code, json.loads(out)["by_source"]) == (0, {one.url: 800})


def test_what_a_fork_is_asked_wrongly(tmp_path: Path) -> None:
    url, out = nobody(), ("--out", tmp_path / "no")
    for given in ((), (url, "--registry", url)):
        code, _, err = run("fork", *given, *out)
        assert (code, "a fork wants either the URL of a seed or a registry: http" in err) == (2, True)
    for more in (("--place", "z"), ("--seeds", 2), ("--wait", 3)):
        code, _, err = run("fork", url, *more, *out)
        assert (code, "place, seeds and wait are for a registry, and none was given" in err) == (2, True)
    for wrong, message in (
        (("--key", "{"), "--key is no key in JSON"),
        (("--key", '{"tp": [0, 1]}'), "key is none: Object missing required field `model`"),
        (("--key", '{"model": "m", "tp": [2, 1]}'), "key has rank 2 of 1 in tp"),
        (("--key", '{"model": "m", "engin": "x"}'), "key has 'engin'; a key has model, revision"),
        (("--key", "m", "--seeds", 65), "seeds is 65"),
        (("--key", "m", "--wait", 0), "wait is 0"),
        (("--key", "m", "--transports", "x"), "transports is ['x']"),
        (("--key", "m", "--limit", "fast"), "limit is 'fast'"),
        (("--key", "m", "--devices", "mlx5_0"), "no transport here takes NICs"),
        (("--key", "m", "--protocol", "tcp"), "protocol is 'tcp', but no transport here takes one"),
        (("--key", "m", "--ca", "none"), "ca is "),
    ):
        code, _, err = run("fork", "--registry", url, *wrong, *out)
        assert (code, message in err) == (2, True), (wrong, err)
    code, _, err = run("fork", "--registry", "nonsense", "--key", "m", *out)
    assert (code, "file:/path.json" in err) == (2, True)


def test_a_seed_without_tls_where_some_are_trusted(tmp_path: Path) -> None:
    """It is a seed that failed, and no mistake of who calls."""
    ca, url = tmp_path / "ca.pem", nobody()
    trustme.CA().cert_pem.write_to_path(str(ca))
    (tmp_path / "seeds").write_text(json.dumps({"seeds": [url]}))
    given = ("--registry", f"file:{tmp_path / 'seeds'}", "--key", "m", "--ca", ca, "--out", tmp_path / "no")
    code, _, err = run("fork", *given)
    assert (code, "error: SeedError" in err, f"{url} is read without TLS" in err) == (4, True, True), err
    assert "it knows no other than the 1 seed that failed" in err


def test_a_registry_that_is_down_is_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the error, not in the log before it too."""
    monkeypatch.setattr("tensorlift.fleet.finding_seeds._DOWN_SECONDS", 0.05)
    code, _, err = run("fork", "--registry", nobody(), "--key", "m", "--out", tmp_path / "out")
    assert (code, err.count("cannot be reached"), caplog.messages) == (4, 1, [])
    assert "(host=, --host)" in err
