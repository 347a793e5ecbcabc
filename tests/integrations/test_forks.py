"""An engine's model out of an instance, or out of files, as all ranks agree."""

from __future__ import annotations

import logging

import pytest
import torch

import tensorlift
from support import ranks
from tensorlift.errors import ForkError
from tensorlift.forking.manifest import ModelKey
from tensorlift.integrations import forks
from tensorlift.integrations.fork_settings import ForkSettings
from tensorlift.integrations.settings import Settings
from tensorlift.integrations.state import State

LOG = logging.getLogger("tests.forks")
KEY = ModelKey(model="m")


class Model(torch.nn.Linear):
    def __init__(self, value: float = 0.0) -> None:
        super().__init__(4, 4, bias=False)
        self.requires_grad_(False).weight.fill_(value)


def settings(*urls, **more):
    return Settings(instances=ForkSettings(seed=urls, transports=("tcp",), **more))


def fork_model(settings, make=Model, **more):
    return forks.fork_model(make, lambda: KEY, settings, engine="tests", group=None, log=LOG, **more)


@pytest.fixture
def seed():
    with tensorlift.seed(State(Model(2.0), "tests").tensors(), key=KEY, weights="v2") as made:
        yield made


def test_a_model_comes_with_a_line_in_the_log(seed, caplog):
    caplog.set_level(logging.INFO)
    model, state, came = fork_model(settings(seed.url))
    assert bool((model.weight == 2).all())
    assert came.weights == "v2"
    assert state.tensors()["weight"].data_ptr() == model.weight.data_ptr()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("tensorlift: rank 0: forked ")
    assert "'m' (target), version v2 in " in line
    assert f"from {seed.url} (tcp" in line


def test_progress_is_drawn_as_the_engine_draws_it_unless_the_setting_says_otherwise(seed):
    seen = []

    class Bar:
        def __enter__(self):
            return lambda done, total: seen.append((done, total))

        def __exit__(self, *_):
            seen.append("closed")

    fork_model(settings(seed.url), bar=Bar)
    assert seen[-1] == "closed"
    assert seen[-2][0] == seen[-2][1] > 0
    seen.clear()
    quiet = Settings({"progress": False}, instances=settings(seed.url).instances)
    assert fork_model(quiet, bar=Bar) is not None
    assert seen == []


def failing():
    raise RuntimeError("this method cannot process zeros")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: torch.nn.Linear(3, 4, bias=False), "has other weights than the model here"),
        (failing, "RuntimeError: this method cannot process zeros"),
    ],
)
def test_what_does_not_fit_is_loaded_from_files_with_the_reason(seed, caplog, make, says):
    assert fork_model(settings(seed.url), make) is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert says in record.getMessage()
    assert record.getMessage().endswith("loading from files")


def test_an_engine_that_cannot_name_its_weights_loads_files(seed, caplog):
    found = forks.fork_model(
        Model, lambda: {}["served name"], settings(seed.url), engine="tests", group=None, log=LOG
    )
    assert found is None
    assert f"no fork from {seed.url}: KeyError: 'served name'" in caplog.text


def test_nobody_is_there(seed, caplog):
    seed.close()
    assert fork_model(settings(seed.url)) is None
    assert f"no fork of 'm' (target) from {seed.url}: SeedError" in caplog.text
    with pytest.raises(ForkError, match=r"cannot be reached.*files may not stand in"):
        fork_model(settings(seed.url, fallback=False))


def test_a_registry_is_handed_on(monkeypatch, seed):
    seen = {}
    original = tensorlift.fork

    def fork(source=None, *, registry=None, **more):
        seen.update(source=source, registry=registry)
        return original(seed.url, **more)

    monkeypatch.setattr(forks.instances, "fork", fork)
    found = Settings(instances=ForkSettings(registry="http://r:1", transports=("tcp",)))
    assert fork_model(found) is not None
    assert seen == {"source": None, "registry": "http://r:1"}
    assert fork_model(settings(seed.url, registry="http://r:1")) is not None
    assert seen == {"source": [seed.url], "registry": None}  # which is for announcing then


