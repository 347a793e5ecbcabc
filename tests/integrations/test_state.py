"""What a model consists of: tensors wherever an engine keeps them, numbers, and what cannot be brought."""

from __future__ import annotations

import dataclasses
import functools
import tracemalloc
import zlib

import pytest
import torch

import tensorlift
from tensorlift.errors import ForkError, RequestError
from tensorlift.integrations.state import SCALARS, State

ENGINE = __name__.partition(".")[0]
KEY = "m"


class Kernel:
    """What an engine's modules point to."""

    def __init__(self, value: float) -> None:
        self.packed = torch.full((4,), value)
        self.scale = value
        self.kv_cache = torch.zeros(64)
        self.more = {"tables": [torch.full((2,), value)]}


@dataclasses.dataclass(frozen=True)
class Frozen:
    alpha: float


class Slotted:
    __slots__ = ("inside",)

    def __init__(self, value: float) -> None:
        self.inside = torch.full((3,), value)


class Model(torch.nn.Module):
    def __init__(self, value: float, flag: bool = True) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((8, 4), value), requires_grad=False)
        self.register_buffer("scales", torch.full((3,), value))
        self.register_buffer("cos_sin_cache", torch.full((3,), value))
        self.inner = torch.nn.Linear(4, 2, bias=False)
        self.inner.requires_grad_(False).weight.fill_(value)
        self.derived = torch.full((5,), value)
        self.kernel = Kernel(value)
        self.config = Frozen(value)
        self.slotted = Slotted(value)
        self.k_scale_float = value
        self.flag = flag
        packed = torch.full((6,), value)
        self.linear = lambda x: x + packed
        self.bound = functools.partial(torch.add, torch.full((7,), value))
        self.method = self.kernel.__init__
        self.me = [self]


def forked(seed_model, model):
    """The second with the state of the first, by way of a seed."""
    theirs, ours = State(seed_model, ENGINE), State(model, ENGINE)
    with tensorlift.seed(theirs.tensors(), key=KEY, transports=("tcp",)) as seed:
        tensorlift.fork(seed.url, into=ours.tensors())
    ours.take()
    return ours


def test_a_fork_has_tensors_and_numbers_wherever_the_engine_keeps_them():
    first, second = Model(2.0), Model(1.0)
    names = set(forked(first, second).tensors())
    assert names == {
        "weight",
        "scales",
        "inner.weight",
        "derived",
        "kernel.packed",
        "kernel.more.tables.0",
        "slotted.inside",
        "linear.packed",
        "bound.0",
        SCALARS,
    }
    for value in (second.weight, second.derived, second.kernel.packed, second.slotted.inside):
        assert bool((value == 2).all())
    assert second.linear(torch.zeros(6)).tolist() == [2.0] * 6
    assert second.bound(torch.zeros(7)).tolist() == [2.0] * 7
    assert (second.k_scale_float, second.kernel.scale, second.config.alpha) == (2.0, 2.0, 2.0)
    # What follows from the configuration, and what is of requests, is each one's own.
    assert second.cos_sin_cache.tolist() == [1.0] * 3
    assert bool((second.kernel.kv_cache == 0).all())


def test_a_switch_that_a_load_sets_comes_along():
    first, second = Model(2.0), Model(1.0)
    first.inner.has_own_head = True
    forked(first, second)
    assert second.inner.has_own_head is True


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda first, second: setattr(first, "flag", False), "'flag' is True here, and False in the seed"),
        (lambda first, second: setattr(first, "flag", 1.0), "'flag' is True here, and 1.0"),
        (lambda first, second: setattr(second, "only_here", 1.0), "'only_here' is 1.0 here, and not there"),
        (
            lambda first, second: setattr(first, "extra", Frozen(1.0)),
            "'extra.alpha' of the seed has no place",
        ),
    ],
)
def test_models_that_were_made_in_another_way_are_told_apart(change, says):
    first, second = Model(2.0), Model(1.0)
    change(first, second)
    with pytest.raises(ForkError, match=says):
        forked(first, second)
    assert second.k_scale_float == 1.0


