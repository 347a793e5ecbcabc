"""from_pretrained by tensorlift against the plain one: every byte, and all that is said about it."""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

import transformers

from support import leaks, models
from tensorlift.errors import (
    CheckpointError,
    DigestError,
    OptionError,
    ReadError,
    RequestError,
    TensorliftError,
    TruncatedError,
)
from tensorlift.integrations import lazy, versions
from tensorlift.integrations import transformers as ours
from tensorlift.integrations.prefetch import Prefetch
from tensorlift.integrations.transformers import fast_loading, from_pretrained

# Those of transformers about itself.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
SHARDS = pytest.mark.parametrize("shards", [False, True], ids=["one-file", "shards"])
# Small windows and arenas, so that what is read ahead ends somewhere.
SMALL = {"arena_size": 4096, "buffer_size": 8192, "chunk_size": 4096}


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    transformers.utils.logging.disable_progress_bar()
    level = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    yield
    transformers.utils.logging.set_verbosity(level)
    transformers.utils.logging.enable_progress_bar()


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Whatever a test does, transformers is as it was afterwards."""
    places = [(swap.holder, swap.name) for swap in ours._find()]
    before = [vars(holder)[name] for holder, name in places]
    assert len(places) == 4
    yield
    assert all(vars(holder)[name] is one for (holder, name), one in zip(places, before, strict=True))


@SHARDS
@pytest.mark.parametrize("kind", models.KINDS)
def test_equal_in_every_byte(kind: str, shards: bool, tmp_path: Path) -> None:
    folder = models.saved(kind, tmp_path, shards=shards)
    auto = models.auto(kind)
    plain = auto.from_pretrained(folder)
    mine = from_pretrained(auto, folder, **SMALL)
    with fast_loading() as loads:
        third = auto.from_pretrained(folder)
    for model in (mine, third):
        models.assert_equal(model, plain)
        assert torch.equal(models.logits(model), models.logits(plain))
        assert model.tensorlift_stats.bytes == models.data_bytes(folder)
        assert model.tensorlift_stats.files == len(list(folder.glob("*.safetensors")))
    assert [stats.bytes for stats in loads.each] == [models.data_bytes(folder)]
    assert loads.stats.bytes == models.data_bytes(folder)
    assert not hasattr(plain, "tensorlift_stats")


@pytest.mark.parametrize("kind", ["llama", "tied", "experts"])
@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (torch.float32, torch.float16),
        (torch.float32, "bfloat16"),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, "auto"),
    ],
)
def test_dtypes(kind: str, stored: torch.dtype, wanted: Any, tmp_path: Path) -> None:
    folder = models.saved(kind, tmp_path, shards=True, dtype=stored)
    plain = models.auto(kind).from_pretrained(folder, dtype=wanted)
    mine = from_pretrained(models.auto(kind), folder, dtype=wanted, **SMALL)
    models.assert_equal(mine, plain)


def test_a_parameter_is_the_tensor_that_was_read(tmp_path: Path) -> None:
    """No copy is made: its storage has exactly its bytes, and belongs to an arena."""
    model = from_pretrained(models.auto("llama"), models.saved("llama", tmp_path))
    with leaks.nothing_left():
        held = leaks.held()[2]
        other = from_pretrained(models.auto("llama"), tmp_path)
        assert leaks.held()[2] > held
        for parameter in other.parameters():
            assert parameter.untyped_storage().nbytes() == parameter.nbytes
        del other, parameter
    assert torch.isfinite(models.logits(model)).all()


@pytest.mark.parametrize("kind", ["llama", "experts"])
@pytest.mark.parametrize("wanted", [torch.float32, torch.float16])
def test_all_is_one_planned_load(
    kind: str, wanted: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = models.saved(kind, tmp_path, shards=True)
    monkeypatch.setattr(lazy.Session, "read", None)
    mine = from_pretrained(models.auto(kind), folder, dtype=wanted)
    assert mine.tensorlift_stats.seconds["total"] > 0


def test_loading_info_of_what_does_not_fit(tmp_path: Path) -> None:
    """Missing, unexpected and mismatched names, and what is not in the model is not read."""
    folder = models.saved("llama", tmp_path, shards=True)
    config = transformers.AutoConfig.from_pretrained(folder)
    config.num_hidden_layers, config.attention_bias, config.intermediate_size = 9, True, 40
    more = {"config": config, "output_loading_info": True, "ignore_mismatched_sizes": True}
    torch.manual_seed(1)
    plain, told = models.auto("llama").from_pretrained(folder, **more)
    torch.manual_seed(1)
    mine, said = from_pretrained(models.auto("llama"), folder, **more)
    assert said == told
    assert said["missing_keys"]
    assert said["unexpected_keys"]
    assert said["mismatched_keys"]
    models.assert_equal(mine, plain)
    assert 0 < mine.tensorlift_stats.bytes < models.data_bytes(folder)


def test_a_base_model_out_of_a_whole_one_and_back(tmp_path: Path) -> None:
    folder = models.saved("encoder", tmp_path)
    for auto in (transformers.AutoModel, transformers.AutoModelForSequenceClassification):
        torch.manual_seed(2)
        plain, told = auto.from_pretrained(folder, output_loading_info=True)
        torch.manual_seed(2)
        mine, said = from_pretrained(auto, folder, output_loading_info=True)
        assert said == told
        models.assert_equal(mine, plain)


def test_subfolder_and_variant(tmp_path: Path) -> None:
    model = models.auto("tied").from_pretrained(models.saved("tied", tmp_path / "source"))
    model.save_pretrained(tmp_path / "sub", variant="fp16")
    mine = from_pretrained(models.auto("tied"), tmp_path, subfolder="sub", variant="fp16")
    models.assert_equal(mine, models.auto("tied").from_pretrained(tmp_path, subfolder="sub", variant="fp16"))


def test_saved_again_it_is_the_same_file(tmp_path: Path) -> None:
    folder = models.saved("tied", tmp_path / "one")
    from_pretrained(models.auto("tied"), folder).save_pretrained(tmp_path / "two")
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two


def test_a_device_map_needs_accelerate_and_a_device_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = models.saved("encoder", tmp_path)
    plain = models.auto("encoder").from_pretrained(folder)
    models.assert_equal(from_pretrained(models.auto("encoder"), folder, device="cpu"), plain)
    monkeypatch.setattr("tensorlift.integrations.transformers._has_accelerate", lambda: False)
    models.assert_equal(from_pretrained(models.auto("encoder"), folder, device="cpu"), plain)
    with pytest.raises(OptionError, match="not both"):
        from_pretrained(models.auto("encoder"), folder, device="cpu", device_map="cpu")


def test_what_is_not_safetensors_is_named(tmp_path: Path) -> None:
    model = models.auto("tied").from_pretrained(models.saved("tied", tmp_path / "source"))
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: .*save_pretrained"):
        from_pretrained(models.auto("tied"), tmp_path)
    with fast_loading(), pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        models.auto("tied").from_pretrained(tmp_path)
    assert torch.equal(models.logits(models.auto("tied").from_pretrained(tmp_path)), models.logits(model))


def test_what_is_asked_of_it_in_vain(tmp_path: Path) -> None:
    folder = models.saved("tied", tmp_path)
    for wrong, said in (
        ({"process_group": "world"}, "process_group"),
        ({"state_dict": {}}, "state_dict"),
        ({"gguf_file": "m.gguf"}, "gguf_file"),
        ({"exchange": "gather"}, "exchange"),
        ({"threads": 0}, "threads"),
        ({"device": "mps"}, "mps"),
    ):
        with pytest.raises(RequestError, match=said):
            from_pretrained(models.auto("tied"), folder, **wrong)
    with pytest.raises(OptionError, match="chunk_size"), fast_loading(chunk_sise=4096):
        raise AssertionError


def test_a_state_dict_of_the_callers_is_left_alone(tmp_path: Path) -> None:
    plain = models.auto("tied").from_pretrained(models.saved("tied", tmp_path))
    with fast_loading() as loads:
        model = type(plain).from_pretrained(None, config=plain.config, state_dict=plain.state_dict())
    assert torch.equal(models.logits(model), models.logits(plain))
    assert loads.each == []


@contextlib.contextmanager
def failing(
    error: type[BaseException] | tuple[type[BaseException], ...], match: str | None = None
) -> Iterator[None]:
    with leaks.nothing_left(), pytest.raises(error, match=match):
        yield


def test_files_that_are_wrong(tmp_path: Path) -> None:
    folder = models.saved("llama", tmp_path, shards=True)
    auto = models.auto("llama")
    from_pretrained(auto, folder)
    shard = sorted(folder.glob("*.safetensors"))[2]
    data = shard.read_bytes()
    shard.write_bytes(data[:-4])
    with failing(TruncatedError, shard.name):
        from_pretrained(auto, folder)
    shard.write_bytes(b"\0" * 64)
    with failing(TensorliftError, shard.name), fast_loading():
        auto.from_pretrained(folder)
    shard.unlink()
    with failing(OSError, shard.name):
        from_pretrained(auto, folder)
    shard.write_bytes(data)
    from_pretrained(auto, folder)


def test_a_file_that_becomes_shorter_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = models.saved("llama", tmp_path)
    from_pretrained(models.auto("llama"), folder)
    path, opened = folder / "model.safetensors", lazy.LazyFile.keys

    def keys(self: lazy.LazyFile) -> list[str]:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2)
        return opened(self)

    monkeypatch.setattr(lazy.LazyFile, "keys", keys)
    with failing((TruncatedError, ReadError), "model.safetensors"):
        from_pretrained(models.auto("llama"), folder)


def test_digests_that_lie_beside_the_files(tmp_path: Path) -> None:
    folder = models.saved("llama", tmp_path, shards=True)
    with pytest.raises(DigestError, match="tensorlift digest"):
        from_pretrained(models.auto("llama"), folder, verify=True)
    subprocess.run([sys.executable, "-m", "tensorlift", "digest", str(folder)], check=True)
    mine = from_pretrained(models.auto("llama"), folder, verify=True)
    assert mine.tensorlift_stats.verified == len(mine.state_dict())
    models.assert_equal(mine, models.auto("llama").from_pretrained(folder))


def test_digests_are_compared(tmp_path: Path) -> None:
    folder = models.saved("tied", tmp_path)
    name = "model.embed_tokens.weight"
    with failing(DigestError, name):
        from_pretrained(models.auto("tied"), folder, verify={name: "0" * 32})


@pytest.mark.parametrize("kind", ["llama", "experts"])
def test_an_error_in_the_middle_leaves_nothing_behind(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = models.saved(kind, tmp_path, shards=True)
    from_pretrained(models.auto(kind), folder)
    taken, take = [], Prefetch.take

    def interrupted(self: Prefetch, name: str) -> torch.Tensor:
        if len(taken) == 20:
            raise KeyboardInterrupt
        taken.append(name)
        return take(self, name)

    monkeypatch.setattr(Prefetch, "take", interrupted)
    with leaks.nothing_left():
        # Not by pytest.raises, which keeps the frames, and in them the model.
        try:
            from_pretrained(models.auto(kind), folder, **SMALL)
        except KeyboardInterrupt:
            taken.append("interrupted")
    assert taken[-1] == "interrupted"


def test_outside_and_in_other_threads_it_is_the_plain_one(tmp_path: Path) -> None:
    folder = models.saved("tied", tmp_path)
    auto = models.auto("tied")
    found: list[Any] = []
    with fast_loading() as loads:
        thread = threading.Thread(target=lambda: found.append(auto.from_pretrained(folder)))
        thread.start()
        thread.join(60)
        mine = auto.from_pretrained(folder)
    found.append(auto.from_pretrained(folder))
    assert len(loads.each) == 1
    for plain in found:
        assert not hasattr(plain, "tensorlift_stats")
        models.assert_equal(plain, mine)


def test_nested(tmp_path: Path) -> None:
    folder = models.saved("tied", tmp_path)
    with fast_loading() as outer:
        with fast_loading(threads=1) as inner:
            models.auto("tied").from_pretrained(folder)
            with pytest.raises(OSError, match="nowhere"):
                models.auto("tied").from_pretrained(tmp_path / "nowhere")
        from_pretrained(models.auto("tied"), folder)
        models.auto("tied").from_pretrained(folder)
    assert (len(inner.each), len(outer.each)) == (1, 1)


def test_scopes_of_several_threads_at_once(tmp_path: Path) -> None:
    """One after another, for transformers replaces functions of its own while it builds a model."""
    kinds = ("llama", "tied", "encoder")
    folders = [models.saved(kind, tmp_path / kind, shards=True) for kind in kinds]
    found: dict[int, Any] = {}
    read: dict[int, int] = {}
    inside, turn = threading.Barrier(len(kinds)), threading.Lock()

    def load(place: int) -> None:
        with fast_loading(**SMALL) as loads:
            inside.wait(60)
            with turn:
                found[place] = models.auto(kinds[place]).from_pretrained(folders[place])
            inside.wait(60)
        read[place] = loads.stats.bytes

    threads = [threading.Thread(target=load, args=(place,)) for place in range(len(kinds))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert read == {place: models.data_bytes(folder) for place, folder in enumerate(folders)}
    for place, kind in enumerate(kinds):
        models.assert_equal(found[place], models.auto(kind).from_pretrained(folders[place]))


def test_another_version_is_said_once_and_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = models.saved("tied", tmp_path)
    monkeypatch.setattr(ours, "_version", lambda: "6.1.0")
    monkeypatch.setattr(versions, "_told", set())
    with caplog.at_level(logging.WARNING, "tensorlift"):
        for _ in range(2):
            from_pretrained(models.auto("tied"), folder)
    assert [("6.1.0" in text, ours.PROVEN in text) for text in caplog.messages] == [(True, True)]
    monkeypatch.delattr(transformers.PreTrainedModel, "_load_pretrained_model")
    with pytest.raises(RequestError, match=r"6\.1\.0 has no _load_pretrained_model"):
        from_pretrained(models.auto("tied"), folder)
    monkeypatch.undo()


def test_two_files_with_one_name_follow_the_index(tmp_path: Path) -> None:
    folder = models.saved("llama", tmp_path, shards=True)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    name, shard = next(iter(index["weight_map"].items()))
    other = next(path for path in sorted(folder.glob("*.safetensors")) if path.name != shard)
    from safetensors.torch import load_file, save_file

    state = load_file(other)
    save_file({**state, name: torch.zeros(3)}, other, metadata={"format": "pt"})
    mine = from_pretrained(models.auto("llama"), folder)
    assert torch.equal(mine.state_dict()[name], load_file(folder / shard)[name])
