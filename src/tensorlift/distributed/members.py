"""Who loads together: the ranks that a caller's ``process_group`` means, and how a process is known again."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from tensorlift.errors import RequestError
from tensorlift.format.quoting import shown

__all__ = ["WORLD", "Members", "Process", "machine", "members_of", "this_process"]

WORLD = "world"


@dataclass(frozen=True, slots=True)
class Members:
    """The ranks of one load."""

    group: Any
    """The caller's ProcessGroup; for "world" that of the world, through which no byte of a load goes."""
    temporary: bool
    """Collectives go through a group that is made for this load."""
    rank: int
    """Of this process, counted in the group."""
    world_ranks: tuple[int, ...]
    """Of all, by their rank in the group."""
    number: int
    """Loads of these ranks before this one, which is why all must load equally often."""

    @property
    def count(self) -> int:
        """How many."""
        return len(self.world_ranks)

    def name(self, rank: int) -> str:
        """A rank of the group as people know it."""
        return f"rank {self.world_ranks[rank]}"

    def store(self) -> Any:
        """A client of its own of the group's store: one that waits would keep the other threads waiting."""
        from torch.distributed import PrefixStore  # type: ignore[attr-defined] # not in every torch

        group = self.group
        store: Any = (
            group.get_group_store()
            if hasattr(group, "get_group_store")
            else dist.distributed_c10d._world.pg_map[group][1]
        )
        # Not every store can: those of old releases of torch, and those that are written in Python.
        with contextlib.suppress(AttributeError, RuntimeError):
            store = store.clone()
        return PrefixStore(f"tensorlift/{self.number}", store)

    def skipping(self) -> Members:
        """The same for the load after this one."""
        with _counting:
            _loads[self.group] = max(_loads.get(self.group, 0), self.number + 2)
        return dataclasses.replace(self, number=self.number + 1)


# Two threads may begin loads over two groups at once.
_counting = threading.Lock()
_loads: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def members_of(process_group: object, *, alone: bool) -> Members | None:
    """The ranks of a load; None for this process alone.

    process_group: None, "world", or a torch.distributed.ProcessGroup that this process is in. ``alone``:
    what to say to a group of one rank, whether it loads as if there were none. Raises RequestError for
    anything else, or where torch.distributed was not initialised although the environment says that there are
    several ranks.
    """
    if process_group is None:
        return None
    if not dist.is_available():
        raise RequestError("process_group: this torch was built without torch.distributed")
    if isinstance(process_group, str) and process_group == WORLD:
        if not dist.is_initialized():
            _check_alone()
            return None
        group: Any = dist.group.WORLD
    elif isinstance(process_group, dist.ProcessGroup):
        group = process_group
    elif process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise RequestError("process_group: this rank is not in the group; only those that are load with it")
    else:
        raise RequestError(
            f"process_group is {shown(process_group)}; expected None, 'world' or a "
            "torch.distributed.ProcessGroup"
        )
    if group.size() == 1 and alone:
        return None
    try:
        world_ranks = tuple(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):
        raise RequestError(
            "process_group: torch.distributed does not know this group; it was destroyed, or not made by "
            "init_process_group() or new_group()"
        ) from None
    with _counting:
        number = _loads.get(group, 0)
        _loads[group] = number + 1
    return Members(group, group is not process_group, group.rank(), world_ranks, number)


def _check_alone() -> None:
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks.strip() not in ("", "1"):
        raise RequestError(
            f"process_group='world', and WORLD_SIZE is {ranks}, but torch.distributed is not initialised: "
            "call torch.distributed.init_process_group() first, or leave process_group out"
        )


class Process(msgspec.Struct, frozen=True):
    """Names a process so that others on its host can see whether it still runs."""

    host: str
    """Of the running kernel and the space of process ids; "" where the kernel does not say."""
    pid: int
    started: str
    """In the kernel's clock: ids are used again."""

    def is_gone(self) -> bool:
        """Whether it ended; for processes of this host."""
        return _started(self.pid) not in (self.started, None)

    def is_beside(self, other: Process) -> bool:
        """Whether one can look after the other by its id: the network between them does not matter."""
        return self.host != "" and self.host == other.host


def machine() -> str:
    """The running kernel, which containers of one machine share; "" where it does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def this_process() -> Process:
    """Of the caller."""
    host = machine()
    try:
        host = host and f"{host}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        host = ""
    started = _started(os.getpid())
    return Process(host if started else "", os.getpid(), started or "")


def _started(pid: int) -> str | None:
    """When a process began; "" for one that has ended, None where that cannot be seen."""
    try:
        about = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        # Hidden from other users, or this process has no descriptor left: a signal needs neither.
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return ""
        except OSError:
            return None
        return None
    # The name comes second and may have blanks and brackets of its own; field 3 is the state, 22 the start.
    fields = about.rpartition(")")[2].split()
    # What is only waited for by its parent has ended.
    return "" if fields[0] in "ZX" else fields[19]
