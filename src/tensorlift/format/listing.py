"""Which files belong to a checkpoint, decided from names and index text alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import msgspec

from tensorlift.errors import CheckpointError
from tensorlift.format.bounds import MOST_PARTS, is_too_much
from tensorlift.format.quoting import clean, quote, some_of

__all__ = [
    "INDEX_SUFFIX",
    "LARGEST_INDEX",
    "OTHER_WEIGHTS",
    "SUFFIX",
    "UNFINISHED",
    "USUAL_INDEX",
    "choose_files",
    "choose_index",
    "foreign_suffix",
    "natural_key",
    "parse_index",
]

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
USUAL_INDEX = "model.safetensors.index.json"
LARGEST_INDEX = 100_000_000
"""Bytes of an index; as many as a header may have, for it lists the same names."""
# Mistral's own layout of the same weights, which stands beside the shards of transformers.
_CONSOLIDATED = "consolidated"

# Suffixes that promise another format. A file given by name with one of these is a mistake that its content
# cannot make good: a .bin that is read as safetensors by one program and as a pickle by the next is not to be
# trusted.
_FOREIGN = frozenset(
    {
        ".7z", ".bin", ".bz2", ".ckpt", ".csv", ".db", ".dduf", ".exe", ".ggml", ".gguf", ".gif", ".gz",
        ".h5", ".hdf5", ".htm", ".html", ".jpeg", ".jpg", ".json", ".jsonl", ".keras", ".log", ".md",
        ".model", ".mp4", ".msgpack", ".nemo", ".npy", ".npz", ".onnx", ".ot", ".parquet", ".pb", ".pdf",
        ".pickle", ".pkl", ".png", ".pt", ".pt2", ".pth", ".py", ".rar", ".so", ".svg", ".tar", ".tflite",
        ".tgz", ".toml", ".tsv", ".txt", ".webp", ".whl", ".xml", ".xz", ".yaml", ".yml", ".zip", ".zst",
    }
)  # fmt: skip
# Of those, the ones of weights: worth naming where no safetensors file is found.
OTHER_WEIGHTS = (".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".npz", ".onnx", ".pt", ".pth")
# What downloaders call a file that they have not finished.
UNFINISHED = frozenset({".aria2", ".crdownload", ".incomplete", ".part", ".tmp"})

_SHARD = re.compile(r"(?P<stem>.*?)(?P<number>\d+)-of-(?P<total>\d+)(?P<rest>.*)", re.DOTALL)


class _Index(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """An index with nothing but what nearly all have."""

    weight_map: dict[str, str]
    metadata: msgspec.Raw = msgspec.Raw()


_DECODER = msgspec.json.Decoder(_Index)


def natural_key(name: str) -> tuple[list[tuple[int, str]], str]:
    """Key for sorting in which numbers count as numbers: model-2 comes before model-10."""
    texts_and_numbers = re.split(r"([0-9]+)", name)  # in turn, beginning with a text
    # A number is compared by the count of its digits, then by them: a hash of 64 digits is no number to
    # compute with.
    key = [
        (len(part.lstrip("0")), part.lstrip("0")) if i % 2 else (0, part)
        for i, part in enumerate(texts_and_numbers)
    ]
    return key, name


def foreign_suffix(name: str) -> str | None:
    """The suffix, in lower case, by which a file name stands for another format; None where it does not."""
    lower = name.rpartition("/")[2].lower()
    if lower.endswith(INDEX_SUFFIX):
        return None
    dot = lower.rfind(".")
    suffix = lower[dot:] if dot > 0 else ""
    return suffix if suffix in _FOREIGN | UNFINISHED else None


def choose_index(names: Iterable[str], folder: str) -> str | None:
    """The index file among the names of a folder; None where there is none."""
    found = sorted(name for name in names if name.endswith(INDEX_SUFFIX) and not name.startswith("."))
    if USUAL_INDEX in found:
        return USUAL_INDEX
    if len(found) > 1:
        raise CheckpointError(
            f"{clean(folder)}: several index files and none of them is {USUAL_INDEX}: {_listed(found)}; "
            "give the path of the one that is meant"
        )
    return found[0] if found else None


def choose_files(names: Iterable[str], folder: str) -> list[str]:
    """The safetensors files of a folder without an index that make its checkpoint, in order.

    Hidden files are left out, files called consolidated* where there are others, and, where there is a
    numbered set (NNNNN-of-NNNNN), all that is not in it. Raises CheckpointError where a set is incomplete or
    there are several.
    """
    found = [name for name in names if name.lower().endswith(SUFFIX) and not name.startswith(".")]
    found = [name for name in found if not name.startswith(_CONSOLIDATED)] or found
    sets: dict[tuple[str, str, str], dict[int, str]] = {}
    for name in found:
        match = _SHARD.fullmatch(name)
        if match and len(match["number"]) <= 9 and len(match["total"]) <= 9:
            members = sets.setdefault((match["stem"], match["total"], match["rest"]), {})
            members[int(match["number"])] = name
    if not sets:
        return sorted(found, key=natural_key)
    if len(sets) > 1:
        shown = [f"{stem}*-of-{total}{rest}" for stem, total, rest in sorted(sets)]
        raise CheckpointError(
            f"{clean(folder)}: {len(sets)} sets of shards and no index that chooses one: {_listed(shown)}; "
            "give the files that are meant as a list"
        )
    ((stem, total, rest), members) = next(iter(sets.items()))
    first = min(members, default=1)
    # Sets count from 1, or from 0: then up to the total or one below it, for both are in use.
    last = int(total) - 1 if first == 0 else int(total)
    missing = [k for k in range(min(first, 1), min(last, 10_000) + 1) if k not in members]
    if missing or len(members) < last:
        width = len(next(iter(members.values()))) - len(stem) - len(rest) - len(total) - len("-of-")
        shown = [f"{stem}{k:0{width}d}-of-{total}{rest}" for k in missing]
        raise CheckpointError(
            f"{clean(folder)}: {len(members)} of {int(total):,} shards are there; missing: {_listed(shown)}. "
            "Download or copy them, or give the wanted files as a list"
        )
    return [members[k] for k in sorted(members)]


def parse_index(text: bytes, path: str) -> dict[str, str]:
    """The weight map of an index file: tensor name to shard, a relative path inside the index's folder.

    text: of which one byte more than LARGEST_INDEX is enough to see that there are too many. Raises
    CheckpointError where it is no index or a shard's name leads out of the folder.
    """
    if len(text) > LARGEST_INDEX:
        raise CheckpointError(f"{clean(path)}: the index has more than {LARGEST_INDEX:,} bytes")
    if is_too_much(text):
        raise CheckpointError(
            f"{clean(path)}: more than {MOST_PARTS:,} lists, objects and keys: this is no index of "
            "a checkpoint"
        )
    weights = _quick_index(text)
    return weights if weights is not None else _exact_index(text, clean(path))


def _quick_index(text: bytes) -> dict[str, str] | None:
    """The weight map, or None where anything at all is doubtful."""
    if b"\\" in text or not text.isascii():
        return None
    try:
        index = _DECODER.decode(text)
        metadata = bytes(index.metadata)
        if metadata:
            json.loads(metadata.decode(), object_pairs_hook=_once)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None
    weights = index.weight_map
    # Decoding keeps the last of equal keys and forgets the others. But where no backslash is, each string has
    # two quotes: were there more, some key went missing.
    quotes = 2 + 4 * len(weights) + (2 + metadata.count(b'"') if metadata else 0)
    if text.count(b'"') != quotes or not weights:
        return None
    shards = set(weights.values())
    return weights if all(_is_inside(shard) and not foreign_suffix(shard) for shard in shards) else None


def _exact_index(text: bytes, where: str) -> dict[str, str]:
    """The weight map; says what is wrong where something is."""
    if text.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{where}: this is a Git LFS pointer, not the index; run 'git lfs pull'")
    try:
        index = json.loads(text.decode("utf-8-sig"), object_pairs_hook=_once)
    except RecursionError:
        raise CheckpointError(f"{where}: the JSON of the index is nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(
            f"{where}: the index is no valid JSON ({quote(str(error))[1:-1]}); download or copy it again"
        ) from None
    weights = index.get("weight_map") if type(index) is dict else None
    if type(weights) is not dict:
        raise CheckpointError(
            f"{where}: the index has no 'weight_map' object; it is no index of safetensors files"
        )
    unusable = {shard for shard in set(filter(_is_text, weights.values())) if not _is_inside(shard)}
    for name, shard in weights.items():
        if type(shard) is not str or shard in unusable:
            raise CheckpointError(
                f"{where}: the index puts tensor {quote(name)} in {quote(shard)}, which is no name of a file "
                "inside its folder"
            )
    for shard in set(weights.values()):
        if foreign_suffix(shard):
            raise CheckpointError(
                f"{where}: the index lists {quote(shard)}, which is no safetensors file: its suffix "
                "stands for another format"
            )
    if not weights:
        raise CheckpointError(f"{where}: the index lists no tensor")
    return weights


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys have to differ, unless they say the same."""
    table = dict(pairs)
    if len(table) != len(pairs):
        for key, value in pairs:
            if table[key] != value:
                raise ValueError(f"{quote(key)} comes twice, with different values")
    return table


def _is_text(value: object) -> bool:
    return type(value) is str


def _is_inside(shard: str) -> bool:
    """Whether this is a plain relative path that does not leave the folder."""
    parts = shard.split("/")
    # Half a surrogate pair cannot be written in a path (JSON escapes can spell one), but those that stand for
    # a byte that is no UTF-8 can.
    halves = any("\ud800" <= c <= "\udfff" and not "\udc80" <= c <= "\udcff" for c in shard)
    return "\0" not in shard and not halves and all(part not in ("", ".", "..") for part in parts)


def _listed(names: list[str]) -> str:
    return some_of(names, 5, clean)
