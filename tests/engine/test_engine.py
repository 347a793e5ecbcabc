"""The engine through its Python class: pieces in, bytes out, tickets, errors, closing."""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from support import child
from support.checkpoints import random_row, write_safetensors
from tensorlift import sources
from tensorlift.engine import abi, digesting
from tensorlift.engine import engine as engine_module
from tensorlift.engine.engine import Engine
from tensorlift.engine.events import STAGE_NAMES
from tensorlift.engine.report import report_of
from tensorlift.engine.sizing import EngineSize
from tensorlift.errors import CheckpointNotFoundError, FileError, RequestError, TruncatedError
from tensorlift.format.checkpoint import Shard
from tensorlift.plan.pieces import DIGEST, new_pieces

SIZE = EngineSize(1 << 16, 1 << 18, 1 << 20, 2, 4, ("AUTO",))
NBYTES = 300_000


@pytest.fixture
def shard(tmp_path: Path) -> Shard:
    path = write_safetensors(tmp_path / "m.safetensors", {"t": random_row("U8", [NBYTES], 1)})
    return sources.read_headers(sources.find(path)).shards[0]


def raw(shard: Shard) -> bytes:
    with open(shard.absolute, "rb") as file:
        return file.read()


def memory(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.full(nbytes, 0xAA, np.uint8)


def test_pieces_land_where_they_should(shard: Shard) -> None:
    to, content = memory(NBYTES + 100), raw(shard)
    with Engine(SIZE) as engine:
        file = engine.add_file(shard)
        assert engine.shards == (shard,)
        address = to.ctypes.data
        first = engine.submit(new_pieces([file], [10], [5], [address + 50]))
        second = engine.submit(
            new_pieces([file] * 3, [64, 0, 7], [200_000, 9, 0], [address + 60, address, 0])
        )
        assert (first, second) == (1, 4)
        engine.wait(second)
        assert engine.landed == 4
        assert engine.bytes_done() == 5 + 200_000 + 9
        report = report_of(engine)
    wanted = memory(NBYTES + 100)
    wanted[50:55] = list(content[10:15])
    wanted[60 : 60 + 200_000] = np.frombuffer(content[64 : 64 + 200_000], np.uint8)
    wanted[:9] = list(content[:9])
    assert (to == wanted).all()
    assert report.bytes == 200_014
    assert sum(report.residency.values()) == 1
    assert report.threads >= 1


def test_nothing_submitted_is_nothing_to_wait_for(shard: Shard) -> None:
    with Engine(SIZE) as engine:
        engine.add_file(shard)
        engine.wait(0)
        assert engine.landed == 0


def test_a_closed_engine_says_so(shard: Shard) -> None:
    engine = Engine(SIZE)
    engine.close()
    engine.close()
    engine.cancel()
    assert engine.closed
    for call in (lambda: engine.landed, engine.stats, lambda: engine.wait(1), lambda: engine.add_file(shard)):
        with pytest.raises(RequestError, match="closed"):
            call()


def test_a_file_that_ends_early_names_the_tensor(shard: Shard) -> None:
    to = memory(NBYTES)
    os.truncate(shard.absolute, 100_000)
    with Engine(SIZE) as engine:
        file = engine.add_file(shard)
        ticket = engine.submit(new_pieces([file], [shard.header.starts[0]], [NBYTES], [to.ctypes.data]))
        with pytest.raises(TruncatedError, match=r"m\.safetensors.*tensor 't'"):
            engine.wait(ticket)


def test_a_file_that_was_replaced(shard: Shard, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(raw(shard))
    os.replace(other, shard.absolute)
    to = memory(10)
    with Engine(SIZE) as engine:
        ticket = engine.submit(new_pieces([engine.add_file(shard)], [0], [10], [to.ctypes.data]))
        with pytest.raises(FileError, match=r"m\.safetensors.*replaced"):
            engine.wait(ticket)


def test_a_file_that_is_gone(shard: Shard) -> None:
    os.unlink(shard.absolute)
    to = memory(10)
    with Engine(SIZE) as engine:
        ticket = engine.submit(new_pieces([engine.add_file(shard)], [0], [10], [to.ctypes.data]))
        with pytest.raises(CheckpointNotFoundError, match="gone"):
            engine.wait(ticket)


@pytest.fixture
def never_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tickets stay pending, as with storage that does not answer."""
    monkeypatch.setitem(abi.library().call, "tl_engine_wait", lambda *_: abi.Status.PENDING)


@pytest.mark.usefixtures("never_there")
def test_a_wait_ends_when_another_thread_closes() -> None:
    engine = Engine(SIZE)
    seen: list[BaseException] = []
    begun = threading.Event()

    def work() -> None:
        try:
            engine.wait(5, tick=begun.set)
        except RequestError as error:
            seen.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(10)
    engine.close()
    thread.join(10)
    assert [str(error) for error in seen] == ["the engine is closed"]


def interrupted(call: Callable[[], object], at: int) -> bool:
    """Ctrl-C before instruction ``at`` of the engine's own frames; False where the call has fewer."""
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename != engine_module.__file__ or frame.f_code.co_name == "__del__":
            return None  # an older engine may be collected meanwhile, and what a __del__ raises goes nowhere
        frame.f_trace_opcodes = True
        if event == "opcode":
            count += 1
            if count == at:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.parametrize("name", ["stats", "wait"])
def test_an_interrupt_anywhere_in_a_call_does_not_keep_close_waiting(name: str) -> None:
    calls = {"stats": lambda engine: engine.stats(), "wait": lambda engine: engine.wait(0)}
    for at in itertools.count(1):
        engine = Engine(SIZE)
        came = interrupted(lambda: calls[name](engine), at)  # noqa: B023 - called at once
        engine.close()
        assert engine.closed
        if not came:
            assert at > 20
            return


def test_a_close_in_the_middle_of_a_call_of_the_same_thread() -> None:
    engine = Engine(SIZE)
    library = engine._abi

    class Closing:
        def engine_stats(self, handle: abi.Handle) -> abi.Stats:
            engine.close()  # as a signal's handler might
            return library.engine_stats(handle)

    engine._abi = Closing()  # type: ignore[assignment]
    engine._abi.engine_cancel = library.engine_cancel  # type: ignore[method-assign]
    engine._abi.engine_destroy = library.engine_destroy  # type: ignore[method-assign]
    with pytest.raises(RequestError, match="closed"):
        engine.stats()


@pytest.mark.usefixtures("never_there")
def test_what_a_tick_raises_comes_out() -> None:
    class Stop(Exception):
        pass

    def tick() -> None:
        raise Stop

    with Engine(SIZE) as engine, pytest.raises(Stop):
        engine.wait(1, tick)


def forked_wait(path: str) -> str:
    shard = sources.read_headers(sources.find(path)).shards[0]
    to = memory(10)
    engine = Engine(SIZE)
    file = engine.add_file(shard)
    pieces = new_pieces([file], [0], [10], [to.ctypes.data])
    engine.wait(engine.submit(pieces))
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            engine.wait(1)
            engine.submit(pieces)
            answer = "no error"
        except RequestError as error:
            answer = str(error)
        engine.close()
        os.write(write, answer.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    engine.close()
    return os.read(read, 1000).decode()


def test_a_forked_child_gets_an_error(shard: Shard) -> None:
    assert "parent process" in child.call(forked_wait, os.fsdecode(shard.absolute))


def test_arenas_are_counted() -> None:
    library = abi.library()
    before = library.arena_live()
    arena, address = library.arena_host(10)
    assert address % 64 == 0
    assert library.arena_live() == before + 1
    library.arena_release(arena)
    assert library.arena_live() == before


def test_probes_answer(shard: Shard) -> None:
    library = abi.library()
    assert library.backend_probe("PREAD", os.fsdecode(shard.absolute)) is None
    assert "No such file" in (library.backend_probe("PREAD", "/no/such/file") or "")
    assert library.backend_not_built("PREAD") is None


def allowed(thread: str) -> str:
    lines = Path("/proc/self/task", thread, "status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith("Cpus_allowed_list"))


def test_threads_stay_on_the_cpus_that_are_near(shard: Shard) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("this process may use one CPU only")
    near = max(os.sched_getaffinity(0))
    to, before = memory(NBYTES), set(os.listdir("/proc/self/task"))
    for backend in ("BUFFERED", "AIO"):
        size = dataclasses.replace(
            SIZE, threads=1, io_depth=1, near=frozenset([near]), backends=(backend, "PREAD")
        )
        with Engine(size) as engine:
            pieces = new_pieces([engine.add_file(shard)], [0], [NBYTES], [to.ctypes.data])
            engine.wait(engine.submit(pieces))
            threads = set(os.listdir("/proc/self/task")) - before
            assert {allowed(thread) for thread in threads} == {str(near)}
            assert bytes(engine.stats().notes) == b""


def test_cpus_that_cannot_be_had_are_told(shard: Shard) -> None:
    to = memory(10)
    with Engine(dataclasses.replace(SIZE, near=frozenset([1023]))) as engine:
        engine.wait(engine.submit(new_pieces([engine.add_file(shard)], [0], [10], [to.ctypes.data])))
        assert b"near the device" in bytes(engine.stats().notes)


def test_a_trace_has_the_reads(shard: Shard) -> None:
    to = memory(NBYTES)
    pieces = [[0, 100_000, 0], [100_000, 200_000, 100_000]]
    for wanted in (True, False):
        with Engine(SIZE, trace=wanted) as engine:
            file = engine.add_file(shard)
            for offset, nbytes, at in pieces:
                engine.wait(engine.submit(new_pieces([file], [offset], [nbytes], [to.ctypes.data + at])))
            events = engine.trace()
        reads = events[events["stage"] == STAGE_NAMES.index("READ")]
        assert int(reads["nbytes"].sum()) == (300_000 if wanted else 0)
        assert (events["begin_ns"] <= events["end_ns"]).all()
        assert {abi.PATH_NAMES[path] for path in reads["path"]} == ({"PREAD_BUFFERED"} if wanted else set())
        assert (len(events) > 0) == wanted


def test_digests_of_pieces_and_of_memory(shard: Shard) -> None:
    to, content = memory(NBYTES), raw(shard)
    pieces = new_pieces(
        [0, 0, 0], [5, 1000, 70_001], [300, 69_001, 200_000], to.ctypes.data + np.array([0, 300, 80_000])
    )
    pieces["flags"] = [DIGEST, 0, DIGEST]
    with Engine(SIZE) as engine:
        engine.add_file(shard)
        with pytest.raises(RequestError, match="not landed"):
            engine.digests(0, 1)
        engine.wait(engine.submit(pieces))
        made = engine.digests(0, 3)
        assert engine.digests(2, 1).tobytes() == made[2].tobytes()
    assert made.shape == (3, 16)
    assert made[0].tobytes() == xxhash.xxh3_128_digest(content[5:305])
    assert made[1].tobytes() == bytes(16)
    assert made[2].tobytes() == xxhash.xxh3_128_digest(content[70_001:270_001])
    parts = np.zeros((3, 16), np.uint8)
    digesting.digest_parts(to, np.array([0, 300, 300, 301]), parts)
    assert [part.tobytes() for part in parts] == [
        xxhash.xxh3_128_digest(some) for some in (content[5:305], b"", content[1000:1001])
    ]


def test_a_digested_piece_fits_a_slot(shard: Shard) -> None:
    to = memory(NBYTES)
    pieces = new_pieces([0], [0], [SIZE.slot_size + 1], [to.ctypes.data])
    pieces["flags"] = DIGEST
    with Engine(SIZE) as engine:
        engine.add_file(shard)
        with pytest.raises(RequestError, match="larger than a slot"):
            engine.submit(pieces)


def probed(kind: int) -> list[object]:
    return list(abi.library().driver_probe(kind))


def test_drivers_are_counted_or_the_reason_is_kept() -> None:
    # In a process of its own: the library keeps what it found, and other tests bring drivers of their own.
    count, reason = child.call(probed, abi.DEVICE_HIP)
    assert count > 0 or reason
