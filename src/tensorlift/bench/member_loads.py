"""Loads by a rank of a crew: ours and other loaders', timed, watched, and compared with the plain library."""

from __future__ import annotations

import gc
import os
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tensorlift.bench.crew_member import Member
from tensorlift.bench.parity import same_bytes
from tensorlift.bench.samples import SETTLE_SECONDS
from tensorlift.bench.worker import (
    Watch,
    call_bytes,
    device_free,
    disk_bytes,
    pinned_bytes,
    reset_peak,
    status_bytes,
)
from tensorlift.errors import MismatchError
from tensorlift.plan.tensor_parallel import WAYS

__all__ = [
    "COLUMNS",
    "GATHER",
    "INSTANT",
    "LOADERS",
    "NONE",
    "PLAIN",
    "ROWS",
    "SLICES",
    "TEMPORARY",
    "Job",
    "Loader",
    "drop_reference",
    "sample",
    "settle",
]

Part = tuple[int, int, int] | None


@dataclass(slots=True)
class Job:
    """What a loader is asked for."""

    member: Member
    files: list[str]
    parts: dict[str, Part] | None
    """For each wanted tensor (dim, start, stop), or None for all of it; None: all tensors, whole."""

    @property
    def device(self) -> str:
        """Where tensors go."""
        return self.member.device

    @property
    def group(self) -> Any:
        """That of all ranks; its communicator is there."""
        import torch.distributed as dist

        return dist.group.WORLD

    @property
    def shares(self) -> dict[int, list[str]]:
        """Files by rank."""
        ranks = self.member.ranks
        return {rank: self.files[rank::ranks] for rank in range(ranks)}


Function = Callable[[Job], tuple[Mapping[str, Any], Any]]


@dataclass(frozen=True, slots=True)
class Loader:
    """A way of loading by all ranks."""

    function: Function
    module: str
    """What has to be importable."""
    devices: tuple[str, ...] = ("cpu", "cuda")
    ways: tuple[str, ...] | None = None
    """Loads each rank's part of the tensors that are cut in these ways; None: everything."""


def _ours(**options: Any) -> Function:
    def load(job: Job) -> tuple[Mapping[str, Any], Any]:
        from tensorlift.loading import load

        state = load(job.files, job.device, process_group=options.get("group") or job.group, **rest)
        return state, state.stats

    rest = {name: value for name, value in options.items() if name != "group"}
    return load


def _our_parts(job: Job) -> tuple[Mapping[str, Any], Any]:
    from tensorlift.loading import load

    assert job.parts is not None
    cuts = {name: part for name, part in job.parts.items() if part is not None}
    state = load(job.files, job.device, names=list(job.parts), slices=cuts, process_group=job.group)
    return state, state.stats


def _safetensors(job: Job) -> tuple[Mapping[str, Any], Any]:
    from tensorlift.bench.rivals import load_safetensors

    return load_safetensors(job.files, job.device)


def _safetensors_parts(job: Job) -> tuple[Mapping[str, Any], Any]:
    from safetensors import safe_open

    assert job.parts is not None
    state: dict[str, Any] = {}
    for file in job.files:
        with safe_open(file, framework="pt", device=job.device) as reader:
            for name in reader.keys():  # noqa: SIM118 - not a mapping
                part = job.parts.get(name)
                if part is not None:
                    dim, start, stop = part
                    index = (slice(None),) * dim + (slice(start, stop),)
                    state[name] = reader.get_slice(name)[index if dim else index[0]].contiguous()
                elif name in job.parts:
                    state[name] = reader.get_tensor(name)
    return state, None


def _fastsafetensors(job: Job) -> tuple[Mapping[str, Any], Any]:
    """Each rank reads a share of the files, and broadcasts tensor by tensor."""
    from fastsafetensors import SafeTensorsFileLoader

    # Tensors stay right behind its end.
    loader = SafeTensorsFileLoader(job.group, job.device, nogds=True)
    loader.add_filenames(job.shares)
    buffer = loader.copy_files_to_device()
    state = {}
    for name in list(buffer.key_to_rank_lidx):
        part = job.parts.get(name) if job.parts is not None else None
        state[name] = buffer.get_tensor(name) if part is None else buffer.get_sharded(name, part[0])
    buffer.close()
    loader.close()
    return state, None


def _fastsafetensors_parallel(job: Job) -> tuple[Mapping[str, Any], Any]:
    """As inference engines use it: broadcasts of many tensors at once."""
    from fastsafetensors import ParallelLoader

    loader = ParallelLoader(job.group, job.files, use_tqdm_on_load=False, device=job.device, nogds=True)
    state = dict(loader.iterate_weights())
    loader.close()
    return state, None


def _runai(distributed: bool) -> Function:
    def load(job: Job) -> tuple[Mapping[str, Any], Any]:
        from runai_model_streamer import SafetensorsStreamer

        # It leaves the number of readers of one load to the next.
        os.environ.pop("RUNAI_STREAMER_PROCESS_GROUP_SIZE", None)
        # By itself it takes gloo for no group.
        os.environ["RUNAI_STREAMER_DIST"] = "1"
        with SafetensorsStreamer() as streamer:
            streamer.stream_files(job.files, device=job.device, is_distributed=distributed)
            return dict(streamer.get_tensors()), None

    return load


def _instanttensor(job: Job) -> tuple[Mapping[str, Any], Any]:
    from instanttensor import safe_open

    files = list(job.files)  # it sorts them in place
    with safe_open(files, framework="pt", device=job.device, process_group=job.group) as reader:
        return dict(reader.tensors()), None


