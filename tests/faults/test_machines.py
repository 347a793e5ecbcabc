"""Machines that give little: locked memory, CPUs, memory, shared memory, disks, standard streams."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from support import child, seccomp
from support.checkpoints import random_row, write_safetensors
from support.loads import digest
from tensorlift import instances, loading
from tensorlift.bench.cases import write_holes
from tensorlift.engine import abi
from tensorlift.errors import TensorliftError
from tensorlift.options import HOST_BACKENDS
from tensorlift.sources.writing import Spec

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
CGROUP = Path("/sys/fs/cgroup")


@pytest.fixture
def path() -> Iterator[Path]:
    """6 MiB, where an ordinary user may read them."""
    rows = {f"t{k}": random_row("U8", [MIB], k) for k in range(6)}
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield write_safetensors(Path(folder) / "model.safetensors", rows)


def every_way(path: str, prepare: Callable[[], object]) -> dict[str, str]:
    """In a child: loads by each reader that works, into memory too, and forks; what came, as a digest."""
    abi.library()
    state = loading.load(path)
    with instances.seed(dict(state), key="m") as seed:
        instances.fork(seed.url, into=dict(state))
    # What is imported later lies where an ordinary user may not look, perhaps.
    prepare()
    usable = [name for name in HOST_BACKENDS if abi.library().backend_probe(name, path) is None]
    found = {name: digest(loading.load(path, backend=name)) for name in usable}
    state = loading.load(path)
    for transports in (["tcp"], ["shm"], ["shm", "tcp"]):
        into = {name: tensor.new_zeros(tensor.shape) for name, tensor in state.items()}
        try:
            with instances.seed(dict(state), key="m", transports=transports) as seed:
                instances.fork(seed.url, into=into)
        except TensorliftError:
            if "tcp" in transports:
                raise
            continue  # shm alone, and it is refused here
        found["+".join(transports)] = digest(into)
    for tensor in state.values():
        tensor.zero_()
    loading.load_into(state, path)
    return found | {"into": digest(state)}


def as_nobody(path: str) -> dict[str, str]:
    def prepare() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 * KIB, 64 * KIB))
        if os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)

    return every_way(path, prepare)


def with_little_shared_memory(path: str) -> dict[str, str] | str:
    libc = ctypes.CDLL(None, use_errno=True)
    mounted = (
        libc.unshare(0x20000) == 0  # CLONE_NEWNS
        and libc.mount(None, b"/", None, 0x44000, None) == 0  # MS_REC | MS_PRIVATE
        and libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=1m") == 0
    )
    if not mounted:
        return os.strerror(ctypes.get_errno())
    found = every_way(path, lambda: None)
    assert os.listdir("/dev/shm") == []
    return found


def without_shared_maps(path: str) -> dict[str, str]:
    return every_way(path, lambda: seccomp.install(seccomp.NO_FILE_MAP))


@pytest.mark.parametrize("how", [as_nobody, with_little_shared_memory, without_shared_maps])
def test_every_way_of_loading(path: Path, how: Callable[[str], Any]) -> None:
    if how is without_shared_maps and (reason := seccomp.supported()):
        pytest.skip(reason)
    answer = child.call(how, str(path), seconds=110)
    if isinstance(answer, str):
        pytest.skip(f"no /dev/shm of its own can be mounted here: {answer}")
    expected = digest(load_file(path))
    assert {"AUTO", "PREAD", "tcp", "shm+tcp", "into"} <= set(answer)
    assert set(answer.values()) == {expected}


@contextlib.contextmanager
def in_group(controller: str, **settings: int) -> Iterator[Path]:
    """A group of cgroup v1 with these limits; skips where there can be none."""
    folder = CGROUP / controller / f"tensorlift-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no group of cgroup v1 can be made below {folder.parent}: {error.strerror}")
    try:
        for name, value in settings.items():
            (folder / f"{controller}.{name}").write_text(str(value))
        yield folder
    finally:
        end = time.monotonic() + 60
        # A process that has ended stays in its group for a moment.
        while (folder / "tasks").read_text() and time.monotonic() < end:
            time.sleep(0.01)
        folder.rmdir()


def in_a_small_group(folder: str, groups: list[str], nbytes: int) -> dict[str, Any]:
    """In a child: memory first, then the limits, then a load into it."""
    import torch

    from tensorlift.engine import machine

    memory = np.full(nbytes, 7, np.uint8)
    state = {"t": torch.from_numpy(memory)}
    for group in groups:
        (Path(group) / "tasks").write_text(str(os.getpid()))
    stats = loading.load_into(state, folder).stats
    usable, threads = machine.usable_cpus(), stats.threads
    return {"cpus": usable, "threads": threads, "wrong": int(np.count_nonzero(memory))}


def test_a_quarter_cpu_and_512_mib(tmp_path: Path) -> None:
    """A checkpoint of four times the group's memory, into memory that it was not charged for."""
    nbytes = 2 * GIB
    write_holes(tmp_path / "holes", [[Spec("t", "U8", (nbytes,))]])
    with (
        in_group("cpu", cfs_period_us=100_000, cfs_quota_us=25_000) as cpu,
        in_group("memory", limit_in_bytes=512 * MIB) as memory,
    ):
        groups = [str(cpu), str(memory)]
        answer = child.call(in_a_small_group, str(tmp_path / "holes"), groups, nbytes, seconds=110)
    assert answer["wrong"] == 0
    assert answer["cpus"] == 1


@contextlib.contextmanager
def full_disk(folder: Path) -> Iterator[Path]:
    """A tmpfs of 64 KiB without room for more than its folder."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    try:
        with contextlib.suppress(OSError), open(folder / "filler", "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(path: Path, tmp_path: Path) -> None:
    """Each verb that writes: an error of the machine, and nothing of it is left."""
    with (
        full_disk(tmp_path / "full") as full,
        instances.seed(dict(loading.load(path)), key="m") as seed,
    ):
        for verb in (
            ["digest", str(path), "--out", str(full / "digests.json")],
            ["fork", seed.url, "--out", str(full / "copy")],
            ["synth", str(full / "synth"), "--like", "qwen3-30b-a3b", "--layers", "1"],
            ["load", str(path), "--trace", str(full / "trace.json")],
        ):
            done = subprocess.run(
                [sys.executable, "-m", "tensorlift", *verb], capture_output=True, text=True, timeout=100
            )
            assert done.returncode == 3, (verb, done.stderr)
            assert done.stderr.startswith("error: MachineError"), (verb, done.stderr)
            assert [file.name for file in full.iterdir() if not is_empty(file)] == ["filler"], verb


def is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_closed_standard_streams(path: Path, tmp_path: Path, closed: str) -> None:
    out = tmp_path / "digests.json"
    for verb, code in (
        (f"digest {path} --out {out}", 0), (f"load {path} --json", 0), (f"load {path}.not", 1),
    ):  # fmt: skip
        done = subprocess.run(
            ["sh", "-c", f"exec {sys.executable} -m tensorlift {verb} {closed}"],
            capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        assert done.returncode == code, (verb, done.stderr)
    assert out.read_bytes().startswith(b"{")


def with_closed_descriptors(path: str) -> dict[str, str]:
    return every_way(path, lambda: os.closerange(0, 3))


def test_descriptors_of_standard_streams_that_are_closed(path: Path) -> None:
    assert set(child.call(with_closed_descriptors, str(path)).values()) == {digest(load_file(path))}
