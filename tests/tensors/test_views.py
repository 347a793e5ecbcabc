"""Tensors from arenas: dtypes, shapes, ownership; also with a torch whose DLPack refuses a dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support import leaks
from support.checkpoints import TORCH_CODES, random_row, write_safetensors
from support.tensors import assert_state, assert_tensor
from tensorlift import compat, loading
from tensorlift.format import dtypes
from tensorlift.tensors import views


@pytest.fixture
def fresh_types() -> Any:
    views._capsule_type.cache_clear()
    yield
    views._capsule_type.cache_clear()


ROWS = {
    **{code: random_row(code, [3, 4], seed) for seed, code in enumerate(TORCH_CODES)},
    "scalar": random_row("F8_E4M3", []),
    "nothing": random_row("F8_E5M2", [0, 2]),
}


def refusing(*refused: torch.dtype) -> Any:
    """torch's own function, but as an older one that has no DLPack for some dtypes."""
    real = torch._C._from_dlpack

    def from_dlpack(capsule: object) -> torch.Tensor:
        made = real(capsule)
        if made.dtype in refused:
            raise BufferError(f"{made.dtype} is not supported by dlpack")
        return made

    return from_dlpack


@pytest.mark.usefixtures("fresh_types")
@pytest.mark.parametrize(
    "refused",
    [
        (),
        (torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2),
        (torch.uint16, torch.uint32, torch.complex64),
    ],
)
def test_every_dtype_whatever_dlpack_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: tuple[torch.dtype, ...]
) -> None:
    monkeypatch.setattr(views, "_from_dlpack", refusing(*refused))
    path = write_safetensors(tmp_path / "m.safetensors", ROWS)
    with leaks.nothing_left():
        state = loading.load(path)
        assert_state(state, ROWS)
        with compat.safe_open(path, "pt") as file:
            for name, row in ROWS.items():
                assert_tensor(file.get_tensor(name), row, name)
        del state, row, name


def test_torch_dtype_and_shape() -> None:
    four = dtypes.BY_CODE["F4"]
    assert views.torch_dtype(four) is torch.float4_e2m1fn_x2
    assert views.torch_shape(four, (3, 8)) == (3, 4)
    assert views.torch_dtype(dtypes.BY_CODE["F6_E2M3"]) is None
    assert views.torch_shape(dtypes.BY_CODE["F32"], [3, 8]) == (3, 8)


def test_a_torch_without_a_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "float8_e8m0fnu")
    assert views.torch_dtype(dtypes.BY_CODE["F8_E8M0"]) is None


def test_capsules_that_nobody_takes_hold_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_safetensors(
        tmp_path / "m.safetensors", {"a": random_row("F32", [9]), "b": random_row("F32", [9])}
    )
    loading.load(path)
    real, taken = torch._C._from_dlpack, []

    def second_fails(capsule: object) -> torch.Tensor:
        taken.append(1)
        if len(taken) == 2:
            raise RuntimeError("no")
        return real(capsule)

    monkeypatch.setattr(views, "_from_dlpack", second_fails)
    with leaks.nothing_left():
        with pytest.raises(RuntimeError, match="no") as caught:
            loading.load(path)
        caught.value.__traceback__ = None
        del caught


def test_what_owned_tensors_can_do(tmp_path: Path) -> None:
    row = random_row("F32", [8, 8])
    state = loading.load(
        write_safetensors(tmp_path / "m.safetensors", {"a": row, "b": random_row("F32", [4])})
    )
    tensor = state["a"]
    assert not tensor._is_view()
    tensor.requires_grad_()
    (tensor * 2).sum().backward()
    assert tensor.grad is not None
    kept = state["b"].clone()
    tensor.detach().add_(1)
    assert torch.equal(state["b"], kept)
    tensor.detach().share_memory_()
