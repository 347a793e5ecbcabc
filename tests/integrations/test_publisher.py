"""What a process offers of its models: from when it serves."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch
import trustme

import tensorlift
from support import ranks
from support.offers import KEY, LOG, SETTINGS, Model, forked, url_of
from tensorlift.errors import ForkError, RequestError, SeedError
from tensorlift.forking.client import SeedClient
from tensorlift.forking.manifest import ModelKey
from tensorlift.integrations import publisher as publishing
from tensorlift.integrations.fork_settings import ForkSettings, Publish
from tensorlift.integrations.publisher import Publisher
from tensorlift.integrations.state import State


def test_nothing_is_offered_before_the_engine_serves_nor_unless_it_is_asked_for(publisher, caplog):
    publisher.add(lambda: State(Model(1.0), "tests"), lambda: KEY, ForkSettings(), LOG)
    publisher.serve()
    publisher.close()
    publisher.add(lambda: State(Model(1.0), "tests"), lambda: KEY, SETTINGS, LOG, "version 3")
    publisher.restore()
    assert not caplog.records
    publisher.serve()
    assert url_of(caplog).startswith("http://127.0.0.1:")
    assert forked(url_of(caplog)) == (1.0, 1.0, "version 3")


def test_target_and_draft_stand_behind_one_url(publisher, caplog):
    draft = ModelKey(model="m", role="draft")
    publisher.add(lambda: State(Model(1.0), "tests"), lambda: KEY, SETTINGS, LOG)
    publisher.add(lambda: State(Model(2.0), "tests"), lambda: draft, SETTINGS, LOG)
    publisher.serve()
    assert forked(url_of(caplog, 0))[:2] == (1.0, 1.0)
    assert forked(url_of(caplog, 0), draft)[:2] == (2.0, 2.0)


@pytest.mark.parametrize("under_tls", [False, True])
def test_ranks_stand_behind_the_first(publisher, caplog, monkeypatch, tmp_path, under_tls):
    ca, tls = None, None
    if under_tls:
        authority, ca, chain = trustme.CA(), str(tmp_path / "ca.pem"), str(tmp_path / "chain.pem")
        authority.cert_pem.write_to_path(ca)
        authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(chain)
        tls = (chain, chain)
    settings = dataclasses.replace(SETTINGS, publish=Publish(readers=1, tls=tls), ca=ca)
    publisher.add(lambda: State(Model(1.0), "tests"), lambda: KEY, settings, LOG)
    publisher.serve()
    front = url_of(caplog)
    assert front.startswith("https://" if under_tls else "http://")
    assert publisher._offers[0].seed.most_readers == 1
    second, key = Publisher(), ModelKey(model="m", tp=(1, 2))
    monkeypatch.setattr(publishing, "rank", lambda: 1)
    port = int(front.rpartition(":")[2])
    settings = dataclasses.replace(settings, publish=Publish(port=port, tls=tls))
    try:
        second.add(lambda: State(Model(5.0), "tests"), lambda: key, settings, LOG)
        second.serve()
        assert forked(front, key, ca)[:2] == (5.0, 5.0)
    finally:
        second.close()
    with pytest.raises(ForkError, match="does not have"):
        forked(front, key, ca)


def versions(rank):
    """In a rank: the version of its weights at the start, and behind each of two updates."""
    made, seen = Publisher(), []
    key = ModelKey(model="m", tp=(rank, 2))
    made.add(lambda: State(Model(1.0), "tests"), lambda: key, SETTINGS, LOG)
    for _ in range(3):
        seen += [offer.weights for offer in made._offers]
        with made.updating("a test"):
            pass
    return seen


def test_all_ranks_of_a_start_call_their_versions_alike_and_no_two_starts_do():
    first, second = (ranks.run(versions, 2) for _ in range(2))
    assert first[0].value == first[1].value, first
    assert len({*first[0].value, *second[0].value}) == 6


def test_a_front_that_did_not_come_is_not_waited_for_again(publisher, monkeypatch):
    waited = []

    def seed(*_, join_timeout, **__):
        waited.append(join_timeout)
        if len(waited) < 3:
            raise SeedError("it cannot be reached")
        return original(Model(1.0), key=KEY)

    original = tensorlift.seed
    monkeypatch.setattr(publishing.instances, "seed", seed)
    publisher.add(lambda: State(Model(1.0), "tests"), lambda: KEY, SETTINGS, LOG)
    publisher.serve()
    for _ in range(2):
        with publisher.updating("a test"):
            pass
    publisher.withdraw("it sleeps")
    publisher.restore()
    assert waited == [30.0, 1.0, 1.0, 30.0]


def test_a_model_with_other_tensors_is_offered_anew_at_the_same_url(publisher, caplog):
    model = Model(1.0)
    publisher.add(lambda: State(model, "tests"), lambda: KEY, SETTINGS, LOG)
    publisher.serve()
    before = SeedClient(url_of(caplog)).state().instance
    with publisher.updating("a test"):
        model.weight = torch.nn.Parameter(torch.full((8,), 4.0), requires_grad=False)
    assert url_of(caplog, 0) == url_of(caplog)
    assert SeedClient(url_of(caplog)).state().instance != before
    assert forked(url_of(caplog))[0] == 4.0


def test_a_seed_whose_end_fails_costs_no_instance(publisher, caplog, monkeypatch):
    publisher.add(lambda: State(Model(1.0), "tests"), lambda: KEY, SETTINGS, LOG)
    publisher.serve()
    original = publishing.Seed.close

    def close(seed):
        original(seed)
        raise OSError("of a registry")

    monkeypatch.setattr(publishing.Seed, "close", close)
    publisher.withdraw("it sleeps")
    assert "its end has failed: OSError: of a registry" in caplog.text
    assert "is not offered: it sleeps" in caplog.text


PROGRAM = """
import logging, torch
from tensorlift.forking.manifest import ModelKey
from tensorlift.integrations.fork_settings import ForkSettings, Publish
from tensorlift.integrations.publisher import publisher
from tensorlift.integrations.state import State

