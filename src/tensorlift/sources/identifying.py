"""Which checkpoint files are, as the version of the weights that come from them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from tensorlift.errors import TensorliftError
from tensorlift.format.header import LONGEST_HEADER
from tensorlift.sources.finding import find

__all__ = ["checkpoint_of", "is_other"]

_KIND = "checkpoint "
# Headers of two trainings of one model are equal, so their values are looked at, throughout all files.
_PLACES, _PLACE_BYTES = 1024, 4096
# Storage that is far away is waited for by many at once.
_THREADS = 16


def checkpoint_of(model: str, revision: str | None = None) -> str:
    """Such as "checkpoint 0123456789abcdef", on every host; "" where the files are not here, or not whole.

    model: a folder, or the name of a model in the Hub's cache. Nothing is downloaded. Of names, sizes,
    headers and 1,024 places of 4 KiB that lie evenly in the files: to read all would take as long as a load.
    """
    name = model if revision is None or os.path.exists(model) else f"{model}@{revision}"
    try:
        found = find(name, download=False)
        return _KIND + _digest([os.fsdecode(file.absolute) for file in found.files])
    # Whatever the files are like: it is the load that says so.
    except (TensorliftError, OSError):
        return ""


def is_other(weights: str, own: Callable[[], str]) -> bool:
    """Whether a version is that of another checkpoint than ours; one that was updated since is of none.

    own: asked where it matters, for it may have to read.
    """
    return weights.startswith(_KIND) and own() not in ("", weights)


def _digest(paths: list[str]) -> str:
    made, total = hashlib.sha256(), sum(os.path.getsize(path) for path in paths)
    for path in sorted(paths, key=os.path.basename):
        with open(path, "rb") as file, ThreadPoolExecutor(_THREADS) as pool:
            size = os.fstat(file.fileno()).st_size
            made.update(f"{os.path.basename(path)}\0{size}\0".encode("utf-8", "surrogateescape"))
            length = int.from_bytes(file.read(8), "little")
            made.update(file.read(min(length, LONGEST_HEADER)))
            steps = max(2, _PLACES * size // max(1, total)) - 1
            offsets = [max(0, size - _PLACE_BYTES) * step // steps for step in range(steps + 1)]
            for piece in pool.map(partial(os.pread, file.fileno(), _PLACE_BYTES), offsets):
                made.update(piece)
    return made.hexdigest()[:16]
