"""slices= of load, open and load_into: bytes as torch's narrow, by every reader, and no more read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tensorlift
from support.checkpoints import TORCH_CODES, Row, Written, random_checkpoint, random_row, write_safetensors
from support.digests import digests_of, flip, headers
from support.page_cache import drop
from support.parts import Part, expected, random_parts
from support.tensors import raw
from tensorlift.engine import abi
from tensorlift.engine.digesting import digest_checkpoint
from tensorlift.errors import DigestError, MismatchError, RequestError, TensorNotFoundError
from tensorlift.format.digests import describe
from tensorlift.format.dtypes import BY_CODE
from tensorlift.options import BACKENDS, LoadOptions
from tensorlift.sources.sidecars import FILE_SUFFIX, write_sidecar

READERS = [name for name in BACKENDS if name != "CUFILE"]
KIB, MIB = 1 << 10, 1 << 20
PAGE = 4096


def assert_part(tensor: torch.Tensor, row: Row, part: Part | None) -> None:
    """Bytes, shape, dtype, and the contract of tensors that are handed out."""
    code, shape, _ = row
    dtype, extents = BY_CODE[code], list(shape)
    if part is not None:
        extents[part[0]] = part[2] - part[1]
    if dtype.elements > 1:
        extents[-1] //= dtype.elements
    assert list(tensor.shape) == extents
    assert tensor.dtype is getattr(torch, str(dtype.torch_name))
    assert tensor.is_contiguous()
    assert tensor.data_ptr() % dtype.alignment == 0
    assert tensor.untyped_storage().nbytes() == len(expected(row, part)) == tensor.nbytes
    assert raw(tensor) == expected(row, part)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Every dtype, odd shapes, several files."""
    folder = tmp_path_factory.mktemp("slices") / "checkpoint"
    return random_checkpoint(folder, shards=3, tensors=30, seed=4, elements=60_000)


def skip_without(backend: str, path: Path) -> None:
    why = abi.library().backend_not_built(backend) or abi.library().backend_probe(backend, str(path))
    if why is not None:
        pytest.skip(f"{backend}: {why}")


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("backend", READERS)
def test_every_reader(written: Written, backend: str, cold: bool) -> None:
    skip_without(backend, written.files[0])
    for seed in range(3):
        if cold:
            for path in written.files:
                drop(path)
        parts = random_parts(written.tensors, seed)
        state = tensorlift.load(written.path, slices=parts, backend=backend, chunk_size=64 * KIB)
        assert list(state) == list(written.tensors)
        for name, row in written.tensors.items():
            assert_part(state[name], row, parts.get(name))
        assert state.stats.bytes == sum(tensor.nbytes for tensor in state.values())
        assert state.stats.bytes == sum(state.stats.readers.values())


@pytest.mark.parametrize("code", TORCH_CODES)
def test_every_dtype_in_every_dimension(tmp_path: Path, code: str) -> None:
    rows = {"a": random_row(code, [5, 6, 8], 1), "b": random_row(code, [8, 600], 2)}
    path = write_safetensors(tmp_path / "x.safetensors", rows, align=1)
    for dim, start, stop in [(0, 1, 4), (1, 2, 3), (2, 2, 6), (2, 0, 4), (1, 4, 6), (1, 3, 3)]:
        parts = {"a": (dim, start, stop), "b": (1, 100, 400)}
        state = tensorlift.load(path, slices=parts)
        for name, part in parts.items():
            assert_part(state[name], rows[name], part)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], Part]:
    shape = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    shape[draw(st.integers(0, len(shape) - 1))] *= draw(st.sampled_from([1, 7, 100]))
    dim = draw(st.integers(0, len(shape) - 1))
    start = draw(st.integers(0, shape[dim]))
    return shape, (dim, start, draw(st.integers(start, shape[dim])))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(cases(), min_size=1, max_size=4), st.sampled_from(["U8", "BF16", "F32", "I64"]))
