"""How headers are read: once, with few descriptors, identity from what was read."""

import ctypes
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from support import child, leaks, seccomp
from support.checkpoints import header_bytes, random_checkpoint, random_row, write_raw, write_safetensors
from tensorlift.engine import abi
from tensorlift.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    FileError,
    LibraryError,
    ReadError,
    TruncatedError,
)
from tensorlift.sources import find, read_headers, read_headers_in_parts, reading


@pytest.mark.parametrize(
    "length", [200, 4087, 4088, 4089, 65527, 65528, 65529, 65536, 99994, 100_000, 1 << 20]
)
def test_headers_around_the_first_read(tmp_path, length):
    tensors = {"w": random_row("U8", [5]), "v": random_row("F64", [2])}
    path = write_safetensors(tmp_path / "x.safetensors", tensors, {"k": "v"}, length=length)
    checkpoint = read_headers(find(path))
    assert checkpoint.names == ["w", "v"]
    assert checkpoint.starts.tolist() == [8 + length, 8 + length + 5]


def columns(checkpoints):
    """What a load needs of each tensor."""
    return [
        (
            c.names[i],
            c.shards[c.shard_of[i]].path,
            int(c.dtypes[i]),
            int(c.starts[i]),
            int(c.sizes[i]),
            c.shapes[i],
        )
        for c in checkpoints
        for i in range(len(c))
    ]


@pytest.mark.parametrize("index", [False, True])
@pytest.mark.parametrize("part_bytes", [0, 30_000, 1 << 30])
def test_parts_are_the_whole(tmp_path, index, part_bytes, monkeypatch):
    monkeypatch.setattr(reading, "_PART_BYTES", part_bytes)
    written = random_checkpoint(tmp_path, shards=7, tensors=30, index=index)
    found = find(tmp_path if index else [*written.files, written.files[2]])
    parts = list(read_headers_in_parts(found))
    assert columns(parts) == columns([read_headers(found)])
    assert len(parts[0].shards) == 1, "reading begins after the first header"
    # Each as large as all before it: 1, 1, 2, 3 of about equal files.
    assert (3 <= len(parts) < 7) == (part_bytes < 1 << 30)


@pytest.mark.parametrize("way", [read_headers, lambda found: list(read_headers_in_parts(found))])
def test_what_concerns_several_files_is_checked_in_parts_too(tmp_path, way):
    one = {"w": random_row("U8", [5]), "a": random_row("U8", [5])}
    first = write_safetensors(tmp_path / "a.safetensors", one)
    second = write_safetensors(tmp_path / "b.safetensors", {"b": random_row("U8", [5]), "w": one["w"]})
    with pytest.raises(CheckpointError, match=r"tensor 'w' is in both .*a.safetensors and .*b.safetensors"):
        way(find([first, second]))
    index = {"weight_map": {"w": "a.safetensors", "b": "b.safetensors", "c": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"the index says that tensor 'c' is in .*b.safetensors"):
        way(find(tmp_path))


def test_identity_and_size(tmp_path):
    written = random_checkpoint(tmp_path, shards=3)
    for shard, file in zip(read_headers(find(tmp_path)).shards, written.files, strict=True):
        info = file.stat()
        assert (shard.device, shard.inode, shard.nbytes) == (info.st_dev, info.st_ino, info.st_size)
        assert shard.path == str(file)
        assert shard.absolute == os.fsencode(file)


def openings(folder, work):
    """How often files of a folder are opened while something is done, as the kernel counts."""
    libc = ctypes.CDLL(None, use_errno=True)
    watch = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    assert watch >= 0
    try:
        assert libc.inotify_add_watch(watch, os.fsencode(folder), 0x20) >= 0  # IN_OPEN
        work()
        events, count = os.read(watch, 1 << 16), 0
        while events:
            events, count = events[16 + int.from_bytes(events[12:16], sys.byteorder) :], count + 1
        return count
    finally:
        os.close(watch)


@pytest.mark.parametrize("read", [read_headers, lambda found: list(read_headers_in_parts(found))])
def test_each_file_is_opened_once_and_closed(tmp_path, read):
    random_checkpoint(tmp_path, shards=40, tensors=1)
    found = find(tmp_path)
    with leaks.nothing_left():
        assert openings(tmp_path, lambda: read(found)) == 40


@pytest.fixture
def by_python(monkeypatch):
    """What the library does not read, Python reads."""
    monkeypatch.setattr(reading.FileHeaders, "take", lambda self, at: None)


def test_python_reads_what_the_library_does_not(tmp_path, by_python):
    written = random_checkpoint(tmp_path, shards=3, tensors=5)
    assert read_headers(find(tmp_path)).names == list(written.tensors)


def test_headers_are_read_without_the_library(tmp_path, monkeypatch):
    def missing(*given):
        raise LibraryError("it is not there")

    written = random_checkpoint(tmp_path, shards=3, tensors=5)
    monkeypatch.setattr(abi, "library", missing)
    assert read_headers(find(tmp_path)).names == list(written.tensors)


def test_what_is_done_meanwhile_comes_before_the_first_header(tmp_path, monkeypatch):
    random_checkpoint(tmp_path, shards=3, tensors=5)
    done, take = [], reading.FileHeaders.take
    monkeypatch.setattr(reading.FileHeaders, "take", lambda self, at: done.append(at) or take(self, at))
    read_headers(find(tmp_path), lambda: done.append("meanwhile"))
    assert done == ["meanwhile", 0, 1, 2]


def test_what_fails_meanwhile_leaves_nothing(tmp_path):
    random_checkpoint(tmp_path, shards=20, tensors=1)
    with leaks.nothing_left(), pytest.raises(ZeroDivisionError):
        read_headers(find(tmp_path), lambda: 1 // 0)


def test_an_iteration_that_is_left_ends_its_threads(tmp_path):
    random_checkpoint(tmp_path, shards=60, tensors=2)
    with leaks.nothing_left():
        parts = read_headers_in_parts(find(tmp_path))
        next(parts)
        parts.close()


@pytest.mark.parametrize("files", [1, 20])
def test_nothing_is_left_after_an_error(tmp_path, files):
    written = random_checkpoint(tmp_path, shards=files, tensors=1)
    written.files[0].write_bytes(b"")
    with leaks.nothing_left():
        for _ in range(3):
            with pytest.raises(TruncatedError):
                read_headers(find(tmp_path))


def test_200_shards_with_64_descriptors(tmp_path):
    random_checkpoint(tmp_path, shards=200, tensors=1, elements=10)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        assert len(read_headers(find(tmp_path)).shards) == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_file_that_changes_after_it_was_found(tmp_path):
    path = write_safetensors(tmp_path / "x.safetensors", {"w": random_row("U8", [5])})
    found = find(path)
    path.unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"x\.safetensors"):
        read_headers(found)
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="named pipe"):  # and not a wait for its writer
        read_headers(found)
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointError, match="folder"):
        read_headers(found)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path):
    path = write_safetensors(tmp_path / "x.safetensors", {"w": random_row("U8", [5])})
    path.chmod(0)
    with pytest.raises(ReadError, match="permission") as caught:
        read_headers(find(path))
    assert caught.value.errno == 13


