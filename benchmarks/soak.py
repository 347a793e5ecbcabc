"""Thousands of loads, hundreds of forks, many starts at once: what is held has to be as much as at first.

    python benchmarks/soak.py [--device cpu|standin|cuda:0] [--loads 2000] [--forks 200] [--starts 50]

Loads come in rounds of all kinds: readers, sizes, ways of loading, passes that end early, errors, slices,
kept pinned memory. Forks do too: over TCP and shared memory, from seeds of this process and of others, which
go and come, some killed in the middle. Bytes are compared each time. After each round it is counted what this
process holds; what it holds at the end is compared with what it held after the third round. Starts are
processes that all begin at once, and load. A table comes last; the exit code is 1 where something has grown,
a byte was wrong or a process did not end well.

"standin" is the device of the tests. Not needed: rich, safetensors, a network.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from soak_kinds import KEY, Bench, child, end, kinds_of_forks, kinds_of_loads

import tensorlift
from tensorlift.engine import abi

__all__ = ["main"]

KIB, MIB = 1 << 10, 1 << 20
SETTLED = 3
"""Rounds behind which nothing may grow."""
ALLOWED = {
    "threads": 0, "descriptors": 0, "children": 0, "arenas": 0, "files in /dev/shm": 0,
    "kept by keep_pinned": 0, "pinned bytes": 0, "device bytes by the driver": 0, "device bytes by torch": 0,
    # Maps are joined and cut as the kernel and the C library please, and what Python has cached goes up and
    # down.
    "maps": 16, "Python's blocks": 2000, "bytes of malloc": 512 * KIB, "resident bytes": 8 * MIB,
}  # fmt: skip


def digest(state: Any) -> str:
    """Of all tensors, in the order of their names."""
    total = hashlib.sha256()
    for name in sorted(state):
        total.update(name.encode() + state[name].cpu().numpy().tobytes())
    return total.hexdigest()


def be_child(what: str, folder: Path, device: str) -> None:
    """A seed until standard input ends, or one load."""
    with surroundings(device):
        state = tensorlift.load(folder / "model", "cuda:0" if device == "standin" else device)
        if what == "start":
            print(digest(state))
            return
        with tensorlift.seed(dict(state), key=KEY) as seed:
            print(seed.url, flush=True)
            sys.stdin.read()


@contextlib.contextmanager
def surroundings(device: str) -> Iterator[None]:
    """With the stand-in, a fresh one that loads are told of; it has to be clean at the end."""
    if device != "standin":
        yield
        return
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    from support import standin

    sys.path.pop(0)
    with standin.device():
        yield


def keep_apart() -> None:
    """Gives this process a /dev/shm of its own where that is allowed: others' files are not counted then."""
    libc = ctypes.CDLL(None)
    new_mounts, recursive_private = 0x20000, 0x44000
    if libc.unshare(new_mounts) == 0 and libc.mount(None, b"/", None, recursive_private, None) == 0:
        libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None)


def one_arena() -> None:
    """Has all threads share one arena of malloc's.

    Each new thread takes any of eight arenas a CPU, in which pieces that are free keep whole pages: resident
    bytes would go up by as much as there are CPUs for thousands of loads, whatever is freed.
    """
    arena_max = -8  # M_ARENA_MAX
    ctypes.CDLL(None).mallopt(arena_max, 1)


