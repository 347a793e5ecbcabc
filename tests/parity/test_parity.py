"""Random checkpoints come out of tensorlift and of safetensors alike: names, dtypes, shapes, every byte."""

import math
import struct
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tensorlift
from support.checkpoints import TORCH_CODES, header_bytes, random_row, write_safetensors
from tensorlift.format.dtypes import BY_CODE

# Files are written and read: how long that takes says nothing, and the folder may be used by every example.
PARITY = settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda name: name != "__metadata__"
)
EXTENTS = st.integers(0, 7) | st.just(1) | st.just(257)


@st.composite
def shapes(draw, code: str) -> list[int]:
    """0 to 4 dimensions; F4 packs two elements of the last one, so that has to be there and even."""
    shape = draw(st.lists(EXTENTS, max_size=4 if code != "F4" else 3))
    while math.prod(shape) > 20_000:
        shape.pop()
    return [*shape, 2 * draw(st.integers(0, 20))] if code == "F4" else shape


@st.composite
def tensors(draw) -> dict:
    """Rows as `write_safetensors` takes them."""
    rows = {}
    for name in draw(st.lists(NAMES, unique=True, max_size=8)):
        code = draw(st.sampled_from(TORCH_CODES))
        rows[name] = random_row(code, draw(shapes(code)), draw(st.integers(0, 1000)))
    return rows


METADATA = st.none() | st.dictionaries(
    NAMES, st.text(st.characters(exclude_categories=["Cs"]), max_size=9), max_size=3
)


def same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    assert ours.is_contiguous()
    assert ours.data_ptr() % ours.dtype.itemsize == 0
    ours, theirs = (t.contiguous().reshape(-1).view(torch.uint8) for t in (ours, theirs))
    assert torch.equal(ours, theirs)


def compare(path: Path) -> None:
    """Every way of reading of ours against the reference."""
    with safetensors.safe_open(path, "pt") as reference, tensorlift.safe_open(path, "pt") as f:
        names = list(reference.keys())
        assert sorted(f.keys()) == sorted(names)
        assert (f.metadata() or {}) == (reference.metadata() or {})
        theirs = {name: reference.get_tensor(name) for name in names}
        # Empty tensors share an offset, and the reference gives those in the order of its hash table.
        ordered = [
            [n for n in keys if theirs[n].numel()] for keys in (f.offset_keys(), reference.offset_keys())
        ]
        assert ordered[0] == ordered[1]
        for name in names:
            same(f.get_tensor(name), theirs[name])
    loaded = tensorlift.load(path)
    assert (list(loaded) and set(loaded) == set(names)) or not names
    for name, tensor in loaded.items():
        same(tensor, theirs[name])
    with tensorlift.open(path) as weights:
        for name, tensor in weights:
            same(tensor, theirs[name])
    state = {name: torch.empty_like(tensor) for name, tensor in theirs.items()}
    tensorlift.load_into(state, path)
    for name, tensor in state.items():
        same(tensor, theirs[name])


@PARITY
@given(tensors(), METADATA, st.sampled_from([1, 2, 4, 8, 16, 64, 4096]), st.integers(0, 3))
def test_written_here(tmp_path, rows, metadata, align, extra):
    """Headers of any length: the data begin at any offset, so that tensors are misaligned."""
    length = len(header_bytes(rows, metadata, align)) + extra
    compare(write_safetensors(tmp_path / "x.safetensors", rows, metadata, length=length))


@PARITY
@given(tensors().filter(bool), METADATA)
def test_written_by_safetensors(tmp_path, rows, metadata):
    """With a tensor at least: of none and empty metadata, safetensors 0.8 writes a file that it refuses."""
    state = {}
    for name, (code, shape, raw) in rows.items():
        dtype = BY_CODE[code]
        wanted = [*shape[:-1], shape[-1] // dtype.elements] if shape else []
        flat = (
            torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
        )
        state[name] = flat.view(getattr(torch, dtype.torch_name)).reshape(wanted)
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file(state, path, metadata)
    compare(path)
    for name, tensor in tensorlift.load_file(path).items():
        same(tensor, state[name])


@PARITY
@given(st.lists(tensors(), min_size=2, max_size=4), st.booleans())
def test_several_files(tmp_path, files, as_list):
    """A list and a folder against the files one by one."""
    folder = tmp_path / "folder"
    for old in folder.glob("*"):
        old.unlink()
    paths, theirs = [], {}
    for k, rows in enumerate(files):
        rows = {f"{k}.{name}": row for name, row in rows.items()}
        paths.append(write_safetensors(folder / f"model-{k + 1:05d}-of-{len(files):05d}.safetensors", rows))
        theirs |= safetensors.torch.load_file(paths[-1])
    ours = tensorlift.load(paths if as_list else folder)
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        same(tensor, theirs[name])


@PARITY
@given(tensors().filter(bool), st.data())
def test_slices(tmp_path, rows, data):
    path = write_safetensors(tmp_path / "x.safetensors", rows)
    name = data.draw(st.sampled_from(sorted(rows)))
    code, shape, _ = rows[name]
    if not shape or code == "F4":
        return
    bounds = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    index = tuple(slice(begin, end) for begin, end in bounds[: data.draw(st.integers(1, len(shape)))])
    with tensorlift.safe_open(path, "pt") as f, safetensors.safe_open(path, "pt") as reference:
        part = f.get_slice(name)
        assert part.get_shape() == reference.get_slice(name).get_shape()
        same(part[index], reference.get_tensor(name)[index])


@PARITY
@given(st.binary(max_size=200), st.integers(0, 40))
def test_what_safetensors_refuses_is_refused(tmp_path, header, data_bytes):
    """Ours is the stricter one: whatever it takes, the reference takes too."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(data_bytes))
    try:
        with safetensors.safe_open(path, "pt") as reference:
            list(reference.keys())
    except (safetensors.SafetensorError, OSError):
        with pytest.raises(tensorlift.FileError):
            tensorlift.safe_open(path, "pt")
