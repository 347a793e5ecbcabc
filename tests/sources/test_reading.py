"""How headers are read: once, with few descriptors, identity from what was read."""

import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from support.checkpoints import header_bytes, random_checkpoint, random_row, write_raw, write_safetensors
from tensorlift.errors import CheckpointError, CheckpointNotFoundError, FileError, ReadError, TruncatedError
from tensorlift.sources import find, read_headers


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    "length", [200, 4087, 4088, 4089, 65527, 65528, 65529, 65536, 99994, 100_000, 1 << 20]
)
def test_headers_around_the_first_read(tmp_path, length):
    tensors = {"w": random_row("U8", [5]), "v": random_row("F64", [2])}
    path = write_safetensors(tmp_path / "x.safetensors", tensors, {"k": "v"}, length=length)
    checkpoint = read_headers(find(path))
    assert checkpoint.names == ["w", "v"]
    assert checkpoint.starts.tolist() == [8 + length, 8 + length + 5]


def test_identity_and_size(tmp_path):
    written = random_checkpoint(tmp_path, shards=3)
    for shard, file in zip(read_headers(find(tmp_path)).shards, written.files, strict=True):
        info = file.stat()
        assert (shard.device, shard.inode, shard.nbytes) == (info.st_dev, info.st_ino, info.st_size)
        assert shard.path == str(file)
        assert shard.absolute == os.fsencode(file)


def test_each_file_is_opened_once_and_closed(tmp_path, monkeypatch):
    written = random_checkpoint(tmp_path, shards=20, tensors=1)
    found = find(tmp_path)
    opened, real = [], os.open

    def spy(path, flags, *rest):
        assert flags & os.O_CLOEXEC
        opened.append(path)
        return real(path, flags, *rest)

    before, threads = descriptors(), threading.active_count()
    monkeypatch.setattr(os, "open", spy)
    read_headers(found)
    assert sorted(opened) == sorted(os.fsencode(file) for file in written.files)
    assert descriptors() == before
    assert threading.active_count() == threads


@pytest.mark.parametrize("files", [1, 20])
def test_nothing_is_left_after_an_error(tmp_path, files):
    written = random_checkpoint(tmp_path, shards=files, tensors=1)
    written.files[0].write_bytes(b"")
    before, threads = descriptors(), threading.active_count()
    for _ in range(3):
        with pytest.raises(TruncatedError):
            read_headers(find(tmp_path))
    assert descriptors() == before
    assert threading.active_count() == threads


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


def test_a_refused_open_keeps_its_number_and_words(tmp_path, monkeypatch):
    found = find(write_safetensors(tmp_path / "x.safetensors", {"w": random_row("U8", [5])}))

    def refuse(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(
        ReadError, match=r"x\.safetensors: could not be opened: Permission denied; check"
    ) as caught:
        read_headers(found)
    assert caught.value.errno == 13


def test_a_read_that_fails_keeps_its_number_and_words(tmp_path, monkeypatch):
    found = find(write_safetensors(tmp_path / "x.safetensors", {"w": random_row("U8", [5])}))

    def refuse(*args):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "read", refuse)
    with pytest.raises(ReadError, match=r"x\.safetensors: could not be read: Input/output error") as caught:
        read_headers(found)
    assert caught.value.errno == 5


def test_short_reads_go_on_and_an_early_end_is_an_error(tmp_path, monkeypatch):
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
from tensorlift.sources import find, read_headers
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


@pytest.mark.parametrize("allowed", [0, 1, 3])
def test_headers_are_read_where_no_thread_can_be_started(tmp_path, monkeypatch, allowed):
    written = random_checkpoint(tmp_path, shards=40, tensors=2)
    real, left = threading.Thread.start, [None] * allowed

    def start(thread):
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    checkpoint = read_headers(find(tmp_path))
    assert sorted(checkpoint.names) == sorted(written.tensors)
