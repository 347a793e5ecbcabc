"""Digests that the engine makes, against an independent xxHash."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.checkpoints import random_checkpoint, random_row, write_safetensors
from support.digests import CHUNK, digests_of, headers
from tensorlift.engine import abi, digesting
from tensorlift.engine.digesting import digest_checkpoint
from tensorlift.engine.engine import Engine
from tensorlift.engine.sizing import EngineSize
from tensorlift.errors import BackendError, LibraryError, TruncatedError
from tensorlift.format.digests import describe
from tensorlift.options import LoadOptions
from tensorlift.plan.chunks import digest_pieces

SIZES = st.lists(
    st.one_of(
        st.integers(0, 300), st.integers(CHUNK - 2, CHUNK + 2), st.integers(2 * CHUNK - 1, 2 * CHUNK + 1)
    ),
    min_size=1,
    max_size=8,
)


def made(path: Path, options: LoadOptions | None = None) -> dict[str, str]:
    checkpoint = headers(path)
    digests = digest_checkpoint(checkpoint, options or LoadOptions())
    return {tensor.name: tensor.digest for tensor in describe(checkpoint, digests).tensors}


@settings(max_examples=25, deadline=None)
@given(SIZES, st.integers(0, 1000), st.sampled_from([1, 8]))
def test_equal_to_xxhash(sizes: list[int], seed: int, align: int) -> None:
    tensors = {f"t{i}": random_row("U8", [size], seed + i) for i, size in enumerate(sizes)}
    with tempfile.TemporaryDirectory() as folder:
        path = write_safetensors(Path(folder, "m.safetensors"), tensors, align=align)
        assert made(path) == digests_of(tensors)


@pytest.mark.parametrize("backend", ["PREAD", "MMAP", "URING", "BUFFERED"])
def test_every_reader_gives_the_same(tmp_path: Path, backend: str) -> None:
    written = random_checkpoint(tmp_path / "c", shards=3, tensors=12, seed=4, elements=400_000)
    options = LoadOptions(backend=(backend, "AUTO"), chunk_size=64 << 10, threads=3)
    assert made(written.path, options) == digests_of(written.tensors)


def test_memory_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digesting, "_WINDOW", 2 * CHUNK)
    tensors = {f"t{i}": random_row("U8", [CHUNK + i * 1000], i) for i in range(20)}
    path = write_safetensors(tmp_path / "m.safetensors", tensors)
    seen: list[tuple[int, int]] = []
    checkpoint = headers(path)
    digests = digest_checkpoint(checkpoint, LoadOptions(), lambda done, total: seen.append((done, total)))
    assert {t.name: t.digest for t in describe(checkpoint, digests).tensors} == digests_of(tensors)
    assert seen[-1] == (int(checkpoint.sizes.sum()),) * 2
    assert abi.library().arena_live() == 0


def test_nothing_at_all(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "m.safetensors", {})
    assert made(path) == {}


def test_a_file_that_became_shorter_is_truncated(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "m.safetensors", {"t": random_row("U8", [3 * CHUNK])})
    checkpoint = headers(path)
    with path.open("r+b") as file:
        file.truncate(2 * CHUNK)
    with pytest.raises(TruncatedError, match=r"m\.safetensors"):
        digest_checkpoint(checkpoint, LoadOptions())
    assert abi.library().arena_live() == 0


def test_a_library_without_xxhash_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What tl_digest answers there: zeros.
    monkeypatch.setattr(digesting, "digest_parts", lambda data, edges, made: None)
    path = write_safetensors(tmp_path / "m.safetensors", {"t": random_row("U8", [3])})
    with pytest.raises(LibraryError, match="libxxhash-dev"):
        digest_checkpoint(headers(path), LoadOptions())


def test_trees_of_several_tensors() -> None:
    import xxhash

    pieces = np.random.default_rng(1).integers(0, 256, (5, 16), np.uint8)
    found = digesting.tree_digests(pieces, np.array([0, 2, 2, 5]))
    assert [row.tobytes() for row in found] == [
        xxhash.xxh3_128_digest(pieces[a:b].tobytes()) for a, b in ((0, 2), (2, 2), (2, 5))
    ]


def test_direct_reads_are_cut_at_blocks_not_at_pieces(tmp_path: Path) -> None:
    # The data begins 8 bytes behind a block's begin, so every edge of a piece lies inside a block.
    count = 16
    tensors = {"t": random_row("U8", [count * CHUNK])}
    path = write_safetensors(tmp_path / "m.safetensors", tensors, length=4096)
    size = EngineSize(CHUNK, 4 * CHUNK, 8 * CHUNK, 1, 4, ("URING", "AIO"))
    memory = np.zeros(count * CHUNK + 8192, np.uint8)
    begin = -(-memory.ctypes.data // 4096) * 4096 + 8
    checkpoint = headers(path)
    assert checkpoint.starts[0] % 4096 == 8
    with Engine(size) as engine:
        file = engine.add_file(checkpoint.shards[0])
        pieces = digest_pieces(
            np.array([file], np.int32), checkpoint.starts, checkpoint.sizes, np.array([begin], np.uint64)
        )
        try:
            engine.wait(engine.submit(pieces))
        except BackendError as error:
            pytest.skip(f"no direct asynchronous reads here: {error}")
        stats = engine.stats()
        made = digesting.tree_digests(engine.digests(0, count), np.array([0, count]))
    assert made.tobytes().hex() == digests_of(tensors)["t"]
    # At each edge of a slot one block is read twice, at the edges of the pieces inside a slot none.
    assert stats.direct_bytes_read <= count * CHUNK + (count // 4 + 1) * 4096
