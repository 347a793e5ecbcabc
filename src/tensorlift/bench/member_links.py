"""What several devices can do at best, measured by the ranks of a crew; what a communicator takes."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from tensorlift.bench.crew_member import Member
from tensorlift.bench.member_loads import settle
from tensorlift.bench.worker import device_free

__all__ = ["all_gather", "communicator", "facts", "link", "load_until_death"]

MIB = 1 << 20


def facts(member: Member) -> dict[str, Any]:
    """Of the rank's device, and whether it reaches the others' memory."""
    import torch

    if not member.is_cuda:
        return {"torch": torch.__version__}
    index = torch.device(member.device).index or 0
    count = torch.cuda.device_count()
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": list(torch.cuda.nccl.version()),  # type: ignore[no-untyped-call]
        "gpu": torch.cuda.get_device_name(index),
        "peers": [other for other in range(count) if other != index and _reaches(index, other)],
    }


def _reaches(index: int, other: int) -> bool:
    import torch

    return bool(torch.cuda.can_device_access_peer(index, other))


def link(member: Member, at: float, copies: int) -> float:
    """Bytes per second of pinned copies to the device; on a CPU, of copies in memory."""
    from tensorlift.bench.pinned import pinned_copy_rate
    from tensorlift.bench.samples import Sampler

    settle(member)
    while (left := at - time.monotonic()) > 0:
        time.sleep(left)
    if member.is_cuda:
        return pinned_copy_rate(member.device, copies)
    return Sampler(member.device, 1).link_rate()


def all_gather(member: Member, nbytes: int, times: int) -> list[float]:
    """Seconds of an all-gather, in place, whose whole result has so many bytes: five means of ``times``."""
    import torch
    import torch.distributed as dist

    width = nbytes // member.ranks
    whole = torch.zeros(width * member.ranks, dtype=torch.uint8, device=member.device)
    share = whole[member.rank * width : (member.rank + 1) * width]
    # torch 2.13 renamed it, and warns of the name that it had.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    found = []
    for _ in range(6):
        member.synchronize()
        begin = time.perf_counter()
        for _ in range(times):
            gather(whole, share)
        member.synchronize()
        found.append((time.perf_counter() - begin) / times)
    return found[1:]


def communicator(member: Member, times: int, nbytes: int) -> list[dict[str, Any]]:
    """A load's own group, made, used once and ended, again and again: seconds, and device memory by the
    driver's count (none on a CPU). What the first leaves is left once in a process.
    """
    import torch

    from tensorlift.distributed.communicator import Communicator
    from tensorlift.distributed.members import WORLD, members_of

    found = []
    for _ in range(times):
        settle(member)
        free = [device_free(member.device)]
        members = members_of(WORLD, alone=False)
        assert members is not None
        group = Communicator(members, torch.device(member.device))
        group.wait_until_made(lambda: None)
        free.append(device_free(member.device))
        width = nbytes // member.ranks
        whole = torch.zeros(width * member.ranks, dtype=torch.uint8, device=member.device)
        work: list[Any] = []
        group.gather(whole, whole[member.rank * width : (member.rank + 1) * width], work)
        work[0].wait()
        member.synchronize()
        free.append(device_free(member.device))
        group.release(broken=False)
        del whole, work
        settle(member)
        free.append(device_free(member.device))
        one: dict[str, Any] = {"make_seconds": group.seconds_made, "end_seconds": group.seconds_destroyed}
        if free[0] is not None:
            made, used, left = (free[0] - now for now in free[1:])
            one |= {"made_bytes": made, "used_bytes": used - width * member.ranks, "left_bytes": left}
        found.append(one)
    return found


def load_until_death(
    member: Member, files: list[str], group: str, victim: int, at_tensor: int, options: dict[str, Any]
) -> int | None:
    """A gather in the middle of which one rank kills itself. Tells when and with what error this one ends.

    group: "world", for one that is made for the load, or "own", for that of all ranks, which is of no use
    any more. Gives the bytes of device memory that are gone behind the former.
    """
    from tensorlift.errors import PeerError

    settle(member)
    free = device_free(member.device)
    try:
        _load(member, files, group, victim, at_tensor, options)
    except PeerError as error:
        # At once: what comes next may wait for a gather that never ends.
        member.tell({"at": time.monotonic(), "message": str(error).splitlines()[0]})
    else:
        raise RuntimeError(f"rank {victim} was killed, and rank {member.rank} loaded all the same")
    if free is None or group == "own":
        return None
    settle(member)
    return int(free - device_free(member.device))


def _load(
    member: Member, files: list[str], group: str, victim: int, at_tensor: int, options: dict[str, Any]
) -> None:
    import torch.distributed as dist

    from tensorlift.loading import open as open_weights

    own: Any = dist.group.WORLD if group == "own" else group
    with open_weights(files, member.device, process_group=own, exchange="gather", **options) as weights:
        for count, (_, tensor) in enumerate(weights):
            del tensor
            if member.rank == victim and count == at_tensor:
                member.tell({"at": time.monotonic()})
                os.kill(os.getpid(), signal.SIGKILL)
