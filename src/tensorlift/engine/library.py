"""Where the native library lies. Nothing is loaded here, and nothing at import."""

from __future__ import annotations

import importlib.resources
import os
from pathlib import Path

from tensorlift.errors import LibraryError

__all__ = ["FILE_NAME", "VARIABLE", "find_library"]

FILE_NAME = "libtensorlift.so"
VARIABLE = "TENSORLIFT_LIBRARY"


def find_library() -> str:
    """Path of the native library: ``TENSORLIFT_LIBRARY``, beside the package, or where the package's files
    are.

    Raises LibraryError with every place that was looked at.
    """
    chosen = os.environ.get(VARIABLE)
    if chosen:
        if not os.path.isfile(chosen):
            raise LibraryError(
                f"{VARIABLE} is {chosen!r}, which is no file; unset it to use the library of the package"
            )
        return chosen
    beside = Path(__file__).parent.parent / FILE_NAME
    places = [str(beside)]
    # An editable install keeps built files in another folder than the sources.
    installed = importlib.resources.files("tensorlift").joinpath(FILE_NAME)
    if str(installed) not in places:
        places.append(str(installed))
    for place in places:
        if os.path.isfile(place):
            return place
    raise LibraryError(
        f"the native library {FILE_NAME} was not found at {' or '.join(places)}; "
        f"install the package (pip install .), or set {VARIABLE} to a library that was built by hand"
    )
