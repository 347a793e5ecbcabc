"""load(), open() and load_into() of a seed: the same as of the files that it was loaded from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tensorlift
from support import leaks
from support.checkpoints import Written, random_checkpoint, random_row, write_safetensors
from support.tensors import assert_state, raw
from support.waiting import when
from tensorlift.errors import (
    DtypeError,
    ForkError,
    MismatchError,
    OptionError,
    OutOfMemoryError,
    RequestError,
    SeedError,
    TensorNotFoundError,
)
from tensorlift.forking import movers
from tensorlift.forking.manifest import ModelKey
from tensorlift.forking.remote import SeedCheckpoint, url_of
from tensorlift.forking.seed import Seed

KEY = ModelKey(model="org/model", processed=False)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return random_checkpoint(tmp_path_factory.mktemp("remote"), shards=2, tensors=40)


@pytest.fixture
def url(written: Written) -> Iterator[str]:
    with leaks.nothing_left(arenas=False), Seed(tensorlift.load(written.path), KEY) as seed:
        yield url_of(seed.url, "org/model")


def test_load(url: str, written: Written) -> None:
    told: list[tuple[int, int]] = []
    state = tensorlift.load(url, progress=lambda done, total: told.append((done, total)))
    assert_state(state, written.tensors)
    nbytes = sum(len(row[2]) for row in written.tensors.values())
    assert told == sorted(told)
    assert told[-1] == (nbytes, nbytes)
    assert (state.stats.bytes, state.stats.tensors) == (nbytes, len(written.tensors))
    assert list(state.stats.readers.values()) == [nbytes]
    assert "read by: http://127.0.0.1:" in state.stats.summary()


def test_names(url: str, written: Written) -> None:
    some = dict(list(written.tensors.items())[3:9])
    assert_state(tensorlift.load(url, names=list(some)), some)
    assert tensorlift.load(url, names=lambda name: False) == {}
    with pytest.raises(TensorNotFoundError, match=r"^tensorlift://.*: no tensor 'x' among 80"):
        tensorlift.load(url, names="x")


@pytest.mark.parametrize("size", ["1B", "3KB", None])
def test_open(url: str, written: Written, size: str | None) -> None:
    with tensorlift.open(url, buffer_size=size) as weights:
        assert weights.names == list(written.tensors)
        assert len(weights) == len(written.tensors)
        state = dict(weights)
        assert_state(state, written.tensors)
        assert weights.stats.bytes == sum(len(row[2]) for row in written.tensors.values())
        with pytest.raises(RequestError, match="iterated over already"):
            iter(weights)


def test_a_consumer_that_drops_tensors_holds_one_part(tmp_path: Path) -> None:
    offered = {str(number): torch.full((1000,), number, dtype=torch.uint8) for number in range(20)}
    with Seed(offered, KEY) as seed, tensorlift.open(url_of(seed.url, ""), buffer_size=2000) as weights:
        for _ in weights:
            assert weights._pass is not None
            assert weights._pass.transfer.held_bytes <= 2000


@pytest.mark.parametrize(("take", "then"), [(0, RequestError), (3, StopIteration)])
def test_a_pass_that_ends_early(url: str, take: int, then: type[Exception]) -> None:
    weights = tensorlift.open(url, buffer_size="1KB")
    iterator = iter(weights)
    for _ in range(take):
        next(iterator)
    weights.close()
    with pytest.raises(then):
        next(iterator)


def test_close_of_another_thread_ends_a_slow_read() -> None:
    offered = {"a": torch.ones(3_000_000)}  # torch starts threads for it
    with leaks.nothing_left(), Seed(offered, KEY, limit="50KB/s") as seed:
        weights = tensorlift.open(url_of(seed.url, ""))
        with (
            when(lambda: seed.stats()["connections"] > 0, weights.close),
            pytest.raises(RequestError, match="the load was closed"),
        ):
            next(iter(weights))


def test_load_into(url: str, written: Written) -> None:
    model = {name: torch.zeros_like(tensor) for name, tensor in tensorlift.load(written.path).items()}
    filled = tensorlift.load_into(model, url)
    assert (filled.missing_keys, filled.unexpected_keys) == ([], [])
    assert filled.stats.bytes == sum(len(row[2]) for row in written.tensors.values())
    assert_state(model, written.tensors)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(30, 40)
        self.b = torch.nn.Linear(30, 40, bias=False)
        self.b.weight = self.a.weight
        self.turned = torch.nn.Parameter(torch.rand(30, 20).t())
        self.narrow = torch.nn.Parameter(torch.rand(9).half())
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


@pytest.mark.parametrize("straight", [True, False])
def test_load_into_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, straight: bool) -> None:
    """Tied, turned, of another dtype, and as on a device that no fork writes to."""
    rows = {
        "a.weight": random_row("I32", (40, 30)), "a.bias": random_row("BF16", (40,)),
        "turned": random_row("I16", (20, 30)), "narrow": random_row("I8", (9,)),
        "count": random_row("I64", ()),
    }  # fmt: skip
    path = write_safetensors(tmp_path / "model.safetensors", rows)
    if not straight:
        monkeypatch.setattr(SeedCheckpoint, "_takes", lambda *_: False)
    wanted, model = Model(), Model()
    before = model.a.weight._version
    tensorlift.load_into(wanted, path)
    with Seed(tensorlift.load(path), KEY) as seed:
        filled = tensorlift.load_into(model, url_of(seed.url, ""), buffer_size="1KB")
        assert filled.missing_keys == []
    for one, other in zip(model.state_dict().values(), wanted.state_dict().values(), strict=True):
        assert raw(one.contiguous()) == raw(other.contiguous())
    assert model.a.weight._version > before


def test_what_does_not_fit(url: str) -> None:
    model = {"other": torch.zeros(3)}
    with pytest.raises(
        MismatchError, match=r"^tensorlift://.*different names: 1 not in the checkpoint: 'other'"
    ):
        tensorlift.load_into(model, url)
    assert tensorlift.load_into(model, url, strict=False).missing_keys == ["other"]
    with Seed({"a": torch.zeros(3)}, KEY) as seed:
        other = url_of(seed.url, "")
        with pytest.raises(MismatchError, match=r"'a': \[3\] in tensorlift://.*, \[4\] in the model"):
            tensorlift.load_into({"a": torch.zeros(4)}, other)


def test_a_dtype_that_this_torch_lacks(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(*_: object) -> None:
        raise DtypeError("no such dtype")

    monkeypatch.setattr(movers, "check_expressible", lacking)
    with pytest.raises(DtypeError, match="no such dtype"):
        tensorlift.load(url)


def test_refused_options(url: str) -> None:
    for act in (
        tensorlift.load,
        tensorlift.open,
        lambda path, **given: tensorlift.load_into({}, path, **given),
    ):
        with pytest.raises(OptionError, match=r"^backend: not for tensorlift://"):
            act(url, backend="PREAD")
        with pytest.raises(OptionError, match=r"^slices, process_group: not for tensorlift://"):
            act(url, slices={}, process_group="world")
        with pytest.raises(OptionError, match="unknown option 'thread'"):
            act(url, thread=2)


def test_a_seed_among_files(url: str, written: Written) -> None:
    with pytest.raises(RequestError, match="a seed is no file: load, open and load_into take one, alone"):
        tensorlift.load([url, written.path])
    with pytest.raises(RequestError, match="a seed is no file"):
        tensorlift.safe_open(url, "pt")


def test_more_than_the_machine_has(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(wanted: int) -> None:
        raise OutOfMemoryError(f"{wanted} bytes")

    monkeypatch.setattr(movers.memories, "check_host", full)
    with pytest.raises(OutOfMemoryError, match=r"[0-9]+ bytes"):
        tensorlift.load(url)


def test_a_seed_that_ends_in_the_middle() -> None:
    seed = Seed({"a": torch.ones(3_000_000)}, KEY, limit="50KB/s")
    with (
        when(lambda: seed.stats()["connections"] > 0, seed.close),
        pytest.raises(ForkError, match=r"bytes could not be had: http://"),
    ):
        tensorlift.load(url_of(seed.url, ""))
    with pytest.raises(SeedError, match="cannot be reached"):
        tensorlift.load(url_of(seed.url, ""))


def test_weights_that_change_in_the_middle() -> None:
    offered = {"a": torch.ones(3_000_000)}
    with Seed(offered, KEY, limit="3MB/s") as seed:

        def change() -> None:
            with seed.updating(timeout=0):
                offered["a"].zero_()

        with (
            when(lambda: seed.stats()["connections"] == 2, change),
            pytest.raises(ForkError, match="the weights have changed 1 time while they were read"),
        ):
            tensorlift.load(url_of(seed.url, ""))
