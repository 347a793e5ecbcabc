"""What registering costs, by an engine that charges for it; and that reading does not wait for it."""

from __future__ import annotations

import itertools
import threading

import pytest

from support.standin_fabric import Costs, StandIn, World, side_by_side
from support.waiting import until
from tensorlift.engine.abi_fork import Memory
from tensorlift.forking.fabrics import ANY, FabricError
from tensorlift.forking.registering import Registration, spans_of


def engine(costs: Costs | None = None) -> StandIn:
    return World(costs or Costs()).make(ANY, "127.0.0.1")


def registered(fabric: StandIn, regions: list[Memory]) -> Registration:
    made = Registration(fabric, regions)
    until(lambda: made.problem or len(made.places()) - made.places().count(None) == len(regions))
    return made


def test_what_lies_side_by_side_is_registered_as_one() -> None:
    a = Memory(1000, 10)
    b, c = Memory(1010, 5), Memory(1012, 20)
    apart, elsewhere = Memory(1033, 7), Memory(1015, 5, 1, 0)
    spans = spans_of([apart, c, a, b, elsewhere, Memory(5, 0)])
    assert [span.memory for span in spans] == [apart, Memory(1000, 32), elsewhere]
    assert [sorted(span.regions) for span in spans] == [[0], [1, 2, 3], [4]]
    assert spans_of([]) == []


def test_merging_saves_what_regions_cost() -> None:
    """1,000 parameters one behind another: what is paid by the region falls to one, by the page it stays."""
    block, regions = side_by_side([8192] * 1000)
    apart = engine(Costs(call=0, region=1e-3, page=1e-6, device=0))
    for region in regions:
        apart.register([region])
    merged = engine(apart.world.costs)
    registered(merged, regions).close()
    assert merged.calls == [[Memory(block.ctypes.data, block.nbytes)]]
    assert apart.clock == pytest.approx(1.0 + 2000e-6)
    assert merged.clock == pytest.approx(1e-3 + 2000e-6)


def test_small_regions_go_many_in_a_call_and_large_ones_alone() -> None:
    """Calls cost by all that is known, so that one a region would cost by the square."""
    fabric = engine(Costs(call=1.0, region=0, page=0, device=0))
    small = [Memory(at << 20, 100) for at in range(200)]
    large = [Memory((1 << 40) + (at << 32), 1 << 30) for at in range(3)]
    done = registered(fabric, [*small, *large])
    assert [len(call) for call in fabric.calls] == [64, 64, 64, 8, 1, 1, 1]
    assert done.nbytes == 200 * 100 + 3 * (1 << 30)
    done.close()
    assert fabric.registered == []


def test_reading_overlaps_registering() -> None:
    """By the engine's clock: each region is read once it is registered, rather than all behind the last."""
    costs = Costs(call=0, region=0, page=1e-3, device=0)
    fabric = engine(costs)
    sizes = [1 << 30] * 10
    regions = [Memory((1 << 40) + (at << 32), nbytes) for at, nbytes in enumerate(sizes)]
    ready: list[float] = []
    register = fabric.register

    def timed(memories: list[Memory]) -> None:
        register(memories)
        ready.append(fabric.clock)

    fabric.register = timed  # type: ignore[method-assign,assignment]
    registered(fabric, regions).close()
    transfer = costs.of(regions[:1])  # as long as it takes to register one
    ends = list(itertools.accumulate(ready, lambda end, begin: max(end, begin) + transfer, initial=0.0))
    behind = ready[-1] + transfer * len(regions)
    assert ends[-1] == pytest.approx(ready[-1] + transfer)
    assert ends[-1] < 0.6 * behind


def test_a_region_can_be_had_before_the_next_is_registered() -> None:
    fabric = engine()
    fabric.may_register = threading.Semaphore(1)
    regions = [Memory(0x10000, 1 << 30), Memory(1 << 40, 1 << 30), Memory(1 << 50, 0)]
    made = Registration(fabric, regions)
    made.wait(0, 60)
    assert made.places() == [regions[0], None, regions[2]]
    made.wait(1, 0.01)  # not yet
    made.wait(2, 60)  # has no bytes
    made.wait(7, 60)  # there is none
    assert made.places()[1] is None
    fabric.may_register.release()
    made.wait(1, 60)
    assert made.places() == regions
    made.close()


def test_what_cannot_be_registered_is_said_and_the_rest_stays(caplog: pytest.LogCaptureFixture) -> None:
    fabric = engine()
    fabric.fails_to_register = lambda memories: memories[0].address == 1 << 40
    made = Registration(fabric, [Memory(0x10000, 1 << 30), Memory(1 << 40, 1 << 30)])
    made.wait(1, 60)
    until(lambda: made.problem)
    assert made.problem == "no more pages can be pinned"
    assert "no more pages can be pinned" in caplog.text
    assert made.places()[0] is not None
    made.close()
    assert fabric.registered == []


def test_who_waits_for_all_is_told_of_an_end_and_of_a_problem() -> None:
    """Before the time is over that it would wait for."""
    found: list[bool] = []

    def wait(made: Registration) -> threading.Thread:
        thread = threading.Thread(target=lambda: found.append(made.wait_for_all(3000)), daemon=True)
        thread.start()
        return thread

    fabric = engine()
    fabric.may_register = threading.Semaphore(0)
    made = Registration(fabric, [Memory(0x10000, 1 << 30)])
    waiting = wait(made)
    until(lambda: made._state._waiters)  # type: ignore[attr-defined]
    ending = threading.Thread(target=made.close)
    ending.start()
    waiting.join(60)
    fabric.may_register.release()
    ending.join()
    assert found == [False]
    broken = engine()
    broken.fails_to_register = lambda memories: True
    made = Registration(broken, [Memory(0x10000, 1 << 30)])
    wait(made).join(60)
    assert found == [False, False]
    made.close()


def test_whatever_a_binding_raises_is_a_problem() -> None:
    fabric = engine()

    def broken(memories: object) -> None:
        raise TypeError

    fabric.register = broken  # type: ignore[method-assign,assignment]
    made = Registration(fabric, [Memory(0x10000, 1 << 30)])
    made.wait(0, 60)
    assert made.problem == "TypeError"
    made.close()


def test_what_may_stay_registered_is_said() -> None:
    regions = [Memory(0x10000, 1 << 30), Memory(1 << 40, 1 << 30)]
    fine = registered(engine(), regions)
    fine.close()
    assert not fine.may_stay
    fabric = engine()
    fabric.fails_to_register = lambda memories: memories[0].address == 1 << 40
    half = registered(fabric, regions)
    half.close()
    assert half.may_stay

    def stuck(memories: object) -> None:
        raise FabricError("it does not let go")

    fabric = engine()
    fabric.unregister = stuck  # type: ignore[method-assign,assignment]
    kept = registered(fabric, regions)
    kept.close()
    assert kept.may_stay


def test_an_end_in_the_middle_waits_for_the_call_that_is_under_way() -> None:
    fabric = engine()
    fabric.may_register = threading.Semaphore(0)
    regions = [Memory((at + 1) << 40, 1 << 30) for at in range(3)]
    made = Registration(fabric, regions)
    ending = threading.Thread(target=made.close)
    ending.start()
    until(lambda: made._is_ending)
    fabric.may_register.release(3)
    ending.join()
    assert len(fabric.calls) == 1
    assert fabric.registered == []