def test_attributes_that_are_no_attributes():
    state = State(Model(1.0), ENGINE)
    state.tensors()[SCALARS].fill_(255)
    with pytest.raises(ForkError, match="cannot be read"):
        state.take()


def packed(text):
    """A state to which a seed has sent this for its attributes."""
    state, raw = State(Model(1.0), ENGINE), zlib.compress(text)
    sent = len(raw).to_bytes(4, "little") + raw
    state.tensors()[SCALARS][: len(sent)] = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
    return state


def test_attributes_that_would_take_all_memory(monkeypatch):
    monkeypatch.setattr("tensorlift.integrations.state._MOST_TEXT", 1_000_000)
    state = packed(b" " * 3_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(ForkError, match=r"sent, [23],\d+ bytes, are more than 1,000,000 bytes of text"):
            state.take()
        assert tracemalloc.get_traced_memory()[1] < 2_900_000
    finally:
        tracemalloc.stop()


def test_attributes_that_are_nested_without_end_or_cut_off():
    nested, cut = packed(b"[" * 200_000), packed(b"{}")
    cut.tensors()[SCALARS][0] -= 1
    for state in (nested, cut):
        with pytest.raises(ForkError, match="cannot be read"):
            state.take()


def test_attributes_with_too_much_text_are_not_sent(monkeypatch):
    monkeypatch.setattr("tensorlift.integrations.state._MOST_TEXT", 10)
    with pytest.raises(RequestError, match=r"more than are sent: .*, 10 as text"):
        State(Model(1.0), ENGINE)


def test_more_attributes_than_are_sent():
    model = Model(1.0)
    generator = torch.Generator().manual_seed(0)
    for at, value in enumerate(torch.rand(2000, generator=generator, dtype=torch.float64).tolist()):
        setattr(model, f"number{at}", value)
    with pytest.raises(RequestError, match="more than are sent"):
        State(model, ENGINE)


@pytest.mark.parametrize(
    "hide",
    [
        lambda model: setattr(model.kernel, "handle", torch.tensor(0x7F00_1234_5678)),
        lambda model: setattr(model, "pointers", torch.tensor([1, 0x7F00_1234_5678])),
        lambda model: setattr(model, "native", torch.classes.native_of_tests),
    ],
)
def test_handles_of_native_code_are_not_offered(hide, monkeypatch):
    class Native:
        pass

    monkeypatch.setattr(torch, "ScriptObject", Native)
    monkeypatch.setattr(torch.classes, "native_of_tests", Native(), raising=False)
    model = Model(1.0)
    hide(model)
    with pytest.raises(RequestError, match=r"where they cannot be read.*native code\)"):
        State(model, ENGINE).tensors()


def test_small_whole_numbers_are_no_addresses():
    model = Model(1.0)
    model.table = torch.arange(5)
    assert "table" in State(model, ENGINE).tensors()


def test_tensors_are_those_that_are_there_when_they_are_asked_for():
    model = Model(1.0)
    state = State(model, ENGINE)
    model.derived = torch.full((5,), 9.0)
    model.k_scale_float, model.flag = 3.0, False
    state.refresh()
    assert state.tensors()["derived"].tolist() == [9.0] * 5
    second = Model(1.0)
    other = State(second, ENGINE)
    other.tensors()[SCALARS].copy_(state.tensors()[SCALARS])
    other.take()
    assert (second.k_scale_float, second.flag) == (3.0, True)
    model.derived = torch.zeros(6)
    with pytest.raises(RequestError, match="'derived' has another dtype, shape or stride"):
        state.tensors()
    del model.derived
    with pytest.raises(RequestError, match="'derived' is no longer there"):
        state.tensors()


def test_held_tensors_stay_what_they_were():
    model = Model(1.0)
    state = State(model, ENGINE, hold=True)
    kept = model.weight
    model.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    assert state.is_held
    assert bool((state.tensors()["weight"] == 1).all())
    kept.data[0, 0] = 7.0
    with pytest.raises(RequestError, match="changed weights in place"):
        state.tensors()
