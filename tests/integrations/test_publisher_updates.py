"""What a process offers of its models while their weights change, and their memory goes."""

from __future__ import annotations

import contextlib
import threading
import time

import msgspec
import pytest

import tensorlift
from support import leaks, waiting
from support.offers import KEY, LOG, SETTINGS, Model, forked, url_of
from tensorlift.errors import ForkError, SeedError
from tensorlift.forking import seed as seeds
from tensorlift.forking.client import SeedClient
from tensorlift.forking.leases import LeaseRefusedError
from tensorlift.integrations import publisher as publishing
from tensorlift.integrations.state import State


def test_a_changed_model_has_another_version_and_is_read_as_a_whole(publisher, caplog):
    model = Model(1.0)
    publisher.add(lambda: State(model, "tests"), lambda: KEY, SETTINGS, LOG)
    publisher.serve()
    url = url_of(caplog)
    client = SeedClient(url)
    with publisher.updating("a test"):
        assert publisher.is_updating
        with pytest.raises(SeedError, match="it updates its weights"):
            client.lease(1.0)
        publisher.begin_update("a test")
        model.weight.data.fill_(3.0)
        model.scale = 3.0
    value, scale, version = forked(url)
    assert (value, scale) == (3.0, 3.0)
    assert version.startswith("updated ")


def test_an_update_inside_of_another_does_not_end_it(publisher, caplog):
    publisher.add(lambda: State(Model(1.0), "tests"), lambda: KEY, SETTINGS, LOG)
    publisher.serve()
    publisher.begin_update("a session")
    with publisher.updating("from disk"):
        pass
    with pytest.raises(SeedError, match="it updates its weights"):
        SeedClient(url_of(caplog)).lease(1.0)
    publisher.end_update()
    assert forked(url_of(caplog))[2].endswith(", 1")


def test_an_update_that_fails_leaves_nothing_to_read_until_one_that_does_not(publisher, caplog):
    model = Model(1.0)
    publisher.add(lambda: State(model, "tests"), lambda: KEY, SETTINGS, LOG)
    publisher.serve()
    url = url_of(caplog)
    with pytest.raises(ZeroDivisionError), publisher.updating("a test"):
        model.weight.data[0] = 1 / 0
    assert "the weights are of no version" in caplog.text
    with pytest.raises(SeedError, match="cannot be reached"):
        forked(url)
    publisher.restore()
    with pytest.raises(SeedError):
        forked(url)
    with publisher.updating("a test"):
        model.weight.data.fill_(2.0)
        model.scale = 2.0
        publisher.came()
    assert forked(url)[:2] == (2.0, 2.0)


def test_nobody_is_let_in_between_a_failure_and_the_end_of_its_seed(publisher, caplog, monkeypatch):
    publisher.add(lambda: State(Model(1.0), "tests"), lambda: KEY, SETTINGS, LOG)
    publisher.serve()
    seen = []
    original = publishing.Seed.close

    def close(seed):
        with pytest.raises(LeaseRefusedError, match="updating"):
            seed.grant(1.0)
        seen.append(seed)
        original(seed)

    monkeypatch.setattr(publishing.Seed, "close", close)
    publisher.begin_update("a test")
    publisher.spoil()
    publisher.end_update()
    assert len(seen) == 1


def test_memory_that_is_released_is_not_read_and_lost_weights_have_to_come_again(publisher, caplog):
    model = Model(1.0)
    publisher.add(lambda: State(model, "tests"), lambda: KEY, SETTINGS, LOG, "v")
    publisher.serve()
    url = url_of(caplog)
    publisher.withdraw("it sleeps")
    assert "is not offered: it sleeps" in caplog.text
    with pytest.raises(SeedError):
        forked(url)
    publisher.restore()
    assert forked(url) == (1.0, 1.0, "v")
    publisher.withdraw("it sleeps", lost=True)
    publisher.restore()
    publisher.begin_update("of the draft", role="draft")
    publisher.end_update()
    with pytest.raises(SeedError):
        forked(url)
    publisher.begin_update("of nothing")
    publisher.end_update()
    with pytest.raises(SeedError):
        forked(url)
    publisher.begin_update("of all")
    publisher.came()
    publisher.end_update()
    assert forked(url)[0] == 1.0


def test_weights_that_are_lost_come_back_role_by_role(publisher, caplog):
    draft = msgspec.structs.replace(KEY, role="draft 1")
    for key in (KEY, draft):
        publisher.add(lambda: State(Model(1.0), "tests"), lambda key=key: key, SETTINGS, LOG)
    publisher.serve()
    publisher.withdraw("they are reset", lost=True)
    for role, is_all in (("target", False), ("draft", True)):
        publisher.begin_update("one role", role=role)
        publisher.came()
        caplog.clear()
        publisher.end_update()
        assert ("offers" in caplog.text) is is_all
    assert [forked(url_of(caplog, at), key)[0] for at, key in enumerate((KEY, draft))] == [1.0, 1.0]


