"""Model weights into accelerator memory at the speed of the hardware.

    state = tensorlift.load("model.safetensors", device="cuda:0")
    with tensorlift.open(path, device="cuda:0") as weights:
        for name, tensor in weights: ...
    tensorlift.load_into(model, path)
    seed = tensorlift.seed(model, key="org/model"); tensorlift.fork(seed.url, into=other)

Importing this package loads neither torch nor the native library, and starts nothing.
"""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import TYPE_CHECKING, Any

from tensorlift.errors import (
    BackendError,
    CheckpointError,
    CheckpointNotFoundError,
    DeviceError,
    DigestError,
    DisagreementError,
    DriverError,
    DtypeError,
    FileError,
    ForkError,
    HeaderError,
    LibraryError,
    MachineError,
    ManifestError,
    MismatchError,
    OptionError,
    OutOfMemoryError,
    PeerError,
    RanksError,
    ReadError,
    RequestError,
    SeedError,
    TensorliftError,
    TensorNotFoundError,
    TruncatedError,
)
from tensorlift.options import LoadOptions
from tensorlift.stats import LoadStats

if TYPE_CHECKING:
    from tensorlift.compat import load_file, safe_open
    from tensorlift.engine.engine import release_pinned
    from tensorlift.forking.fork import Forked
    from tensorlift.forking.manifest import ModelKey
    from tensorlift.forking.seed import Seed
    from tensorlift.instances import fork, seed
    from tensorlift.loading import load, load_into, open  # noqa: A004 - its public name
    from tensorlift.tensors.memory import record_stream
    from tensorlift.weights import Weights

__all__ = [
    "BackendError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "DeviceError",
    "DigestError",
    "DisagreementError",
    "DriverError",
    "DtypeError",
    "FileError",
    "ForkError",
    "Forked",
    "HeaderError",
    "LibraryError",
    "LoadOptions",
    "LoadStats",
    "MachineError",
    "ManifestError",
    "MismatchError",
    "ModelKey",
    "OptionError",
    "OutOfMemoryError",
    "PeerError",
    "RanksError",
    "ReadError",
    "RequestError",
    "Seed",
    "SeedError",
    "TensorNotFoundError",
    "TensorliftError",
    "TruncatedError",
    "Weights",
    "__version__",
    "fork",
    "load",
    "load_file",
    "load_into",
    "open",
    "record_stream",
    "release_pinned",
    "safe_open",
    "seed",
]

_LATER = {
    "Forked": "forking.fork",
    "ModelKey": "forking.manifest",
    "Seed": "forking.seed",
    "Weights": "weights",
    "fork": "instances",
    "load": "loading",
    "load_file": "compat",
    "load_into": "loading",
    "open": "loading",
    "record_stream": "tensors.memory",
    "release_pinned": "engine.engine",
    "safe_open": "compat",
    "seed": "instances",
}

try:
    __version__ = metadata.version("tensorlift")
except metadata.PackageNotFoundError:  # run from a source tree
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:
    """Loads what needs torch at its first use."""
    if name in _LATER:
        value = getattr(importlib.import_module(f"tensorlift.{_LATER[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
