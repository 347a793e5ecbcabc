"""From what a caller names to the files of a checkpoint, by names alone: no file but an index is opened."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from tensorlift.errors import CheckpointError, RequestError
from tensorlift.format.listing import (
    INDEX_SUFFIX,
    LARGEST_INDEX,
    SUFFIX,
    UNFINISHED,
    choose_files,
    choose_index,
    foreign_suffix,
    natural_key,
    parse_index,
)
from tensorlift.format.quoting import clean, quote
from tensorlift.sources import hub
from tensorlift.sources.problems import not_a_file, nothing_at, nothing_in, open_regular, refused

__all__ = ["Found", "PathLike", "Source", "file_bytes", "find", "index_text"]

PathLike: TypeAlias = "str | bytes | os.PathLike[str] | os.PathLike[bytes]"
"""What may name a file or folder."""


@dataclass(frozen=True, slots=True)
class Source:
    """One file of a checkpoint, not opened yet."""

    path: str
    """As the caller gave it (or below the folder that the caller gave), for messages."""
    absolute: bytes
    """For the kernel."""
    member: str | None = None
    """Its name in the index."""
    nbytes: int = 0
    """When it was found; what counts is what its header's reader finds."""
    written: tuple[int, int, int] = (0, 0, 0)
    """Device and inode when it was found, and when that file was last written to, in ns."""


@dataclass(frozen=True, slots=True)
class Found:
    """The files of a checkpoint, in order."""

    where: str
    """What the caller asked for, for messages."""
    files: tuple[Source, ...]
    weight_map: Mapping[str, str] | None = None
    """Of the index: tensor name to `Source.member`; None where there is no index."""

    @property
    def members(self) -> list[str]:
        """The name of each file in the index; empty ones where there is none."""
        return [source.member or "" for source in self.files]


def file_bytes(found: Found) -> int:
    """Bytes of all files when they were found."""
    return sum(source.nbytes for source in found.files)


def find(path: PathLike | Iterable[PathLike], *, download: bool = True) -> Found:
    """The files that a caller means.

    `path` is a file, a folder, an index (*.safetensors.index.json), the folder of a model in a Hub cache, a
    Hub id ('organisation/name', with '@revision' if wanted; only as str, and only where no such path and no
    checkpoint 'organisation' exists), or an iterable of files, which are taken in its order. `download`:
    whether a Hub id that is not in the local cache may be fetched. Raises TypeError for anything else,
    CheckpointNotFoundError where nothing is, and CheckpointError where the names make no checkpoint.
    """
    if isinstance(path, (str, bytes, os.PathLike)):
        shown = _as_text(path)
        about = _about(shown) if shown else None
        if about is None:
            return _not_here(shown, isinstance(path, str), download)
        return _folder(shown) if stat.S_ISDIR(about.st_mode) else _file(shown, about)
    # An open file is an iterable too, of its lines: bytes of tensors, taken for names.
    none = isinstance(path, (Mapping, bytearray, memoryview)) or hasattr(path, "read")
    if none or not isinstance(path, Iterable):
        raise TypeError(
            f"path: wanted str, bytes, os.PathLike or an iterable of these, found {type(path).__name__}"
        )
    given = list(path)
    shown_all = [_as_text(one) for one in given]
    if not given:
        raise CheckpointError("the list of files is empty")
    files: list[Source] = []
    for shown in shown_all:
        about = _about(shown)
        if about is None:
            raise nothing_at(shown)
        if stat.S_ISDIR(about.st_mode) or shown.lower().endswith(INDEX_SUFFIX):
            kind = "a folder" if stat.S_ISDIR(about.st_mode) else "an index"
            raise CheckpointError(
                f"{clean(shown)}: a list takes safetensors files, and this is {kind}; give it alone"
            )
        files.extend(_file(shown, about).files)
    where = shown_all[0] if len(files) == 1 else f"{shown_all[0]} and {len(files) - 1:,} more"
    return Found(where, tuple(files))


def _not_here(shown: str, may_be_id: bool, download: bool) -> Found:
    """Where no file is: a model of the Hub, out of the local cache if that has all of it, else downloaded if
    that is wanted.
    """
    asked = hub.parse_id(shown) if may_be_id and not _is_checkpoint(os.path.dirname(shown)) else None
    if asked is None:
        # Of a model on the Hub, the name alone was given.
        bare = may_be_id and not foreign_suffix(shown) and hub.parse_id(f"organisation/{shown}")
        raise nothing_at(shown, "; a model of the Hub is asked for as 'organisation/name'" if bare else "")
    unfinished = None
    folder = hub.cached(*asked)
    if folder is not None:
        try:
            return replace(_folder(folder), where=shown)
        except CheckpointError as error:
            unfinished = error
    if not download:
        raise unfinished or nothing_at(
            shown, "; the local Hub cache has no such model either, and only loading it downloads it"
        )
    return replace(_folder(hub.download(*asked, unfinished)), where=shown)


