"""Values of a wrong kind for what the public functions take: an error of the package that names the argument,
never one of whatever stumbled over it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorlift
from support.checkpoints import random_row, write_safetensors
from tensorlift.errors import DeviceError, OptionError, RequestError, TensorliftError, TensorNotFoundError


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


def generator() -> Iterator[int]:
    yield 1


# Made anew for each call: a generator can be used once.
WRONG: dict[str, Callable[[], object]] = {
    "bytes": lambda: b"x",
    "object": object,
    "complex": lambda: 1j,
    "array": lambda: np.zeros(3),
    "tensor": lambda: torch.zeros(2),
    "generator": generator,
    "list": lambda: [[]],
    "number of 5,001 digits": lambda: 10**5000,
    "without text": Unshowable,
}
SETTINGS = list(tensorlift.LoadOptions.__dataclass_fields__)
LOADS = ["names", "slices", "process_group", *SETTINGS]
FORKS = [
    *("source", "key", "token", "ca", "connections", "patience", "chunk_bytes", "progress", "transports"),
    *("devices", "protocol", "limit", "digests", "registry", "place", "seeds", "wait", "into", "unwanted"),
]
SEEDS = [
    *(
        "model",
        "key",
        "host",
        "port",
        "token",
        "insecure",
        "limit",
        "readers",
        "weights",
        "tls",
        "join",
        "ca",
    ),
    *("join_timeout", "transports", "devices", "protocol", "digests", "registry", "registry_ca", "place"),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_safetensors(tmp_path_factory.mktemp("m") / "m.safetensors", {"a": random_row("F32", [2, 4])})


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("name", LOADS)
def test_of_loads(path: Path, name: str, kind: str) -> None:
    calls: list[Callable[..., object]] = [
        lambda **given: tensorlift.load(path, **given),
        lambda **given: list(tensorlift.open(path, **given)),
        lambda **given: tensorlift.load_into({"a": torch.zeros(2, 4)}, path, **given),
    ]
    for call in calls:
        with pytest.raises(TensorliftError, match=name):
            call(**{name: WRONG[kind]()})


@pytest.mark.parametrize("kind", WRONG)
def test_of_devices_and_what_loads_alone_have(path: Path, kind: str) -> None:
    with pytest.raises(DeviceError, match=r"^device"):
        tensorlift.load(path, device=WRONG[kind]())  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"^strict is"):
        tensorlift.load_into({}, path, strict=WRONG[kind]())  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="load_into fills"):
        tensorlift.load_into(WRONG[kind](), path)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"^framework is"):
        tensorlift.safe_open(path, WRONG[kind]())  # type: ignore[arg-type]
    with pytest.raises(TensorNotFoundError), tensorlift.safe_open(path, "pt") as file:
        file.get_tensor(WRONG[kind]())  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"^record_stream takes"):
        tensorlift.record_stream(torch.zeros(1), WRONG[kind]())  # type: ignore[arg-type]


def test_bytes_are_no_list_of_names(path: Path) -> None:
    """Those without any selected nothing, in silence."""
    with pytest.raises(RequestError, match=r"^names: wanted None, a str"):
        tensorlift.load_into({"a": torch.zeros(2, 4)}, path, names=b"")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("name", FORKS)
def test_of_forks(name: str, kind: str) -> None:
    given: dict[str, Any] = {"source": "http://127.0.0.1:9", "into": {"a": torch.zeros(2)}}
    if name == "registry":
        given |= {"source": None, "key": "m"}
    with pytest.raises((RequestError, OptionError)):
        tensorlift.fork(**given | {name: WRONG[kind]()})


@pytest.mark.parametrize("kind", [kind for kind in WRONG if kind != "bytes"])
def test_of_what_stands_in_for_seeds(kind: str) -> None:
    """At once, and not when the seeds have failed."""
    with pytest.raises(OptionError, match=r"^fallback is .*; expected a file"):
        tensorlift.fork("http://127.0.0.1:9", into={"a": torch.zeros(2)}, fallback=WRONG[kind]())


@pytest.mark.parametrize("kind", WRONG)
def test_of_a_seed_that_runs(kind: str) -> None:
    with tensorlift.seed({"a": torch.zeros(2)}, key="m") as seed:
        for given in ({"timeout": WRONG[kind]()}, {"weights": WRONG[kind]()}):
            with pytest.raises(OptionError, match=f"^{next(iter(given))} is"), seed.updating(**given):  # type: ignore[arg-type]
                pass
        with pytest.raises(OptionError, match=r"^timeout is"):
            seed.close(WRONG[kind]())  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("name", SEEDS)
def test_of_seeds(name: str, kind: str) -> None:
    given: dict[str, Any] = {"model": {"a": torch.zeros(2)}, "key": "m"}
    with pytest.raises((RequestError, OptionError)):
        tensorlift.seed(**given | {name: WRONG[kind]()})


def test_a_function_is_no_source() -> None:
    with pytest.raises(
        OptionError, match="a fork wants the URL of a seed, or several in a list, not <function"
    ):
        tensorlift.fork(generator, into={"a": torch.zeros(2)})  # type: ignore[arg-type]


def test_numbers_are_no_files_of_a_certificate() -> None:
    """They are descriptors, which were closed."""
    descriptor = os.open(os.devnull, os.O_RDONLY)
    with pytest.raises(OptionError, match=r"^tls is"):
        tensorlift.seed({"a": torch.zeros(2)}, key="m", tls=(descriptor, descriptor))
    os.close(descriptor)
