"""The face of safetensors, beside safetensors itself."""

from __future__ import annotations

import inspect
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

from support import leaks
from support.checkpoints import random_checkpoint, random_row, write_safetensors
from support.tensors import assert_state, assert_tensor
from tensorlift import compat
from tensorlift.errors import (
    DtypeError,
    OptionError,
    RequestError,
    TensorliftError,
    TensorNotFoundError,
    TruncatedError,
)


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    return {
        "z": torch.randn(7, 33, 129),
        "h": torch.randn(40, 3000).half(),
        "f8": torch.randn(64, 64).to(torch.float8_e4m3fn),
        "c": torch.randn(3, 5, dtype=torch.complex64),
        "b": torch.rand(9, 9) > 0.5,
        "s": torch.tensor(2.5),
        "none": torch.empty(0, 3),
    }


@pytest.fixture
def path(tmp_path: Path, state: dict[str, torch.Tensor]) -> Path:
    file = tmp_path / "m.safetensors"
    safetensors.torch.save_file(state, file, metadata={"format": "pt", "x": "y"})
    return file


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    plain = [
        torch.empty(t.numel(), dtype=t.dtype).copy_(t.reshape(-1)).view(torch.uint8) for t in (ours, theirs)
    ]
    return torch.equal(*plain)


def test_the_same_answers(path: Path) -> None:
    with compat.safe_open(path, "pt") as ours, safetensors.safe_open(path, "pt") as theirs:
        assert ours.keys() == theirs.keys()
        assert ours.offset_keys() == theirs.offset_keys()
        assert ours.metadata() == theirs.metadata()
        assert len(ours) == len(theirs.keys())
        for name in theirs.keys():  # noqa: SIM118 - safetensors' files cannot be iterated over
            assert same(ours.get_tensor(name), theirs.get_tensor(name))
            one, other = ours.get_slice(name), theirs.get_slice(name)
            assert one.get_shape() == other.get_shape()
            assert one.get_dtype() == other.get_dtype()
        mine = ours.get_tensors()
        assert list(mine) == list(theirs.get_tensors())


def test_load_file(path: Path) -> None:
    ours, theirs = compat.load_file(path), safetensors.torch.load_file(path)
    assert list(ours) == list(theirs)
    assert all(same(ours[name], theirs[name]) for name in theirs)


def test_the_parameters_have_the_names_of_safetensors() -> None:
    assert list(inspect.signature(compat.load_file).parameters)[:2] == ["filename", "device"]
    assert list(inspect.signature(compat.safe_open).parameters)[:3] == ["filename", "framework", "device"]


def draw(rng: random.Random, size: int) -> Any:
    kind = rng.randrange(5)
    if kind == 0:
        return rng.randrange(-size - 1, size + 1)
    if kind == 1:
        return slice(None)
    if kind == 2:
        ends = [rng.choice([None, rng.randrange(-size - 3, size + 3)]) for _ in range(2)]
        return slice(*ends, rng.choice([None, 1, 2, 5]))
    return Ellipsis if kind == 3 else None


@pytest.mark.parametrize("seed", range(4))
def test_random_indexes(path: Path, state: dict[str, torch.Tensor], seed: int) -> None:
    rng = random.Random(seed)
    ours, theirs = compat.safe_open(path, "pt"), safetensors.safe_open(path, "pt")
    compared = 0
    for _ in range(300):
        name = rng.choice(list(state))
        shape = state[name].shape
        index: Any = tuple(
            draw(rng, shape[min(at, len(shape) - 1)] if shape else 1) for at in range(rng.randrange(4))
        )
        if index.count(Ellipsis) > 1:
            continue
        if len(index) == 1 and rng.random() < 0.5:
            (index,) = index
        try:
            wanted = theirs.get_slice(name)[index]
        except (IndexError, ValueError) as error:
            with pytest.raises(type(error)):
                ours.get_slice(name)[index]
            continue
        got = ours.get_slice(name)[index]
        assert same(got, wanted), (name, index)
        assert got.is_contiguous()
        assert got.untyped_storage().nbytes() == got.numel() * got.element_size()
        compared += 1
    assert compared > 100


