"""Where the digests of a checkpoint lie: found, read and written."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from tensorlift.errors import DigestError, OutOfMemoryError, RequestError
from tensorlift.format.checkpoint import Checkpoint
from tensorlift.format.comparing import Scope, expect, expect_given
from tensorlift.format.digests import LONGEST_SIDECAR, Expected, Sidecar, decode, encode
from tensorlift.format.listing import INDEX_SUFFIX
from tensorlift.format.quoting import clean
from tensorlift.options import LoadOptions
from tensorlift.outputs import Kind, check_output, write_output
from tensorlift.sources.problems import refused

__all__ = [
    "FILE_SUFFIX",
    "FOLDER_NAME",
    "check_place",
    "expected_digests",
    "find_sidecar",
    "is_of_all",
    "read_sidecar",
    "sidecar_to_write",
    "write_sidecar",
]

FOLDER_NAME = "tensorlift.digests.json"
"""The sidecar of a folder lies in it."""
FILE_SUFFIX = ".digests.json"
"""The sidecar of a single file is called like it, with this behind."""

_PART = 1 << 20
_DIGESTS = Kind("a file of digests", b"{", b'"tensorlift.digests"')


def expected_digests(
    checkpoint: Checkpoint, rows: npt.NDArray[np.int64], options: LoadOptions, whole: bool
) -> Expected | None:
    """What ``options.verify`` asks of the given rows; None where nothing is to be checked.

    ``whole``: all tensors were asked for, not some by name, so none may be missing. Raises DigestError where
    there are no digests, or they do not fit the headers; reads no tensor.
    """
    verify = options.verify
    if verify is None or verify is False:
        return None
    if isinstance(verify, Mapping):
        return expect_given(verify, checkpoint)
    path = find_sidecar(checkpoint) if verify is True else verify
    sidecar = read_sidecar(path)
    all_files = is_of_all(path, sidecar, checkpoint)
    return expect(sidecar, checkpoint, rows.tolist(), path, whole=whole, all_files=all_files)


def is_of_all(path: str, sidecar: Sidecar, checkpoint: Checkpoint) -> bool:
    """Whether all files of a sidecar have to be there: a folder or an index was asked for, and the sidecar is
    its own, or lies elsewhere and knows one of its files.
    """
    try:
        own = sidecar_to_write(checkpoint)
    except RequestError:
        return False
    if os.path.basename(own) != FOLDER_NAME:
        return False
    if os.path.realpath(own) == os.path.realpath(path):
        return True
    return bool(Scope.of(sidecar, checkpoint, all_files=False).present)


def _folder_of(checkpoint: Checkpoint) -> str | None:
    """The folder that the caller meant, or that all files lie in; None for files of several folders."""
    where = checkpoint.where
    if os.path.isdir(where) and not _is_hub_folder(checkpoint, where):
        return where
    if where.lower().endswith(INDEX_SUFFIX):
        return os.path.dirname(where)
    folders = {os.path.dirname(shard.path) for shard in checkpoint.shards}
    return folders.pop() if len(folders) == 1 else None


def _is_hub_folder(checkpoint: Checkpoint, where: str) -> bool:
    """Whether the files lie in a snapshot below the folder that was given (a model in a Hub cache)."""
    prefix = os.path.join(where, "snapshots", "")
    return bool(checkpoint.shards) and checkpoint.shards[0].path.startswith(prefix)


def find_sidecar(checkpoint: Checkpoint) -> str:
    """Path of the digests that belong to a checkpoint; DigestError that says where they were looked for."""
    shards, folder = checkpoint.shards, _folder_of(checkpoint)
    places = [shards[0].path + FILE_SUFFIX] if len(shards) == 1 else []
    if folder is not None:
        # A folder's own first where a folder was asked for.
        places.insert(
            0 if os.path.isdir(checkpoint.where) else len(places), os.path.join(folder, FOLDER_NAME)
        )
    for path in places:
        if os.path.lexists(path):
            return path
    looked = " and ".join(map(clean, places)) or "nowhere, for its files lie in several folders"
    raise DigestError(
        f"{clean(checkpoint.where)}: there are no digests to compare with (looked for: {looked}); make them "
        "with 'tensorlift digest', or name the file that has them"
    )


def sidecar_to_write(checkpoint: Checkpoint) -> str:
    """Path where the digests of a checkpoint go by default; RequestError for a list of several files."""
    shards, where = checkpoint.shards, checkpoint.where
    if len(shards) == 1 and where == shards[0].path:
        return where + FILE_SUFFIX
    folder = _folder_of(checkpoint)
    # Some files of a folder must not take the place of the digests of all.
    if folder is None or where.endswith(f" and {len(shards) - 1:,} more"):
        raise RequestError(
            f"{clean(where)}: say where the digests of a list of files go (--out), or give their folder"
        )
    return os.path.join(folder, FOLDER_NAME)


def read_sidecar(path: str) -> Sidecar:
    """Digests from a file. Raises DigestError for what is none, CheckpointNotFoundError, ReadError."""
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise DigestError(f"{clean(path)}: wanted a file of digests, found no regular file")
            return decode(_bytes_of(file, path), path)
    except MemoryError:
        raise OutOfMemoryError(f"{clean(path)}: there is not enough memory for these digests") from None
    except OSError as error:
        if isinstance(error, IsADirectoryError):
            raise DigestError(
                f"{clean(path)}: wanted a file of digests, found a folder; verify=True finds them by itself"
            ) from None
        raise refused(error, path, "read") from None


def _without_waiting(path: str, flags: int) -> int:
    """An opener, for open() closes what comes of one where that is a folder."""
    # Without O_NONBLOCK, opening a named pipe would wait for a writer.
    return os.open(path, flags | os.O_NONBLOCK)


def _bytes_of(file: BinaryIO, path: str) -> bytes:
    """All bytes, in parts: one read of the most that may be would take all that memory for a small file."""
    nbytes = os.fstat(file.fileno()).st_size
    parts: list[bytes] = []
    while nbytes <= LONGEST_SIDECAR and (part := file.read(_PART)):
        parts.append(part)
        nbytes = max(nbytes, sum(map(len, parts)))
    if nbytes > LONGEST_SIDECAR:
        raise DigestError(
            f"{clean(path)}: {nbytes:,} bytes, and files of digests have {LONGEST_SIDECAR:,} at most: "
            "this is none"
        )
    return b"".join(parts)


def check_place(path: str, checkpoint: Checkpoint, option: str) -> None:
    """Raises OptionError or MachineError where the digests of a checkpoint cannot or must not be written."""
    check_output(path, _DIGESTS, option, ((shard.device, shard.inode) for shard in checkpoint.shards))


def write_sidecar(path: str, sidecar: Sidecar) -> None:
    """Writes digests; what is there is replaced once all is on disk, or stays as it is. MachineError."""
    with write_output(path, "the file of digests") as file:
        file.write(encode(sidecar))
