"""Processes that are started once: what they answer, and what becomes of those that fail, hang or die."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import crew_orders, leaks
from tensorlift.bench.crew import Crew
from tensorlift.errors import MachineError


@pytest.fixture
def crew(monkeypatch: pytest.MonkeyPatch) -> Crew:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    return Crew(["cpu", "cpu"], "gloo")


def test_orders_failures_and_new_processes(crew: Crew, capfd: pytest.CaptureFixture[str]) -> None:
    with leaks.nothing_left(), crew:
        assert crew.ask(crew_orders.whoami, 60) == [(0, 2, "cpu"), (1, 2, "cpu")]
        # Said twice: the one of the order before is no stop of this one.
        for _ in range(2):
            crew.send(1, crew_orders.wait_for_stop)
            crew.stop(1)
            (outcome,) = crew.receive([1], 60)
            assert (outcome.value, outcome.told) == (1, ["waiting"])
        with pytest.raises(
            MachineError, match=r"rank 0: ValueError: of no use; rank 1: no answer within 1 s"
        ):
            crew.ask(crew_orders.fail_or_hang, 1, nap=600)
        said = capfd.readouterr().err
        assert "and more" in said
        assert "in fail_or_hang" in said.partition("rank 1 said last")[2]
        # Others, in a group of their own.
        assert crew.starts == 1
        crew.start()
        assert crew.starts == 2
        for rank in range(2):
            crew.send(rank, crew_orders.die, victim=1)
        alive, dead = crew.receive(range(2), 60)
        assert (alive.value, alive.error) == (0, "")
        assert dead.told == ["dying"]
        assert dead.error == "gone: killed by SIGKILL; it said last: farewell"
