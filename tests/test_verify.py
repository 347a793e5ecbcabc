"""load(), open(), load_into() and safe_open with verify: what is right passes, nothing else comes out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support import standin
from support.checkpoints import Written, random_checkpoint, random_row, write_safetensors
from support.digests import CHUNK, digests_of, flip, headers
from tensorlift import compat, loading
from tensorlift.compat import safe_open
from tensorlift.engine import abi
from tensorlift.engine.digesting import digest_checkpoint
from tensorlift.errors import DigestError, OptionError, TensorNotFoundError, TruncatedError
from tensorlift.format.digests import describe
from tensorlift.options import LoadOptions
from tensorlift.sources.sidecars import sidecar_to_write, write_sidecar

BACKENDS = ["AUTO", "PREAD", "URING", "MMAP", "URING_BUFFERED", "AIO", "AIO_BUFFERED", "BUFFERED"]


def digest(path: Path) -> Path:
    """Writes the sidecar of a checkpoint where it belongs."""
    checkpoint = headers(path)
    place = sidecar_to_write(checkpoint)
    write_sidecar(place, describe(checkpoint, digest_checkpoint(checkpoint, LoadOptions())))
    return Path(place)


@pytest.fixture
def written(tmp_path: Path) -> Written:
    made = random_checkpoint(tmp_path / "c", shards=2, tensors=10, seed=8, elements=900_000)
    digest(made.path)
    return made


def streamed(path: Path, **options: Any) -> dict[str, torch.Tensor]:
    with loading.open(path, **options) as weights:
        return dict(weights)


def filled(path: Path, **options: Any) -> dict[str, torch.Tensor]:
    state = {name: torch.empty_like(tensor) for name, tensor in loading.load(path).items()}
    loading.load_into(state, path, **options)
    return state


def one_by_one(path: Path, **options: Any) -> dict[str, torch.Tensor]:
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else path
    with safe_open(files, "pt", **options) as file:
        found: dict[str, torch.Tensor] = {}
        # No comprehension: its dict would go during an error, when the stand-in may run no Python.
        for name in file.keys():  # noqa: SIM118 - no mapping
            found[name] = file.get_tensor(name)
        return found


WAYS: list[Callable[..., dict[str, torch.Tensor]]] = [loading.load, streamed, filled, one_by_one]
way = pytest.mark.parametrize("load", WAYS, ids=["load", "open", "load_into", "safe_open"])


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@way
@pytest.mark.parametrize("backend", BACKENDS)
def test_right_bytes_pass(written: Written, load: Callable[..., Any], backend: str) -> None:
    found = load(written.path, verify=True, backend=[backend, "PREAD"] if backend != "PREAD" else "PREAD")
    assert {name: raw(tensor) for name, tensor in found.items()} == {
        name: row[2] for name, row in written.tensors.items()
    }


@way
def test_a_flipped_bit_is_found_and_named(written: Written, load: Callable[..., Any]) -> None:
    flip(written.files[1], -1)
    name = headers(written.files[1]).names[-1]
    with pytest.raises(DigestError) as caught:
        load(written.path, verify=True)
    assert f"{written.files[1].name}: tensor '{name}'" in str(caught.value)
    if load is not one_by_one:  # the tensors before were handed out there
        assert abi.library().arena_live() == 0
    # Nothing of what was not asked for is compared.
    load(written.path)


SIZES = (5, CHUNK + 3, 0, 2 * CHUNK, 40, 1, CHUNK - 1)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = {f"t{i}": random_row("U8", [size], i) for i, size in enumerate(SIZES)}
    path = write_safetensors(tmp_path_factory.mktemp("single") / "m.safetensors", tensors)
    digest(path)
    return path


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_one_bit_anywhere(single: Path, data: st.DataObject) -> None:
    at = data.draw(st.integers(-sum(SIZES), -1))
    checkpoint = headers(single)
    position = single.stat().st_size + at
    (name,) = [
        n
        for n, start, size in zip(checkpoint.names, checkpoint.starts, checkpoint.sizes, strict=True)
        if start <= position < start + size
    ]
    flip(single, at)
    try:
        for load in (loading.load, streamed):
            with pytest.raises(DigestError, match=f"tensor '{name}'"):
                load(single, verify=True)
    finally:
        flip(single, at)
    assert loading.load(single, verify=True).stats.verified == len(SIZES)


def test_open_hands_out_nothing_of_a_wrong_batch(tmp_path: Path) -> None:
    tensors = {f"t{i}": random_row("U8", [CHUNK], i) for i in range(6)}
    path = write_safetensors(tmp_path / "m.safetensors", tensors)
    digest(path)
    flip(path, -(2 * CHUNK) - 1)  # the last byte of t3
    seen: list[str] = []
    weights = loading.open(path, verify=True, arena_size=CHUNK + 4096, buffer_size=4 * CHUNK)
    with pytest.raises(DigestError, match="'t3'"):
        seen.extend(name for name, _ in weights)
    assert seen == ["t0", "t1", "t2"]
    assert weights.stats.verified == 3


def test_load_into_converts_and_ties(tmp_path: Path) -> None:
    tensors = {"a": random_row("U8", [1000]), "b": random_row("U8", [1000])}
    path = write_safetensors(tmp_path / "m.safetensors", tensors)
    digest(path)
    shared = torch.zeros(1000, dtype=torch.uint8)
    state = {"a": torch.zeros(1000, dtype=torch.int32), "b": shared, "tied": shared}
    assert loading.load_into(state, path, verify=True).stats.verified == 2
    assert (bytes(state["a"].tolist()), bytes(shared.tolist())) == (tensors["a"][2], tensors["b"][2])
    flip(path, -1001)  # a, which is copied: its parameter stays as it was
    before = state["a"].clone()
    with pytest.raises(DigestError, match="'a'"):
        loading.load_into(state, path, verify=True)
    assert torch.equal(state["a"], before)


@way
def test_a_truncated_file_is_still_truncated(written: Written, load: Callable[..., Any]) -> None:
    with written.files[1].open("r+b") as file:
        file.truncate(written.files[1].stat().st_size - 3)
    with pytest.raises(TruncatedError):
        load(written.path, verify=True)


@way
@pytest.mark.parametrize(("code", "shape"), [("I8", [6]), ("U8", [2, 3])])
def test_another_dtype_or_shape_of_the_same_bytes(
    tmp_path: Path, load: Callable[..., Any], code: str, shape: list[int]
) -> None:
    path = write_safetensors(tmp_path / "m.safetensors", {"t": ("U8", [6], b"abcdef")})
    digest(path)
    write_safetensors(path, {"t": (code, shape, b"abcdef")})
    with pytest.raises(DigestError, match=r"m\.safetensors: tensor 't': is .*, expected U8 \[6\]"):
        load(path, verify=True)


def test_the_digests_of_another_model(written: Written, tmp_path: Path) -> None:
    other = random_checkpoint(tmp_path / "other", tensors=3, seed=9, codes=["U8"])
    with pytest.raises(DigestError, match="3 tensors 3 differences; are these the digests of another model"):
        loading.load(other.path, verify=written.path / "tensorlift.digests.json")


def test_only_what_is_selected_is_compared(written: Written) -> None:
    flip(written.files[1], -1)
    state = loading.load(written.path, names="layers.0.*", verify=True)
    assert state.stats.verified == len(state) == 10


def test_small_tensors_are_checked_without_an_engine(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = headers(single)
    small = [name for name, size in zip(checkpoint.names, checkpoint.sizes, strict=True) if size <= CHUNK]
    monkeypatch.setattr(compat.Transfer, "of", None)
    monkeypatch.setattr(compat, "Engine", None)
    with safe_open(single, "pt", verify=True) as file:
        for name in small:
            file.get_tensor(name)
    flip(single, -SIZES[-1])
    try:
        with safe_open(single, "pt", verify=True) as file:
            with pytest.raises(DigestError, match=f"tensor '{small[-1]}': digest is .*, expected"):
                file.get_tensor(small[-1])
            file.get_tensor(small[0])
    finally:
        flip(single, -SIZES[-1])
    # A tensor without bytes has a digest too.
    record = json.loads(Path(f"{single}.digests.json").read_text())
    by_name = {tensor["name"]: tensor["digest"] for tensor in record["tensors"]}
    file = safe_open(single, "pt", verify=by_name | {"t2": "0" * 32})
    with pytest.raises(DigestError, match="'t2'"):
        file.get_tensor("t2")
    file.close()


@way
def test_a_tensor_that_is_gone_is_missed(tmp_path: Path, load: Callable[..., Any]) -> None:
    path = write_safetensors(tmp_path / "m.safetensors", {n: random_row("U8", [9]) for n in "abc"})
    digest(path)
    record = json.loads((tmp_path / "m.safetensors.digests.json").read_text())
    write_safetensors(path, {n: random_row("U8", [9]) for n in "ab"})
    record["files"][0]["nbytes"] = path.stat().st_size
    (tmp_path / "m.safetensors.digests.json").write_text(json.dumps(record))
    with pytest.raises(DigestError, match="tensor 'c': is missing"):
        load(path, verify=True)
    assert loading.load(path, verify=True, names=["a", "b"]).stats.verified == 2


@way
def test_files_of_others_do_not_count(written: Written, load: Callable[..., Any]) -> None:
    one = headers(written.files[0])
    assert set(load(written.files[0], verify=True)) == set(one.names)


@way
def test_a_file_that_is_gone_is_missed_in_a_folder(tmp_path: Path, load: Callable[..., Any]) -> None:
    for name in "ab":
        write_safetensors(tmp_path / f"{name}.safetensors", {name: random_row("U8", [9])})
    digest(tmp_path)
    (tmp_path / "b.safetensors").unlink()
    if load is one_by_one:  # a list of files, which says nothing about the folder
        assert set(load(tmp_path, verify=True)) == {"a"}
    else:
        with pytest.raises(DigestError, match=r"b\.safetensors: is missing, with 1 tensor"):
            load(tmp_path, verify=True)


def test_a_file_that_is_gone_is_missed_by_digests_that_lie_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in "ab":
        write_safetensors(folder / f"{name}.safetensors", {name: random_row("U8", [9])})
    digest(folder)
    elsewhere = tmp_path / "digests.json"
    (folder / "tensorlift.digests.json").rename(elsewhere)
    assert loading.load(folder, verify=elsewhere).stats.verified == 2
    (folder / "b.safetensors").unlink()
    with pytest.raises(DigestError, match=r"b\.safetensors: is missing, with 1 tensor"):
        loading.load(folder, verify=elsewhere)
    assert set(loading.load(folder / "a.safetensors", verify=elsewhere)) == {"a"}


def test_another_size_of_a_file(written: Written) -> None:
    place = written.path / "tensorlift.digests.json"
    record = json.loads(place.read_text())
    record["files"][1]["nbytes"] += 1
    place.write_text(json.dumps(record))
    with pytest.raises(DigestError, match=rf"{written.files[1].name}: has .* bytes, expected"):
        loading.load(written.path, verify=True)
    assert loading.load(written.path, verify=True, names="layers.0.*").stats.verified == 10


def test_digests_by_name(written: Written) -> None:
    by_name = digests_of(written.tensors)
    some = dict(list(by_name.items())[:3])
    assert loading.load(written.path, verify=some).stats.verified == 3
    name = next(iter(some))
    with pytest.raises(DigestError, match=f"tensor '{name}': digest is {some[name]}, expected {'0' * 32}"):
        loading.load(written.path, verify={name: "0" * 32})
    with pytest.raises(TensorNotFoundError, match="verify= has a digest for it"):
        loading.load(written.path, verify={"nowhere": "0" * 32})


def test_the_environment_asks_too(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORLIFT_VERIFY", "1")
    assert loading.load(written.path).stats.verified == len(written.tensors)
    assert loading.load(written.path, verify=False).stats.verified == 0
    moved = (written.path / "tensorlift.digests.json").rename(written.path / "moved.json")
    with pytest.raises(DigestError, match="there are no digests to compare with"):
        loading.load(written.path)
    monkeypatch.setenv("TENSORLIFT_VERIFY", str(moved))
    assert loading.load(written.path).stats.verified == len(written.tensors)
    record = json.loads(moved.read_text())
    record["tensors"].pop()
    moved.write_text(json.dumps(record))
    with pytest.raises(DigestError, match="has no digest"):
        loading.load(written.path)


@pytest.mark.parametrize("wrong", [3, 1.5, "", object()])
def test_what_verify_can_be(written: Written, wrong: object) -> None:
    with pytest.raises(OptionError, match="verify is"):
        loading.load(written.path, verify=wrong)  # type: ignore[arg-type]


@pytest.fixture(params=[abi.DEVICE_CUDA, abi.DEVICE_HIP], ids=["cuda", "hip"])
def device(request: pytest.FixtureRequest) -> Iterator[standin.StandInMemory]:
    with standin.device(request.param) as made:
        yield made


@pytest.mark.parametrize("load", WAYS[:2] + WAYS[3:], ids=["load", "open", "safe_open"])
@pytest.mark.parametrize(
    "sizes",
    [{}, {"chunk_size": 64 << 10, "slot_size": 128 << 10, "arena_size": 3 << 20, "buffer_size": 6 << 20}],
    ids=["automatic", "slots that are raised to a chunk of the digest"],
)
def test_on_a_device(
    written: Written, device: standin.StandInMemory, load: Callable[..., Any], sizes: dict[str, int]
) -> None:
    device.driver.set_copy_delay_us(500)
    found = load(written.path, device="cuda:0", verify=True, **sizes)
    assert {name: raw(tensor) for name, tensor in found.items()} == {
        name: row[2] for name, row in written.tensors.items()
    }
    del found
    flip(written.files[0], -1)
    with pytest.raises(DigestError, match=written.files[0].name):
        load(written.path, device="cuda:0", verify=True, **sizes)


def test_load_into_a_device(written: Written) -> None:
    with standin.device(cpu_too=True):
        state = {name: torch.empty_like(t) for name, t in loading.load(written.path).items()}
        assert loading.load_into(state, written.path, verify=True).stats.verified == len(written.tensors)
        flip(written.files[1], -1)
        with pytest.raises(DigestError, match=written.files[1].name):
            loading.load_into(state, written.path, verify=True)
        del state
