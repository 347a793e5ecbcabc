"""Checkpoints that are written: whole or not at all.

Files are written into a folder of the run's own, under names that no loader takes. Once all are there they
get their place, the index before the shards: a run that was cut off leaves nothing that looks like a
checkpoint, or an index whose shards are missing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tensorlift.errors import MachineError, RequestError
from tensorlift.format import dtypes
from tensorlift.format.listing import USUAL_INDEX
from tensorlift.format.quoting import plural
from tensorlift.stats import human_bytes

__all__ = [
    "SHARD_BYTES",
    "Case",
    "Spec",
    "header_of",
    "in_order",
    "in_shards",
    "write_checkpoint",
    "write_tensors",
]

SHARD_BYTES = 5_000_000_000
"""Size of published shards: transformers and huggingface_hub cut at "5GB" unless told otherwise."""

_UNFINISHED = ".unfinished"
_UNDER_WAY = ".tensorlift-unfinished-"

Read = Callable[[Sequence[str]], Iterable[memoryview]]
"""The bytes of the tensors of these names, in this order."""


@dataclass(frozen=True, slots=True)
class Spec:
    """One tensor to write."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    weights: int = -1
    """Parameters of the model that it holds: its elements; packed ones hold two each, scales none."""

    @property
    def elements(self) -> int:
        """Elements of the format."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return self.elements * dtypes.BY_CODE[self.dtype].bits // 8

    @property
    def parameters(self) -> int:
        """Parameters of the model that it holds."""
        return self.elements if self.weights < 0 else self.weights


WriteFile = Callable[[Path, Sequence[Spec], int], None]
"""Called with a file to write, its tensors, and its number."""


@dataclass(frozen=True, slots=True)
class Case:
    """A checkpoint that was written."""

    folder: Path
    files: tuple[Path, ...]
    tensors: int
    nbytes: int  # data only, headers left out

    @property
    def file_bytes(self) -> int:
        """Bytes of its files, headers included."""
        return sum(file.stat().st_size for file in self.files)


def in_shards(specs: Sequence[Spec], shards: int | None) -> list[list[Spec]]:
    """Cuts the list into so many shards of about the same bytes, or at SHARD_BYTES; in order."""
    share = SHARD_BYTES if shards is None else sum(spec.nbytes for spec in specs) / shards
    parts: list[list[Spec]] = [[]]
    held = 0
    for spec in specs:
        full = held + spec.nbytes > share if shards is None else held >= share and len(parts) < shards
        if full and parts[-1]:
            parts.append([])
            held = 0
        parts[-1].append(spec)
        held += spec.nbytes
    return parts


def write_tensors(folder: Path, specs: Sequence[Spec], read: Read, keep: bool = False) -> Case:
    """Writes tensors that somebody has, in files of SHARD_BYTES; see write_checkpoint()."""

    def write(file: Path, specs: Sequence[Spec], number: int) -> None:
        header, _ = header_of(specs)
        with open(file, "wb") as out:
            out.write(header)
            for part in read([spec.name for spec in specs]):
                out.write(part)

    return write_checkpoint(folder, in_order(in_shards(specs, None)), write, keep)


def write_checkpoint(
    folder: Path, shards: Sequence[Sequence[Spec]], write: WriteFile, keep: bool = False
) -> Case:
    """Writes one file a list of tensors, and an index when there is more than one.

    Args:
        folder: made if it is not there.
        shards: the tensors of each file, in file order.
        write: called with a file to write, its tensors, and its number.
        keep: refuse where the folder holds a checkpoint; else that is removed once the new one is written, or
            before where there is no room for both.

    Raises:
        RequestError: something is there already, or is being written.
        MachineError: there is not enough room, or writing failed.
    """
    count = len(shards)
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    if count == 1:
        names = ["model.safetensors"]
    total = sum(spec.nbytes for specs in shards for spec in specs)
    try:
        if folder.exists() and not folder.is_dir():
            raise RequestError(f"{folder} is a file; name a folder to write the checkpoint to")
        _check_room(folder, total, () if keep else _checkpoint_in(folder))
        with _made(folder), _alone(folder) as is_alone:
            old = _checkpoint_in(folder)
            if old and keep:
                raise RequestError(
                    f"{folder} holds a checkpoint already: {old[-1].name}{_more(len(old) - 1)}; "
                    "name another folder or remove it; --force of tensorlift synth and fork replaces it"
                )
            if is_alone:
                for leftover in folder.glob(f"{_UNDER_WAY}*"):
                    shutil.rmtree(leftover, ignore_errors=True)
            _write_all(folder, names, shards, write, old)
    except OSError as error:
        raise MachineError(f"{error.filename or folder}: cannot write: {error.strerror or error}") from error
    tensors = sum(len(specs) for specs in shards)
    return Case(folder, tuple(folder / name for name in names), tensors, total)


def in_order(shards: Sequence[Sequence[Spec]]) -> list[list[Spec]]:
    """Larger dtypes first, then by name: the order of the library's own serializer, which aligns them."""
    return [sorted(part, key=lambda spec: (-dtypes.BY_CODE[spec.dtype].id, spec.name)) for part in shards]