GATHER, TEMPORARY, NONE = "gather", "gather, a group for the load", "none"
PLAIN, INSTANT = "safetensors", "InstantTensor"
SLICES, ROWS, COLUMNS = "slices", "slices, rows only", "slices, columns only"
LOADERS: dict[str, Loader] = {
    GATHER: Loader(_ours(exchange="gather"), "tensorlift"),
    TEMPORARY: Loader(_ours(exchange="gather", group="world"), "tensorlift"),
    NONE: Loader(_ours(exchange="none"), "tensorlift"),
    PLAIN: Loader(_safetensors, "safetensors"),
    "fastsafetensors": Loader(_fastsafetensors, "fastsafetensors"),
    "fastsafetensors, parallel": Loader(_fastsafetensors_parallel, "fastsafetensors"),
    "Run:ai": Loader(_runai(False), "runai_model_streamer"),
    "Run:ai, distributed": Loader(_runai(True), "runai_model_streamer"),
    INSTANT: Loader(_instanttensor, "instanttensor", ("cuda",)),
    SLICES: Loader(_our_parts, "tensorlift", ways=WAYS),
    ROWS: Loader(_our_parts, "tensorlift", ways=("rows",)),
    COLUMNS: Loader(_our_parts, "tensorlift", ways=("columns",)),
    "safetensors, slices": Loader(_safetensors_parts, "safetensors", ways=WAYS),
    "fastsafetensors, slices": Loader(_fastsafetensors, "fastsafetensors", ways=WAYS),
}
"""By the names under which they are reported. The first three and those of slices are ours."""


def settle(member: Member) -> None:
    """Nothing of a load is left, and the driver has cleared what was given back."""
    gc.collect()
    if member.is_cuda:
        import torch

        torch.cuda.empty_cache()
        member.synchronize()
        time.sleep(SETTLE_SECONDS)


def sample(
    member: Member, loader: str, files: list[str], at: float, watch: bool = False, check: bool = False
) -> dict[str, Any]:
    """One load, begun by all ranks at a time of the monotonic clock: seconds from then until all is there.

    watch: look at memory meanwhile, which takes time; afterwards, and when all is given back. check: compare
    all bytes with what the plain library reads, and raise MismatchError.
    """
    how = LOADERS[loader]
    parts = None if how.ways is None else _parts(member, files, how.ways)
    job = Job(member, files, parts)
    before, free = status_bytes(), device_free(member.device)
    reset_peak()
    watching = Watch(member.device, watch)
    while (left := at - time.monotonic()) > 0:
        time.sleep(left)
    used, called, fetched = _cpu_seconds(), call_bytes(), disk_bytes()
    begin = time.monotonic()
    state, kept = how.function(job)
    member.synchronize()
    seconds = time.monotonic() - at
    found: dict[str, Any] = {
        "seconds": seconds,
        "late": begin - at,
        "cpu_seconds": _cpu_seconds() - used,
        "call_bytes": call_bytes() - called,
        "disk_bytes": disk_bytes() - fetched,
    }
    watching.end()
    told = kept.to_dict() if hasattr(kept, "to_dict") else {}
    if told:
        found |= {
            name: told[name] for name in ("seconds", "readers", "received_bytes", "exchange", "fallbacks")
        }
        found |= {"seconds": seconds, "phases": told["seconds"]}
    if watch:
        after = status_bytes()
        memory: dict[str, Any] = {
            "tensor_bytes": _tensor_bytes(state),
            "resident_peak": after.get("VmHWM", 0) - before.get("VmRSS", 0),
            "anonymous_peak": watching.anonymous - before.get("RssAnon", 0),
            "pinned_peak": pinned_bytes(watching.pinned, told),
        }
        if free is not None:
            memory |= {
                "device_peak": free - watching.free_least,
                "device_held": free - device_free(member.device),
            }
    if check:
        _compare(member, state, files, parts)
    del state, kept
    if watch:
        settle(member)
        after = status_bytes()
        memory["resident_left"] = after.get("VmRSS", 0) - before.get("VmRSS", 0)
        if free is not None:
            memory["device_left"] = free - device_free(member.device)
        found["memory"] = memory
    return found


def drop_reference(member: Member) -> None:
    """Gives back what loads were compared with."""
    member.kept.pop("reference", None)
    settle(member)


def _parts(member: Member, files: list[str], ways: tuple[str, ...]) -> dict[str, Part]:
    key = repr(("parts", files, ways))
    if key not in member.kept:
        from tensorlift.plan.tensor_parallel import tensor_parallel_slices
        from tensorlift.sources import find, read_headers

        checkpoint = read_headers(find(files))
        member.kept[key] = tensor_parallel_slices(checkpoint, member.rank, member.ranks, ways)
    parts: dict[str, Part] = member.kept[key]
    return parts


def _compare(
    member: Member, state: Mapping[str, Any], files: list[str], parts: dict[str, Part] | None
) -> None:
    reference = member.kept.get("reference")
    if reference is None or reference[0] != files:
        member.kept["reference"] = reference = files, _safetensors(Job(member, files, None))[0]
    wanted = reference[1] if parts is None else parts
    if state.keys() != wanted.keys():
        raise MismatchError(f"rank {member.rank}: {len(state)} tensors came, {len(wanted)} were asked for")
    for name in wanted:
        right = reference[1][name]
        part = None if parts is None else parts[name]
        if part is not None:
            dim, start, stop = part
            right = right.narrow(dim, start, stop - start)
        if not same_bytes(state[name], right):
            raise MismatchError(f"rank {member.rank}: tensor {name!r} has other bytes than safetensors reads")


def _tensor_bytes(state: Mapping[str, Any]) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
