"""from_pretrained to a device: the same model as the plain way gives, in the memory of one.

TENSORLIFT_TEST_MODEL_LAYERS says how many layers of Llama 3 8B (0.44 GB each, 2.1 GB besides) the large model
has; 4 unless it is set, and 32 is the whole one (16 GB). It lies in a tmpfs where there is one.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support.device import MIB, NO_DEVICE

if not torch.cuda.is_available():
    pytest.skip(NO_DEVICE, allow_module_level=True)
pytest.importorskip("transformers", reason="transformers is not installed")

import transformers
from transformers import AutoModelForCausalLM

from support import models
from support.leaks import nothing_left
from tensorlift.integrations.transformers import PROVEN, fast_loading, from_pretrained

# Those of transformers about itself; and which version is there is what the machine decides.
pytestmark = pytest.mark.filterwarnings("ignore")
DEVICE = torch.device("cuda", 0)
LAYERS = int(os.environ.get("TENSORLIFT_TEST_MODEL_LAYERS", "4"))
SIZES = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "tie_word_embeddings": False,
}  # fmt: skip
# Arenas, their padding, the ring's device side: what a load may take besides the model.
SPARE = 320 * MIB
NEEDS_ACCELERATE = pytest.mark.skipif(
    not transformers.utils.is_accelerate_available(), reason="a device_map needs accelerate"
)


@pytest.fixture(scope="module")
def large() -> Iterator[Path]:
    shm = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=shm if shm.is_dir() else None))
    try:
        config = transformers.LlamaConfig(**SIZES, num_hidden_layers=LAYERS)
        torch.manual_seed(3)
        with torch.device(DEVICE):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder, max_shard_size="2GB")
        del model
        given_back()
        yield folder
    finally:
        shutil.rmtree(folder)


def given_back() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def plain_of(auto: Any, folder: Path, **more: Any) -> Any:
    """As transformers does it; where buffers are computed, on the host or not, depends on accelerate."""
    if transformers.utils.is_accelerate_available():
        return auto.from_pretrained(folder, device_map=DEVICE, **more)
    return auto.from_pretrained(folder, **more).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_large_model_is_the_same_in_the_memory_of_one(large: Path, dtype: torch.dtype) -> None:
    given_back()
    before = torch.cuda.memory_reserved()
    mine = from_pretrained(AutoModelForCausalLM, large, device=DEVICE, dtype=dtype)
    torch.cuda.synchronize()
    need = sum(tensor.nbytes for tensor in [*mine.parameters(), *mine.buffers()])
    peak = torch.cuda.max_memory_reserved() - before
    # As they are, tensors become parameters. Else those on their way come on top, and their copies' blocks.
    allowed = SPARE if dtype is torch.bfloat16 else 2 * (1 << 30) + SPARE + need // 8
    assert peak <= need + allowed, (peak, need)
    assert mine.tensorlift_stats.bytes == models.data_bytes(large)
    plain = plain_of(AutoModelForCausalLM, large, dtype=dtype)
    for (name, one), (_, other) in zip(mine.named_parameters(), plain.named_parameters(), strict=True):
        assert one.device == DEVICE
        assert one.dtype == other.dtype == dtype
        assert torch.equal(one, other), name
    expected = models.logits(plain)
    assert torch.isfinite(expected).all()
    assert torch.equal(models.logits(mine), expected)


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("kind", models.KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_models_are_the_same(kind: str, dtype: torch.dtype, shards: bool, tmp_path: Path) -> None:
    folder = models.saved(kind, tmp_path, shards=shards)
    mine = from_pretrained(models.auto(kind), folder, device=DEVICE, dtype=dtype, buffer_size=1 << 20)
    plain = plain_of(models.auto(kind), folder, dtype=dtype)
    models.assert_equal(mine, plain)
    assert torch.equal(models.logits(mine), models.logits(plain))
    assert mine.tensorlift_stats.bytes == models.data_bytes(folder)


@NEEDS_ACCELERATE
@pytest.mark.parametrize("where", ["cuda:0", {"": 0}, {"": "cuda:0"}, "auto"])
def test_device_maps(where: Any, tmp_path: Path) -> None:
    folder = models.saved("llama", tmp_path, shards=True)
    plain = models.auto("llama").from_pretrained(folder, device_map=where)
    with fast_loading() as loads:
        mine = models.auto("llama").from_pretrained(folder, device_map=where)
    models.assert_equal(mine, plain)
    # 5.17 says nothing of one device.
    assert getattr(mine, "hf_device_map", None) == getattr(plain, "hf_device_map", None)
    assert loads.stats.bytes == models.data_bytes(folder)


def test_on_a_side_stream(tmp_path: Path) -> None:
    folder = models.saved("llama", tmp_path)
    plain = plain_of(models.auto("llama"), folder)
    with torch.cuda.stream(torch.cuda.Stream()):
        mine = from_pretrained(models.auto("llama"), folder, device=DEVICE)
        found = models.logits(mine)
        torch.cuda.current_stream().synchronize()
    assert torch.equal(found, models.logits(plain))


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    folder = models.saved("experts", tmp_path, shards=True)
    # The second time, for what is made once.
    for _ in range(2):
        model = from_pretrained(models.auto("experts"), folder, device=DEVICE)
        del model
    with nothing_left():
        model = from_pretrained(models.auto("experts"), folder, device=DEVICE)
        del model


def test_which_version_this_is() -> None:
    """What was run here is told by the test report: it need not be the one that was proven."""
    print(f"transformers {transformers.__version__}, proven {PROVEN}")
