"""The public face of forks: one URL for all ranks of an instance, and forks that are seeds at once."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorlift
from support import leaks
from support.instance import ROLES, weights
from tensorlift.errors import OptionError

PATHS = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)


def started(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "support.instance", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": PATHS},
    )


@contextlib.contextmanager
def rank_of_seed(*arguments: object) -> Iterator[tuple[list[str], subprocess.Popen[str]]]:
    """(its URLs, the process), which ends behind it."""
    with started("seed", *arguments) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline()), process
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired, ValueError):
                process.communicate("", timeout=60)
            process.kill()


def sent(process: subprocess.Popen[str]) -> list[int]:
    return json.loads(process.communicate("", timeout=60)[0])


def forked(size: int, front: str) -> list[dict[str, Any]]:
    processes = [started("fork", rank, size, front) for rank in range(2)]
    return [json.loads(process.communicate("", timeout=110)[0]) for process in processes]


def test_two_ranks_with_a_target_and_a_draft_behind_one_url() -> None:
    """Each rank of the fork gets its own rank's bytes, and no others pass."""
    with rank_of_seed(0, 2) as (first, front), rank_of_seed(1, 2, first[0]) as (second, other):
        for rank, (told, urls) in enumerate(zip(forked(2, first[0]), (first, second), strict=True)):
            for role, url in zip(ROLES, urls, strict=True):
                nbytes = sum(tensor.nbytes for tensor in weights(role, rank).values())
                assert told[role] == {"right": True, "by_source": {url: nbytes}}
        expected = [sum(tensor.nbytes for tensor in weights(role, 0).values()) for role in ROLES]
        assert sent(other) == sent(front) == expected


def test_ranks_that_are_not_there() -> None:
    with rank_of_seed(0, 2) as (urls, _):
        there, missing = forked(2, urls[0])
        assert all(there[role]["right"] for role in ROLES)
        for role in ROLES:
            assert missing[role]["error"] == (
                f"{urls[0]} does not have 'org/model' ({role}, tp 1 of 2); there is "
                "'org/model' (target, tp 0 of 2), 'org/model' (draft, tp 0 of 2)"
            )
        for told in forked(4, urls[0]):
            for role in ROLES:
                assert told[role]["error"].endswith(
                    "; its tp is 2, not 4, and a fork does not split weights anew"
                )