def test_lists_of_integers(path: Path, state: dict[str, torch.Tensor]) -> None:
    whole = state["z"]
    part = compat.safe_open(path, "pt").get_slice("z")
    for index in ([0, 2, 2], (slice(None), [5, -1]), (0, slice(1, 3), torch.tensor([7, 3])), ([],)):
        assert same(part[index], whole[index])


def test_a_slice_reads_what_is_asked_for(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "m.safetensors", {"t": random_row("BF16", [4096, 1024])})
    with compat.safe_open(path, "pt", backend="PREAD") as file:
        file.get_slice("t")[100:110]
        file.get_slice("t")[:, :8]
        assert file._engine is not None
        rows, columns = 10 * 2048, 4095 * 2048 + 16
        assert file._engine.bytes_done() == rows + columns


def test_any_order_from_several_threads(tmp_path: Path) -> None:
    made = random_checkpoint(tmp_path, shards=2, tensors=40, elements=600_000, seed=5)
    wrong: list[BaseException] = []

    def work(seed: int) -> None:
        names = list(made.tensors)
        random.Random(seed).shuffle(names)
        try:
            for name in names:
                assert_tensor(file.get_tensor(name), made.tensors[name], name)
        except BaseException as error:  # noqa: BLE001 - shown by the test's own thread
            wrong.append(error)

    with leaks.nothing_left(), compat.safe_open(tmp_path, "pt") as file:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
    assert wrong == []


def test_all_tensors_are_those_of_the_files_that_were_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = random_checkpoint(tmp_path / "there", shards=2, tensors=5, seed=7)
    monkeypatch.chdir(tmp_path / "there")
    with compat.safe_open((path.name for path in made.files), "pt") as file:
        monkeypatch.chdir(tmp_path)
        assert_state(file.get_tensors(), made.tensors)
        assert_state(file.get_tensors(), made.tensors)


@pytest.mark.parametrize("backend", ["AUTO", "PREAD"])
def test_lists_of_files(tmp_path: Path, backend: str) -> None:
    made = random_checkpoint(tmp_path, shards=3, tensors=10, seed=6)
    assert_state(compat.load_file(list(made.files)), made.tensors)
    with leaks.nothing_left(), compat.safe_open(list(made.files), "pt", backend=backend) as file:
        assert file.keys() == sorted(made.tensors)
        for name in file.keys():  # noqa: SIM118 - a method of safetensors
            assert_tensor(file.get_tensor(name), made.tensors[name], name)


def test_a_closed_file_says_so(path: Path) -> None:
    with compat.safe_open(path, "pt") as file:
        kept = file.get_tensor("z")
        part = file.get_slice("z")
    copy = kept.clone()
    calls = (
        file.keys,
        file.offset_keys,
        file.metadata,
        lambda: file.get_tensor("z"),
        lambda: file.get_slice("z"),
    )
    for call in (*calls, lambda: part[0], file.__enter__, file.get_tensors):
        with pytest.raises(RequestError, match="closed"):
            call()
    file.close()
    assert torch.equal(kept, copy)


def test_closing_while_others_read(path: Path) -> None:
    file = compat.safe_open(path, "pt", backend="PREAD")
    begun = threading.Event()
    seen: list[BaseException] = []

    def work() -> None:
        try:
            while True:
                file.get_tensor("z")
                begun.set()
        except BaseException as error:  # noqa: BLE001 - looked at below
            seen.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert begun.wait(20)
    file.close()
    for thread in threads:
        thread.join(20)
    assert len(seen) == 3
    assert all(isinstance(error, RequestError) for error in seen), seen


