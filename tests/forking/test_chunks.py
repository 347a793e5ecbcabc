"""The queue of chunks: each byte once, nothing lost whatever sources do, and no success with a hole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorlift.forking.chunks import SAMPLED, Chunk, ChunkQueue, checked, cut
from tensorlift.plan.extents import Extents


def extents(*pairs: tuple[int, int]) -> Extents:
    return Extents(*(np.array([pair[at] for pair in pairs], np.int64) for at in (0, 1)))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 30)), max_size=8), st.integers(1, 20))
def test_cutting_covers_each_byte_once(pairs: list[tuple[int, int]], chunk_bytes: int) -> None:
    chunks = cut(3, extents(*((start, start + size) for start, size in pairs)), chunk_bytes)
    bytes_ = [byte for chunk in chunks for byte in range(chunk.offset, chunk.offset + chunk.nbytes)]
    assert len(bytes_) == len(set(bytes_))
    assert set(bytes_) == {byte for start, size in pairs for byte in range(start, start + size)}
    assert all(chunk.region == 3 and 0 < chunk.nbytes <= chunk_bytes for chunk in chunks)


def queue(count: int = 3) -> ChunkQueue:
    return ChunkQueue([Chunk(0, 10 * k, 10) for k in range(count)])


def test_two_sources_share() -> None:
    work = queue()
    assert (work.take("a"), work.take("b"), work.take("a"), work.take("b")) == (0, 1, 2, None)
    assert not work.is_done
    for number, source in ((0, "a"), (1, "b"), (2, "a")):
        work.done(number, source)
    assert work.is_done
    assert work.bytes_by_source() == {"a": 20, "b": 10} == work.moved_bytes


def test_a_wrong_chunk_comes_again_and_then_from_elsewhere() -> None:
    work = queue(1)
    for _ in range(2):
        assert work.take("liar") == 0
        work.wrong(0, "liar")
    assert work.take("liar") is None
    assert (work.may(0, "liar"), work.may(0, "b")) == (False, True)
    assert work.take("b") == 0
    work.done(0, "b")
    assert work.is_done
    assert work.moved_bytes == {"liar": 20, "b": 10}
    assert work.bytes_by_source() == {"b": 10}


def test_what_a_lost_source_held_goes_back_and_what_it_did_stays() -> None:
    work = queue()
    work.done(work.take("a") or 0, "a")
    assert work.take("a") == 1
    work.leave("a")
    assert work.take("a") is None
    # What it holds it may still be writing: nobody else gets it before it is given back.
    assert [work.take("b"), work.take("b")] == [2, None]
    work.give_back(1, "a", 4)
    assert (work.may(1, "a"), work.may(1, "b")) == (False, True)
    assert [work.take("b"), work.take("b")] == [1, None]
    assert work.bytes_by_source() == {"a": 10}
    assert work.moved_bytes == {"a": 14}


def test_a_lost_source_may_end_what_it_holds() -> None:
    work = queue(1)
    assert work.take("a") == 0
    work.leave("a")
    work.done(0, "a")
    assert work.is_done


def test_who_does_not_hold_a_chunk_has_no_say_about_it() -> None:
    work = queue(1)
    assert work.take("a") == 0
    for say in (work.done, work.wrong, work.give_back):
        with pytest.raises(LookupError):
            say(0, "b")
    work.give_back(0, "a")
    for say in (work.done, work.wrong, work.give_back):
        with pytest.raises(LookupError):
            say(0, "a")


def test_nothing_is_done_at_once() -> None:
    assert ChunkQueue([]).is_done


SOURCES = ("a", "b", "c")
ACTS = [*("take", "done", "wrong", "give back") * 20, "leave"]


@settings(deadline=None)
@given(
    st.integers(0, 12),
    st.lists(st.tuples(st.sampled_from(ACTS), st.sampled_from(SOURCES)), min_size=60, max_size=200),
)
def test_nothing_is_lost(count: int, acts: list[tuple[str, str]]) -> None:
    """Sources that fail, lie and leave: at the end each chunk is done once, or nobody may bring it."""
    work, held = queue(count), list[tuple[int, str]]()
    for act, source in acts:
        mine = [pair for pair in held if pair[1] == source]
        if act == "take" and (number := work.take(source)) is not None:
            assert number not in {other for other, _ in held}
            held.append((number, source))
        elif act == "leave":
            work.leave(source)
        elif act in ("done", "wrong", "give back") and mine:
            held.remove(mine[0])
            if act == "done":
                work.done(*mine[0])
            elif act == "wrong":
                work.wrong(*mine[0])
            else:
                work.give_back(*mine[0])
    for number, source in held:
        work.done(number, source)
    for source in SOURCES:
        while (number := work.take(source)) is not None:
            work.done(number, source)
    kept = [number for number, _ in work.kept()]
    assert sum(work.bytes_by_source().values()) == 10 * len(kept) == 10 * len(set(kept))
    lacking = set(range(count)) - set(kept)
    assert not any(work.may(number, source) for number in lacking for source in SOURCES)
    assert work.is_done == (not lacking)


def test_which_chunks_are_checked() -> None:
    chunks = [Chunk(region, 10 * k, 10) for region, count in ((0, 5), (2, 1), (1, 400)) for k in range(count)]
    assert checked(chunks, "full") == set(range(406))
    assert checked(chunks, "off") == set()
    assert checked(chunks, "sample", lambda: 1.0) == {0, 4, 5, 6, 405}
    assert checked(chunks, "sample", lambda: SAMPLED) == {0, 4, 5, 6, 405}
    assert checked(chunks, "sample", lambda: 0.0) == set(range(406))
    assert checked([], "sample") == set()
    # 400 drawn with a chance of an eighth: 50, and outside of these bounds once in 10 ** 12.
    assert 10 < len(checked(chunks, "sample")) < 115


def test_who_holds_what_and_what_is_kept() -> None:
    work = queue()
    assert work.take("a") == 0
    assert (list(work.held()), list(work.kept())) == ([(0, "a")], [])
    work.done(0, "a")
    assert (list(work.held()), list(work.kept())) == ([], [(0, "a")])
    work.leave("b")
    assert not work.may(1, "b")
