"""Searches the settings for the fastest: pure logic, given a function that measures one choice.

Two rounds, since one sample says little. The survey tries one setting after another, one sample each, and
goes on from the best so far. The final takes the few best and the automatic choice in turn, several samples
each, so that what drifts on the machine meets all of them; only its medians count.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensorlift.engine.sizing import KIB, MIB, EngineSize
from tensorlift.errors import MachineError, OptionError
from tensorlift.options import BACKENDS, HOST_BACKENDS, LoadOptions

__all__ = ["AUTOMATIC", "RULE", "Choice", "Found", "Trial", "axes", "compare", "search", "verdict"]

FINALISTS = 3
ROUNDS = 9
SURVEY_SHARE = 0.4
# On a machine that others use too, medians differ by this much without a reason; what is really faster also
# wins most rounds, whatever else the machine did meanwhile. Where the median is this much above the least
# sample, something else decided: with ten busy threads on two processors it was 1.5 to 6 times the least.
NOISE = 0.05
WON_SHARE = 0.75
STEADY = 1.5
RULE = (
    "a choice is recommended where its median is lower than that of the automatic one by more than "
    f"{NOISE:.0%} and by more than the middle half of the samples of either spreads, and it won "
    f"{WON_SHARE:.0%} of the rounds; for files in any state, where it is also not slower "
    f"by more than {NOISE:.0%} in the other state; never where a median is above {STEADY} "
    "times the least sample, for then the machine was busy"
)


@dataclass(frozen=True, slots=True)
class Choice:
    """Settings that differ from the automatic choice; None is automatic. Sizes are bytes."""

    backend: str | None = None
    threads: int | None = None
    chunk_size: int | None = None
    io_depth: int | None = None
    slot_size: int | None = None
    pinned_bytes: int | None = None

    def options(self) -> dict[str, Any]:
        """As keyword arguments of a load."""
        fields = (field.name for field in dataclasses.fields(self))
        return {name: value for name in fields if (value := getattr(self, name)) is not None}

    def texts(self) -> dict[str, str]:
        """As text that the command line and the environment take."""
        return {name: _text(name, value) for name, value in self.options().items()}

    def environment(self) -> dict[str, str]:
        """As environment variables."""
        return {LoadOptions.variable(name): text for name, text in self.texts().items()}

    def __str__(self) -> str:
        return " ".join(f"{name}={text}" for name, text in self.texts().items()) or "automatic"


AUTOMATIC = Choice()

Measure = Callable[[Choice], float]


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of one choice: seconds of the survey (None: not measured) and of the final, or why not."""

    choice: Choice
    survey: float | None = None
    final: tuple[float, ...] = ()
    refused: str | None = None

    @property
    def seconds(self) -> float | None:
        """The median of the final, else the one sample of the survey."""
        return statistics.median(self.final) if self.final else self.survey


@dataclass(frozen=True, slots=True)
class Found:
    """The outcome of a search: all trials in the order in which they were first tried."""

    trials: tuple[Trial, ...]
    complete: bool
    """Whether the survey got through all candidates in its time."""

    @property
    def automatic(self) -> Trial:
        """The automatic choice."""
        return self.trials[0]

    @property
    def best(self) -> Trial:
        """The lowest median of the final."""
        return min((trial for trial in self.trials if trial.final), key=lambda t: statistics.median(t.final))

    @property
    def gap(self) -> float:
        """By how much of the best's time the automatic choice takes longer: 0.1 is a tenth."""
        best, automatic = self.best.seconds, self.automatic.seconds
        return automatic / best - 1 if best and automatic else 0.0

    @property
    def won(self) -> float:
        """The share of the final's rounds in which the best was faster than the automatic choice."""
        rounds = list(zip(self.best.final, self.automatic.final, strict=True))
        return sum(best < automatic for best, automatic in rounds) / len(rounds)

    @property
    def steady(self) -> bool:
        """Whether the samples of the best and of the automatic choice are near enough to compare them."""
        finals = (self.best.final, self.automatic.final)
        return all(statistics.median(final) <= STEADY * min(final) for final in finals)

    @property
    def apart(self) -> bool:
        """Whether the two medians differ by more than the samples of either do (their middle half)."""
        finals = (self.best.final, self.automatic.final)
        fast, slow = (statistics.median(final) for final in finals)
        return slow - fast > max(map(_spread, finals))

    @property
    def advice(self) -> Choice:
        """What to set in this state: AUTOMATIC, nothing, where the best is not surely better. See RULE."""
        sure = self.steady and self.apart and self.gap > NOISE and self.won >= WON_SHARE
        return self.best.choice if sure else AUTOMATIC

    def holds(self, choice: Choice) -> bool | None:
        """Whether a choice is slower than the automatic one by no more than noise; None: not in the final."""
        trial = next((t for t in self.trials if t.choice == choice and (t.final or t.refused)), None)
        if trial is None:
            return None
        if trial.refused or not Found((self.automatic, trial), True).steady:
            return False
        return statistics.median(trial.final) <= (1 + NOISE) * statistics.median(self.automatic.final)