def test_a_refused_open_keeps_its_number_and_words(tmp_path, monkeypatch, by_python):
    found = find(write_safetensors(tmp_path / "x.safetensors", {"w": random_row("U8", [5])}))

    def refuse(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(
        ReadError, match=r"x\.safetensors: could not be opened: Permission denied; check"
    ) as caught:
        read_headers(found)
    assert caught.value.errno == 13


def test_a_read_that_fails_keeps_its_number_and_words(tmp_path, monkeypatch, by_python):
    found = find(write_safetensors(tmp_path / "x.safetensors", {"w": random_row("U8", [5])}))

    def refuse(*args):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "read", refuse)
    with pytest.raises(ReadError, match=r"x\.safetensors: could not be read: Input/output error") as caught:
        read_headers(found)
    assert caught.value.errno == 5


def test_short_reads_go_on_and_an_early_end_is_an_error(tmp_path, monkeypatch, by_python):
    header = header_bytes({"w": random_row("U8", [5])}, length=200_000)
    path = write_raw(tmp_path / "x.safetensors", header, bytes(5))
    found, real, end = find(path), os.read, [None]

    def short(fd, nbytes):
        if end[0] is not None and os.lseek(fd, 0, os.SEEK_CUR) > end[0]:
            return b""
        return real(fd, min(nbytes, 70_000))

    monkeypatch.setattr(os, "read", short)
    assert read_headers(found).names == ["w"]
    end[0] = 100_000
    with pytest.raises(TruncatedError, match="the header has 200,000 bytes, but 60,000 of them are gone"):
        read_headers(found)


def test_a_claim_of_a_large_header_allocates_nothing(tmp_path):
    """100 MB claimed in a file of a few bytes, in a process that may not have that much."""
    path = write_raw(tmp_path / "x.safetensors", b"{}", claim=100_000_000)
    code = f"""
import resource
from tensorlift.errors import FileError
from tensorlift.sources import find, read_headers, read_headers_in_parts
from tensorlift.sources import reading
found = find({str(path)!r})
now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (32 << 20),) * 2)
try:
    read_headers(found)
except FileError as error:
    print("refused", error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=_environment()
    )
    assert done.stdout.startswith("refused"), done.stderr
    assert "100,000,000" in done.stdout


def _environment() -> dict[str, str]:
    """For a child: the same package as here, installed or not."""
    import tensorlift

    package = str(Path(tensorlift.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])}


def test_any_file_error_is_of_the_tree(tmp_path):
    path = write_raw(tmp_path / "x.safetensors", b"[]")
    with pytest.raises(FileError):
        read_headers(find(path))


def names_without_threads(path):
    """In a child."""
    seccomp.install([rule for call in ("clone", "clone3") for rule in seccomp.named(f"{call}=EAGAIN")])
    return sorted(read_headers(find(path)).names)


@pytest.mark.skipif(seccomp.supported() is not None, reason=str(seccomp.supported()))
def test_headers_are_read_where_no_thread_can_be_started(tmp_path):
    written = random_checkpoint(tmp_path, shards=40, tensors=2)
    assert child.call(names_without_threads, str(tmp_path)) == sorted(written.tensors)
