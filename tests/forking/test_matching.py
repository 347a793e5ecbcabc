"""What goes where, played in memory: after all errands our tensors are theirs, and no other byte changed."""

from __future__ import annotations

import ctypes
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorlift.engine.abi_fork import Memory
from tensorlift.errors import ForkError
from tensorlift.forking.manifest import Tensor
from tensorlift.forking.matching import copies_of, errands
from tensorlift.forking.offering import Offering, named_tensors, offer


def run(theirs: Offering, ours: Offering, chunk_bytes: int) -> list[int]:
    """Bytes of each errand."""
    moved = []
    for chunk, places, _ in errands(copies_of(theirs.tensors, ours.tensors, ours.memories), chunk_bytes):
        assert 0 < chunk.nbytes <= chunk_bytes
        assert chunk.offset + chunk.nbytes <= theirs.regions[chunk.region].nbytes
        source = theirs.memories[chunk.region].address + chunk.offset
        end = 0
        for offset, nbytes, address in places.tolist():
            assert end <= offset
            end = offset + nbytes
            assert end <= chunk.nbytes
            ctypes.memmove(address, source + offset, nbytes)
        moved.append(chunk.nbytes)
    return moved


def model(views: list[tuple[str, int]], seed: int) -> dict[str, torch.Tensor]:
    """Tensors of every kind: dense, transposed, with holes, tied, views of one storage, expanded, empty."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.rand(12, 10, generator=generator)
    made: dict[str, torch.Tensor] = {}
    for at, (kind, size) in enumerate(views):
        fresh = torch.rand(size, 6, generator=generator)
        made[f"t{at}"] = {
            "dense": lambda fresh=fresh: fresh,
            "transposed": lambda fresh=fresh: fresh.t(),
            "columns": lambda fresh=fresh: fresh[:, 1:4],
            "steps": lambda fresh=fresh: fresh[:, ::2],
            "rows of one": lambda size=size: shared[size : size + 3],
            "columns of one": lambda size=size: shared[:, size % 9 : size % 9 + 2],
            "expanded": lambda fresh=fresh, size=size: fresh[:1].expand(size + 1, 6),
            "scalar": lambda fresh=fresh: fresh.new_tensor(3.5),
            "empty": lambda fresh=fresh: fresh[:0],
            "tied": lambda fresh=fresh: next(iter(made.values()), fresh),
        }[kind]()
    return made


KINDS = [
    "dense", "transposed", "columns", "steps", "rows of one", "columns of one", "expanded", "scalar", "empty",
    "tied",
]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, 8)), min_size=1, max_size=12),
    st.integers(1, 400),
)
def test_a_model_of_the_same_making(views: list[tuple[str, int]], chunk_bytes: int) -> None:
    theirs, ours = model(views, 1), model(views, 2)
    holes = {name: tensor._base.clone() for name, tensor in ours.items() if tensor._base is not None}
    run(offer(named_tensors(theirs)), offer(named_tensors(ours)), chunk_bytes)
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
    for name, before in holes.items():
        base = ours[name]._base
        assert base is not None
        # What of the storage belongs to no tensor is as it was.
        marks = torch.zeros_like(base, dtype=torch.bool)
        for other in ours.values():
            if other.untyped_storage().data_ptr() == base.untyped_storage().data_ptr():
                dims = [pair for pair in zip(other.shape, other.stride(), strict=True) if pair[1]]
                shape, stride = zip(*dims, strict=True) if dims else ((), ())
                torch.as_strided(marks, shape, stride, other.storage_offset()).fill_(True)
        assert torch.equal(base[~marks], before[~marks]), name


def test_what_is_one_there_may_be_two_here() -> None:
    shared = torch.rand(5, 4)
    theirs = {"a": shared, "b": shared, "c": shared[1:3], "d": shared.t()}
    ours = {
        "a": torch.zeros(5, 4),
        "b": torch.zeros(5, 4),
        "c": torch.zeros(2, 4),
        "d": torch.zeros(5, 4).t(),
    }
    run(offer(named_tensors(theirs)), offer(named_tensors(ours)), 33)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_what_is_two_there_cannot_be_one_here() -> None:
    """Else one would have the other's bytes."""
    shared = torch.zeros(1000)
    theirs = offer(named_tensors({"a": torch.rand(1000), "b": torch.rand(1000), "c": torch.rand(5)}))
    for mine in (shared, shared.clone()[:1000]):
        ours = {"a": shared, "b": mine, "c": mine[5:10]}
        with pytest.raises(ForkError, match=r"tensors here share memory.*'(a|b)', '(b|c)'"):
            copies_of(theirs.tensors, offer(named_tensors(ours)).tensors, offer(named_tensors(ours)).memories)