def _is_checkpoint(folder: str) -> bool:
    """Whether files of one lie there: then 'folder/name' is a file misspelled, and no id of the Hub."""
    try:
        return any(name.lower().endswith((SUFFIX, INDEX_SUFFIX)) for name in os.listdir(folder))
    except OSError:
        return False


def _as_text(path: object) -> str:
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise TypeError(f"path: wanted str, bytes or os.PathLike, found {type(path).__name__}")
    text = os.fsdecode(path)
    if text.startswith(("tensorlift://", "tensorlift+https://")):
        raise RequestError(
            f"{clean(text)}: a seed is no file: load, open and load_into take one, alone; 'tensorlift fork' "
            "writes its tensors to files"
        )
    if "\0" in text:
        raise CheckpointError(f"{clean(text)}: the path has a NUL character, which no file name can have")
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        raise CheckpointError(f"{clean(text)}: the path has half a surrogate pair: no file name") from None
    return text


def _about(shown: str) -> os.stat_result | None:
    """What is at a path; None where nothing is."""
    try:
        return os.stat(shown)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise refused(error, shown, "looked at") from None


def _source(shown: str, about: os.stat_result, member: str | None = None) -> Source:
    # Not abspath(): it takes 'link/..' for the link's own folder, the kernel for the folder that it leads to.
    absolute = shown if os.path.isabs(shown) else os.path.join(_working_folder(shown), shown)
    written = about.st_dev, about.st_ino, about.st_mtime_ns
    return Source(shown, os.fsencode(absolute), member, about.st_size, written)


def _working_folder(shown: str) -> str:
    try:
        return os.getcwd()
    except OSError as error:
        raise refused(error, shown, "reached from the working folder, which is gone") from None


def _file(shown: str, about: os.stat_result) -> Found:
    if not stat.S_ISREG(about.st_mode):
        raise not_a_file(shown, about.st_mode)
    if shown.lower().endswith(INDEX_SUFFIX):
        return _index(os.path.dirname(shown), os.path.basename(shown), shown)
    suffix = foreign_suffix(shown)
    if suffix is not None:
        raise _other_format(shown, suffix)
    return Found(shown, (_source(shown, about),))


def _other_format(shown: str, suffix: str) -> CheckpointError:
    means = "stands for another format; convert it, or rename it if it is safetensors after all"
    if suffix == ".json":
        means = f"holds weights only as an index (*{INDEX_SUFFIX}); give the folder that it is in"
    elif suffix in UNFINISHED:
        means = (
            "stands for a download that was not finished; finish it, or rename it if it is whole after all"
        )
    return CheckpointError(
        f"{clean(shown)}: wanted a safetensors file, found the suffix {suffix}, which {means}"
    )


def _folder(shown: str) -> Found:
    try:
        names = os.listdir(shown)
    except OSError as error:
        raise refused(error, shown, "listed") from None
    index = choose_index(names, shown)
    if index is not None:
        return _index(shown, index, shown)
    chosen = choose_files(names, shown)
    if not chosen:
        if hub.is_cache_folder(shown, names):
            return replace(_folder(hub.snapshot_of(shown)), where=shown)
        raise nothing_in(shown, names, _folders_with_weights(shown, names))
    return Found(shown, tuple(_shard(os.path.join(shown, name), None, "") for name in chosen))


def _folders_with_weights(shown: str, names: list[str]) -> list[str]:
    """Subfolders (of the first hundred entries) that have safetensors files: diffusers keeps them there."""
    folders = []
    for name in sorted(names)[:100]:
        try:
            inside = os.listdir(os.path.join(shown, name))
        except OSError:  # a file, or a folder that is not ours to read
            continue
        if any(entry.endswith(SUFFIX) for entry in inside):
            folders.append(name)
    return folders


def _index(folder: str, name: str, where: str) -> Found:
    path = os.path.join(folder, name)
    weights = parse_index(index_text(path), path)
    members = sorted(set(weights.values()), key=natural_key)
    said = f" (the index {quote(name)} lists it)"
    files = tuple(_shard(os.path.join(folder, member), member, said) for member in members)
    return Found(where, files, weights)


def index_text(path: str) -> bytes:
    """For parse_index(): no more than it takes, of a regular file. Raises CheckpointError, ReadError."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            return file.read(LARGEST_INDEX + 1)
    except OSError as error:
        raise refused(error, path, "read") from None


def _shard(path: str, member: str | None, said: str) -> Source:
    about = _about(path)
    if about is None:
        missing = nothing_at(path)
        raise CheckpointError(f"{missing}. A shard is missing{said}; download or copy it again")
    if not stat.S_ISREG(about.st_mode):
        raise not_a_file(path, about.st_mode, said)
    return _source(path, about, member)
