"""load_into() where a parameter's memory is replaced meanwhile, or cannot be written."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.checkpoints import random_row, write_safetensors
from tensorlift import loading
from tensorlift.errors import HeaderError, MismatchError, RequestError, TruncatedError
from tensorlift.forking.manifest import ModelKey
from tensorlift.forking.seed import Seed
from tensorlift.options import HOST_BACKENDS
from tensorlift.tensors.direct import Direct


def write(folder: Path, **tensors: torch.Tensor) -> Path:
    codes = {torch.float32: "F32", torch.uint8: "U8"}
    rows = {name: (codes[one.dtype], list(one.shape), one.numpy().tobytes()) for name, one in tensors.items()}
    return write_safetensors(folder / "m.safetensors", rows)


@pytest.mark.parametrize("when", ["before", "after"])
def test_memory_that_is_taken_from_a_parameter_meanwhile_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    path = write(tmp_path, t=torch.ones(4 << 20, dtype=torch.uint8))
    array = np.zeros(4 << 20, np.uint8)
    tensor, memory = torch.from_numpy(array), weakref.ref(array)
    del array

    def replaced(real: Callable[..., object]) -> Callable[..., object]:
        def then(*given: object) -> object:
            tensor.data = torch.zeros(4 << 20, dtype=torch.uint8)
            assert (memory() is None) == (when == "before")
            return real(*given)

        return then

    name = "start" if when == "before" else "wait"
    monkeypatch.setattr(Direct, name, replaced(getattr(Direct, name)))
    if when == "before":
        with pytest.raises(RequestError, match="memory of 't' was replaced"):
            loading.load_into({"t": tensor}, path)
    else:
        loading.load_into({"t": tensor}, path)
    assert memory() is None
    assert not tensor.any()


@pytest.mark.parametrize("fresh", [torch.zeros(9), torch.zeros(9).double(), torch.zeros(18)[::2]])
@pytest.mark.parametrize("names", [None, "*"])
def test_memory_that_a_parameter_gets_while_headers_are_read_is_what_is_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: torch.Tensor, names: str | None
) -> None:
    wanted = torch.randn(9)
    path, tensor = write(tmp_path, t=wanted), torch.zeros(9)
    before = tensor.data
    read_headers = loading.sources.read_headers

    def replaced(found: Any, meanwhile: Any) -> object:
        checkpoint = read_headers(found, meanwhile)
        tensor.data = fresh.clone() if fresh.is_contiguous() else fresh
        return checkpoint

    monkeypatch.setattr(loading.sources, "read_headers", replaced)
    loading.load_into({"t": tensor}, path, names=names)
    assert torch.equal(tensor, wanted.to(tensor.dtype))
    assert not before.any()


def test_a_shape_that_changes_while_headers_are_read_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, tensor = write(tmp_path, t=torch.randn(9)), torch.zeros(9)
    read_headers = loading.sources.read_headers

    def replaced(found: Any, meanwhile: Any) -> object:
        checkpoint = read_headers(found, meanwhile)
        tensor.data = torch.zeros(8)
        return checkpoint

    monkeypatch.setattr(loading.sources, "read_headers", replaced)
    with pytest.raises(MismatchError, match=r"'t': \[9\] in .*, \[8\] in the model"):
        loading.load_into({"t": tensor}, path)


def test_bad_headers_come_before_what_is_wrong_with_destinations(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "m.safetensors", {"t": random_row("F32", [4])})
    for wrong in (torch.zeros(4).to_sparse(), torch.zeros(4, device="meta"), torch.zeros(5)):
        with pytest.raises((RequestError, MismatchError), match="'t'"):
            loading.load_into({"t": wrong}, path)
    path.write_bytes(path.read_bytes()[:-1])
    for wrong in (torch.zeros(4).to_sparse(), torch.zeros(4, device="meta"), torch.zeros(5)):
        with pytest.raises((TruncatedError, HeaderError)):
            loading.load_into({"t": wrong}, path)


@pytest.mark.parametrize("backend", HOST_BACKENDS)
def test_memory_that_cannot_be_written_is_refused(tmp_path: Path, backend: str) -> None:
    path = write(tmp_path, a=torch.ones(3), t=torch.ones(100_000, dtype=torch.uint8))
    (tmp_path / "there").write_bytes(bytes(100_000))
    array = np.memmap(tmp_path / "there", np.uint8, "r")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it should not be written to
        state = {"a": torch.zeros(3), "t": torch.from_numpy(array)}
    with pytest.raises(RequestError, match="the memory of 't' cannot be written"):
        loading.load_into(state, path, backend=backend)
    assert not state["a"].any()
    assert not array.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("nbytes", [0, 1000])
@pytest.mark.parametrize("source", ["files", "seed"])
def test_a_tensor_whose_storage_was_freed_or_resized(
    tmp_path: Path, source: str, nbytes: int, dtype: torch.dtype
) -> None:
    """What lies behind the storage's end was written to, which ended the process."""
    tensor = torch.zeros(256, 256, dtype=dtype)
    needed = tensor.nbytes
    tensor.untyped_storage().resize_(nbytes)
    given = {"t": torch.ones(256, 256)}
    said = f"'t' has shape .256, 256., which takes {needed:,} bytes, and its storage has {nbytes:,}: it was "
    with Seed(given, ModelKey(model="m", processed=False)) as seed:
        path = write(tmp_path, **given) if source == "files" else seed.url.replace("http:", "tensorlift:")
        with pytest.raises(RequestError, match=said):
            loading.load_into({"t": tensor}, path)
