"""The roll-out in processes, with fewer and smaller ones than it has by default."""

from __future__ import annotations

from support import leaks
from support.programs import program_of


def test_a_tree_of_two() -> None:
    program = program_of("benchmarks/fleet.py")
    with leaks.nothing_left():
        found = program.measured(instances=2, nbytes=2 << 20, link="20MB/s", readers=1, is_tree=True)
    assert (found["instances"], found["readers"], len(found["seconds"])) == (2, 1, 2)
    assert 0 < found["seconds"][0] <= found["seconds"][1] == found["all_seconds"]
    assert 1 <= found["from_the_first"] <= 2


def test_arithmetic_of_large_fleets() -> None:
    hundred, thousand = program_of("benchmarks/fleet.py").predicted(between=1.0)
    assert (hundred["one seed"], hundred["storage"]) == (1000, 100)
    # What docs/fleet.md has.
    found = [[round(value) for name, value in row.items() if "tree" in name] for row in (hundred, thousand)]
    assert found == [[73, 101, 240], [107, 142, 321]]
