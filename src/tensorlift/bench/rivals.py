"""Other loaders, each driven as its own documentation does it: one small adapter each.

An adapter takes files and a device and gives a mapping of tensors, all there and all owned, and whatever has
to be kept alive for them. It runs in a process of its own.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorlift.errors import RequestError

__all__ = ["DEFAULT", "OURS", "RIVALS", "Adapter", "Rival", "chosen"]

Adapter = Callable[[list[str], str], tuple[Mapping[str, Any], Any]]


@dataclass(frozen=True, slots=True)
class Rival:
    """A loader to measure."""

    name: str
    module: str
    """What has to be importable."""
    package: str
    """Its distribution."""
    pip: str
    """The command that installs it."""
    adapter: str
    """``module:function`` of an Adapter."""
    devices: tuple[str, ...] = ("cpu", "cuda")
    imports: tuple[str, ...] = ()
    """Modules that it imports when it is first used; imported before the clock."""
    folder: Path | None = None
    """Searched first for its modules: for two versions of one package."""

    def obstacle(self, device: str) -> str | None:
        """Why it cannot be measured here at all, as far as that is known without importing it."""
        if device.partition(":")[0] not in self.devices:
            return f"loads to {' and '.join(self.devices)} only"
        there = self.folder and (self.folder / self.module).exists()
        if not there and importlib.util.find_spec(self.module) is None:
            return f"not installed: {self.pip}"
        return None


def load_ours(files: list[str], device: str) -> tuple[Mapping[str, Any], Any]:
    """``tensorlift.load``."""
    from tensorlift.loading import load

    state = load(files, device=device)
    return state, state.stats


def load_safetensors(files: list[str], device: str) -> tuple[Mapping[str, Any], Any]:
    """``load_file`` for each file; on a CPU a clone of each tensor, since those lie in a map of the file."""
    from safetensors.torch import load_file

    state: dict[str, Any] = {}
    for file in files:
        for name, tensor in load_file(file, device=device).items():
            state[name] = tensor.clone() if device == "cpu" else tensor
    return state, None


def load_safetensors_ahead(files: list[str], device: str) -> tuple[Mapping[str, Any], Any]:
    """``prefetch`` of safetensors 0.9, two files ahead, 8 threads."""
    from safetensors import safe_open

    if not hasattr(safe_open, "prefetch"):
        raise ImportError(f"this safetensors has no prefetch; {_BESIDE}")
    readers: list[Any] = [safe_open(file, framework="pt", device=device, backend="pread") for file in files]
    state: dict[str, Any] = {}
    under_way: list[Any] = []
    for reader in [*readers, None, None]:
        if reader is not None:
            under_way.append(reader.prefetch(device=device, threads=8))
        if reader is None or len(under_way) > 2:
            state.update(iter(under_way.pop(0) if under_way else ()))
    return state, readers


def load_fastsafetensors(files: list[str], device: str) -> tuple[Mapping[str, Any], Any]:
    """``SafeTensorsFileLoader`` without GPUDirect Storage; its buffer is kept for the tensors."""
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), device, nogds=True)
    loader.add_filenames({0: files})
    buffer = loader.copy_files_to_device()
    return {name: buffer.get_tensor(name) for name in list(buffer.key_to_rank_lidx)}, (loader, buffer)


def load_fastsafetensors_parallel(files: list[str], device: str) -> tuple[Mapping[str, Any], Any]:
    """``ParallelLoader`` without GPUDirect Storage, as inference engines use it."""
    from fastsafetensors import ParallelLoader

    loader = ParallelLoader(None, files, use_tqdm_on_load=False, device=device, nogds=True)
    return dict(loader.iterate_weights()), loader


def load_runai(files: list[str], device: str) -> tuple[Mapping[str, Any], Any]:
    """``SafetensorsStreamer``, then a copy of each tensor to the device."""
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(files)
        return {name: tensor.to(device) for name, tensor in streamer.get_tensors()}, None


def load_instanttensor(files: list[str], device: str) -> tuple[Mapping[str, Any], Any]:
    """``safe_open`` with its default back end, which reads directly."""
    from instanttensor import safe_open

    with safe_open(files, framework="pt", device=device) as reader:
        return dict(reader.tensors()), None


def load_instanttensor_buffered(files: list[str], device: str) -> tuple[Mapping[str, Any], Any]:
    """``safe_open`` with the back end that reads through the page cache."""
    from instanttensor import BackendPolicy, safe_open

    with safe_open(files, framework="pt", device=device, backend=BackendPolicy.BUFFERED) as reader:
        return dict(reader.tensors()), None


def _rival(
    name: str, function: Adapter, package: str, *devices: str, pip: str = "", imports: tuple[str, ...] = ()
) -> Rival:
    command = pip or f"pip install {package}"
    adapter = f"{__name__}:{function.__name__}"
    module = package.replace("-", "_")
    return Rival(name, module, package, command, adapter, devices or ("cpu", "cuda"), imports)


# numpy and importlib import some of their own modules late.
_LATE = ("tensorlift.loading", "importlib.readers", "numpy.ma")
OURS = _rival("tensorlift", load_ours, "tensorlift", imports=_LATE)

# A version beside the one that is installed goes into a folder of its own.
_BESIDE = (
    "pip install --no-deps --target FOLDER safetensors==0.9.0rc1, then --rival-path safetensors-rc=FOLDER"
)

RIVALS: dict[str, Rival] = {
    rival.name: rival
    for rival in (
        _rival("safetensors", load_safetensors, "safetensors", imports=("safetensors.torch",)),
        _rival("safetensors-rc", load_safetensors_ahead, "safetensors", "cuda", pip=_BESIDE),
        _rival("fastsafetensors", load_fastsafetensors, "fastsafetensors"),
        _rival("fastsafetensors-parallel", load_fastsafetensors_parallel, "fastsafetensors"),
        _rival("runai", load_runai, "runai-model-streamer"),
        _rival("instanttensor", load_instanttensor, "instanttensor", "cuda"),
        _rival("instanttensor-buffered", load_instanttensor_buffered, "instanttensor", "cuda"),
    )
}
"""The loaders that can be measured, by name."""

DEFAULT = ("safetensors", "fastsafetensors", "runai", "instanttensor")


def chosen(names: str, folders: Sequence[str] = ()) -> list[Rival]:
    """The rivals of a list with commas, folders given as ``NAME=FOLDER``; RequestError names known ones."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    places: dict[str, Path] = {}
    for text in folders:
        name, _, folder = text.partition("=")
        if not Path(folder).is_dir() or not folder:
            raise RequestError(f"--rival-path {text!r}: not NAME=FOLDER with a folder that is there")
        places[name] = Path(folder).absolute()
    for name in [*wanted, *places]:
        if name not in RIVALS:
            raise RequestError(f"no rival is called {name!r}; there are {', '.join(RIVALS)}")
    found = [RIVALS[name] for name in dict.fromkeys(wanted)]
    return [_placed(rival, places.get(rival.name)) for rival in found]


def _placed(rival: Rival, folder: Path | None) -> Rival:
    return dataclasses.replace(rival, folder=folder)
