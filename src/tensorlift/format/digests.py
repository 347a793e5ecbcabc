"""Digests of tensors in a sidecar: what is in it, how it is written and read.

    {"format": "tensorlift.digests", "version": 1, "algorithm": "xxh3-128-tree-1mib",
     "files": [{"name": "model.safetensors", "nbytes": 4096}],
     "tensors": [{"name": "w", "file": "model.safetensors", "dtype": "BF16", "shape": [2, 2], "nbytes": 8,
                  "digest": "32 hexadecimal digits"}]}

The digest of a tensor is XXH3-128 of its chunks' digests, one after another, 16 bytes each in canonical (big
endian) order; a chunk is 1 MiB counted from the tensor's first byte, the last one what is left. That a
tensor of one chunk is digested twice and one of no bytes gives the digest of nothing needs no rule of its
own. Names of files are relative to the folder that holds them all; they are compared, never opened. It guards
against damage and mixed-up files, not against somebody who changes both: XXH3 is no cryptographic hash.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from tensorlift.errors import DigestError
from tensorlift.format.bounds import LARGEST, MOST_PARTS, Count, is_too_much, product
from tensorlift.format.checkpoint import Checkpoint
from tensorlift.format.dtypes import ALL, BY_CODE
from tensorlift.format.quoting import clean, plural, quote

__all__ = [
    "ALGORITHM",
    "DIGEST_BYTES",
    "LONGEST_SIDECAR",
    "Expected",
    "FileRecord",
    "Sidecar",
    "TensorRecord",
    "decode",
    "describe",
    "encode",
    "listed",
]

ALGORITHM = "xxh3-128-tree-1mib"
DIGEST_BYTES = 16
LONGEST_SIDECAR = 200_000_000
"""Bytes that a sidecar may have: twice the longest header, for it repeats names, dtypes and shapes."""

_FORMAT, _VERSION = "tensorlift.digests", 1
_SHOWN = 20

Digests = npt.NDArray[np.uint8]
_Hex = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$", max_length=32)]


class FileRecord(msgspec.Struct, gc=False, frozen=True):
    """One file: its name below the checkpoint's folder, and all its bytes."""

    name: str
    nbytes: Count


class TensorRecord(msgspec.Struct, gc=False, frozen=True):
    """One tensor; dtype and shape as written in the file, the digest as hexadecimal digits."""

    name: str
    file: str
    dtype: str
    shape: tuple[Count, ...]
    nbytes: Count
    digest: _Hex


class Sidecar(msgspec.Struct, frozen=True):
    """The digests of a checkpoint: files, and tensors in file order."""

    files: tuple[FileRecord, ...]
    tensors: tuple[TensorRecord, ...]


class _Head(msgspec.Struct):
    format: str = ""
    version: int = 0
    algorithm: str = ""


@dataclass(frozen=True, slots=True)
class Expected:
    """The digests that the rows of a checkpoint have to have: (rows, 16) bytes, where ``known``."""

    digests: Digests
    known: npt.NDArray[np.bool_]
    where: str
    """Who says so, for messages."""


def describe(checkpoint: Checkpoint, digests: Digests) -> Sidecar:
    """The sidecar of a checkpoint, from the digests of all its rows: (rows, 16) bytes."""
    names = _file_names(checkpoint)
    text = digests.tobytes().hex()
    step = 2 * DIGEST_BYTES
    return Sidecar(
        tuple(FileRecord(name, shard.nbytes) for name, shard in zip(names, checkpoint.shards, strict=True)),
        tuple(
            TensorRecord(name, names[shard], ALL[dtype].code, shape, nbytes, text[at : at + step])
            for name, shard, dtype, shape, nbytes, at in zip(
                checkpoint.names,
                checkpoint.shard_of.tolist(),
                checkpoint.dtypes.tolist(),
                checkpoint.shapes,
                checkpoint.sizes.tolist(),
                range(0, step * len(checkpoint), step),
                strict=True,
            )
        ),
    )