@pytest.mark.parametrize("framework", ["np", "numpy", "tf", "flax", "mlx", "nonsense", None])
def test_other_frameworks_are_refused_with_a_hint(path: Path, framework: Any) -> None:
    with pytest.raises(OptionError, match=r"framework is .*pt, torch, pytorch.*safetensors"):
        compat.safe_open(path, framework)


def test_names_and_dtypes_that_are_not_there(tmp_path: Path) -> None:
    rows = {"weight": random_row("F32", [2]), "six": random_row("F6_E3M2", [8])}
    file = compat.safe_open(write_safetensors(tmp_path / "m.safetensors", rows), "pt")
    for call in (file.get_tensor, file.get_slice):
        with pytest.raises(TensorNotFoundError, match=r"'weigth'.*'weight'"):
            call("weigth")
    with pytest.raises(DtypeError, match="'six'"):
        file.get_tensor("six")
    part = file.get_slice("six")
    assert part.get_dtype() == "F6_E3M2"
    with pytest.raises(DtypeError, match="'six'"):
        part[0]


def test_f4_is_indexed_as_torch_has_it(tmp_path: Path) -> None:
    rows = {"t": random_row("F4", [6, 8], 1)}
    part = compat.safe_open(write_safetensors(tmp_path / "m.safetensors", rows), "pt").get_slice("t")
    assert part.get_shape() == [6, 8]
    assert_tensor(part[2:4], ("F4", (2, 8), rows["t"][2][8:16]))


@pytest.mark.parametrize("backend", [None, "PREAD"])
def test_failures_leave_it_usable(tmp_path: Path, backend: str | None) -> None:
    rows = {"a": random_row("U8", [5000]), "b": random_row("U8", [5000], 1)}
    path = write_safetensors(tmp_path / "m.safetensors", rows)
    with leaks.nothing_left():
        file = compat.safe_open(path, "pt", backend=backend)
        assert_tensor(file.get_tensor("a"), rows["a"])
        content = path.read_bytes()
        os.truncate(path, 7000)
        with pytest.raises(TruncatedError, match=r"m\.safetensors"):
            file.get_tensor("b")
        with open(path, "r+b") as whole:
            whole.write(content)
        assert_tensor(file.get_tensor("b"), rows["b"])
        file.close()


def test_a_thread_sees_no_failure_of_another_threads_file(tmp_path: Path) -> None:
    rows = {name: random_row("U8", [2 << 20], seed) for seed, name in enumerate("ab")}
    paths = [write_safetensors(tmp_path / f"{name}.safetensors", {name: rows[name]}) for name in rows]
    file = compat.safe_open(paths, "pt", backend="PREAD")
    os.truncate(paths[0], 1000)
    seen: list[str] = []
    ended = threading.Event()

    def fail() -> None:
        while not ended.is_set():
            with pytest.raises(TruncatedError, match=r"a\.safetensors"):
                file.get_tensor("a")
            seen.append("a")

    thread = threading.Thread(target=fail)
    with leaks.nothing_left():
        thread.start()
        try:
            while len(seen) < 50:
                assert_tensor(file.get_tensor("b"), rows["b"])
        finally:
            ended.set()
            thread.join(60)
        file.close()


def test_a_huge_slice_index_fails_as_an_index(path: Path) -> None:
    with pytest.raises(IndexError):
        compat.safe_open(path, "pt").get_slice("z")[10**9]


def test_inside_inference_mode(path: Path) -> None:
    with torch.inference_mode(), torch.device("meta"):
        file = compat.safe_open(path, "pt")
        made = [
            file.get_tensor("z"),
            file.get_slice("z")[:, ::2],
            file.get_slice("z")[0:0],
            file.get_tensor("none"),
        ]
    assert not any(tensor.is_inference() or tensor.is_meta for tensor in made)


def test_errors_are_of_the_tree(tmp_path: Path) -> None:
    with pytest.raises(TensorliftError):
        compat.safe_open(tmp_path / "nothing.safetensors", "pt")
    with pytest.raises(FileNotFoundError):
        compat.load_file(tmp_path / "nothing.safetensors")
