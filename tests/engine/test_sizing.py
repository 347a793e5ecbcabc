"""Automatic numbers: what small and large work, caches and options lead to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorlift.engine import machine
from tensorlift.engine.sizing import GIB, KIB, MIB, PAGE, Facts, budget, facts_of_this_machine, size_engine
from tensorlift.errors import OptionError
from tensorlift.options import LoadOptions

BIG = Facts(cpus=64, cache=300 * MIB)


def test_a_large_load_on_a_large_machine() -> None:
    size = size_engine(LoadOptions(), 30 * GIB, device=True, facts=BIG)
    assert (size.chunk_size, size.slot_size, size.pinned_bytes) == (MIB, 16 * MIB, 128 * MIB)
    assert (size.threads, size.io_depth, size.backends) == (16, 32, ("AUTO",))


@pytest.mark.parametrize(
    ("nbytes", "chunk", "threads"),
    [(30 * GIB, 4 * MIB, 16), (256 * MIB + 5, 2 * MIB, 16), (5 * MIB, MIB, 5), (4 * KIB, 4 * KIB, 1)],
)
def test_a_load_to_the_cpu_reads_more_at_once_but_shares_fairly(
    nbytes: int, chunk: int, threads: int
) -> None:
    size = size_engine(LoadOptions(), nbytes, device=False, facts=BIG)
    assert (size.chunk_size, size.threads) == (chunk, threads)


def test_a_tiny_model_pins_a_few_pages() -> None:
    size = size_engine(LoadOptions(), 4 * KIB, device=True, facts=BIG)
    assert size.pinned_bytes <= 16 * KIB
    assert size.threads == 1


@pytest.mark.parametrize(
    ("cache", "pinned"), [(32 * MIB, 24 * MIB), (100 * MIB, 48 * MIB), (None, 128 * MIB)]
)
def test_the_ring_fits_into_half_the_cache(cache: int | None, pinned: int) -> None:
    size = size_engine(LoadOptions(), GIB, device=True, facts=Facts(4, cache))
    assert size.pinned_bytes == pinned
    assert size.pinned_bytes // size.slot_size >= 3


def test_explicit_numbers_are_taken() -> None:
    options = LoadOptions(
        chunk_size=8 * KIB,
        slot_size=10 * KIB,
        pinned_bytes=64 * KIB,
        threads=3,
        io_depth=2,
        backend=("PREAD", "MMAP"),
    )
    size = size_engine(options, GIB, device=True, facts=BIG)
    assert (size.chunk_size, size.slot_size, size.pinned_bytes) == (8 * KIB, 16 * KIB, 64 * KIB)
    assert (size.threads, size.io_depth, size.backends) == (3, 2, ("PREAD", "MMAP"))


@pytest.mark.parametrize("explicit", [{"slot_size": 16 * MIB}, {"chunk_size": 8 * MIB}])
def test_explicit_sizes_pin_no_more_than_a_small_load_needs(explicit: dict[str, int]) -> None:
    size = size_engine(LoadOptions(**explicit), 100, device=True, facts=BIG)
    assert (size.chunk_size, size.slot_size, size.pinned_bytes) == (PAGE, PAGE, 2 * PAGE)


def test_a_ring_that_holds_no_two_slots_is_refused() -> None:
    with pytest.raises(OptionError, match="pinned_bytes is 1048576, which holds less than two slots"):
        size_engine(LoadOptions(slot_size=MIB, pinned_bytes=MIB), GIB, device=True, facts=BIG)
    with pytest.raises(OptionError, match="two slots"):
        size_engine(LoadOptions(pinned_bytes=KIB), 4 * GIB, device=True, facts=BIG)


@given(
    st.integers(0, 1 << 36),
    st.booleans(),
    st.integers(1, 256),
    st.one_of(st.none(), st.integers(1 << 16, 1 << 30)),
    st.one_of(st.none(), st.integers(1, 1 << 13)),
    st.one_of(st.none(), st.integers(1, 1 << 28)),
)
def test_what_the_engine_asks_for_holds_always(
    nbytes: int, device: bool, cpus: int, cache: int | None, pages: int | None, slot: int | None
) -> None:
    options = LoadOptions(chunk_size=None if pages is None else pages * PAGE, slot_size=slot)
    size = size_engine(options, nbytes, device=device, facts=Facts(cpus, cache))
    assert size.chunk_size % PAGE == 0
    assert size.slot_size % size.chunk_size == 0
    assert size.pinned_bytes % size.slot_size == 0
    assert size.pinned_bytes >= 2 * size.slot_size
    assert 1 <= size.threads <= min(cpus, 16)
    assert not device or size.slot_size <= max(PAGE, 2 * (nbytes + PAGE))
    if pages is None and slot is None and device:
        assert size.pinned_bytes <= max(2 * PAGE, 2 * nbytes + 2 * MIB)


def test_budgets() -> None:
    assert budget(LoadOptions(), device=True, free=80 * GIB).arena_size == 258 * MIB
    assert budget(LoadOptions(), device=True, free=80 * GIB).buffer_size == GIB
    little = budget(LoadOptions(), device=True, free=200 * MIB)
    assert little.arena_size * 2 <= little.buffer_size <= 100 * MIB
    assert budget(LoadOptions(), device=False, free=None).arena_size % (2 * MIB) == 0
    assert budget(LoadOptions(arena_size=5, buffer_size=7), device=True, free=None).arena_size == 5


def test_near_a_device_there_is_only_a_part_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "local_ranks", lambda: 2)
    monkeypatch.setattr(machine, "usable_cpus", lambda **_: 24)
    caches = {None: 100 * MIB, frozenset(range(8)): 60 * MIB}
    monkeypatch.setattr(machine, "last_level_cache", lambda cpus=None, **_: caches[cpus])
    monkeypatch.setattr(machine, "cpus_near", lambda address: frozenset(range(8)) if address else frozenset())
    assert facts_of_this_machine.__wrapped__() == Facts(24, 100 * MIB)
    assert facts_of_this_machine.__wrapped__("") == Facts(24, 100 * MIB)
    facts = facts_of_this_machine.__wrapped__("0000:3b:00.0")
    assert facts == Facts(8, 60 * MIB, frozenset(range(8)))
    size = size_engine(LoadOptions(), 30 * GIB, device=True, facts=facts)
    assert (size.threads, size.near) == (8, frozenset(range(8)))


@given(
    st.integers(0, 1 << 36),
    st.one_of(st.none(), st.integers(1, 2 * MIB // PAGE).map(lambda pages: pages * PAGE)),
    st.one_of(st.none(), st.integers(1, 4 * MIB)),
    st.booleans(),
)
def test_what_is_digested_fits_into_a_slot(
    nbytes: int, chunk_size: int | None, slot_size: int | None, device: bool
) -> None:
    options = LoadOptions(chunk_size=chunk_size, slot_size=slot_size)
    size = size_engine(options, nbytes, device=device, digest=True, facts=BIG)
    assert size.slot_size >= min(nbytes, MIB)
    assert size.slot_size % size.chunk_size == 0
    assert size.pinned_bytes >= 2 * size.slot_size
