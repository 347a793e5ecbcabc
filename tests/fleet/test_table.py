"""The embedded registry: what it knows, when, and no longer."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from support.registries import KEY, announced
from tensorlift.errors import RequestError, SeedError
from tensorlift.fleet import table as module
from tensorlift.fleet.contract import ForkReport, Load, Near
from tensorlift.fleet.store import NotWrittenError, Store
from tensorlift.fleet.table import Table
from tensorlift.forking.manifest import ModelKey


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> Table:
    return Table(Store(None), 15, clock, lambda: 0.5)


def ports(table: Table, count: int = 64, key: ModelKey = KEY, **more: object) -> list[int]:
    try:
        found = table.candidates(key, Near(), count, **more)  # type: ignore[arg-type]
    except SeedError:
        return []
    return [int(url.rpartition(":")[2]) for url in found]


def report(number: int, state: str = "reading") -> ForkReport:
    return ForkReport(fork=f"{number:032x}", key=KEY, state=state)  # type: ignore[arg-type]


def test_who_stops_renewing_is_gone(table: Table, clock: Clock) -> None:
    for number in (1, 2):
        assert table.announce(announced(number)) == 15
    clock.now += 14.9
    assert table.renew(announced(1).instance, Load()) == 15
    assert sorted(ports(table)) == [2, 3]
    clock.now += 0.1
    assert ports(table) == [2]
    assert table.renew(announced(2).instance, Load()) is None
    assert [seed.instance for seed in table.view().seeds] == [announced(1).instance]
    clock.now += 15
    with pytest.raises(SeedError, match=r"^'org/model' \(target\): it knows none; there is nothing$"):
        table.candidates(KEY, Near())


def test_what_is_there_is_named(table: Table) -> None:
    table.announce(announced(1, ModelKey(model="org/model", tp=(0, 2))))
    with pytest.raises(SeedError, match=r"there is 'org/model' \(target, tp 0 of 2\); its tp is 2, not 1"):
        table.candidates(KEY, Near())


def test_forks_are_spread_before_seeds_have_told_of_them(table: Table, clock: Clock) -> None:
    for number in range(4):
        table.announce(announced(number, most_readers=2))
    first = [ports(table, 1)[0] for _ in range(8)]
    assert sorted(first) == [1, 1, 2, 2, 3, 3, 4, 4]
    assert sorted(first[:4]) == [1, 2, 3, 4]
    with pytest.raises(SeedError, match="4 seeds of it, all with as many readers") as full:
        table.candidates(KEY, Near())
    assert full.value.retry_seconds == 1
    # Both of one have come, and one of those has ended.
    table.renew(announced(2).instance, Load(readers=1, leases=2))
    assert ports(table) == [3]
    assert ports(table) == []
    # That has nothing to do with those who are on their way to another.
    table.renew(announced(1).instance, Load(readers=0))
    assert ports(table) == []
    # Who does not come counts no longer.
    clock.now += 10
    assert sorted(ports(table)) == [1, 2, 3, 4]


def test_withdrawn_and_begun_again(table: Table) -> None:
    table.announce(announced(1))
    table.withdraw(announced(1).instance)
    table.withdraw(announced(1).instance)
    assert ports(table) == []
    # Another instance at the same URL: that of the process that was there is gone.
    table.announce(announced(1))
    table.announce(announced(9, url=announced(1).url))
    assert [seed.instance for seed in table.view().seeds] == [announced(9).instance]


def test_another_version_takes_the_place_of_the_first(table: Table) -> None:
    table.announce(announced(1, weights="1"))
    table.announce(announced(1, weights="2"))
    assert [seed.weights for seed in table.view().seeds] == ["2"]


def test_forks_under_way_and_ended(table: Table, clock: Clock) -> None:
    table.report(report(1, "waiting"))
    table.report(report(2))
    table.report(report(3))
    assert [fork.state for fork in table.view().forks] == ["waiting", "reading", "reading"]
    table.report(report(1, "done"))
    table.report(report(2, "failed"))
    clock.now += 15
    view = table.view()
    assert view.forks == []
    assert view.ended == {(KEY, "done"): 1, (KEY, "failed"): 1, (KEY, "lost"): 1}
    assert [state for _, state in view.recent] == ["lost", "failed", "done"]


def test_those_that_wait_ask_less_often_where_they_are_many(table: Table) -> None:
    table.announce(announced(1, most_readers=1))
    assert ports(table) == [2]
    for number in range(600):
        table.report(report(number, "waiting"))
    with pytest.raises(SeedError) as full:
        table.candidates(KEY, Near())
    assert full.value.retry_seconds == 6


def test_there_are_ends_to_what_it_knows(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_SEEDS", 2)
    monkeypatch.setattr(module, "_MOST_FORKS", 2)
    for number in (1, 2, 1):
        table.announce(announced(number))
        table.report(report(number))
    with pytest.raises(RequestError, match="2 seeds are known already"):
        table.announce(announced(3))
    with pytest.raises(RequestError, match="2 forks are under way already"):
        table.report(report(3))
    table.report(report(3, "done"))


def test_keys_that_forks_ended_with_are_not_counted_without_end(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody withdraws them, so that each new one stayed, in memory and in the file."""
    monkeypatch.setattr(module, "_MOST_COUNTS", 3)
    path = tmp_path / "registry.db"
    table = Table(Store(str(path)), 15, clock)
    for number in range(5):
        for state in ("done", "reading"):
            key = ModelKey(model=f"m{number}")
            table.report(ForkReport(fork=f"{number:032x}", key=key, state=state))  # type: ignore[arg-type]
    table.report(ForkReport(fork="0" * 32, key=ModelKey(model="m0"), state="done"))
    clock.now += 15
    before = {(ModelKey(model=f"m{number}"), "done"): 2 - bool(number) for number in range(3)}
    assert table.view().ended == before
    assert table.view().forks == []
    table.close()
    table = Table(Store(str(path)), 15, clock)
    assert table.view().ended == before
    table.close()


