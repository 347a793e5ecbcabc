"""The search of the best settings, with made-up times: no clock and no file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from unittest import mock

import pytest

from tensorlift.bench import tuning
from tensorlift.bench.tuning import AUTOMATIC, Choice, Found, Trial, axes, search
from tensorlift.engine.sizing import EngineSize
from tensorlift.errors import BackendError, OptionError
from tensorlift.options import LoadOptions

MIB = 1 << 20
SIZE = EngineSize(1 * MIB, 16 * MIB, 128 * MIB, 2, 32, ("AUTO",))
AXES: dict[str, list[str | int]] = {"backend": ["PREAD", "URING"], "threads": [1, 4, 8], "io_depth": [64]}


class World:
    """A clock that moves by what a load takes, and the loads that were asked for."""

    def __init__(self, seconds: Callable[[Choice], float]) -> None:
        self.seconds, self.time, self.asked = seconds, 0.0, list[Choice]()

    def measure(self, choice: Choice) -> float:
        self.asked.append(choice)
        took = self.seconds(choice)
        self.time += took
        return took

    def search(self, seconds: float = 1000.0) -> Found:
        return search(AXES, self.measure, lambda: self.time, seconds)


def faster_with_threads(choice: Choice) -> float:
    """8 threads are best, and URING helps only then."""
    took = {None: 10.0, 1: 14.0, 4: 8.0, 8: 5.0}[choice.threads]
    return took - 1 if choice.backend == "URING" and choice.threads == 8 else took


def test_best_is_found_and_advised() -> None:
    found = World(lambda c: faster_with_threads(c) - (0.5 if c.backend == "URING" else 0)).search()
    assert found.best.choice == found.advice == Choice(backend="URING", threads=8)
    assert found.gap == pytest.approx(10 / 3.5 - 1)
    assert found.won == 1.0
    assert found.complete


def test_final_takes_turns_and_begins_with_each() -> None:
    world = World(faster_with_threads)
    found = world.search(seconds=100.0)
    finalists = [trial.choice for trial in found.trials if trial.final]
    assert AUTOMATIC in finalists
    assert len(finalists) == tuning.FINALISTS + 1
    assert all(len(trial.final) == tuning.ROUNDS for trial in found.trials if trial.final)
    rounds = world.asked[-tuning.ROUNDS * len(finalists) :]
    starts = rounds[:: len(finalists)]
    assert set(starts) == set(finalists)
    for at in range(0, len(rounds), len(finalists)):
        assert set(rounds[at : at + len(finalists)]) == set(finalists)


def test_nothing_is_advised_within_noise() -> None:
    found = World(lambda c: 1.0 if c.threads is None else 1 / (1 + tuning.NOISE / 2)).search()
    assert found.best.choice.threads is not None
    assert found.gap == pytest.approx(tuning.NOISE / 2)
    assert found.advice == AUTOMATIC


def test_nothing_is_advised_for_what_wins_by_luck() -> None:
    other = Choice(threads=4)
    automatic = Trial(AUTOMATIC, 1.0, (1.0, 1.0, 1.2, 1.2, 1.2))
    # Faster in three of five rounds.
    lucky = Trial(other, 1.0, (1.1, 1.1, 0.9, 0.9, 0.9))
    found = Found((automatic, lucky), True)
    assert found.best.choice == other
    assert (found.won, found.gap > tuning.NOISE) == (0.6, True)
    assert found.advice == AUTOMATIC
    sure = dataclasses.replace(lucky, final=(0.9, 1.1, 0.9, 0.9, 0.9))
    assert Found((automatic, sure), True).advice == other
    # The same rounds and the same medians, but what else the machine did decided most of them.
    for busy in (
        (dataclasses.replace(automatic, final=(0.7, 1.0, 1.2, 1.2, 1.2)), sure),
        (automatic, dataclasses.replace(sure, final=(0.9, 1.1, 0.9, 0.9, 0.5))),
    ):
        assert Found(busy, True).advice == AUTOMATIC
        assert not Found(busy, True).steady


def final(**seconds: tuple[float, ...]) -> Found:
    """A search whose final had the automatic choice, and others by their number of threads."""
    trials = [Trial(AUTOMATIC, 1.0, seconds.pop("automatic"))]
    trials += [Trial(Choice(threads=int(name[1:])), 1.0, taken) for name, taken in seconds.items()]
    return Found(tuple(trials), True)


def test_nothing_is_advised_within_the_spread_of_the_samples() -> None:
    wide = (1.0, 1.1, 1.2, 1.3, 1.4)
    found = final(automatic=wide, t4=tuple(s - 0.15 for s in wide))
    assert (found.steady, found.won, found.gap > tuning.NOISE, found.apart) == (True, 1.0, True, False)
    assert found.advice == AUTOMATIC
    assert final(automatic=wide, t4=tuple(s - 0.25 for s in wide)).advice == Choice(threads=4)


def never(state: str, choice: Choice) -> Found:
    raise AssertionError(state, choice)


def test_the_verdict_has_to_hold_in_every_state() -> None:
    fast, same, slow = (0.5,) * 5, (1.02,) * 5, (1.2,) * 5
    flat = (1.0,) * 5
    warm = final(automatic=flat, t4=fast)
    assert tuning.verdict({"warm": warm}, never)[0] == Choice(threads=4)
    for cold, wanted in ((fast, 4), (same, 4), (slow, None)):
        states = {"warm": warm, "cold": final(automatic=flat, t4=cold)}
        assert tuning.verdict(states, never) == (Choice(threads=wanted), {"warm": {}, "cold": {}})
    # What the other final does not have is measured there.
    for cold, wanted in ((same, 4), (slow, None)):
        check = mock.Mock(return_value=final(automatic=flat, t4=cold))
        choice, checked = tuning.verdict({"warm": warm, "cold": final(automatic=flat, t8=flat)}, check)
        assert choice == Choice(threads=wanted)
        assert check.call_args_list == [mock.call("cold", Choice(threads=4))]
        assert list(checked["cold"]) == [Choice(threads=4)]
    assert tuning.verdict({"warm": final(automatic=flat, t4=flat)}, never)[0] == AUTOMATIC


def test_compare_takes_turns_and_keeps_a_refusal() -> None:
    world = World(lambda choice: 1.0 if choice == AUTOMATIC else 0.5)
    found = tuning.compare(Choice(threads=2), world.measure)
    assert [len(trial.final) for trial in found.trials] == [tuning.ROUNDS] * 2
    assert found.holds(Choice(threads=2))
    assert world.asked[:4] == [AUTOMATIC, Choice(threads=2), Choice(threads=2), AUTOMATIC]

    def refuses(choice: Choice) -> float:
        raise BackendError("not here")

    assert tuning.compare(Choice(threads=2), refuses).holds(Choice(threads=2)) is False


def test_survey_ends_with_its_time_and_says_so() -> None:
    world = World(lambda choice: 10.0)
    found = world.search(seconds=30.0 / tuning.SURVEY_SHARE)
    assert not found.complete
    assert len(found.trials) == 3
    assert all(len(trial.final) >= tuning.ROUNDS for trial in found.trials)


def test_final_uses_the_time_that_is_left() -> None:
    found = World(lambda choice: 1.0).search(seconds=100.0)
    assert len(found.automatic.final) > tuning.ROUNDS


@pytest.mark.parametrize("error", [BackendError("no such call"), OptionError("does not fit")])
def test_what_is_refused_is_kept_with_its_reason(error: Exception) -> None:
    def seconds(choice: Choice) -> float:
        if choice.backend == "URING":
            raise error
        return 1.0

    found = World(seconds).search()
    (refused,) = (trial for trial in found.trials if trial.choice == Choice(backend="URING"))
    assert (refused.refused, refused.seconds, refused.final) == (str(error), None, ())


def test_errors_of_the_automatic_choice_come_out() -> None:
    def seconds(choice: Choice) -> float:
        raise BackendError("nothing works here")

    with pytest.raises(BackendError):
        World(seconds).search()


def test_bug_in_a_load_comes_out() -> None:
    def seconds(choice: Choice) -> float:
        if choice != AUTOMATIC:
            raise ZeroDivisionError
        return 1.0

    with pytest.raises(ZeroDivisionError):
        World(seconds).search()


def test_axes_leave_out_what_is_automatic_and_what_has_no_use() -> None:
    warm = axes(SIZE, cold=False, device=False, cpus=2)
    assert set(warm) == {"backend", "threads", "chunk_size"}
    assert not {"AUTO", "URING", "AIO"} & set(warm["backend"])
    assert warm["threads"] == [1, 4]
    assert 1 * MIB not in warm["chunk_size"]
    cold = axes(SIZE, cold=True, device=True, cpus=64)
    assert {"URING", "AIO"} <= set(cold["backend"])
    assert 32 not in cold["io_depth"]
    assert max(int(value) for value in cold["threads"]) == 128
    assert {"slot_size", "pinned_bytes"} <= set(cold)


@pytest.mark.parametrize("device", [False, True])
def test_every_value_is_a_setting(device: bool) -> None:
    for name, values in axes(SIZE, cold=True, device=device, cpus=3).items():
        for value in values:
            choice = Choice(**{name: value})  # type: ignore[arg-type]
            from_text = LoadOptions.resolve(choice.environment())
            assert from_text == LoadOptions.resolve({}, **choice.options())
            assert getattr(from_text, name) in (value, (value,))


def test_choices_read_well() -> None:
    assert str(AUTOMATIC) == "automatic"
    assert str(Choice("URING", 4, 512 << 10, slot_size=4097)) == (
        "backend=URING threads=4 chunk_size=512KiB slot_size=4097"
    )
