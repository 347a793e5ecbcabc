"""What comes from other processes: bounds, and texts that are none."""

from __future__ import annotations

import msgspec
import pytest

from support.registries import KEY, announced
from tensorlift.errors import OptionError, RequestError
from tensorlift.fleet import contract
from tensorlift.fleet.contract import Announcement, ForkReport, Near, Wanted, check_announcement, near_of
from tensorlift.forking.manifest import ModelKey

GOOD = msgspec.to_builtins(announced(1))


def read(kind: type, **changes: object) -> object:
    return msgspec.json.decode(msgspec.json.encode({**GOOD, **changes}), type=kind)


def test_what_is_sent_is_what_comes() -> None:
    assert read(Announcement) == announced(1)


@pytest.mark.parametrize(
    "changes",
    [
        {"instance": "x" * 32},
        {"instance": "a" * 33},
        {"url": "http://" + "a" * 200},
        {"most_readers": 0},
        {"most_readers": 2**40},
        {"near": {"host": "h" * 65}},
        {"near": {"place": "p" * 201}},
        {"load": {"readers": -1}},
        {"load": {"sent_bytes": 2**63}},
        {"load": {"rate": -1}},
        {"load": {"rate": 1e300}},
        {"load": {"rate": "1"}},
        {"key": {"model": "m" * 5000}},
        {"key": {"model": "m", "tp": [0, 0]}},
        {"weights": 7},
    ],
)
def test_what_is_out_of_bounds(changes: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        read(Announcement, **changes)


@pytest.mark.parametrize(
    ("seed", "message"),
    [
        (announced(1, url="ftp://x:1"), "is no URL of a seed"),
        (announced(1, url="http://user:secret@10.0.0.1"), "is no URL of a seed"),
        (announced(1, ModelKey(model="m", tp=(2, 2))), "rank 2 of 2 in tp"),
        (announced(1, ModelKey(model="\ud800")), "is no text that can be sent on"),
        (announced(1, place="\udfff"), "is no text that can be sent on"),
    ],
)
def test_what_types_do_not_say(seed: Announcement, message: str) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        check_announcement(seed)
    assert "secret" not in str(refused.value)


def test_other_messages_have_bounds_too() -> None:
    wanted = {"key": {"model": "m"}}
    for changes in ({"count": 0}, {"count": 65}, {"without": ["u"] * 101}, {"without": ["u" * 201]}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(wanted | changes, Wanted)
    report = {"fork": "0" * 32, "key": {"model": "m"}, "state": "done"}
    assert msgspec.convert(report, ForkReport).has_ended
    for other in ({"state": "lost"}, {"seconds": -1.0}, {"seeds": ["u"] * 65}, {"reason": "r" * 5000}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(report | other, ForkReport)


def test_where_this_process_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(contract.PLACE_VARIABLE, raising=False)
    here = near_of()
    assert (len(here.host), here.place) == (32, "")
    monkeypatch.setenv(contract.PLACE_VARIABLE, "z/r")
    assert near_of() == Near(here.host, "z/r")
    assert near_of("other") == Near(here.host, "other")
    assert near_of("") == here
    for wrong in ("a//b", "/a", "a/", "x" * 201, "a\n", "a/ /b"):
        with pytest.raises(OptionError, match="expected names from the widest to the nearest"):
            near_of(wrong)

    def unknown() -> str:
        raise OSError

    monkeypatch.setattr(contract, "host_id", unknown)
    assert near_of("z") == Near("", "z")


def test_many_say_it_less_often() -> None:
    assert contract.lease_seconds(10) == contract.LEASE_SECONDS
    # 10,000 that say it three times in 200 s are 150 a second.
    assert contract.lease_seconds(10_000) == 200
    assert announced(3).key == KEY