class Model(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.layers = torch.nn.ModuleList(torch.nn.Linear(30, 40) for _ in range(4))
            self.tied = torch.nn.Linear(30, 40, bias=False)
        self.tied.weight = self.layers[0].weight
        self.register_buffer("steps", torch.tensor(seed), persistent=False)


def same(one: Model, other: Model) -> bool:
    mine, theirs = ({**m.state_dict(), "steps": m.steps} for m in (one, other))
    return all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_tree_of_eight() -> None:
    """Each fork is a seed at once, with regions numbered alike: later ones read from all before them."""
    with leaks.nothing_left(), contextlib.ExitStack() as opened:
        urls = [opened.enter_context(tensorlift.seed(Model(1), key="m", weights="v3", token="t")).url]
        for number in range(2, 9):
            model = Model(number)
            parents = [urls[number // 2 - 1], urls[number // 2 - 2]] if number > 3 else urls[0]
            came = tensorlift.fork(parents, into=model, token="t", key="m", chunk_bytes=1000, patience=60)
            assert same(model, Model(1))
            assert came.left == ()
            assert set(came.by_source) <= {*parents} if number > 3 else {urls[0]}
            seed = tensorlift.seed(model, key=came.key, weights=came.weights, token="t")
            urls.append(opened.enter_context(seed).url)
        model = Model(9)
        assert tensorlift.fork(urls, into=model, token="t", patience=60).left == ()
        assert same(model, Model(1))


def test_a_seed_and_its_fork_at_once() -> None:
    """A to B to C, where C reads from A and from B, each of which is slow."""
    with tensorlift.seed(Model(1), key="m", weights="v1", limit="60KB/s") as first:
        model = Model(2)
        came = tensorlift.fork(first.url, into=model)
        with tensorlift.seed(model, key=came.key, weights=came.weights, limit="60KB/s") as second:
            last = Model(3)
            result = tensorlift.fork([first.url, second.url], into=last, chunk_bytes=1000, patience=60)
            assert same(last, Model(1))
            assert set(result.by_source) == {first.url, second.url}


def test_what_cannot_be() -> None:
    with pytest.raises(tensorlift.OptionError, match="key is ''; expected the name of a model"):
        tensorlift.seed(Model(1), key="")
    with pytest.raises(tensorlift.OptionError, match="a seed here takes no 'tokken'; expected one of key, "):
        tensorlift.seed(Model(1), key="m", tokken="t")
    for bad in ("", "two words"):
        with pytest.raises(tensorlift.OptionError, match="token ") as caught:
            tensorlift.fork("http://127.0.0.1:1", into=Model(1), token=bad)
        assert "two words" not in str(caught.value)


def test_nothing_shows_the_token() -> None:
    with tensorlift.seed(Model(1), key="m", token="hush") as seed:
        assert repr(seed) == f"<Seed of 'm' (target) at {seed.url}>"
        came = tensorlift.fork(seed.url, into=Model(2), token="hush")
        assert "hush" not in repr(came) + repr(seed.stats())


def test_a_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    into = {"a": torch.zeros(50_000)}
    with tensorlift.seed({"a": torch.ones(50_000)}, key="m") as seed:
        tensorlift.fork(seed.url, into=into, progress=True)
    assert (into["a"] == 1).all()
    assert "kB" in capsys.readouterr().err


@pytest.mark.parametrize(
    "more",
    [
        {"connections": 0}, {"connections": 65}, {"connections": "two"}, {"patience": -1},
        {"patience": "10s"}, {"patience": float("nan")}, {"chunk_bytes": 0}, {"chunk_bytes": "much"},
        {"digests": "some"}, {"transports": "tcp"}, {"token": ""}, {"key": 3},
    ],
)  # fmt: skip
def test_what_is_no_option(more: dict[str, Any]) -> None:
    (name,) = more
    with pytest.raises(tensorlift.OptionError, match=f"^{name} is .*; expected "):
        tensorlift.fork("http://127.0.0.1:9", into={"a": torch.zeros(1)}, **more)


def test_a_size_as_text() -> None:
    into = {"a": torch.zeros(5000)}
    with tensorlift.seed({"a": torch.ones(5000)}, key="m") as seed:
        tensorlift.fork(seed.url, into=into, chunk_bytes="4KiB")
        assert seed.stats()["sent_chunks"] == 5
    assert (into["a"] == 1).all()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"seeds": 2}, "are for a registry"),
        ({"place": "zone"}, "are for a registry"),
        ({"wait": 5.0}, "are for a registry"),
        ({"streams": 2}, "a fork here takes no 'streams'; expected one of token, "),
        ({"limit": "25%"}, "share is of its NICs"),
        ({"protocol": "tcp"}, "protocol is 'tcp', but no transport here takes one"),
    ],
)
def test_options_that_would_be_of_no_use(given: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        tensorlift.fork("http://127.0.0.1:1", into={"a": torch.zeros(1)}, **given)


def test_an_option_that_a_server_of_sglang_does_not_have() -> None:
    with pytest.raises(OptionError, match="a fork here takes no 'connections'"):
        tensorlift.fork("sglang+http://127.0.0.1:1", into={}, connections=2)


@pytest.mark.parametrize(
    "call",
    [
        lambda **more: tensorlift.fork("http://127.0.0.1:1", into={}, **more),
        lambda **more: tensorlift.fork("sglang+http://127.0.0.1:1", into={}, **more),
        lambda **more: tensorlift.seed({}, key="m", **more),
    ],
)
def test_which_options_there_are(call: Callable[..., Any]) -> None:
    """All that may be given, and nothing that the package alone gives."""
    with pytest.raises(OptionError) as caught:
        call(unknown=1)
    listed = str(caught.value).partition("expected one of ")[2].split(", ")
    assert {"registry", "place", "token", "transports", "limit"} <= set(listed)
    assert not {"part_of", "pacer", "unwanted", "model", "url", "urls", "into", "options"} & set(listed)
    assert len(listed) == len(set(listed))


def test_a_seed_without_transports_is_not_announced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Forks would be sent to it in vain."""
    monkeypatch.setattr(tensorlift.Seed, "transports", ())
    with (
        leaks.nothing_left(),
        tensorlift.seed({"a": torch.zeros(1)}, key="m", registry="http://127.0.0.1:1") as seed,
    ):
        assert "a seed of m is not announced: no transport is there" in caplog.text
        assert seed._followers == []


def test_the_token_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the command line and the engines have it; what is given goes before it."""
    made = {"a": torch.ones(3)}
    monkeypatch.setenv("TENSORLIFT_TOKEN", "from-there")
    with tensorlift.seed(made, key="m", host="0.0.0.0") as seed:
        assert seed.token == "from-there"
        url = seed.url.replace("0.0.0.0", "127.0.0.1")
        into = {"a": torch.zeros(3)}
        tensorlift.fork(url, into=into)
        assert torch.equal(into["a"], made["a"])
        with pytest.raises(tensorlift.SeedError, match="does not take this token"):
            tensorlift.fork(url, into=into, token="another")
    with tensorlift.seed(made, key="m", token="given") as seed:
        assert seed.token == "given"


SECRETIVE = [
    "http://me:geheim@127.0.0.1:9/x",
    "http://me:pass/geheim@127.0.0.1:9",
    "http://me:pass?geheim@127.0.0.1:9",
    "http://127.0.0.1:9?password=geheim",
    "https://127.0.0.1:9#geheim",
    "tensorlift://me:geheim@127.0.0.1:9/m",
    "tensorlift://127.0.0.1:9/m?token=geheim",
    "sglang+http://127.0.0.1:9?token=geheim",
    "redis://me:geheim@127.0.0.1:x/0",
    "redis://127.0.0.1:9/0?passphrase=geheim",
    "unix:///no/socket?password=geheim",
    "dns://me:geheim@host",
    "ftp://127.0.0.1/?password=geheim",
]


@pytest.mark.parametrize("url", SECRETIVE)
def test_no_secret_of_a_url_is_shown(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Wherever a URL can be given: in no error, nor behind one, nor in a log."""
    monkeypatch.setattr("tensorlift.fleet.finding_seeds._DOWN_SECONDS", 0.05)
    made = {"a": torch.zeros(1)}
    given: list[Callable[[], object]] = [
        lambda: tensorlift.load(url),
        lambda: tensorlift.open(url),
        lambda: tensorlift.load_into({}, url),
        lambda: tensorlift.load(url, backend="PREAD"),
        lambda: tensorlift.fork(url, into=made, key="m"),
        lambda: tensorlift.fork(registry=url, into=made, key="m", wait=1),
        lambda: tensorlift.fork(registry=[url], into=made, key="m", wait=1),
        lambda: tensorlift.fork(registry=[url, None], into=made, key="m"),  # type: ignore[list-item]
        lambda: tensorlift.seed(made, key="m", join=url, join_timeout=0.05),
    ]
    for call in given:
        with pytest.raises(tensorlift.TensorliftError) as refused:
            call()
        error: BaseException | None = refused.value
        while error is not None:
            assert "geheim" not in f"{error} {error.args}"
            error = error.__cause__ if error.__suppress_context__ else error.__context__
    assert "geheim" not in caplog.text
