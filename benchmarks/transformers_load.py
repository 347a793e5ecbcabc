"""from_pretrained of transformers against the same by tensorlift, on one device.

    python benchmarks/transformers_load.py      # 16 GB (Llama 3 8B, random weights), tmpfs, one H200
    python benchmarks/transformers_load.py --layers 2 --hidden 64 --device cpu   # tries the script alone

The model is made on the device from its configuration and saved with save_pretrained to a tmpfs. Then both
ways load it in turn, in one process: once as stored, once with another dtype (float16 out of bfloat16). First
the bytes of all parameters and the logits of one prompt have to be equal. Medians; the first sample of each
does not count; half a second before each sample the memory of the one before was given back. Each sample is
the whole call, from the path to a model on the device.

    of the plain     how many times as fast as the plain way; the bar is 5 where the dtype is as stored
    peak             device memory that torch had reserved at most, less what it had before
    model            bytes of all parameters and buffers

The plain way is device_map where accelerate is there, else from_pretrained(...).to(device), and the table
says which. The file with all samples goes to $OUT if that is set, else to benchmarks/results.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tensorlift.bench import machine
from tensorlift.bench.report import Row, Series, show_rows, write_report
from tensorlift.errors import MismatchError

os.environ.setdefault("HF_HUB_OFFLINE", "1")

RESULTS = Path(__file__).resolve().parent / "results"
BAR = 5.0
SETTLE_SECONDS = 0.5
GIB = 1 << 30
# Llama 3 8B.
SIZES = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
DTYPES = {"as stored": torch.bfloat16, "float16": torch.float16}

Load = Callable[[Path, torch.dtype], Any]


def write_model(folder: Path, sizes: dict[str, Any], layers: int, device: str) -> None:
    """Random weights in bfloat16, in files of 5 GB at most, as transformers writes them."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=layers)
    config.dtype = torch.bfloat16
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="5GB")


def ways(device: str) -> tuple[str, dict[str, Load]]:
    """What the plain way is here, and both."""
    import transformers

    from tensorlift.integrations.transformers import from_pretrained

    auto = transformers.AutoModelForCausalLM
    mapped = transformers.utils.is_accelerate_available()

    def plain(folder: Path, dtype: torch.dtype) -> Any:
        if mapped:
            return auto.from_pretrained(folder, device_map=device, dtype=dtype)
        return auto.from_pretrained(folder, dtype=dtype).to(device)

    def ours(folder: Path, dtype: torch.dtype) -> Any:
        return from_pretrained(auto, folder, device=device, dtype=dtype)

    name = "device_map" if mapped else ".to(device), for accelerate is not installed"
    return name, {"transformers": plain, "tensorlift": ours}


def warm_up(device: str) -> None:
    """What cuBLAS takes at its first product stays: taken later, it would keep a block of a model with it."""
    ones = torch.ones(64, 64, dtype=torch.bfloat16, device=device)
    torch.matmul(ones, ones)


def settle(device: str) -> None:
    gc.collect()
    if device != "cpu":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        time.sleep(SETTLE_SECONDS)


def reserved(device: str, peak: bool = False) -> int:
    if device == "cpu":
        return 0
    return torch.cuda.max_memory_reserved(device) if peak else torch.cuda.memory_reserved(device)


def sample(load: Load, folder: Path, dtype: torch.dtype, device: str) -> tuple[Any, float, dict[str, Any]]:
    """The model, seconds of the whole call, and what was seen."""
    settle(device)
    before = reserved(device)
    begin = time.perf_counter()
    model = load(folder, dtype)
    if device != "cpu":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - begin
    note: dict[str, Any] = {"peak": reserved(device, peak=True) - before}
    stats = getattr(model, "tensorlift_stats", None)
    if stats is not None:
        note["stats"] = stats.to_dict()
    return model, seconds, note


def bytes_of(model: Any) -> int:
    tensors = [*model.parameters(), *model.buffers()]
    return sum(tensor.nbytes for tensor in tensors)


