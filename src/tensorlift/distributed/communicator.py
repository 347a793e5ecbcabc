"""The collectives of a load: the caller's group, or one that is made for the load and ended after it."""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tensorlift.distributed.members import Members
from tensorlift.engine import abi
from tensorlift.errors import DeviceError, RanksError

__all__ = ["Communicator"]

# A consumer may take any time between two tensors, and so may a gather: that a rank is gone the board tells.
_FOR_EVER = datetime.timedelta(days=7)
# For ranks to find each other, once each has said that it is there.
_MEETING = datetime.timedelta(seconds=60)
# Seconds: for the end of a group, and of one whose ranks may be gone (NCCL takes 0.5 either way, two H200).
_PATIENCE, _BROKEN = 5.0, 2.0


class Communicator:
    """All-gathers among the members, in the order in which they are issued."""

    def __init__(self, members: Members, device: torch.device) -> None:
        """Begins to make the group, in a thread: ranks need not come to it at the same time."""
        self._members, self._device, self._pid = members, device, os.getpid()
        self._group: Any = None if members.temporary else members.group
        self._failed: BaseException | None = None
        self.seconds_made = self.seconds_destroyed = 0.0
        self._made, self._released = threading.Event(), threading.Event()
        self._meeting: Any = None
        if not members.temporary:
            self._made.set()
            return
        if device.type == "cuda" and not dist.is_nccl_available():
            raise DeviceError(
                "process_group='world' on a CUDA device needs NCCL, which this torch lacks; use a torch that "
                "was built with it, or exchange='none'"
            )
        threading.Thread(target=self._make, name="tensorlift-communicator", daemon=True).start()

    def __del__(self) -> None:
        """In the child of a fork a group must not end: it would wait for threads that only the parent has."""
        if self._pid != os.getpid() and self._group is not None:
            abi.keep_for_ever(self._group)

    @property
    def is_temporary(self) -> bool:
        """Made for this load."""
        return self._members.temporary

    def wait_until_made(self, check: Callable[[], None]) -> None:
        """Returns when there is a group; ``check`` is called meanwhile, and may raise."""
        while not self._made.wait(0.02):
            check()
        if self._failed is not None:
            check()
            raise self._failed

    def gather(self, whole: torch.Tensor, share: torch.Tensor, work: list[Any]) -> None:
        """Begins to complete ``whole``, of which ``share`` is this rank's part, on the current stream.

        Both are bytes in one dimension; the parts of all ranks are equal and lie in the order of the ranks.
        ``work`` gets the gather.
        """
        # torch 2.13 renamed what is below all_gather_into_tensor, and warns of the name that it had.
        group = self._group
        if group is None:
            raise RanksError("the load was closed")
        from torch._C._distributed_c10d import AllgatherOptions  # a torch may be without

        # Not by the limit of a caller's group, for a consumer may take any time.
        options = AllgatherOptions()
        options.timeout = _FOR_EVER
        gather = group.all_gather_single if hasattr(group, "all_gather_single") else group._allgather_base
        # No step of Python between the two: a signal's handler that raises there would lose what was issued,
        # and the first collective of a group waits for the other ranks.
        work.extend(map(gather, (whole,), (share,), (options,)))

    def release(self, *, broken: bool) -> None:
        """Ends a temporary group; ``broken``: its collectives may never end by themselves."""
        if not self._members.temporary:
            self._group = None
            return
        begin = time.perf_counter()
        self._released.set()
        # Its end may wait for peers that are gone (vLLM #39846), and this thread must not.
        ending = threading.Thread(target=self._end, args=(broken,), name="tensorlift-end", daemon=True)
        ending.start()
        ending.join(_BROKEN if broken else _PATIENCE)
        self.seconds_destroyed = time.perf_counter() - begin

    def _make(self) -> None:
        begin = time.perf_counter()
        members = self._members
        backend: Any
        try:
            from torch.distributed import PrefixStore  # type: ignore[attr-defined]

            from tensorlift.distributed.meeting import Meeting

            store = PrefixStore("group", members.store())
            if self._device.type == "cuda":
                kind = dist.ProcessGroup.BackendType.NCCL
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = _FOR_EVER
                torch.cuda.set_device(self._device)  # of this thread
                backend = dist.ProcessGroupNCCL(store, members.rank, members.count, options)
                if hasattr(backend, "eager_connect_single_device"):
                    # Here, beside the first reads; else the first gather makes it, in the load's own thread.
                    backend.eager_connect_single_device(self._device)
            else:
                kind = dist.ProcessGroup.BackendType.GLOO
                meeting = Meeting(store, self._released, _MEETING)
                backend = dist.ProcessGroupGloo(meeting, members.rank, members.count, _MEETING)
                backend._set_default_timeout(_FOR_EVER)
                self._meeting = meeting  # the back end holds the half of it that is not Python's
            group = dist.ProcessGroup(store, members.rank, members.count)
            group._set_default_backend(kind)
            group._register_backend(self._device, kind, backend)
            self._group = group
        except BaseException as error:  # noqa: BLE001 - raised again in the load's thread
            self._failed = error
        self.seconds_made = time.perf_counter() - begin
        self._made.set()

    def _end(self, broken: bool) -> None:
        self._made.wait()
        group, self._group = self._group, None
        if group is None:
            return
        with contextlib.suppress(Exception):
            # gloo's abort() and shutdown() free nobody (torch 2.13); the end of its object closes sockets.
            if group._get_backend_name() != "gloo":
                group.abort() if broken else group.shutdown()
        del group
        self._meeting = None