class _Malloc(ctypes.Structure):
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def held(bench: Bench) -> dict[str, int]:
    """What this process has now."""
    gc.collect()
    if bench.device.startswith("cuda"):
        # Before memory of the host is counted: what torch knows of a pool goes with the pool's last block.
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Malloc
    libc.malloc_trim(0)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kib = {name: int(status.get(name, "0").split()[0]) for name in ("RssAnon", "VmPin", "VmLck")}
    found = {
        "threads": int(status["Threads"]),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "children": len(Path("/proc/thread-self/children").read_text().split()),
        "arenas": abi.library().arena_live(),
        "files in /dev/shm": len(os.listdir("/dev/shm")),
        "kept by keep_pinned": bench.kept,
        "pinned bytes": (kib["VmPin"] + kib["VmLck"]) * KIB,
        "maps": Path("/proc/self/maps").read_text().count("\n"),
        "Python's blocks": sys.getallocatedblocks(),
        "bytes of malloc": int(libc.mallinfo2().uordblks + libc.mallinfo2().hblkhd),
        "resident bytes": kib["RssAnon"] * KIB,
    }
    if bench.device.startswith("cuda"):
        free, total = torch.cuda.mem_get_info()
        found["device bytes by the driver"] = total - free
        found["device bytes by torch"] = torch.cuda.memory_reserved()
    return found


@dataclass
class Line:
    """One line of the table."""

    what: str
    first: int
    last: int
    allowed: int

    @property
    def flat(self) -> bool:
        """Whether no more is held than at first, and what may be between."""
        return self.last - self.first <= self.allowed


def rounds(bench: Bench, name: str, kinds: list[Callable[[], object]], count: int) -> list[Line]:
    """Runs so many rounds; what was held behind the third and at the end."""
    begin, first = time.monotonic(), held(bench)
    for number in range(1, count + 1):
        with surroundings(bench.device):
            for kind in kinds:
                kind()
        if number == min(SETTLED, count):
            first = held(bench)
    last, until = held(bench), time.monotonic() + 5
    # The kernel lists a thread that was joined for a moment more.
    while last["threads"] > first["threads"] and time.monotonic() < until:
        time.sleep(0.01)
        last = held(bench)
    print(f"{name}: {count} rounds of {len(kinds)}, {time.monotonic() - begin:.0f} s", flush=True)
    return [Line(f"{name}: {what}", first[what], last[what], ALLOWED[what]) for what in first]


def starts(bench: Bench, count: int) -> list[Line]:
    """Processes that all begin at once; wrong ones and those that are left are lines."""
    begin, before = time.monotonic(), sorted(bench.folder.rglob("*"))
    shm = len(os.listdir("/dev/shm"))
    processes = [child("start", bench) for _ in range(count)]
    said = [end(process).strip() for process in processes]
    wrong = sum(one != digest(bench.expected) for one in said)
    wrong += sum(process.returncode != 0 for process in processes)
    print(f"starts: {count} at once, {time.monotonic() - begin:.0f} s", flush=True)
    return [
        Line("starts: wrong ones", 0, wrong, 0),
        Line("starts: files", len(before), len(sorted(bench.folder.rglob("*"))), 0),
        Line("starts: files in /dev/shm", shm, len(os.listdir("/dev/shm")), 0),
    ]


def show(lines: list[Line]) -> None:
    """The table."""
    print(f"{'':44}{'third round':>15}{'end':>15}{'more':>12}{'allowed':>10}")
    for line in lines:
        more = f"{line.last - line.first:>12,}{line.allowed:>10,}"
        print(f"{line.what:44}{line.first:>15,}{line.last:>15,}{more}  {'flat' if line.flat else 'GREW'}")


def main(argv: list[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--loads", type=int, default=2000)
    parser.add_argument("--forks", type=int, default=200)
    parser.add_argument("--starts", type=int, default=50)
    parser.add_argument("--folder", type=Path, help="where a folder for the checkpoint is made")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    if asked.child:
        be_child(asked.child[0], Path(asked.child[1]), asked.device)
        return 0
    keep_apart()
    one_arena()
    lines: list[Line] = []
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        bench = Bench(Path(folder), asked.device)
        for name, kinds, wanted in (
            ("loads", kinds_of_loads(bench), asked.loads),
            ("forks", kinds_of_forks(bench), asked.forks),
        ):
            if wanted:
                lines += rounds(bench, name, kinds, -(-wanted // len(kinds)))
        if asked.starts:
            lines += starts(bench, asked.starts)
    show(lines)
    return 0 if all(line.flat for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