@pytest.mark.parametrize(
    ("offered", "own", "comes"),
    [
        ("checkpoint 1", "checkpoint 2", False),
        ("checkpoint 1", "checkpoint 1", True),
        ("checkpoint 1", "", True),
        ("updated 0123, 1", "checkpoint 2", True),
    ],
)
def test_an_instance_of_another_checkpoint_is_not_ours(caplog, offered, own, comes):
    with tensorlift.seed(State(Model(2.0), "tests").tensors(), key=KEY, weights=offered) as seed:
        assert (fork_model(settings(seed.url), own=lambda: own) is not None) == comes
        assert (seed.stats()["sent_chunks"] > 0) == comes  # it is asked before it is read
    why = "the instance has checkpoint 1, and the files here are checkpoint 2; loading from files"
    assert (why in caplog.text) != comes


def test_another_instance_is_read_where_the_first_is_of_another_checkpoint(caplog):
    with (
        tensorlift.seed(State(Model(1.0), "tests").tensors(), key=KEY, weights="checkpoint 1") as other,
        tensorlift.seed(State(Model(2.0), "tests").tensors(), key=KEY, weights="checkpoint 2") as seed,
    ):
        model, _, came = fork_model(settings(other.url, seed.url), own=lambda: "checkpoint 2")
    assert bool((model.weight == 2).all())
    assert "the instance has checkpoint 1" in came.left[0]


def test_a_registrys_password_is_not_shown(caplog):
    url = "redis://user:HUNTER2@127.0.0.1:1/0?password=HUNTER2"
    for registry in (url, ("http://user:HUNTER2@127.0.0.1:1", "http://user:HUNTER2@[")):
        found = Settings(instances=ForkSettings(registry=registry, transports=("tcp",), wait=0.1))
        assert fork_model(found) is None
        assert "HUNTER2" not in caplog.text + repr(found)
    assert "from the registry redis://127.0.0.1:1/0: " in caplog.text
    assert "from the registry http://127.0.0.1:1, http://[: " in caplog.text


def test_weights_without_a_version_out_of_a_registry_are_of_one_rank_alone(monkeypatch):
    from_registry = Settings(instances=ForkSettings(registry="http://r:1", transports=("tcp",)))
    with tensorlift.seed(State(Model(2.0), "tests").tensors(), key=KEY) as seed:
        original = tensorlift.fork
        monkeypatch.setattr(
            forks.instances, "fork", lambda source=None, registry=None, **more: original(seed.url, **more)
        )
        # Rank 0 may have it of the first of two, and rank 1 of the second.
        two = settings(seed.url, "http://127.0.0.1:1")
        for asked, says in (
            (from_registry, "unnamed of rank 0"),
            (settings(seed.url), ""),
            (two, "unnamed of rank 0"),
        ):
            _, found = forks._made(Model, lambda: KEY, asked, "tests", None, str)
            assert (found.weights, found.why) == (says, "")


def test_a_share_of_a_limit_is_the_seeds_alone(seed):
    assert fork_model(Settings(instances=ForkSettings(seed=(seed.url,), limit="25% "))) is not None


def said(who, weights="", why=""):
    return forks.msgspec.json.encode(forks._Said(who, "", weights, why))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ([said("rank 0", "a"), said("rank 1", "a")], ""),
        ([said("rank 0", "a"), said("rank 1", "", "gone")], "rank 1: gone"),
        ([said("rank 0", "a"), said("rank 1", "")], "rank 0 a, rank 1 that of the files"),
    ],
)
def test_ranks_have_one_version_or_load_from_files(given, why):
    assert why in forks._decide(given).decode()
    assert bool(forks._decide(given)) == bool(why)


def two_ranks(rank, urls):
    """In a rank: what it gets where all have a peer, and where rank 1 has none."""
    got = []
    for key in (ModelKey(model="m", tp=(rank, 2)), ModelKey(model="m", tp=(rank, 2 + rank))):
        found = forks.fork_model(
            Model,
            lambda key=key: key,
            settings(*urls),
            engine="tests",
            group="world",
            log=logging.getLogger("tensorlift"),
        )
        got.append(None if found is None else float(found[0].weight[0, 0]))
    return got


def test_two_ranks_fork_from_their_peers_or_none_does():
    front, second = (State(Model(value), "tests").tensors() for value in (2.0, 3.0))
    with (
        tensorlift.seed(front, key=ModelKey(model="m", tp=(0, 2))) as seed,
        tensorlift.seed(second, key=ModelKey(model="m", tp=(1, 2)), join=seed.url),
    ):
        outcomes = ranks.run(two_ranks, 2, [seed.url])
    assert [outcome.value for outcome in outcomes] == [[2.0, None], [3.0, None]], outcomes
