"""The rounds of soak.py: every kind of load, every kind of fork, bytes compared each time."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import tensorlift
from tensorlift.engine import abi
from tensorlift.options import HOST_BACKENDS
from tensorlift.sources.writing import Spec, header_of

__all__ = ["KEY", "Bench", "child", "end", "kinds_of_forks", "kinds_of_loads"]

KIB, MIB = 1 << 10, 1 << 20
SECONDS = 600
"""For whatever is waited for."""
KEY = "soak"
PROGRAM = Path(__file__).resolve().with_name("soak.py")
TIGHT: dict[str, Any] = {"arena_size": MIB, "buffer_size": 2 * MIB, "chunk_size": 64 * KIB}
State = dict[str, torch.Tensor]


@dataclass
class Bench:
    """What all rounds share: a checkpoint in several files, its tensors, and spoilt copies."""

    folder: Path
    device: str
    kept: int = 0
    """Bytes that were pinned between loads, when they were given back last."""
    expected: State = field(default_factory=dict)
    small: State = field(default_factory=dict)

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(1)
        for shard in range(3):
            count, side = ((40, 33), (8, 512), (2, 2048))[shard]
            part = {
                f"layers.{shard}.{k}": torch.randint(-99, 99, (side, side), generator=random).float()
                for k in range(count)
            }
            self.expected |= write(self.model / f"model-{shard}.safetensors", part)
        self.small = {"a": torch.arange(1000.0), "b": torch.ones(7, 3)}
        write(self.folder / "small.safetensors", self.small)
        (self.folder / "bad.safetensors").write_bytes(b"\x07" + bytes(7) + b"{'a':1}")

    @property
    def model(self) -> Path:
        """The folder of the checkpoint."""
        return self.folder / "model"

    @property
    def wanted(self) -> str:
        """The device, as loads are told it."""
        return "cuda:0" if self.device == "standin" else self.device

    def check(self, found: Any, expected: State | None = None) -> None:
        """All tensors and bytes."""
        expected = self.expected if expected is None else expected
        if set(found) != set(expected):
            raise AssertionError("other tensors came")
        for name, tensor in expected.items():
            if not torch.equal(found[name].cpu(), tensor):
                raise AssertionError(f"tensor {name} is wrong")

    def empty(self, **options: Any) -> State:
        """Tensors to load into."""
        device = "cpu" if self.device == "standin" else self.device
        return {name: torch.empty_like(one, device=device, **options) for name, one in self.expected.items()}


def write(path: Path, tensors: State) -> State:
    """A checkpoint; gives the tensors."""
    path.parent.mkdir(exist_ok=True)
    specs = [Spec(name, "F32", tuple(one.shape)) for name, one in tensors.items()]
    data = b"".join(one.numpy().tobytes() for one in tensors.values())
    path.write_bytes(header_of(specs)[0] + data)
    return tensors


def kinds_of_loads(bench: Bench) -> list[Callable[[], object]]:
    """One round."""
    path, device, expected = bench.model, bench.wanted, bench.expected
    usable = [
        name
        for name in HOST_BACKENDS
        if abi.library().backend_probe(name, str(path / "model-0.safetensors")) is None
    ]

    def whole(**options: Any) -> None:
        bench.check(tensorlift.load(path, device, **options))

    def small(**options: Any) -> None:
        bench.check(tensorlift.load(bench.folder / "small.safetensors", device, **options), bench.small)

    def passed(**options: Any) -> None:
        with tensorlift.open(path, device, **options) as weights:
            bench.check(dict(weights))

    def into(**options: Any) -> None:
        state = bench.empty(**options)
        tensorlift.load_into(state, path)
        bench.check({name: tensor.float() for name, tensor in state.items()})

    def sliced() -> None:
        found = tensorlift.load(path, device, slices=lambda name, shape: (1, 3, 20))
        bench.check(found, {name: tensor[:, 3:20] for name, tensor in expected.items()})

    def filtered() -> None:
        wanted = {name: one for name, one in expected.items() if name.startswith("layers.1.")}
        bench.check(tensorlift.load(path, device, names="layers.1.*"), wanted)

    def by_name() -> None:
        with tensorlift.safe_open(str(path / "model-1.safetensors"), "pt", device) as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                bench.check({name: file.get_tensor(name)}, {name: expected[name]})
                part = {name: file.get_slice(name)[3:9]}
                bench.check(part, {name: expected[name][3:9]})

    def release() -> None:
        bench.kept = tensorlift.release_pinned()

    return [
        *(lambda name=name: whole(backend=name) for name in usable),
        *(lambda name=name: passed(backend=name, **TIGHT) for name in usable),
        whole, small, passed, sliced, filtered, by_name, into, lambda: into(dtype=torch.float64),
        lambda: whole(own="tensor"), lambda: whole(keep_pinned=True), lambda: small(keep_pinned=True), whole,
        lambda: passed(keep_pinned=True), *kinds_of_ends(bench), release,
    ]  # fmt: skip


def kinds_of_ends(bench: Bench) -> list[Callable[[], object]]:
    """Passes that end early, and loads that fail."""
    path, device = bench.model, bench.wanted

    def left_early(held: bool) -> None:
        weights = tensorlift.open(path, device, **TIGHT)
        with weights if held else contextlib.nullcontext():
            for count, _ in enumerate(weights):
                if count == 5:
                    break

    def consumer_raises() -> None:
        with expects(ZeroDivisionError), tensorlift.open(path, device, **TIGHT) as weights:
            for _ in weights:
                raise ZeroDivisionError

    def interrupted() -> None:
        def report(done: int, total: int) -> None:
            raise KeyboardInterrupt

        with expects(KeyboardInterrupt):
            tensorlift.load(path, device, progress=report)

    def truncated() -> None:
        file = bench.folder / "cut.safetensors"
        write(file, {f"t{k}": torch.ones(200, 1000) for k in range(12)})
        with expects(tensorlift.TruncatedError), tensorlift.open(file, device, **TIGHT) as weights:
            for _ in weights:
                os.truncate(file, 3 * MIB)

    def refused(error: type[Exception], name: str, **options: Any) -> None:
        with expects(error):
            tensorlift.load(bench.folder / name, device, **options)

    def wrong_digest() -> None:
        with expects(tensorlift.DigestError):
            tensorlift.load(path, device, verify={"layers.0.0": "0" * 32})

    return [
        lambda: left_early(True), lambda: left_early(False), consumer_raises, interrupted, truncated,
        wrong_digest, lambda: refused(tensorlift.HeaderError, "bad.safetensors"),
        lambda: refused(tensorlift.CheckpointNotFoundError, "nowhere.safetensors"),
        lambda: refused(tensorlift.TensorNotFoundError, "small.safetensors", names="c"),
        lambda: refused(tensorlift.OptionError, "small.safetensors", threads=-1),
    ]  # fmt: skip


def kinds_of_forks(bench: Bench) -> list[Callable[[], object]]:
    """One round; what the first begins, the last ends."""
    other: list[tuple[subprocess.Popen[str], str]] = []

    def fork(url: str, **options: Any) -> Any:
        state = bench.empty()
        done = tensorlift.fork(url, into=state, patience=60.0, **options)
        bench.check(state)
        return done

    def own(*transports: str, **options: Any) -> None:
        with tensorlift.seed(dict(bench.expected), key=KEY, transports=transports) as seed:
            fork(seed.url, **options)

    def another(*transports: str) -> None:
        if not other:
            other.append(begin_seed(bench))
        fork(other[0][1], transports=transports)

    def unlike() -> None:
        with tensorlift.seed(bench.small, key=KEY) as seed, expects(tensorlift.ForkError):
            tensorlift.fork(seed.url, into=bench.empty())

    def updated() -> None:
        with tensorlift.seed(dict(bench.expected), key=KEY, weights="1") as seed:
            with seed.updating(weights="2"):
                pass
            assert fork(seed.url).weights == "2"

    def killed() -> None:
        """In the middle: the files stand in."""
        process, url = other.pop()

        def report(done: int, total: int) -> None:
            process.kill()

        fork(url, chunk_bytes=256 * KIB, limit="40MB/s", progress=report, fallback=bench.model)
        end(process)

    def gone() -> None:
        """One that ends as it should, and is asked once more."""
        process, url = begin_seed(bench)
        fork(url)
        end(process)
        assert process.returncode == 0
        with expects(tensorlift.ForkError):
            tensorlift.fork(url, into=bench.empty(), patience=1.0)

    return [
        lambda: own("tcp"), lambda: own("shm"), lambda: own("tcp", "shm", connections=4),
        lambda: own("tcp", digests="off", chunk_bytes=64 * KIB), lambda: another("tcp"),
        lambda: another("shm"), unlike, updated, killed, gone,
    ]  # fmt: skip


@contextlib.contextmanager
def expects(error: type[BaseException]) -> Iterator[None]:
    """An error that has to come."""
    try:
        yield
    except error:
        return
    raise AssertionError(f"no {error.__name__} came")


def child(what: str, bench: Bench) -> subprocess.Popen[str]:
    """This program in a process of its own."""
    command = [sys.executable, str(PROGRAM), "--child", what, str(bench.folder), "--device", bench.device]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def begin_seed(bench: Bench) -> tuple[subprocess.Popen[str], str]:
    """A seed in another process, and its URL."""
    process = child("seed", bench)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> str:
    """Closes its standard input and gives what it still says; its return code is there then."""
    return process.communicate(timeout=SECONDS)[0]