def test_as_safetensors_slices(tmp_path: Path, given: list[tuple[list[int], Part]], code: str) -> None:
    rows = {f"t{k}": random_row(code, shape, k) for k, (shape, _) in enumerate(given)}
    parts = {f"t{k}": part for k, (_, part) in enumerate(given)}
    path = write_safetensors(tmp_path / "x.safetensors", rows)
    options: dict[str, Any] = {"chunk_size": 4 * KIB}
    state = tensorlift.load(path, slices=parts, **options)
    into = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    tensorlift.load_into(into, path, slices=parts, **options)
    with (
        safetensors.safe_open(path, "pt") as reference,
        tensorlift.open(path, slices=parts, **options) as weights,
    ):
        passed = dict(weights)
        for name, (dim, start, stop) in parts.items():
            wanted = reference.get_tensor(name).narrow(dim, start, stop - start).contiguous()
            if stop > start:
                index = (slice(None),) * dim + (slice(start, stop),)
                assert raw(reference.get_slice(name)[index].contiguous()) == raw(wanted)
            for found in (state[name], passed[name], into[name]):
                assert found.dtype is wanted.dtype
                assert found.shape == wanted.shape
                assert found.is_contiguous()
                assert raw(found) == raw(wanted)


def test_a_function_of_name_and_shape(written: Written) -> None:
    def halves(name: str, shape: tuple[int, ...]) -> Part | None:
        return (0, 0, shape[0] // 2) if len(shape) == 2 and not name.endswith("f4") else None

    with tensorlift.open(written.path, slices=halves, names="layers.1.*") as weights:
        found = dict(weights)
    assert list(found) == [name for name in written.tensors if name.startswith("layers.1.")]
    for name, tensor in found.items():
        assert_part(tensor, written.tensors[name], halves(name, tuple(written.tensors[name][1])))


def test_names_that_are_left_out(tmp_path: Path) -> None:
    rows = {name: random_row("F32", [4, 6]) for name in "ab"}
    path = write_safetensors(tmp_path / "x.safetensors", rows)
    state = tensorlift.load(path, names="a", slices={"a": (1, 1, 2), "b": (9, 9, 9)})
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {"a": (4, 1)}
    with pytest.raises(TensorNotFoundError, match="no tensor 'c' among 2"):
        tensorlift.load(path, names="a", slices={"c": (1, 1, 2)})


@pytest.mark.parametrize(
    "call", [tensorlift.load, tensorlift.open, lambda path, **o: tensorlift.load_into({}, path, **o)]
)
def test_what_makes_no_sense(tmp_path: Path, call: Any) -> None:
    path = write_safetensors(tmp_path / "x.safetensors", {"a": random_row("F4", [4, 6])})
    text = re.escape(f"{path}: tensor 'a' of shape [4, 6]: the slice [1, 1, 4] begins or ends inside a byte")
    with pytest.raises(RequestError, match=text):
        call(path, slices={"a": (1, 1, 4)})
    with pytest.raises(RequestError, match="is outside of dimension 1"):
        call(path, slices=lambda name, shape: (1, 0, 8))


def test_a_row_slice_reads_its_bytes(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "x.safetensors", {"a": random_row("F32", [1024, 1024])})
    skip_without("URING", path)
    drop(path)
    state = tensorlift.load(path, slices={"a": (0, 300, 400)}, backend="URING")
    asked = state.stats.direct_bytes
    assert state.stats.bytes == state.stats.readers["URING_DIRECT"] == 400 * KIB
    assert 400 * KIB <= asked <= 400 * KIB + 2 * PAGE


@pytest.mark.parametrize(("shape", "columns"), [((200, 4096), (64, 3072)), ((100, 16384), (1024, 1280))])
def test_a_column_slice_reads_no_more_than_its_rows(
    tmp_path: Path, shape: tuple[int, int], columns: tuple[int, int]
) -> None:
    path = write_safetensors(tmp_path / "x.safetensors", {"a": random_row("U8", shape)})
    skip_without("URING", path)
    drop(path)
    state = tensorlift.load(path, slices={"a": (1, *columns)}, backend="URING")
    (rows, width), row = shape, columns[1] - columns[0]
    assert state.stats.bytes == state.stats.readers["URING_DIRECT"] == rows * row
    # Gaps of a page and more are not read; each row lies in two blocks at most.
    touched = (rows - 1) * width + row + 2 * PAGE if width - row < PAGE else 2 * PAGE * rows
    assert rows * row <= state.stats.direct_bytes <= touched


def test_parts_hold_only_their_own_memory(tmp_path: Path) -> None:
    path = write_safetensors(
        tmp_path / "x.safetensors", {f"t{k}": random_row("U8", [512, 4096], k) for k in range(8)}
    )
    state = tensorlift.load(path, slices=lambda name, shape: (1, 0, 512))
    assert state.stats.device_peak_bytes <= 8 * 512 * 512 + 8 * PAGE


def test_load_into_wants_the_shape_of_the_slice(tmp_path: Path) -> None:
    rows = {
        "a": random_row("F32", [8, 6], 1),
        "b": random_row("F32", [8, 6], 2),
        "c": random_row("F32", [8], 3),
    }
    path = write_safetensors(tmp_path / "x.safetensors", rows)
    parts: dict[str, Part] = {"a": (1, 2, 4), "b": (1, 3, 6), "c": (0, 1, 5)}
    # In place; with another dtype; not contiguous.
    into = {
        "a": torch.zeros(8, 2),
        "b": torch.zeros(8, 3, dtype=torch.float64),
        "c": torch.zeros(4, 2)[:, 0],
    }
    tensorlift.load_into(into, path, slices=parts)
    for name, tensor in into.items():
        assert raw(tensor.to(torch.float32).contiguous()) == expected(rows[name], parts[name]), name
    with pytest.raises(MismatchError, match=re.escape("'a': [8, 3] in")):
        tensorlift.load_into(into, path, slices=parts | {"a": (1, 2, 5)})


def test_digests_are_those_of_whole_tensors(tmp_path: Path) -> None:
    rows = {name: random_row("F32", [700, 600], k) for k, name in enumerate("abc")}
    path = write_safetensors(tmp_path / "x.safetensors", rows)
    sidecar = describe(headers(path), digest_checkpoint(headers(path), LoadOptions()))
    write_sidecar(str(path) + FILE_SUFFIX, sidecar)
    parts: dict[str, Part] = {"a": (1, 5, 300), "c": (0, 1, 600)}
    state = tensorlift.load(path, verify=True, slices=parts)
    assert state.stats.verified == 1
    with tensorlift.open(path, verify=True, slices=parts) as weights:
        found = dict(weights)
    assert weights.stats.verified == 1
    into = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    assert tensorlift.load_into(into, path, verify=True, slices=parts).stats.verified == 1
    for name, row in rows.items():
        for tensor in (state[name], found[name], into[name]):
            assert raw(tensor) == expected(row, parts.get(name)), name
    flip(path, -len(rows["c"][2]) - 1000)  # in the middle of b
    with pytest.raises(DigestError, match="tensor 'b': digest is"):
        tensorlift.load(path, verify=True, slices=parts)
    assert tensorlift.load(path, verify=True, slices=parts | {"b": (0, 0, 1)}).stats.verified == 0


def test_given_digests_name_no_part(tmp_path: Path) -> None:
    rows = {name: random_row("F32", [7, 6], k) for k, name in enumerate("ab")}
    path = write_safetensors(tmp_path / "x.safetensors", rows)
    given = {"b": digests_of(rows)["b"]}
    assert tensorlift.load(path, verify=given, slices={"a": (1, 1, 2)}).stats.verified == 1
    with pytest.raises(RequestError, match="verify names tensor 'a', of which slices takes a part"):
        tensorlift.load(path, verify={"a": "0" * 32}, slices={"a": (0, 1, 2)})
