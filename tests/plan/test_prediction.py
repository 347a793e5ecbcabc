"""Predictions of several ranks: bytes by hand, and what has to hold for any rates and any work."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorlift.errors import OptionError
from tensorlift.plan.prediction import DEFAULT_RATES, Costs, Prediction, Rates, Work, best, predict

GB = 10**9
FREE = Costs(0, 0, 0, 0)
STAGES = ("storage", "host", "link", "peer", "network")
UNLIMITED = Rates(*[math.inf] * len(STAGES))


@st.composite
def works(draw: st.DrawFn) -> Work:
    nbytes = draw(st.integers(0, 10**12))
    ranks = draw(st.integers(1, 64))
    own = draw(st.none() | st.integers(0, nbytes))
    own_read = draw(st.none() | st.integers(own or 0, nbytes))
    return Work(
        nbytes,
        ranks,
        draw(st.none() | st.integers(1, 16)),
        own,
        own_read,
        draw(st.sampled_from((0.0, 0.25, 0.5, 1.0))),
        draw(st.integers(1 << 20, 1 << 30)),
        group=draw(st.none() | st.integers(1, 64)),
    )


rates = st.builds(Rates, *[st.none() | st.floats(1e8, 1e12) for _ in STAGES])


def close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)


def test_eight_ranks_by_hand() -> None:
    work = Work(800 * GB, 8, own=100 * GB, own_read=300 * GB, arena=GB, ahead=2 * GB)
    given = Rates(storage=50e9, link=50e9, peer=350e9)
    everything, slices, gather = predict(work, given, FREE).values()
    assert (everything.read, everything.received, everything.from_storage) == (800 * GB, 0, 6400 * GB)
    assert (slices.read, slices.received, slices.from_storage) == (300 * GB, 0, 2400 * GB)
    assert (gather.read, gather.received, gather.from_storage) == (100 * GB, 700 * GB, 800 * GB)
    assert {one.held for one in (everything, slices, gather)} == {102 * GB}
    # The slowest stage, and the first arena (one of 800, of 300) through the others.
    assert close(everything.seconds, 128 + 16 / 800)
    assert close(slices.seconds, 48 + 6 / 300)
    assert close(gather.seconds, 16 + (2 + 2) / 800)
    assert [one.limit for one in (everything, slices, gather)] == ["storage"] * 3
    assert best({one.way: one for one in (everything, slices, gather)}) is gather


@pytest.mark.parametrize(
    ("given", "cached", "limit"),
    [
        (Rates(storage=1e9), 0.0, "storage"),
        (Rates(host=1e9), 1.0, "host"),
        (Rates(link=1e8), 0.0, "link"),
        (Rates(peer=1e9), 0.0, "peer"),
        (Rates(network=1e8), 0.0, "network"),
    ],
)
def test_the_limiting_stage_is_named(given: Rates, cached: float, limit: str) -> None:
    gather = predict(Work(100 * GB, 16, 8, cached=cached), given)["gather"]
    assert gather.limit == limit


def test_a_communicator_is_the_limit_of_a_small_gather() -> None:
    predictions = predict(Work(10 * 10**6, 8))
    assert predictions["gather"].limit == "communicator"
    assert best(predictions).way == "all"


def test_cached_and_uncached_bytes_follow_each_other() -> None:
    given = Rates(storage=2e9, host=100e9, link=50e9)
    warm, cold, half = (
        predict(Work(100 * GB, cached=share, arena=1 << 20), given, FREE)["all"].seconds
        for share in (1.0, 0.0, 0.5)
    )
    assert math.isclose(half, (warm + cold) / 2, rel_tol=1e-4)


def test_a_group_a_host_needs_no_network_and_more_storage() -> None:
    work = Work(100 * GB, 32, 8)
    everyone = predict(work)["gather"]
    hosts = predict(dataclasses.replace(work, group=8))["gather"]
    assert (everyone.from_storage, hosts.from_storage) == (100 * GB, 400 * GB)
    assert hosts.stages["network"] == 0
    # Each host receives the three quarters that others have read.
    assert close(everyone.stages["network"], 75 * GB / (8 * DEFAULT_RATES["network"]))


def test_slices_are_there_only_where_they_can_be() -> None:
    assert list(predict(Work(GB, 2))) == ["all", "gather"]
    assert list(predict(Work(GB, 2, own_read=GB // 2))) == ["all", "slices", "gather"]


@given(works(), rates)
def test_one_rank_gathers_as_it_reads_all(work: Work, given: Rates) -> None:
    everything, gather = (
        predict(dataclasses.replace(work, ranks=1), given)[way] for way in ("all", "gather")
    )
    assert dataclasses.replace(gather, way="all") == everything


@given(works(), rates)
def test_slices_of_everything_are_all(work: Work, given: Rates) -> None:
    predictions = predict(dataclasses.replace(work, own_read=work.nbytes), given)
    assert dataclasses.replace(predictions["slices"], way="all") == predictions["all"]
    assert best(predictions).way != "slices"


@given(works(), rates)
def test_bytes_are_conserved(work: Work, given: Rates) -> None:
    predictions = predict(work, given)
    group = min(work.group or work.ranks, work.ranks)
    gather = predictions["gather"]
    assert gather.read + gather.received == work.nbytes
    assert work.nbytes <= gather.read * group < work.nbytes + group
    for one in predictions.values():
        own = work.nbytes if work.own is None else work.own
        assert own <= one.held <= own + max(work.ahead, work.arena)
        assert one.from_storage <= predictions["all"].from_storage


@given(works(), rates, st.sampled_from(STAGES), st.floats(1.0, 100.0))
def test_a_faster_stage_is_never_slower(work: Work, given: Rates, stage: str, times: float) -> None:
    known = {**given.assumed(), **given.given()}
    faster = dataclasses.replace(given, **{stage: known[stage] * times})
    for way, one in predict(work, given).items():
        assert predict(work, faster)[way].seconds <= one.seconds * (1 + 1e-9)


@given(works(), rates)
def test_time_lies_between_the_slowest_stage_and_their_sum(work: Work, given: Rates) -> None:
    for one in predict(work, given, FREE).values():
        assert max(one.stages.values()) <= one.seconds * (1 + 1e-9)
        assert one.seconds <= sum(one.stages.values()) * (1 + 1e-9)


@given(works(), rates)
def test_the_best_is_the_fastest(work: Work, given: Rates) -> None:
    predictions = predict(work, given)
    assert best(predictions).seconds == min(one.seconds for one in predictions.values())


@given(works())
def test_without_limits_fixed_costs_are_left(work: Work) -> None:
    gathers = min(work.group or work.ranks, work.ranks) > 1
    costs = Costs(start=1, make_communicator=2, destroy_communicator=3, gather=0)

    def seconds(one: Prediction) -> float:
        return 6.0 if gathers and one.way == "gather" else 1.0

    for one in predict(work, UNLIMITED, costs).values():
        assert one.seconds == seconds(one)


def test_unknown_rates_are_named() -> None:
    assert Rates().assumed() == DEFAULT_RATES
    assert set(Rates(storage=1.0).assumed()) == set(DEFAULT_RATES) - {"storage"}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Rates(link=0), "link is 0"),
        (lambda: Rates(link=math.nan), "link is nan"),
        (lambda: Work(1, 0), "ranks is 0"),
        (lambda: Work(-1), "nbytes is -1"),
        (lambda: Work(1, own=2), "own is 2"),
        (lambda: Work(1, cached=1.5), "cached is 1.5"),
    ],
)
def test_what_cannot_be_is_refused(make: object, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        make()  # type: ignore[operator]