def test_what_is_no_announcement(table: Table) -> None:
    with pytest.raises(RequestError, match="rank 5 of 2"):
        table.announce(announced(1, ModelKey(model="m", pp=(5, 2))))
    assert table.view().seeds == []


def test_what_cannot_be_written_changes_nothing(
    table: Table, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.announce(announced(1))
    table.report(report(1))

    def full(*_: object) -> None:
        raise NotWrittenError("no room", True)

    for name in ("put", "drop", "count"):
        monkeypatch.setattr(Store, name, full)
    with pytest.raises(NotWrittenError):
        table.announce(announced(2))
    with pytest.raises(NotWrittenError):
        table.report(report(1, "done"))
    assert ports(table) == [2]
    assert (len(table.view().forks), table.view().ended) == (1, {})
    # What is known of time alone goes on.
    assert table.renew(announced(1).instance, Load(3)) == 15
    clock.now += 15
    assert ports(table) == []
    assert table.view().ended == {(KEY, "lost"): 1}


def test_behind_a_restart_all_are_known_for_a_lease(tmp_path: Path, clock: Clock) -> None:
    path = str(tmp_path / "registry")
    first = Table(Store(path), 15, clock)
    first.announce(announced(1))
    first.announce(announced(2))
    first.withdraw(announced(2).instance)
    first.report(report(1, "done"))
    first.close()
    again = Table(Store(path), 15, clock)
    assert ports(again) == [2]
    assert again.view().ended == {(KEY, "done"): 1}
    assert again.renew(announced(1).instance, Load()) == 15
    clock.now += 15
    assert ports(again) == []
    again.close()
    last = Table(Store(path), 15, clock)
    assert ports(last) == []
    last.close()


def test_threads_may_ask_at_once(table: Table) -> None:
    def work(first: int) -> None:
        for number in range(first, first + 20):
            table.announce(announced(number))
            table.renew(announced(number).instance, Load(1))
            table.candidates(KEY, Near())
            table.report(report(number))
            table.report(report(number, "done"))

    threads = [threading.Thread(target=work, args=[20 * one]) for one in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    view = table.view()
    assert (len(view.seeds), view.forks, view.ended) == (160, [], {(KEY, "done"): 160})
