"""What ranks compare before they load together, and what follows from it: pure, over what each rank says."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tensorlift.errors import DisagreementError
from tensorlift.format.checkpoint import Checkpoint, Shard
from tensorlift.format.quoting import clean, some_of

__all__ = [
    "SEVERAL",
    "File",
    "Request",
    "Schedule",
    "agree_on_call",
    "agree_on_files",
    "files_of",
    "pack",
    "schedule_of",
    "unpack",
]

Name = Callable[[int], str]

SEVERAL = "several"
"""As the type of a request's device: its tensors go to more than one."""


class File(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One file of a checkpoint as all ranks must have it; where it lies and how old it is may differ."""

    name: str
    """Without the folder."""
    nbytes: int
    header: str
    """A digest of what the header says."""


class Request(msgspec.Struct, frozen=True):
    """What one rank wants of the files that all have; bytes."""

    exchange: str
    """auto, gather or none."""
    device: str
    """Its type, or SEVERAL."""
    verify: bool
    own: str
    arena_size: int
    rows: bytes
    """See pack(): which rows it wants whole."""
    temporary: bool
    """The group is made for this load."""
    host: str
    """Which one; "" where the kernel does not say."""
    cached: float
    """Of the files, 0 to 1; -1 where that is not known."""


class Schedule(msgspec.Struct, frozen=True):
    """What all ranks do."""

    exchange: str
    """gather or none."""
    why: str
    arena_size: int
    rows: bytes
    """See pack(): what is exchanged."""
    figures: dict[str, float]
    """What auto rests on: seconds, bytes, bytes a second, shares."""
    ranks_per_host: int


def files_of(checkpoint: Checkpoint) -> list[File]:
    """In the order of the shards."""
    return [
        File(clean(shard.path.rpartition("/")[2]), shard.nbytes, _digest(shard))
        for shard in checkpoint.shards
    ]


def _digest(shard: Shard) -> str:
    """Of names, dtypes, shapes, places and metadata: two headers with the same are the same to a load."""
    header = shard.header
    digest = hashlib.blake2b(digest_size=16)
    for part in (
        msgspec.json.encode([header.names, header.shapes, header.metadata]),
        header.dtypes.tobytes(),
        header.starts.tobytes(),
        header.sizes.tobytes(),
    ):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def agree_on_call(at_random: Sequence[bool], name: Name) -> None:
    """Raises DisagreementError where some ranks read at random, whom the others would wait for for ever."""
    if len(set(at_random)) > 1:
        one, other = at_random.index(True), at_random.index(False)
        raise DisagreementError(
            f"{name(one)} called safe_open, and {name(other)} load, open or load_into: every rank of a group "
            "has to call the same function, in the same order"
        )


def agree_on_files(given: Sequence[Sequence[File]], name: Name) -> None:
    """Raises DisagreementError where two ranks have different files; their order does not count."""
    first = sorted(given[0])
    for rank, files in enumerate(given):
        if sorted(files) != first:
            raise DisagreementError(_difference(given[0], files, name(0), name(rank)))


def _difference(ours: Sequence[File], theirs: Sequence[File], us: str, them: str) -> str:
    begin = f"{us} and {them} were asked to load different checkpoints together: "
    advice = "; give all ranks the same files"
    here, there = {file.name: file for file in ours}, {file.name: file for file in theirs}
    for have, lack, mine, other in ((here, there, us, them), (there, here, them, us)):
        missing = [name for name in have if name not in lack]
        if missing:
            return f"{begin}{mine} has {some_of(missing, 1)}, {other} has no file of that name{advice}"
    for name, file in here.items():
        other_file = there[name]
        if file.nbytes != other_file.nbytes:
            sizes = f"{file.nbytes:,} bytes on {us} and {other_file.nbytes:,} on {them}"
            return f"{begin}{name} has {sizes}{advice}"
        if file.header != other_file.header:
            return f"{begin}{name} has the same size on both, but its header says different things{advice}"
    return f"{begin}one has a file more often than the other{advice}"


def pack(mask: npt.NDArray[np.bool_]) -> bytes:
    """A mask over the rows of a checkpoint, small."""
    return zlib.compress(np.packbits(mask).tobytes(), 1)


def unpack(packed: bytes, count: int) -> npt.NDArray[np.bool_]:
    """The mask again."""
    return np.unpackbits(np.frombuffer(zlib.decompress(packed), np.uint8), count=count).astype(bool)


def schedule_of(
    given: Sequence[Request],
    sizes: npt.NDArray[np.int64],
    name: Name,
    predict: Callable[[Sequence[Request], int], tuple[str, str, dict[str, float]]],
    ranks_per_host: int,
) -> Schedule:
    """What all do, from what each wants; ``sizes``: bytes of all rows.

    ``predict``: (exchange, why, figures) of requests that leave it open, and of the bytes that all want.
    Raises DisagreementError where requests do not go together.
    """
    for field in ("exchange", "device", "own", "verify"):
        _same(given, field, name)
    common = np.ones(len(sizes), bool)
    for packed in {request.rows for request in given}:
        common &= unpack(packed, len(sizes))
    nbytes = sum(sizes[common].tolist())  # sparse files can be larger together than 64 bits say
    exchange, why = given[0].exchange, "asked for"
    figures: dict[str, float] = {}
    if not nbytes and exchange != "none":
        exchange, why = "none", "no tensor is wanted whole by all ranks"
    elif given[0].device == SEVERAL and exchange != "none":
        exchange, why = "none", "the tensors of a rank lie on several devices"
    elif exchange == "auto":
        exchange, why, figures = predict(given, nbytes)
    if exchange == "none":
        common[:] = False
    arena_size = min(request.arena_size for request in given)
    return Schedule(exchange, why, arena_size, pack(common), figures, ranks_per_host)


def _same(given: Sequence[Request], field: str, name: Name) -> None:
    values: list[Any] = [getattr(request, field) for request in given]
    other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
    if other is not None:
        raise DisagreementError(
            f"{name(0)} and {name(other)} were asked to load together in different ways: {field} is "
            f"{values[0]!r} on one and {values[other]!r} on the other"
        )
