"""docs/errors.md: every class is there, in the tree of the code, with a message that is really printed."""

from __future__ import annotations

import errno
import inspect
import os
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

import tensorlift
from support import child, seccomp
from support.checkpoints import random_row, write_raw, write_safetensors, write_sharded
from tensorlift import errors, sources
from tensorlift.cli.console import print_error
from tensorlift.distributed.agreement import File, agree_on_files
from tensorlift.distributed.board import Failure as BoardFailure
from tensorlift.engine import abi
from tensorlift.engine.abi import Status
from tensorlift.engine.failures import Failure, exception_of
from tensorlift.forking.client import SeedClient
from tensorlift.forking.manifest import (
    Layout,
    Manifest,
    ModelKey,
    Region,
    Tensor,
    decode,
    encode,
    layout_digest,
)
from tensorlift.forking.offering import Offering
from tensorlift.forking.same_weights import Wanted, _check
from tensorlift.format.checkpoint import Shard

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "errors.md").read_text(encoding="utf-8")
CLASSES = [
    name for name, value in inspect.getmembers(errors, inspect.isclass) if value.__module__ == errors.__name__
]
FILE = "model.safetensors"


def section(name: str) -> str:
    found = re.search(rf"^### `{name}`\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"docs/errors.md has no section {name}"
    return found.group(1)


def good() -> str:
    rows = {"layer.weight": random_row("BF16", [64, 64]), "layer.bias": random_row("BF16", [64])}
    return str(write_safetensors(Path(FILE), rows))


def shard() -> Shard:
    return sources.read_headers(sources.find(good())).shards[0]


def raised(failure: Failure, about: Shard | None) -> None:
    raise exception_of(failure, about)


def wrong_header() -> None:
    tensor = {"dtype": "BF16", "shape": [64, 64], "data_offsets": [0, 8190]}
    tensorlift.load(write_raw(Path(FILE), {"layer.weight": tensor}, b"0" * 8190))


def cut_short() -> None:
    good()
    os.truncate(FILE, os.path.getsize(FILE) - 100)
    tensorlift.load(FILE)


def missing_shard() -> None:
    shards = {f"model-0000{k}-of-00002.safetensors": {f"a{k}": random_row("U8", [4])} for k in (1, 2)}
    write_sharded(Path("model"), shards)
    os.remove("model/model-00002-of-00002.safetensors")
    tensorlift.load("model")


def full_disk() -> None:
    with mock.patch("os.fsync", side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))):
        tensorlift.load(good(), trace="full.json")


def no_library() -> None:
    os.environ["TENSORLIFT_LIBRARY"] = "gone/libtensorlift.so"
    tensorlift.load(good())


def ranks_apart() -> None:
    raise errors.RanksError("an all-gather failed, and no rank has said why: Connection closed by peer")


def peer_failed() -> None:
    raise BoardFailure(3, "error", f"rank 3 failed: ReadError: {FILE}: Input/output error").error()


def lying_seed() -> None:
    tensors = (Tensor("layer.weight", "float16", (4096,), (1,), 0, 0),)
    lying = Manifest(
        instance="0" * 32, epoch=0, key=ModelKey(model="m"), layout=layout_digest(tensors),
        regions=(Region(4096),), tensors=tensors,
    )  # fmt: skip
    decode(encode(lying), "http://10.0.0.7:8000")


SEED = "http://10.0.0.7:8000"


def other_weights() -> None:
    tensors = (Tensor("layer.weight", "float16", (5,), (1,), 0, 0),)
    theirs = Manifest(
        instance="0" * 32, epoch=0, key=ModelKey(model="m"), layout=layout_digest(tensors),
        regions=(Region(10),), tensors=tensors,
    )  # fmt: skip
    wanted = Wanted(None, Offering((), (), ()), ("tcp",), None, True, lambda _: "")
    _check(SeedClient(SEED), theirs, wanted, [Layout("layer.weight", "float16", (4,), (1,))])


def updating_seed() -> None:
    raise SeedClient(SEED)._refusal(503, b'{"reason": "updating", "retry_seconds": 0.1}')


