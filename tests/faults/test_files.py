"""Files that change under a load, and processes that fork: an ordinary error from every back end."""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from support import child, leaks, page_cache
from support.checkpoints import random_row, write_safetensors
from tensorlift import compat, loading
from tensorlift.engine import abi
from tensorlift.engine.engine import Engine
from tensorlift.errors import FileError, TensorliftError, TruncatedError
from tensorlift.options import HOST_BACKENDS
from tensorlift.weights import Weights

MIB = 1 << 20


@pytest.fixture(params=HOST_BACKENDS)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    probe = tmp_path / "probe"
    probe.write_bytes(bytes(8192))
    reason = abi.library().backend_probe(request.param, str(probe))
    if reason is not None:
        pytest.skip(f"{request.param} cannot be used here: {reason}")
    return str(request.param)


def write(path: Path, seed: int = 0) -> Path:
    return write_safetensors(path, {f"t{k}": random_row("U8", [MIB], seed + k) for k in range(12)})


def opened(path: Path, backend: str) -> Weights:
    return loading.open(path, backend=backend, arena_size="1MiB", buffer_size="2MiB", chunk_size="64KiB")


def test_truncated_after_opening(tmp_path: Path, backend: str) -> None:
    path = write(tmp_path / "model.safetensors")
    weights = opened(path, backend)
    os.truncate(path, 5 * MIB)
    with pytest.raises(TruncatedError, match=r"model\.safetensors"):
        list(weights)


def test_truncated_while_it_is_read(tmp_path: Path, backend: str) -> None:
    path = write(tmp_path / "model.safetensors")
    live = abi.library().arena_live()
    kept: list[torch.Tensor] = []

    def consume() -> None:
        with opened(path, backend) as weights:
            for _, tensor in weights:
                kept.append(tensor)
                os.truncate(path, 5 * MIB)

    with pytest.raises(TruncatedError, match=r"model\.safetensors") as caught:
        consume()
    assert "t4" in str(caught.value) or "t5" in str(caught.value) or str(5 * MIB) in str(caught.value)
    assert 1 <= len(kept) <= 5
    # The traceback holds the frame that holds a tensor.
    del caught
    kept.clear()
    assert abi.library().arena_live() == live


def test_emptied_under_a_load_into(tmp_path: Path, backend: str) -> None:
    path = write(tmp_path / "model.safetensors")
    state = {f"t{k}": torch.zeros(MIB, dtype=torch.uint8) for k in range(12)}

    def cut(done: int, total: int) -> None:
        os.truncate(path, 100)

    os.truncate(path, 12 * MIB)
    with pytest.raises(TensorliftError, match=r"model\.safetensors"):
        loading.load_into(state, path, backend=backend, progress=cut)


def test_replaced_after_opening(tmp_path: Path, backend: str) -> None:
    path = write(tmp_path / "model.safetensors")
    weights = opened(path, backend)
    os.replace(write(tmp_path / "other", seed=50), path)
    with pytest.raises(FileError, match=r"model\.safetensors.*replaced"):
        list(weights)


def test_removed_after_opening(tmp_path: Path, backend: str) -> None:
    path = write(tmp_path / "model.safetensors")
    weights = opened(path, backend)
    path.unlink()
    with pytest.raises(FileError, match=r"model\.safetensors.*gone") as caught:
        list(weights)
    assert isinstance(caught.value, FileNotFoundError)


def write_over(path: Path) -> None:
    """Other bytes over the data, in place, once."""
    if path.stat().st_mtime == 1:
        with open(path, "r+b") as file:
            file.seek(-12 * MIB, os.SEEK_END)
            file.write(bytes(12 * MIB))