def _more(count: int) -> str:
    return f" and {plural(count, 'more file')}" if count else ""


def _checkpoint_in(folder: Path) -> list[Path]:
    """The files that make a checkpoint of the folder, the index first; RequestError for what is no file."""
    there = [*folder.glob(USUAL_INDEX), *sorted(folder.glob("*.safetensors"))]
    for path in there:
        if path.is_dir() and not path.is_symlink():
            raise RequestError(f"{path} is a folder, where a file of the checkpoint goes; move it away")
    return there


@contextlib.contextmanager
def _made(folder: Path) -> Iterator[None]:
    """The folder is there; those that were made for it go again where nothing could be written."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir()
        raise


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """One run at a time in a folder; the kernel forgets a run that dies. False where that cannot be told."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    is_alone = True
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RequestError(f"{folder}: another run is writing a checkpoint there; wait for it") from None
        except OSError:
            # Network file systems may lock no folder; names of files under way are each run's own there too.
            is_alone = False
        yield is_alone
    finally:
        os.close(fd)


def _check_room(folder: Path, nbytes: int, replaced: Sequence[Path]) -> None:
    """Before anything is made or removed: what is free, and what the files to be replaced give back."""
    above = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    # Of some of these the kernel says that nothing is free, which is not what is wrong.
    if os.statvfs(above).f_flag & os.ST_RDONLY:
        raise MachineError(f"{folder}: cannot write: {os.strerror(errno.EROFS)}; name a folder elsewhere")
    free = shutil.disk_usage(above).free + sum(_own_bytes(file) for file in replaced)
    if nbytes > free:
        raise MachineError(
            f"{folder}: {human_bytes(nbytes)} are to be written, {human_bytes(free)} are free; make room, or "
            "name a folder elsewhere"
        )


def _own_bytes(file: Path) -> int:
    """What its removal gives back: nothing while another name holds the bytes."""
    facts = file.lstat()
    return facts.st_blocks * 512 if facts.st_nlink == 1 else 0


def _write_all(
    folder: Path,
    names: Sequence[str],
    shards: Sequence[Sequence[Spec]],
    write: WriteFile,
    old: Sequence[Path],
) -> None:
    """Writes into a folder of its own inside, then gives each file its name; ``old`` goes in between."""
    total = sum(spec.nbytes for specs in shards for spec in specs)
    written = [*names]
    # Where there is no room for both, the old one has to go first.
    early = total > shutil.disk_usage(folder).free
    if early:
        _remove(old)
    own = Path(tempfile.mkdtemp(prefix=_UNDER_WAY, dir=folder))
    try:
        for number, (name, specs) in enumerate(zip(names, shards, strict=True)):
            write(own / (name + _UNFINISHED), specs, number)
        if len(names) > 1:
            weight_map = {s.name: name for name, specs in zip(names, shards, strict=True) for s in specs}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            written.insert(0, USUAL_INDEX)
            text = json.dumps(index, indent=2) + "\n"
            (own / (USUAL_INDEX + _UNFINISHED)).write_text(text, encoding="utf-8")
        if not early:
            _remove(old)
        for name in written:
            (own / (name + _UNFINISHED)).rename(folder / name)
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _remove(files: Sequence[Path]) -> None:
    for file in files:
        file.unlink()


def header_of(specs: Sequence[Spec]) -> tuple[bytes, int]:
    """The file's beginning (length field and JSON), and the bytes of data that follow it."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        end = offset + spec.nbytes
        entries[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, offset
