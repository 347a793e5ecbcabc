"""Models of the Hugging Face Hub: the local cache's layout, and the download where the network allows it.

models--org--name/refs/main                 text: the commit that this revision stands for
models--org--name/snapshots/<commit>/...    links into blobs/
"""

from __future__ import annotations

import glob
import os
import re
from typing import TYPE_CHECKING, Any

from tensorlift.errors import CheckpointError, CheckpointNotFoundError
from tensorlift.format.listing import INDEX_SUFFIX, LARGEST_INDEX, SUFFIX, choose_index, parse_index
from tensorlift.format.quoting import clean, quote
from tensorlift.sources.problems import open_regular, refused

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["cached", "download", "is_cache_folder", "parse_id", "snapshot_of"]

# Names of organisations and models: letters, digits, '-', '_' and '.', as the Hub's own validation has it.
_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95})(@(?P<revision>[\w./-]+))?",
    re.ASCII,
)
# The same weights often lie in subfolders too, in other layouts: they would double the download.
_TOP_ONLY = ["*/*"]


def parse_id(text: str) -> tuple[str, str | None] | None:
    """Repository and revision of 'org/name' or 'org/name@revision'; None where the text is no Hub id."""
    match = _ID.fullmatch(text)
    if not match or match["repo"].lower().endswith(SUFFIX):
        return None
    return match["repo"], match["revision"]


def is_cache_folder(path: str, names: list[str]) -> bool:
    """Whether a folder with these names is that of a model in a Hub cache."""
    return "snapshots" in names and (
        os.path.basename(os.path.normpath(path)).startswith("models--") or "refs" in names or "blobs" in names
    )


def snapshot_of(path: str) -> str:
    """The folder of the snapshot that a model's cache folder stands for: refs/main, else the only one."""
    try:
        snapshots = sorted(os.listdir(os.path.join(path, "snapshots")))
    except OSError as error:
        raise refused(error, os.path.join(path, "snapshots"), "listed") from None
    try:
        reference = os.path.join(path, "refs", "main")
        with open(reference, encoding="ascii", errors="replace", opener=open_regular) as file:
            commit = file.read(200).strip()
    except (OSError, CheckpointError):  # not there, not to be read, no file
        commit = ""
    if commit in snapshots:
        return os.path.join(path, "snapshots", commit)
    there = ", ".join(clean(name) for name in snapshots[:5]) or "none"
    if commit:
        raise CheckpointNotFoundError(
            f"{clean(path)}: refs/main stands for the snapshot {quote(commit)}, which is not there (there: "
            f"{there}); "
            "finish the download, or give the path of a snapshot"
        )
    if len(snapshots) != 1:
        raise CheckpointNotFoundError(
            f"{clean(path)}: no refs/main, and not one snapshot but {len(snapshots)} ({there}); give the "
            "path of one"
        )
    return os.path.join(path, "snapshots", snapshots[0])


def cached(repo: str, revision: str | None) -> str | None:
    """The folder of a model in the local cache, whole or not; None where there is none. No network."""
    hub = _library(repo)
    try:
        return str(hub.snapshot_download(repo, revision=revision, local_files_only=True))
    except FileNotFoundError:  # LocalEntryNotFoundError is one
        return None
    except (OSError, ValueError) as error:
        raise _failed(repo, revision, error, "looked for in the local cache") from error


def download(repo: str, revision: str | None, unfinished: CheckpointError | None = None) -> str:
    """Downloads index and shards of a model, with a progress bar, and gives the folder.

    `unfinished` is why what the cache holds was not enough. Raises CheckpointNotFoundError where the Hub has
    no such model, or may not be asked (HF_HUB_OFFLINE), and CheckpointError where the download fails.
    """
    hub = _library(repo)
    name = repo if revision is None else f"{repo}@{revision}"
    if hub.constants.HF_HUB_OFFLINE or _is_set("HF_HUB_OFFLINE") or _is_set("TRANSFORMERS_OFFLINE"):
        if unfinished is not None:
            raise unfinished
        raise CheckpointNotFoundError(
            f"{name}: no such file or folder, and no such model in the local Hub cache "
            f"({hub.constants.HF_HUB_CACHE}); "
            "HF_HUB_OFFLINE forbids to download it"
        )
    try:
        folder = _fetch(hub, repo, revision, ["*" + INDEX_SUFFIX])
        return _fetch(hub, repo, revision, _wanted(folder))
    except CheckpointError:
        raise
    except Exception as error:
        # Whatever the library and the HTTP client below it raise: our caller is to see one kind of error.
        raise _failed(repo, revision, error, "downloaded") from error


def _fetch(hub: Any, repo: str, revision: str | None, patterns: list[str]) -> str:
    return str(
        hub.snapshot_download(repo, revision=revision, allow_patterns=patterns, ignore_patterns=_TOP_ONLY)
    )


def _wanted(folder: str) -> list[str]:
    """Patterns for the shards that the index lists, or for all safetensors files where there is no index."""
    index = choose_index(os.listdir(folder), folder) if os.path.isdir(folder) else None
    if index is None:
        return ["*" + SUFFIX]
    path = os.path.join(folder, index)
    with open(path, "rb", opener=open_regular) as file:
        shards = sorted(set(parse_index(file.read(LARGEST_INDEX + 1), path).values()))
    return [index, *map(glob.escape, shards)]


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").upper() in ("1", "ON", "YES", "TRUE")


def _library(repo: str) -> ModuleType:
    try:
        import huggingface_hub
        import huggingface_hub.constants
    except ImportError as error:
        raise CheckpointNotFoundError(
            f"{repo}: no such file or folder; to look for it in the Hub cache, or to download it, "
            f"huggingface_hub is needed: pip install 'tensorlift[hub]' ({error})"
        ) from error
    return huggingface_hub


def _failed(repo: str, revision: str | None, error: Exception, doing: str) -> CheckpointError:
    name = repo if revision is None else f"{repo}@{revision}"
    kind = type(error).__name__
    hints = {
        "GatedRepoError": "accept its licence on the Hub and log in (hf auth login)",
        "RepositoryNotFoundError": "check the name; a private model needs a login (hf auth login)",
        "RevisionNotFoundError": "check the revision",
        "HFValidationError": "check the name",
        "LocalEntryNotFoundError": "check the network, or download it where there is one",
    }
    hint = hints.get(kind, "check the network and the space on disk")
    # Their texts have paragraphs and end in a period; ours goes on.
    said = " ".join(str(error).split()).rstrip(".")
    said = clean(said if len(said) <= 300 else said[:300] + "…")
    text = f"{name}: no such local file or folder, and it could not be {doing}: {kind}: {said}; {hint}"
    if kind in ("RepositoryNotFoundError", "RevisionNotFoundError", "LocalEntryNotFoundError"):
        return CheckpointNotFoundError(text)
    return CheckpointError(text)
