"""Who loads together, and how a process is known again."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from support import child
from tensorlift.distributed import members
from tensorlift.distributed.members import Process, machine, members_of, this_process
from tensorlift.errors import RequestError


def of(process: subprocess.Popen[bytes]) -> Process:
    started = members._started(process.pid)
    assert started
    return Process(this_process().host, process.pid, started)


def test_a_process_is_there_until_it_ends() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        seen = of(process)
        assert not seen.is_gone()
        process.send_signal(signal.SIGSTOP)
        assert not seen.is_gone()
        process.kill()
        # One that its parent has not waited for is a zombie, and gone.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert Path(f"/proc/{process.pid}/stat").exists()
        assert seen.is_gone()
    assert seen.is_gone()


def test_an_id_that_is_used_again_is_another_process() -> None:
    mine = this_process()
    assert not mine.is_gone()
    assert Process(mine.host, mine.pid, str(int(mine.started) - 1)).is_gone()


def test_names_of_processes_do_not_confuse(tmp_path: Path) -> None:
    program = tmp_path / "a) S 1 (b Z"
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([str(program), "60"]) as process:
        assert int(of(process).started) > 0
        assert not of(process).is_gone()
        process.kill()


def test_a_process_that_cannot_be_looked_at_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc hides it, or this process has no descriptor left."""

    def refused(*_: object, **__: object) -> str:
        raise OSError(24, "too many open files")

    with subprocess.Popen(["sleep", "60"]) as process:
        seen = of(process)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_text", refused)
            assert not seen.is_gone()
            patch.setattr(os, "kill", lambda *_: (_ for _ in ()).throw(PermissionError()))
            assert not seen.is_gone()
        process.kill()
        process.wait()
        monkeypatch.setattr(Path, "read_text", refused)
        assert seen.is_gone()


def test_who_is_beside_whom() -> None:
    mine = this_process()
    assert mine.host.startswith(machine())
    assert mine.is_beside(Process(mine.host, 1, "2"))
    assert not mine.is_beside(Process("elsewhere", mine.pid, mine.started))
    # Two that do not know where they are.
    assert not Process("", 1, "1").is_beside(Process("", 2, "1"))


def test_where_the_kernel_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> str:
        raise PermissionError

    monkeypatch.setattr(Path, "read_text", refused)
    assert machine() == ""
    assert this_process().host == ""


def test_what_is_no_group() -> None:
    assert members_of(None, alone=True) is None
    for wrong in ("World", 3, [0, 1], object()):
        with pytest.raises(RequestError, match=r"process_group is .*; expected None, 'world' or"):
            members_of(wrong, alone=True)
    with pytest.raises(RequestError, match="this rank is not in the group"):
        members_of(dist.GroupMember.NON_GROUP_MEMBER, alone=True)


@pytest.mark.parametrize(("size", "refused"), [("1", False), ("", False), (" 1 ", False), ("8", True)])
def test_world_where_there_is_none(monkeypatch: pytest.MonkeyPatch, size: str, refused: bool) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    if not refused:
        assert members_of("world", alone=True) is None
        return
    with pytest.raises(RequestError, match=r"WORLD_SIZE is 8, but torch\.distributed is not initialised"):
        members_of("world", alone=True)


def test_a_torch_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_available", lambda: False)
    assert members_of(None, alone=True) is None
    with pytest.raises(RequestError, match=r"built without torch\.distributed"):
        members_of("world", alone=True)


def imported_without_it() -> None:
    import sys

    for name in ("Store", "PrefixStore", "ProcessGroup", "TCPStore"):
        delattr(sys.modules["torch.distributed"], name)
    for name in [name for name in sys.modules if name.startswith("tensorlift")]:
        del sys.modules[name]
    import tensorlift.loading  # noqa: F401


def test_the_package_can_be_imported_there() -> None:
    child.call(imported_without_it)


def counting() -> Any:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group, other = dist.group.WORLD, dist.new_group([0])
    assert members_of("world", alone=True) is None
    found: list[int] = []

    def count() -> None:
        for _ in range(50):
            made = members_of("world", alone=False)
            assert made is not None
            found.append(made.number)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(200))
    # The world by its name or as a group is one group; another one counts for itself.
    mine, theirs = members_of(group, alone=False), members_of(other, alone=False)
    assert mine is not None
    assert theirs is not None
    assert (mine.number, mine.temporary, theirs.number) == (200, False, 0)
    later = mine.skipping().skipping()
    assert later.number == 202
    after = members_of("world", alone=False)
    assert after is not None
    assert (after.number, after.temporary, after.name(0), after.count) == (203, True, "rank 0", 1)
    # The keys of one load are no other's.
    later.store().set("key", b"1")
    assert later.store().check(["key"])
    assert not after.store().check(["key"])
    return "ok"


def test_loads_are_counted_by_group() -> None:
    assert child.call(counting) == "ok"