def closed_weights() -> None:
    weights = tensorlift.open(good())
    weights.close()
    list(weights)


def other_shape() -> None:
    shapes = {"layer.weight": (64, 32), "layer.bias": (64,)}
    tensorlift.load_into({n: torch.zeros(s, dtype=torch.bfloat16) for n, s in shapes.items()}, good())


def unknown_dtype() -> None:
    tensorlift.load(write_safetensors(Path(FILE), {"layer.weight": random_row("F6_E2M3", [4, 4])}))


EXAMPLES: dict[str, Callable[[], object]] = {
    "FileError": lambda: raised(Failure(Status.REPLACED, "it has another inode"), shard()),
    "HeaderError": wrong_header,
    "TruncatedError": cut_short,
    "DigestError": lambda: tensorlift.load(good(), verify={"layer.weight": "0" * 32}),
    "CheckpointError": missing_shard,
    "CheckpointNotFoundError": lambda: tensorlift.load(good().replace("model", "models")),
    "MachineError": full_disk,
    "ReadError": lambda: raised(Failure(Status.READ, "", errno.EIO, 0, 4096, 4096), shard()),
    "DriverError": lambda: raised(
        Failure(
            Status.DRIVER, "cuMemcpyHtoDAsync: an illegal memory access was encountered", driver_code=700
        ),
        None,
    ),
    "LibraryError": no_library,
    "OutOfMemoryError": lambda: abi.library().arena_host(1 << 60),
    "RanksError": ranks_apart,
    "DisagreementError": lambda: agree_on_files(
        [[File(FILE, 8336, "")], [File(FILE, 8344, "")]], lambda rank: f"rank {rank}"
    ),
    "PeerError": peer_failed,
    "ManifestError": lying_seed,
    "ForkError": other_weights,
    "SeedError": updating_seed,
    "RequestError": closed_weights,
    "OptionError": lambda: tensorlift.load(good(), chunk_size="5"),
    "DeviceError": lambda: tensorlift.load(good(), device="toaster"),
    "DtypeError": unknown_dtype,
    "TensorNotFoundError": lambda: tensorlift.load(good(), names="layer.wieght"),
    "MismatchError": other_shape,
}


def without_uring(path: str) -> None:
    tensorlift.load(path)
    seccomp.install(seccomp.NO_URING)
    tensorlift.load(path, backend="URING")


def test_tree_is_that_of_the_code() -> None:
    assert errors.__doc__ is not None
    drawn = [line for line in errors.__doc__.splitlines() if re.search(r"Error {2,}", line)]
    assert len(drawn) == len(CLASSES)
    assert textwrap.dedent("\n".join(drawn)) in PAGE


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_is_public(name: str) -> None:
    assert getattr(tensorlift, name) is getattr(errors, name)
    assert name in tensorlift.__all__


@pytest.mark.parametrize("name", [name for name in CLASSES if name != "TensorliftError"])
def test_every_class_has_its_section(name: str) -> None:
    assert "**Do:**" in section(name)
    assert name in EXAMPLES or name == "BackendError"


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_is_what_is_printed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # Set, so that it is put back whatever an example does to it.
    monkeypatch.setenv("TENSORLIFT_LIBRARY", os.environ.get("TENSORLIFT_LIBRARY", ""))
    with pytest.raises(errors.TensorliftError) as caught:
        EXAMPLES[name]()
    print_error(caught.value)
    said = capsys.readouterr().err
    assert said.startswith(f"error: {name}\n")
    shown = section(name).replace("(torch TORCH)", f"(torch {torch.__version__})")
    assert f"```\n{said}```" in shown.replace("'FOLDER'", f"'{tmp_path}'")


def test_example_of_a_refused_reader_is_what_is_printed(tmp_path: Path) -> None:
    if abi.library().backend_not_built("URING") is not None:
        pytest.skip("this library was built without liburing")
    file = write_safetensors(tmp_path / FILE, {"a": random_row("U8", [1 << 21])})
    answer = child.caught(without_uring, str(file))
    assert answer["error"] == "BackendError"
    assert answer["message"].replace(str(file), FILE) in section("BackendError")