def test_an_update_goes_on_behind_a_withdrawal(publisher, caplog):
    model = Model(1.0)
    publisher.add(lambda: State(model, "tests"), lambda: KEY, SETTINGS, LOG)
    publisher.serve()
    url = url_of(caplog)
    publisher.begin_update("a test")
    model.weight.data[:4] = 2.0
    publisher.withdraw("it sleeps", gone=True)
    publisher.restore()
    assert publisher.is_updating
    with pytest.raises(SeedError, match="cannot be reached"):
        forked(url)  # half of one version and half of another
    model.weight.data[4:] = 2.0
    publisher.end_update()
    assert forked(url)[0] == 2.0


def test_what_was_lost_amid_an_update_that_update_does_not_bring(publisher, caplog):
    publisher.add(lambda: State(Model(1.0), "tests"), lambda: KEY, SETTINGS, LOG)
    publisher.serve()
    url = url_of(caplog)
    publisher.begin_update("a test")
    publisher.withdraw("it sleeps", lost=True, gone=True)
    publisher.restore()
    publisher.end_update()
    with pytest.raises(SeedError, match="cannot be reached"):
        forked(url)
    with publisher.updating("of all"):
        publisher.came()
    assert forked(url)[0] == 1.0


def test_memory_that_is_gone_is_not_offered_by_the_end_of_an_update(publisher, caplog):
    publisher.add(lambda: State(Model(1.0), "tests"), lambda: KEY, SETTINGS, LOG)
    publisher.serve()
    url = url_of(caplog)
    publisher.withdraw("it sleeps", gone=True)
    with publisher.updating("of nothing"):
        pass
    with pytest.raises(SeedError, match="cannot be reached"):
        forked(url)
    publisher.restore()
    assert forked(url)[0] == 1.0


def test_an_update_whose_end_fails_costs_its_seed_and_not_the_instance(publisher, caplog, monkeypatch):
    publisher.add(lambda: State(Model(1.0), "tests"), lambda: KEY, SETTINGS, LOG)
    publisher.serve()
    url, original = url_of(caplog), seeds.settle
    before = SeedClient(url).state().instance

    def settle(tensors):
        monkeypatch.setattr(seeds, "settle", original)
        raise RuntimeError("an error of the device")

    monkeypatch.setattr(seeds, "settle", settle)
    with publisher.updating("a test"):
        pass
    assert "the end of an update has failed: RuntimeError: an error of the device" in caplog.text
    assert not publisher.is_updating
    assert SeedClient(url).state().instance != before
    assert forked(url)[0] == 1.0


def test_an_interrupt_as_an_update_begins_leaves_none_under_way(publisher, caplog, monkeypatch):
    publisher.add(lambda: State(Model(1.0), "tests"), lambda: KEY, SETTINGS, LOG)
    publisher.serve()

    def updating(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(publishing.Seed, "updating", updating)
    with pytest.raises(KeyboardInterrupt), publisher.updating("a test"):
        pass
    assert not publisher.is_updating
    with pytest.raises(SeedError, match="cannot be reached"):
        forked(url_of(caplog))


def test_an_engine_that_ends_amid_an_update_leaves_nothing(publisher, caplog):
    with leaks.nothing_left():
        publisher.add(lambda: State(Model(1.0), "tests"), lambda: KEY, SETTINGS, LOG)
        publisher.serve()
        publisher.begin_update("a test")
        publisher.close()
        publisher.end_update()
    assert not publisher.is_updating


def test_readers_meet_one_version_or_none_whatever_an_engine_does(publisher, caplog):
    """Forks one after the other, while weights change in all the ways that hooks know."""
    model = Model(1.0, 1 << 20)
    publisher.add(lambda: State(model, "tests"), lambda: KEY, SETTINGS, LOG)
    publisher.serve()
    url, seen, ended = url_of(caplog), [], threading.Event()

    def read():
        while not ended.is_set():
            into = Model(0.0, 1 << 20)
            state = State(into, "tests")
            try:
                tensorlift.fork(url, into=state.tensors(), key=KEY, patience=1.0)
            except ForkError:
                continue
            state.take()
            seen.append({float(into.weight.min()), float(into.weight.max()), into.scale})

    def write(value):
        for part in model.weight.data.chunk(8):
            part.fill_(value)
            time.sleep(0.001)
        model.scale = value

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for turn in range(2, 30):
            value = float(turn)
            with contextlib.suppress(ZeroDivisionError), publisher.updating("a test"):
                write(value)
                publisher.came()
                if turn % 4 == 1:
                    publisher.withdraw("it sleeps", gone=True)
                    publisher.restore()
                    write(value + 0.5)
                if turn % 5 == 0:
                    model.weight.data[0] = 1 / 0
            if turn % 3 == 0:
                publisher.withdraw("it sleeps", lost=True, gone=True)
                model.weight.data.fill_(-1.0)
                publisher.restore()
    finally:
        with publisher.updating("the last"):
            write(99.0)
            publisher.came()
        waiting.until(lambda: {99.0} in seen)
        ended.set()
        for reader in readers:
            reader.join(60)
    assert all(len(one) == 1 and one != {-1.0} for one in seen), seen