def file_bytes(folder: Path) -> int:
    """Data bytes of all tensors in the files."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            total += path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")
    return total


def check_equal(loads: dict[str, Load], folder: Path, dtype: torch.dtype, device: str) -> int:
    """Raises MismatchError where parameters, buffers or logits differ; bytes of the model."""
    plain, ours = (loads[name](folder, dtype) for name in ("transformers", "tensorlift"))
    if ours.tensorlift_stats.bytes != file_bytes(folder):
        raise MismatchError(f"tensorlift read {ours.tensorlift_stats.bytes} of {file_bytes(folder)} bytes")
    pairs = zip(
        [*plain.named_parameters(), *plain.named_buffers()],
        [*ours.named_parameters(), *ours.named_buffers()],
        strict=True,
    )
    for (name, one), (_, other) in pairs:
        same = one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
        if not same:
            raise MismatchError(f"{name} differs from what transformers loads")
    prompt = torch.arange(64, device=device).reshape(2, 32)
    with torch.inference_mode():
        difference = (plain(prompt).logits - ours(prompt).logits).abs().max().item()
    if difference != 0:
        raise MismatchError(f"logits differ by up to {difference}")
    return bytes_of(ours)


def measure(options: argparse.Namespace, folder: Path, loads: dict[str, Load]) -> list[Row]:
    rows = []
    for case, dtype in DTYPES.items():
        nbytes = check_equal(loads, folder, dtype, options.device)
        print(f"{case}: bytes and logits are equal", file=sys.stderr, flush=True)
        series = {name: Series(f"{name}, {case}", nbytes) for name in loads}
        for _ in range(options.runs + 1):
            for name, load in loads.items():
                model, seconds, note = sample(load, folder, dtype, options.device)
                del model
                series[name].seconds.append(seconds)
                series[name].notes.append(note)
                print(f"{case}: {name} {seconds:.3f} s", file=sys.stderr, flush=True)
        plain, ours = series["transformers"], series["tensorlift"]
        bar = BAR if case == "as stored" and options.device != "cpu" else None
        ratio = plain.median / ours.median
        rows.append(
            Row(f"from_pretrained, {case}", "times as fast as the plain way", ratio, bar, True, [ours, plain])
        )
    return rows


def show_memory(rows: list[Row]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("load")
    for column in ("seconds", "GB/s", "filling", "peak GiB", "model GiB"):
        table.add_column(column, justify="right")
    for row in rows:
        for series in row.series:
            notes = series.notes[series.warm_up :]
            filling = [note["stats"]["seconds"]["total"] for note in notes if "stats" in note]
            table.add_row(
                series.name,
                f"{series.median:.3f}",
                f"{series.rate / 1e9:.1f}",
                f"{sorted(filling)[len(filling) // 2]:.3f}" if filling else "-",
                f"{max(note['peak'] for note in notes) / GIB:.2f}",
                f"{series.nbytes / GIB:.2f}",
            )
    Console(width=110, highlight=False, markup=False).print(table)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/tensorlift-transformers"))
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, help="another hidden size, with all else in proportion")
    parser.add_argument("--runs", type=int, default=5, help="samples that count, of each")
    parser.add_argument("--commit", help="of the tree, where git is not there to tell")
    return parser.parse_args(argv)


def sizes_of(options: argparse.Namespace) -> dict[str, Any]:
    if options.hidden is None:
        return SIZES
    share = options.hidden / SIZES["hidden_size"]
    scaled = {name: int(SIZES[name] * share) for name in ("vocab_size", "hidden_size", "intermediate_size")}
    return SIZES | scaled | {"num_attention_heads": 4, "num_key_value_heads": 2}


def main(argv: list[str] | None = None) -> int:
    import transformers

    options = arguments(argv)
    transformers.utils.logging.disable_progress_bar()
    facts = machine.facts(options.folder.parent, device=options.device, commit=options.commit)
    plain, loads = ways(options.device)
    warm_up(options.device)
    options.folder.mkdir(exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            write_model(Path(name), sizes_of(options), options.layers, options.device)
            rows = measure(options, Path(name), loads)
    finally:
        with contextlib.suppress(OSError):  # not empty: it was there before
            options.folder.rmdir()
    settings = {key: str(value) for key, value in vars(options).items()} | {"plain": plain}
    path = write_report(Path(os.environ.get("OUT") or RESULTS), "transformers", facts, settings, rows)
    print(f"written: {path}; the plain way is {plain}")
    show_memory(rows)
    show_rows(rows)
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