def compare(choice: Choice, measure: Measure) -> Found:
    """A final of one choice and the automatic one alone, or why the choice is not possible."""
    samples: dict[Choice, list[float]] = {AUTOMATIC: [], choice: []}
    try:
        for number in range(ROUNDS):
            for each in list(samples)[:: -1 if number % 2 else 1]:
                samples[each].append(measure(each))
    except (OptionError, MachineError) as error:
        return Found((Trial(AUTOMATIC), Trial(choice, refused=str(error))), True)
    return Found(tuple(Trial(each, final=tuple(taken)) for each, taken in samples.items()), True)


def verdict(
    found: Mapping[str, Found], check: Callable[[str, Choice], Found]
) -> tuple[Choice, dict[str, dict[Choice, Found]]]:
    """What to set whatever the state: the advice for one that is no worse in the others, else AUTOMATIC.

    check: measures a choice against the automatic one in a state whose final does not have it.

    Also gives what was checked, by state.
    """
    checked: dict[str, dict[Choice, Found]] = {state: {} for state in found}
    advised = {each.advice: each.gap for each in found.values() if each.advice != AUTOMATIC}
    for choice in sorted(advised, key=lambda choice: -advised[choice]):
        for state, each in found.items():
            held = each.holds(choice)
            if held is None:
                checked[state][choice] = check(state, choice)
                held = checked[state][choice].holds(choice)
            if not held:
                break
        else:
            return choice, checked
    return AUTOMATIC, checked


def axes(size: EngineSize, *, cold: bool, device: bool, cpus: int) -> dict[str, list[str | int]]:
    """Values to try beside the automatic ones in ``size``, by setting, those that matter most first."""
    # What reads storage whatever is cached would measure the disk where the file is cached.
    known = BACKENDS if device else HOST_BACKENDS
    readers = [name for name in known if cold or name not in ("URING", "AIO", "CUFILE")]
    values: dict[str, tuple[int, Sequence[int]]] = {}
    if cold:
        values["io_depth"] = (size.io_depth, [8, 16, 32, 64, 128])
    values["threads"] = (size.threads, [1 << k for k in range(8) if 1 << k <= 2 * cpus])
    values["chunk_size"] = (size.chunk_size, [256 * KIB << k for k in range(6)])
    if device:
        values["slot_size"] = (size.slot_size, [4 * MIB << k for k in range(4)])
        values["pinned_bytes"] = (size.pinned_bytes, [32 * MIB << k for k in range(5)])
    found: dict[str, list[str | int]] = {"backend": [n for n in readers if (n,) != size.backends]}
    return found | {name: [v for v in every if v != chosen] for name, (chosen, every) in values.items()}


def search(
    candidates: Mapping[str, Sequence[str | int]], measure: Measure, now: Callable[[], float], seconds: float
) -> Found:
    """Finds the fastest choice in about ``seconds`` of the clock ``now``.

    measure: seconds that one load with a choice takes; OptionError and MachineError mean that the choice is
        not possible here. The automatic choice has to be: its errors come out.
    """
    begin = now()
    table: dict[Choice, Trial] = {}
    measure(AUTOMATIC)  # the first load of a process pays for what later ones find done
    table[AUTOMATIC] = Trial(AUTOMATIC, measure(AUTOMATIC))
    complete = _survey(candidates, table, measure, lambda: now() - begin > SURVEY_SHARE * seconds)
    ranked = sorted(
        (t for t in table.values() if t.survey is not None and t.choice != AUTOMATIC),
        key=lambda t: t.survey or 0.0,
    )
    finalists = [AUTOMATIC, *(trial.choice for trial in ranked[:FINALISTS])]
    samples: dict[Choice, list[float]] = {choice: [] for choice in finalists}
    rounds = 0
    while rounds < ROUNDS or now() - begin < seconds:
        # Each goes first in turn: what a load leaves behind meets the next one.
        for at in range(len(finalists)):
            choice = finalists[(at + rounds) % len(finalists)]
            samples[choice].append(measure(choice))
        rounds += 1
    for choice, taken in samples.items():
        table[choice] = dataclasses.replace(table[choice], final=tuple(taken))
    return Found(tuple(table.values()), complete)


def _survey(
    candidates: Mapping[str, Sequence[str | int]],
    table: dict[Choice, Trial],
    measure: Measure,
    late: Callable[[], bool],
) -> bool:
    """One sample of each value of each setting, from the best so far on; False where the time was over."""
    base = AUTOMATIC
    for name, values in candidates.items():
        for value in values:
            choice = dataclasses.replace(base, **{name: value})  # type: ignore[arg-type]
            if choice in table:
                continue
            if late():
                return False
            try:
                table[choice] = Trial(choice, measure(choice))
            except (OptionError, MachineError) as error:
                table[choice] = Trial(choice, refused=str(error))
        measured = [trial for trial in table.values() if trial.survey is not None]
        base = min(measured, key=lambda trial: trial.survey or 0.0).choice
    return True


def _spread(samples: Sequence[float]) -> float:
    if len(samples) < 2:
        return 0.0
    first, _, third = statistics.quantiles(samples, n=4, method="inclusive")
    return third - first


def _text(name: str, value: str | int) -> str:
    if isinstance(value, str) or name not in ("chunk_size", "slot_size", "pinned_bytes"):
        return str(value)
    for unit, step in (("MiB", MIB), ("KiB", KIB)):
        if value % step == 0:
            return f"{value // step}{unit}"
    return str(value)
