"""The program that changes weights under stopped readers, with fewer updates than it has by default."""

from __future__ import annotations

from support import leaks
from support.programs import program_of


def test_no_torn_read_and_refusals_are_counted() -> None:
    program = program_of("benchmarks/fork_updates.py")
    with leaks.nothing_left():
        found = program.run(updates=40, readers=2)
    assert (found["updates"], found["stopped"]) == (40, 4)
    assert found["torn"] == 0
    assert found["reads"] > 0
    assert found["refused_leases"] + found["refused_chunks"] + found["stale_chunks"] > 0