@pytest.mark.parametrize("how", ["load", "open", "load_into"])
def test_written_to_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, how: str
) -> None:
    """Neither the old tensors nor the new ones: some of both, with no sign of it in what was read."""
    path = write(tmp_path / "model.safetensors")
    os.utime(path, (1, 1))
    state = {f"t{k}": torch.zeros(MIB, dtype=torch.uint8) for k in range(12)}
    real = Engine.submit

    def submit(engine: Engine, *given: Any) -> int:
        ticket = real(engine, *given)
        write_over(path)
        return ticket

    monkeypatch.setattr(Engine, "submit", submit)
    runs = {
        "load": lambda: loading.load(path, backend=backend),
        "open": lambda: len(list(opened(path, backend))),
        "load_into": lambda: loading.load_into(state, path, backend=backend),
    }
    with leaks.nothing_left(), pytest.raises(FileError, match=r"model\.safetensors: .*written to while"):
        runs[how]()


def test_replaced_while_it_is_read(tmp_path: Path, backend: str) -> None:
    """What is open is the old one: all of it comes, or an error where it has to be opened again."""
    path, other = write(tmp_path / "model.safetensors"), write(tmp_path / "other", seed=50)
    expected = {name: tensor.clone() for name, tensor in loading.load(path).items()}
    found = {}
    with opened(path, backend) as weights, contextlib.suppress(FileError):
        for name, tensor in weights:
            if not found:
                os.replace(other, path)
            found[name] = tensor
    assert found
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_a_file_system_without_a_time_of_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says the present one, whenever it is asked."""
    path = write(tmp_path / "model.safetensors")
    real, seconds = os.stat, itertools.count(2)

    def stat(*given: Any, **named: Any) -> os.stat_result:
        os.utime(path, (1, next(seconds)))
        return real(*given, **named)

    monkeypatch.setattr(os, "stat", stat)
    loading.load(path)


def fork_in_the_middle(name: str, backend: str, closes: bool) -> dict[str, Any]:
    """In a child: its own child goes on with the iterator (only an error may come of it), or closes it."""
    import warnings

    weights = opened(Path(name), backend)
    tensors = iter(weights)
    first = next(tensors)[0]
    ours, theirs = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns of forks with threads: that is what this is about.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            if closes:
                weights.close()
            for _ in tensors:
                pass
            os.write(theirs, b"no error")
        except TensorliftError as error:
            os.write(theirs, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(theirs)
    said = b""
    while part := os.read(ours, 4096):
        said += part
    os.waitpid(pid, 0)
    return {"first": first, "child": said.decode(), "rest": len(list(tensors))}


def test_a_forked_child_gets_an_error_and_the_parent_goes_on(tmp_path: Path, backend: str) -> None:
    path = write(tmp_path / "model.safetensors")
    for closes in (False, True):
        answer = child.call(fork_in_the_middle, str(path), backend, closes)
        assert answer["child"] == "no error" if closes else "fork" in answer["child"]
        assert answer["first"] == "t0"
        assert answer["rest"] == 11


SHARDS = 200


def loaded_with_few_descriptors(folder: str, backend: str, how: str) -> list[bool]:
    import resource

    with compat.safe_open(folder, "pt", backend=backend) as file:
        names = file.keys()
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        if how == "load":
            found = dict(loading.load(folder, backend=backend, io_depth=128))
        else:
            found = {name: file.get_tensor(name) for name in names}
    rows = {f"t{k}": random_row("U8", [300_000], k) for k in range(SHARDS)}
    return [found[name].numpy().tobytes() == row[2] for name, row in rows.items()]


@pytest.mark.parametrize("how", ["load", "get_tensor"])
def test_more_shards_than_descriptors(tmp_path: Path, backend: str, how: str) -> None:
    for k in range(SHARDS):
        path = tmp_path / f"model-{k + 1:05d}-of-{SHARDS:05d}.safetensors"
        write_safetensors(path, {f"t{k}": random_row("U8", [300_000], k)})
        page_cache.drop(path)
    right = child.call(loaded_with_few_descriptors, str(tmp_path), backend, how)
    assert len(right) == SHARDS
    assert all(right)