def _file_names(checkpoint: Checkpoint) -> list[str]:
    """Names of the shards below the folder that holds them all."""
    paths = [os.fsdecode(shard.absolute) for shard in checkpoint.shards]
    if not paths:
        return []
    folder = os.path.commonpath([os.path.dirname(path) for path in paths])
    return [clean(os.path.relpath(path, folder)) for path in paths]


def encode(sidecar: Sidecar) -> bytes:
    """JSON, a line for each file and tensor."""
    head = msgspec.json.encode(_Head(_FORMAT, _VERSION, ALGORITHM))
    files, tensors = (
        b",\n".join(map(msgspec.json.encode, part)) for part in (sidecar.files, sidecar.tensors)
    )
    return head[:-1] + b',\n"files":[\n' + files + b'\n],\n"tensors":[\n' + tensors + b"\n]}\n"


def decode(raw: bytes, path: str) -> Sidecar:
    """A sidecar from its bytes; DigestError, with the place, where it is none or contradicts itself."""
    where = clean(path)
    if len(raw) > LONGEST_SIDECAR:
        raise DigestError(f"{where}: more than {LONGEST_SIDECAR:,} bytes: this is no file of digests")
    if is_too_much(raw):
        raise DigestError(
            f"{where}: more than {MOST_PARTS:,} lists, objects and keys: this is no file of digests"
        )
    try:
        head = msgspec.json.decode(raw, type=_Head)
        if head.format != _FORMAT:
            raise DigestError(
                f"{where}: wanted a file of digests (format {_FORMAT!r}), found format {quote(head.format)}"
            )
        if (head.version, head.algorithm) != (_VERSION, ALGORITHM):
            raise DigestError(
                f"{where}: wanted version {_VERSION} and algorithm {ALGORITHM!r}, found version "
                f"{quote(head.version)} and {quote(head.algorithm)}; make the digests again, or take the "
                "tensorlift that made them"
            )
        sidecar = msgspec.json.decode(raw, type=Sidecar)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise DigestError(
            f"{where}: this is no file of digests: {quote(str(error), 300)[1:-1]}; make it again with "
            "'tensorlift digest'"
        ) from None
    _check_once([file.name for file in sidecar.files], "file", where)
    _check_once([tensor.name for tensor in sidecar.tensors], "tensor", where)
    _check_sizes(sidecar, where)
    return sidecar


def _check_sizes(sidecar: Sidecar, where: str) -> None:
    """Each tensor has the bytes of its dtype and shape, and those of a file fit into it."""
    left = {file.name: file.nbytes for file in sidecar.files}
    for tensor in sidecar.tensors:
        wrong, dtype = "", BY_CODE.get(tensor.dtype)
        if tensor.file not in left:
            wrong = f"is said to be in {quote(tensor.file)}, which is not among its files"
        elif dtype is not None and (bits := product(tensor.shape) * dtype.bits) != 8 * tensor.nbytes:
            takes = quote(-(-bits // 8)) if bits <= LARGEST else "more than any memory has"
            wrong = (
                f"is said to have {plural(tensor.nbytes, 'byte')}, but {tensor.dtype} "
                f"{quote(tensor.shape)} takes {takes}"
            )
        else:
            left[tensor.file] -= tensor.nbytes
            if left[tensor.file] < 0:
                wrong = f"and those before it do not fit into the bytes of {quote(tensor.file)}"
        if wrong:
            raise DigestError(f"{where}: tensor {quote(tensor.name)} {wrong}; make the digests again")


def _check_once(names: Sequence[str], what: str, where: str) -> None:
    if len(set(names)) == len(names):
        return
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise DigestError(f"{where}: {what} {quote(name)} comes twice; make the digests again")
        seen.add(name)


def listed(lines: Sequence[str]) -> str:
    """Lines for a message, the first of many only."""
    more = [f"and {len(lines) - _SHOWN:,} more"] if len(lines) > _SHOWN else []
    return "\n  ".join([*lines[:_SHOWN], *more])