def test_a_seed_that_says_that_all_is_in_one_place() -> None:
    """Each byte of it goes to many places; that takes no time that grows with their square."""
    count = 30_000
    there = [Tensor(f"t{k}", "uint8", (1000,), (1,), 0, k % 7) for k in range(count)]
    here = [Tensor(f"t{k}", "uint8", (1000,), (1,), 0, k * 1000) for k in range(count)]
    found = errands(copies_of(there, here, [Memory(1 << 40, count * 1000)]), 8 << 20)
    assert sum(int(places[:, 1].sum()) for _, places, _ in found) == count * 1000


def test_tied_tensors_move_once() -> None:
    theirs, ours = ({"a": one, "b": one, "c": one[2:7]} for one in (torch.rand(1000), torch.zeros(1000)))
    assert run(offer(named_tensors(theirs)), offer(named_tensors(ours)), 1 << 20) == [4000]
    assert torch.equal(ours["c"], theirs["c"])


def test_small_tensors_of_one_storage_come_in_one_chunk() -> None:
    """Padding between them is moved as well; a long gap is not."""
    theirs, ours = torch.arange(300_000).to(torch.uint8), torch.zeros(300_000, dtype=torch.uint8)
    spans = [(0, 10), (64, 100), (200, 250), (250_000, 250_100)]
    there, here = (offer(named_tensors({f"{a}": one[a:b] for a, b in spans})) for one in (theirs, ours))
    assert run(there, here, 1 << 20) == [250, 100]
    assert all(torch.equal(ours[a:b], theirs[a:b]) for a, b in spans)
    assert ours.count_nonzero() <= sum(b - a for a, b in spans)


def test_tensors_that_only_one_side_has_are_left_out() -> None:
    theirs, ours = {"a": torch.rand(3), "b": torch.rand(3)}, {"a": torch.zeros(3), "c": torch.zeros(3)}
    assert run(offer(named_tensors(theirs)), offer(named_tensors(ours)), 100) == [12]
    assert torch.equal(ours["a"], theirs["a"])
    assert not ours["c"].any()


@pytest.mark.parametrize("count", [100_000])
def test_many(count: int) -> None:
    tensors = [Tensor(f"t{k}", "bfloat16", (64, 32), (32, 1), k % 100, k // 100 * 4096) for k in range(count)]
    here = [Tensor(f"t{k}", "bfloat16", (64, 32), (32, 1), 0, k * 8192) for k in range(count)]
    begin = time.perf_counter()
    copies = copies_of(tensors, here, [Memory(1 << 40, 1 << 30)])
    middle = time.perf_counter()
    found = errands(copies, 8 << 20)
    print(f"{middle - begin:.2f} s, {time.perf_counter() - middle:.2f} s")
    assert len(found) == 100
    assert sum(int(places[:, 1].sum()) for _, places, _ in found) == count * 4096
    assert np.all(copies.nbytes == 4096)


def test_more_runs_than_can_be_planned() -> None:
    """A seed that says so of a tensor, in a few bytes, took 200 bytes for each before any had come."""
    told = [Tensor(name, "uint8", (2 << 20, 2), (8, 2), 0, 0) for name in "ab"]
    ours = [Memory(4096, 32 << 20, 0, 0)]
    with pytest.raises(ForkError, match=r"'b', of shape .*2097152.* lies in so many pieces"):
        copies_of(told, told, ours)
    told = [Tensor("a", "uint8", (1 << 40,), (2,), 0, 0)]
    with pytest.raises(ForkError, match=r"more than 4,194,304 in all; make it contiguous"):
        copies_of(told, told, ours)
