"""Engines in general: one a process, what a failed read leaves, the environment; missing packages."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref

import pytest

from support import leaks
from support.standin_fabric import World
from tensorlift.errors import OptionError
from tensorlift.forking.fabrics import (
    ANY,
    FabricError,
    Packages,
    Part,
    Shared,
    Wiring,
    batches,
    ended,
    surroundings,
)
from tensorlift.forking.transports import check_transports

HOST = "127.0.0.1"


class Thing:
    pass


def test_one_engine_for_all_who_want_the_same() -> None:
    world = World()
    target, draft = (Shared.borrow(world.make, ANY, HOST) for _ in range(2))
    other = Shared.borrow(world.make, Wiring("tcp"), HOST)
    assert target is draft is not other
    target.give_back()
    assert not world.made[0].is_closed
    draft.give_back()
    other.give_back()
    assert [one.is_closed for one in world.made] == [True, True]


def test_one_that_lasts_is_there_for_the_next() -> None:
    world = World()
    first = Shared.borrow(world.make, ANY, HOST)
    world.made[0].lasts = True  # type: ignore[misc]
    first.give_back()
    assert Shared.borrow(world.make, ANY, HOST) is first
    first.spoil(None)
    first.give_back()
    assert world.made[0].is_closed


def test_a_destination_that_may_still_be_written_to_stays_with_its_engine() -> None:
    world = World()
    spoilt, user = (Shared.borrow(world.make, ANY, HOST) for _ in range(2))
    destination = Thing()
    alive = weakref.ref(destination)
    spoilt.spoil(destination)
    del destination
    fresh = Shared.borrow(world.make, ANY, HOST)
    assert fresh is not spoilt
    spoilt.give_back()
    assert alive() is not None
    assert not world.made[0].is_closed
    user.give_back()
    assert world.made[0].is_closed
    assert alive() is None
    fresh.give_back()


def test_an_engine_that_does_not_begin_is_not_remembered() -> None:
    world = World(refused="no NIC")
    with pytest.raises(FabricError, match="no NIC"):
        Shared.borrow(world.make, ANY, HOST)
    world.refused = ""
    Shared.borrow(world.make, ANY, HOST).give_back()


def test_the_environment_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TL_USERS", "theirs")
    monkeypatch.setenv("TL_FORCED", "theirs")
    monkeypatch.setenv("TL_NONE", "theirs")
    monkeypatch.delenv("TL_WANTED", raising=False)
    before = dict(os.environ)
    with surroundings({"TL_FORCED": "ours", "TL_NONE": ""}, {"TL_USERS": "ours", "TL_WANTED": "ours"}):
        assert os.environ["TL_USERS"] == "theirs"
        assert (os.environ["TL_FORCED"], os.environ["TL_WANTED"]) == ("ours", "ours")
        assert "TL_NONE" not in os.environ
    assert dict(os.environ) == before


def test_a_wait_ends_with_whoever_waits() -> None:
    asked = iter(range(5))

    def go_on() -> None:
        if next(asked) == 3:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        ended(lambda: False, go_on)
    ended(lambda: True, go_on)


def test_no_call_has_too_many_parts() -> None:
    parts = [Part(at, at, 1) for at in range(2500)]
    cut = list(batches(parts))
    assert [len(some) for some in cut] == [1024, 1024, 452]
    assert [part for some in cut for part in some] == parts


def test_a_package_that_is_not_there() -> None:
    packages = Packages(("not_there_at_all", "nor_this"), "pip install it")
    with pytest.raises(OptionError, match=r"has 'x', and it is not there \(No module.*pip install it"):
        packages.check("x")


WITHOUT = """
import sys
import torch
import tensorlift
from tensorlift.errors import OptionError

model = {"w": torch.arange(100_000)}
names = ("mooncake", "mooncake.engine", "nixl", "nixl._api", "nixl_cu12", "nixl_cu13")
with tensorlift.seed(model, key="k") as seed:
    for round in ("as it is", "blocked"):
        for transports in (None, ["tcp"]):
            into = {"w": torch.zeros(100_000, dtype=torch.int64)}
            tensorlift.fork(seed.url, into=into, transports=transports)
            assert torch.equal(into["w"], model["w"])
        assert not {name for name in names if sys.modules.get(name)}
        sys.modules.update(dict.fromkeys(names))
    for kind, words in dict(
        mooncake=("pip install mooncake-transfer-engine", "apt-get install libibverbs1"),
        nixl=("pip install nixl",),
    ).items():
        for ask in (
            lambda: tensorlift.seed(model, key="k", transports=["tcp", kind]),
            lambda: tensorlift.fork(seed.url, into=model, transports=["tcp", kind]),
        ):
            try:
                ask()
            except OptionError as error:
                assert all(word in str(error) for word in words), error
            else:
                raise AssertionError("it was not refused")
print("done")
"""


def test_nothing_of_an_engine_is_needed_or_imported_where_none_is_named() -> None:
    out = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False)
    assert out.stdout.strip() == "done", out.stderr


def test_what_is_refused_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with leaks.nothing_left(), pytest.raises(OptionError, match="libibverbs1"):
        check_transports(["mooncake", "tcp"])
