"""Files that stand in for seeds: all of it and of one version, whatever the seeds had."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import tensorlift
from support.digests import flip
from support.ports import nobody
from support.waiting import when
from tensorlift.cli.main import app
from tensorlift.errors import (
    CheckpointNotFoundError,
    DigestError,
    ForkError,
    MismatchError,
    RequestError,
    TruncatedError,
)
from tensorlift.forking.fork import Forked, fork_into
from tensorlift.forking.manifest import ModelKey
from tensorlift.forking.seed import Seed

pytestmark = pytest.mark.usefixtures("clean")

KEY = ModelKey(model="org/model")
SMALL: dict[str, Any] = {"chunk_bytes": 4000, "patience": 20.0}
LAYERS = 12


class Model(torch.nn.Module):
    """Tied weights, a buffer that is saved, one that is not, one of no bytes; ``like`` shares some values."""

    def __init__(self, seed: int, derived: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for at in range(LAYERS):
            weight = torch.rand(50, 40, generator=generator)
            self.register_parameter(f"w{at:02}", torch.nn.Parameter(weight))
        self.head = torch.nn.Parameter(torch.empty(0))
        self.head = self.w03
        self.register_buffer("steps", torch.tensor([seed]))
        self.register_buffer("rope", torch.full((7,), float(seed)), persistent=False)
        self.register_buffer("nothing", torch.empty(0, 5))
        self.alias = self.w05.detach()
        if derived:
            self.scale = torch.full((3,), float(seed))


def saved(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "head"}


def same(model: torch.nn.Module, state: dict[str, torch.Tensor]) -> bool:
    here = saved(model)
    return here.keys() == state.keys() and all(torch.equal(here[name], state[name]) for name in state)


@pytest.fixture
def path(tmp_path: Path) -> str:
    """The weights of Model(1), in two files."""
    state = saved(Model(1))
    names = sorted(state)
    for number, part in enumerate((names[:6], names[6:])):
        save_file(
            {name: state[name] for name in part}, tmp_path / f"model-0000{number + 1}-of-00002.safetensors"
        )
    return str(tmp_path)


def digest(path: str) -> None:
    assert CliRunner().invoke(app, ["digest", path]).exit_code == 0


def half(offered: object, model: object, path: object, chunks: int = 10, **more: Any) -> tuple[str, Forked]:
    """A fork of a seed that ends once it has sent so many chunks."""
    seed = Seed(offered, KEY, limit="50KB/s")
    with when(lambda: seed.stats()["sent_chunks"] >= chunks, seed.close):
        return seed.url, fork_into(model, seed.url, fallback=path, **SMALL, **more)


def test_without_a_seed_all_comes_from_files(path: str) -> None:
    model, told = Model(2), list[tuple[int, int, dict[str, int]]]()

    def progress(done: int, total: int, by_source: dict[str, int]) -> None:
        told.append((done, total, dict(by_source)))

    result = fork_into(model, nobody(), fallback=path, progress=progress, **SMALL)
    assert same(model, saved(Model(1)))
    assert result.by_source == {"files": result.bytes}
    assert result.bytes == sum(tensor.nbytes for tensor in saved(model).values())
    assert result.moved_bytes == result.bytes
    assert result.weights == ""
    assert "cannot be reached" in result.left[0]
    assert result.own == ("rope",)
    assert torch.equal(model.rope, torch.full((7,), 2.0))
    assert model.head is model.w03
    assert told[-1] == (result.bytes, result.bytes, result.by_source)


def test_with_a_seed_no_file_is_opened() -> None:
    with Seed(Model(1), KEY) as seed:
        model = Model(2)
        result = fork_into(model, seed.url, fallback="/nowhere", **SMALL)
        assert same(model, saved(Model(1)))
        assert result.by_source == {seed.url: result.bytes}
        assert result.own == ()
        assert torch.equal(model.rope, torch.full((7,), 1.0))


def test_with_digests_what_came_whole_stays(path: str) -> None:
    digest(path)
    model, told = Model(2), list[dict[str, int]]()

    def progress(done: int, total: int, by_source: dict[str, int]) -> None:
        told.append(dict(by_source))
        assert done == sum(by_source.values()) <= total

    url, result = half(Model(1), model, path, progress=progress)
    assert same(model, saved(Model(1)))
    assert set(result.by_source) == {url, "files"}
    assert told[-1] == result.by_source
    assert result.by_source[url] >= 4 * 8000
    assert sum(result.by_source.values()) == result.bytes
    assert result.bytes == sum(tensor.nbytes for tensor in saved(model).values())
    assert result.moved_bytes < 1.5 * result.bytes
    # Part of it came from the seed, and cannot be proven: put back.
    assert torch.equal(model.rope, torch.full((7,), 2.0))


def test_without_digests_all_is_read(path: str) -> None:
    model = Model(2)
    _, result = half(Model(1), model, path)
    assert same(model, saved(Model(1)))
    assert result.by_source == {"files": result.bytes}


@pytest.mark.parametrize("digested", [True, False])
@pytest.mark.parametrize("common", [(), ("w00", "w01", "w03"), tuple(f"w{at:02}" for at in range(LAYERS))])
def test_never_a_mixture_of_two_versions(path: str, digested: bool, common: tuple[str, ...]) -> None:
    """The seed has another version, of which more or fewer tensors are those of the files."""
    if digested:
        digest(path)
    offered, wanted = Model(9), saved(Model(1))
    with torch.no_grad():
        for name in common:
            getattr(offered, name).copy_(wanted[name])
    model = Model(2)
    url, result = half(offered, model, path)
    assert same(model, wanted)
    if not (digested and common):
        assert result.by_source == {"files": result.bytes}
    elif len(common) == LAYERS:
        assert result.by_source[url] >= 4 * 8000


def test_damage_is_found_where_digests_are(path: str) -> None:
    """A file that is not that of its digests makes no model together with what a seed has brought."""
    digest(path)
    flip(Path(path, "model-00002-of-00002.safetensors"), -8)
    with pytest.raises(DigestError, match="'w11'") as caught:
        half(Model(1), Model(2), path)
    assert isinstance(caught.value.__cause__, ForkError)


def test_what_no_file_has(path: str) -> None:
    """Computed behind a load: nobody can say of which version it is."""
    digest(path)
    with pytest.raises(
        ForkError,
        match=r"cannot stand in for the seeds: 1 tensor of the model are in no file: 'scale'; they "
        "are computed behind a load: fork again, or give a fallback that is a function",
    ) as caught:
        half(Model(1, derived=True), Model(2, derived=True), path)
    assert "could not be had" in str(caught.value.__cause__)


def test_a_function_loads_what_no_file_has(path: str) -> None:
    """Which finds what is not saved as it was, and does what the engine does behind a load."""
    model, told = Model(2, derived=True), list[tuple[int, int]]()
    offered = Model(1, derived=True)
    found = []

    def load(into: Any) -> None:
        assert into is model
        found.extend([into.scale.clone(), into.rope.clone()])
        tensorlift.load_into(into, path)
        into.scale.copy_(into.steps.expand(3))

    progress = lambda done, total: told.append((done, total))  # noqa: E731
    url, result = half(offered, model, load, chunks=24, progress=progress)
    assert same(model, saved(Model(1)))
    assert torch.equal(model.scale, torch.full((3,), 1.0))
    assert torch.equal(found[0], torch.full((3,), 2.0))
    assert torch.equal(found[1], torch.full((7,), 2.0))
    assert result.by_source == {"files": result.bytes}
    assert result.bytes == sum(t.nbytes for t in (*saved(model).values(), model.rope, model.scale))
    assert told[-1] == (result.bytes, result.bytes)
    assert (result.weights, result.own, result.key) == ("", (), None)
    assert result.left[0].startswith(url)


def test_a_function_that_fails_or_is_not_needed() -> None:
    def load(_: object) -> None:
        raise ZeroDivisionError("the engine's own")

    with pytest.raises(ZeroDivisionError, match="the engine's own") as caught:
        fork_into(Model(2, derived=True), nobody(), fallback=load, **SMALL)
    assert "cannot be reached" in str(caught.value.__cause__)
    with Seed(Model(1, derived=True), KEY) as seed:
        model = Model(2, derived=True)
        result = fork_into(model, seed.url, fallback=load, **SMALL)
        assert result.by_source == {seed.url: result.bytes}
        assert torch.equal(model.scale, torch.full((3,), 1.0))


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (
            lambda model: model.register_parameter("more", torch.nn.Parameter(torch.rand(3))),
            MismatchError,
            "more",
        ),
        (lambda model: delattr(model, "w07"), MismatchError, "1 not in the model: 'w07'"),
        (lambda model: setattr(model, "w07", torch.nn.Parameter(torch.rand(3))), MismatchError, "w07"),
    ],
)
@pytest.mark.parametrize("digested", [True, False])
def test_files_of_another_model(
    path: str, change: Callable[[Any], object], error: type[Exception], says: str, digested: bool
) -> None:
    if digested:
        digest(path)
    model, offered = Model(2), Model(1)
    change(model)
    change(offered)
    with pytest.raises(error, match=says) as caught:
        half(offered, model, path)
    assert isinstance(caught.value.__cause__, ForkError)


def test_files_that_are_not_there_or_too_short(path: str) -> None:
    with pytest.raises(CheckpointNotFoundError):
        fork_into(Model(2), nobody(), fallback=os.path.join(path, "nowhere.safetensors"), **SMALL)
    for name in os.listdir(path):
        os.truncate(os.path.join(path, name), os.path.getsize(os.path.join(path, name)) - 8)
    with pytest.raises(TruncatedError):
        fork_into(Model(2), nobody(), fallback=path, **SMALL)
    with pytest.raises(RequestError, match="there is no seed to fork from"):
        fork_into(Model(2), [], fallback=path)


def test_other_layouts_and_dtypes_are_converted_as_by_load_into(path: str) -> None:
    digest(path)

    def changed(seed: int) -> Model:
        model = Model(seed)
        model.w01 = torch.nn.Parameter(model.w01.detach().to(torch.float64))
        model.w02 = torch.nn.Parameter(model.w02.detach().t().contiguous().t())
        return model

    model = changed(2)
    url, result = half(changed(1), model, path)
    state, wanted = saved(model), saved(Model(1))
    assert state["w01"].dtype == torch.float64
    assert all(torch.equal(state[name].to(wanted[name].dtype), wanted[name]) for name in wanted)
    assert set(result.by_source) == {url, "files"}


def test_two_names_of_one_tensor_that_files_have_twice(tmp_path: Path) -> None:
    """The seed brought it, one name agrees: the other is read over it, as load_into would."""
    state = saved(Model(1))
    path = tmp_path / "model.safetensors"
    save_file(state | {"head": torch.full((50, 40), 4.0)}, path)
    digest(str(path))
    model = Model(2)
    half(Model(1), model, str(path))
    plain = Model(2)
    tensorlift.load_into(plain, path)
    assert same(model, saved(plain))


def test_everything_came_but_what_is_not_saved(path: str) -> None:
    """All tensors of the files have come: nothing is read."""
    digest(path)
    offered, model = Model(1), Model(2)
    offered.register_buffer("table", torch.rand(30_000), persistent=False)
    model.register_buffer("table", torch.zeros(30_000), persistent=False)
    url, result = half(offered, model, path, chunks=35)
    assert same(model, saved(Model(1)))
    assert set(result.own) == {"rope", "table"}
    assert not model.table.any()
    assert url in result.by_source


def test_a_dict(path: str) -> None:
    digest(path)
    mine, theirs = ({name: t.clone() for name, t in saved(Model(k)).items()} for k in (2, 1))
    url, result = half(theirs, mine, path)
    assert set(result.by_source) == {url, "files"}
    assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())