settings = ForkSettings(publish=Publish(), registry="http://127.0.0.1:1", transports=("tcp",))
log, model = logging.getLogger("x"), torch.nn.Linear(2, 2)
publisher.add(lambda: State(model, "tests"), lambda: ModelKey(model="m"), settings, log)
publisher.serve()
assert publisher._offers[0].seed is not None
publisher.begin_update("a test")
raise SystemExit(7)
"""


def test_a_process_that_publishes_ends_by_itself():
    found = subprocess.run([sys.executable, "-c", PROGRAM], timeout=120, capture_output=True, text=True)
    assert (found.returncode, "Traceback" in found.stderr) == (7, False), found.stderr


def test_held_weights_are_of_the_start_alone(publisher, caplog):
    model = Model(1.0)
    publisher.add(lambda: State(model, "tests", hold=True), lambda: KEY, SETTINGS, LOG)
    model.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    publisher.serve()
    url = url_of(caplog)
    assert forked(url)[0] == 1.0
    with publisher.updating("weights are reloaded"):
        pass
    assert "weights are reloaded, and what was offered are the weights of the start" in caplog.text
    with pytest.raises(SeedError):
        forked(url)


def test_what_cannot_be_offered_costs_the_offer_alone(publisher, caplog, monkeypatch):
    model = Model(1.0)
    model.handle = torch.tensor(1 << 40)
    publisher.add(lambda: State(model, "tests"), lambda: KEY, SETTINGS, LOG)
    publisher.serve()
    assert "is not offered: RequestError: the engine keeps weights where they cannot be read" in caplog.text
    publisher.add(
        lambda: State(Model(1.0), "tests"), lambda: ModelKey(model="m", role="draft"), SETTINGS, LOG
    )
    publisher.serve()
    assert "(draft) is not offered: SeedError: it would stand behind 'm' (target)" in caplog.text
    # Of another rank the first is not there.
    monkeypatch.setattr(publishing, "rank", lambda: 1)
    publisher.serve()
    assert "(draft) is not offered: RequestError: 'http://127.0.0.1:0' is no URL of a seed" in caplog.text


def test_a_model_that_is_loaded_again_takes_the_place_of_the_first(publisher, caplog):
    publisher.add(lambda: State(Model(1.0), "tests"), lambda: KEY, SETTINGS, LOG)
    publisher.serve()
    publisher.add(lambda: State(Model(2.0), "tests"), lambda: KEY, SETTINGS, LOG)
    publisher.serve()
    assert forked(url_of(caplog))[0] == 2.0
    with pytest.raises(SeedError):
        forked(url_of(caplog, 0))


def test_a_number_that_does_not_fit_any_more_ends_the_offer(publisher, caplog, monkeypatch):
    state = State(Model(1.0), "tests")
    publisher.add(lambda: state, lambda: KEY, SETTINGS, LOG)
    publisher.serve()

    def refuse():
        raise RequestError("too much")

    monkeypatch.setattr(state, "refresh", refuse)
    with publisher.updating("a test"):
        pass
    assert "is not offered: RequestError: too much" in caplog.text


def test_a_model_that_cannot_be_looked_into_costs_the_offer_alone(publisher, caplog):
    publisher.add(lambda: State(None, "tests"), lambda: KEY, SETTINGS, LOG)
    publisher.serve()
    assert "a model is not offered: AttributeError" in caplog.text
