"""Device memory beyond what is needed, after a load and after what an engine does behind it.

    python benchmarks/memory.py [--loaders plain,open,load,instanttensor] [--rival-path FOLDER]

8.7 GB with an embedding of 1.9 GB, in a tmpfs. Each figure comes from a fresh process, which loads a small
checkpoint first, so that what a process makes once is there. Two uses:

    copied  as an engine: parameters are there, each tensor is copied into its own and dropped
    kept    the tensors themselves are the model

In both, for each 20th tensor a buffer is made while loading and stays. Then ("loaded") bytes are compared and
the cache is emptied; then each 20th matrix is replaced by a transposed copy, its original is dropped, and the
cache is emptied again ("post"). Beyond is what torch has reserved (and, the second figure, what the driver
says is gone) less the bytes of all tensors that are held. A kept tensor of ours keeps its arena: what "kept"
drops afterwards stays, by the contract in docs/tensors.md.

"twice" loads a target and then a draft, compares their bytes and drops each: what is left each time. The
surroundings: default, expandable segments, and inside another use_mem_pool. The bar is 2 MiB more than the
plain library in the same surroundings and use; for "twice", 2 MiB. --device cpu tries the script: its figures
mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tensorlift.bench import instanttensor, machine
from tensorlift.bench.cases import Case, Spec, in_shards, remove, write_shards
from tensorlift.bench.geometry import MODELS
from tensorlift.bench.parity import same_bytes
from tensorlift.bench.report import make_record, write_record
from tensorlift.errors import MismatchError
from tensorlift.loading import load
from tensorlift.loading import open as open_weights

RESULTS = Path(__file__).resolve().parent / "results"
MIB = 1 << 20
BAR = 2 * MIB
EVERY = 20
# 1.9 GB in bf16.
EMBEDDING = (463_872, 2048)
LOADERS = ("plain", "open", "load", "instanttensor")
USES = ("copied", "kept", "twice")
SURROUNDINGS = ("default", "expandable", "pool")


def models(layers: int, embedding: tuple[int, int]) -> dict[str, list[Spec]]:
    """The tensors of each checkpoint by its name."""
    model = MODELS["qwen3-30b-a3b"]
    first, *others = model.specs(layers)
    return {
        "target": [replace(first, shape=embedding), *others],
        "draft": model.specs(min(layers, 1)),
        "small": [Spec(f"w{i}.weight", "BF16", (1024, 2048)) for i in range(24)],
    }


def stream(loader: str, case: Case, device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors, one by one."""
    if loader == "plain":
        from safetensors import safe_open

        for file in case.files:
            with safe_open(str(file), framework="pt", device=device) as reader:
                for name in reader.keys():  # noqa: SIM118 - not a mapping
                    yield name, reader.get_tensor(name)
    elif loader == "open":
        with open_weights(case.folder, device) as weights:
            yield from weights
    elif loader == "load":
        state = load(case.folder, device)
        for name in list(state):
            yield name, state.pop(name)
    else:
        import instanttensor as other

        with other.safe_open(list(map(str, case.files)), framework="pt", device=device) as reader:
            yield from reader.tensors()


class Model:
    """What an engine holds: weights, and buffers of its own."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.weights: dict[str, torch.Tensor] = {}
        self.buffers: list[torch.Tensor] = []

    def fill(self, loader: str, case: Case, specs: list[Spec], copied: bool) -> None:
        """Loads; a buffer is made now and then, of 64 KiB to 1 MiB."""
        if copied:
            self.weights = {
                spec.name: torch.empty(spec.shape, dtype=torch.bfloat16, device=self.device) for spec in specs
            }
        for number, (name, tensor) in enumerate(stream(loader, case, self.device)):
            if copied:
                self.weights[name].copy_(tensor)
            else:
                self.weights[name] = tensor
            del tensor
            if number % EVERY == 0:
                size = 64 * 1024 << (number // EVERY % 5)
                self.buffers.append(torch.empty(size, dtype=torch.uint8, device=self.device))

    def transpose(self) -> None:
        """The step behind a load: some weights are replaced by copies in another order."""
        for name in [name for name, tensor in self.weights.items() if tensor.dim() == 2][::EVERY]:
            self.weights[name] = self.weights[name].t().contiguous()

    @property
    def need(self) -> int:
        """Bytes of what is held."""
        return sum(tensor.untyped_storage().nbytes() for tensor in [*self.weights.values(), *self.buffers])

    def check(self, case: Case) -> None:
        """Compares all bytes on the host, so that no device memory is touched for it."""
        from safetensors import safe_open

        for file in case.files:
            with safe_open(str(file), framework="pt") as reader:
                for name in reader.keys():  # noqa: SIM118 - not a mapping
                    if not same_bytes(self.weights[name].cpu(), reader.get_tensor(name)):
                        raise MismatchError(f"{file}: tensor {name!r} has other bytes")


def state_of(device: str) -> dict[str, int]:
    """Bytes that torch has reserved, and that the driver has free, with nothing cached."""
    gc.collect()
    if device == "cpu":
        return {"reserved": 0, "free": 0}
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return {"reserved": torch.cuda.memory_reserved(device), "free": torch.cuda.mem_get_info(device)[0]}


def beyond(device: str, baseline: dict[str, int], need: int) -> dict[str, int]:
    """What is gone besides ``need``: by torch's count, and by the driver's."""
    now = state_of(device)
    return {
        "reserved": now["reserved"] - baseline["reserved"] - need,
        "driver": baseline["free"] - now["free"] - need,
        "need": need,
    }


def surrounded(surroundings: str, device: str) -> contextlib.AbstractContextManager[object]:
    if surroundings != "pool" or device == "cpu":
        return contextlib.nullcontext()
    if not POOLS:
        # It lives as long as the process, as an engine's does.
        POOLS.append(torch.cuda.MemPool())
    return torch.cuda.use_mem_pool(POOLS[0], device=torch.device(device))


POOLS: list[Any] = []


def child(request: dict[str, Any]) -> dict[str, Any]:
    """One figure: a loader, a use, the surroundings."""
    device, loader, use = request["device"], request["loader"], request["use"]
    if device != "cpu":
        torch.cuda.set_device(torch.device(device))
    specs = models(request["layers"], tuple(request["embedding"]))
    cases = {name: read_case(Path(request["folder"], name), specs[name]) for name in specs}
    if loader == "instanttensor":
        why = instanttensor.obstacle(Path(request["rival_path"]) if request["rival_path"] else None)
        if why is not None:
            return {"missing": why}
    found: dict[str, Any] = {}

    def filled(name: str, copied: bool) -> Model:
        model = Model(device)
        with surrounded(request["surroundings"], device):
            model.fill(loader, cases[name], specs[name], copied)
        return model

    # What a process makes once: the context's kernels, the loader's pinned memory and its threads.
    for copied in (True, False):
        warm = filled("small", copied)
        warm.transpose()
        del warm
    baseline = state_of(device)
    if use == "twice":
        for name in ("target", "draft"):
            model = filled(name, copied=False)
            if loader != "plain":
                model.check(cases[name])
            del model
            found[name] = beyond(device, baseline, 0)
        return found
    model = filled("target", use == "copied")
    found["loaded"] = beyond(device, baseline, model.need)
    if loader != "plain" and request["surroundings"] == "default":
        model.check(cases["target"])
    model.transpose()
    found["post"] = beyond(device, baseline, model.need)
    return found


def read_case(folder: Path, specs: list[Spec]) -> Case:
    """A checkpoint that the parent wrote."""
    return Case(
        folder,
        tuple(sorted(folder.glob("*.safetensors"))),
        len(specs),
        sum(spec.nbytes for spec in specs),
    )


def ask(request: dict[str, Any]) -> dict[str, Any]:
    """The figure from a process of its own; what went wrong is an answer too."""
    environment = {**os.environ}
    if request["surroundings"] == "expandable":
        environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    command = [sys.executable, __file__, "--child", json.dumps(request)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    except subprocess.TimeoutExpired:
        return {"error": "no end within 180 s"}
    if done.returncode:
        return {"error": done.stderr.strip()[-3000:]}
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def judge(results: list[dict[str, Any]]) -> bool:
    """Adds to each stage what it has more than the plain library has there; whether all keep the bar."""
    plain = {
        (r["surroundings"], r["use"], stage): r["found"][stage]
        for r in results
        if r["loader"] == "plain"
        for stage in STAGES
        if stage in r["found"]
    }
    good = True
    for result in results:
        for stage in STAGES:
            there = result["found"].get(stage)
            least = plain.get((result["surroundings"], result["use"], stage))
            if there is None or result["loader"] == "plain":
                continue
            if result["use"] == "twice":
                there["more"] = max(there["reserved"], there["driver"])
            else:
                there["more"] = there["reserved"] - (0 if least is None else least["reserved"])
            there["within"] = there["more"] <= BAR
            if result["loader"] != "instanttensor":
                good &= there["within"]
        good &= not (result["loader"] != "instanttensor" and "error" in result["found"])
    return good


STAGES = ("loaded", "post", "target", "draft")


def show(results: list[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("surroundings", "use", "loader", "stage"):
        table.add_column(column)
    for column in ("need MiB", "beyond MiB", "by the driver", "more than plain", ""):
        table.add_column(column, justify="right")
    for result in results:
        where = [result["surroundings"], result["use"], result["loader"]]
        for stage in STAGES:
            there = result["found"].get(stage)
            if there is not None:
                sizes = [f"{there[key] / MIB:.1f}" for key in ("need", "reserved", "driver")]
                more = f"{there['more'] / MIB:.1f}" if "more" in there else "-"
                passed = {True: "ok", False: "NOT"}.get(there.get("within"), "")
                table.add_row(*where, stage, *sizes, more, passed)
        for key in ("error", "missing"):
            if key in result["found"]:
                table.add_row(*where, key, result["found"][key].splitlines()[-1][:60])
    Console(width=140, highlight=False, markup=False).print(table)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loaders", default=",".join(LOADERS))
    parser.add_argument("--uses", default=",".join(USES))
    parser.add_argument("--surroundings", default=",".join(SURROUNDINGS))
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/tensorlift-memory"), help="in a tmpfs")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--rows", type=int, default=EMBEDDING[0], help="of the embedding")
    parser.add_argument("--rival-path", type=Path, help="a folder to find instanttensor in")
    parser.add_argument("--commit", help="of the tree, where git is not there to tell")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    for name, known in (("loaders", LOADERS), ("uses", USES), ("surroundings", SURROUNDINGS)):
        wanted = getattr(options, name).split(",")
        if unknown := [word for word in wanted if word not in known]:
            parser.error(f"--{name}: {', '.join(unknown)}; there are {', '.join(known)}")
        setattr(options, name, [word for word in known if word in wanted])
    return options


def requests(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for surroundings in options.surroundings:
        for use in options.uses:
            for loader in options.loaders:
                # The surroundings are ours to stand; "kept" and the rival are compared in the usual ones.
                if surroundings != "default" and (use == "kept" or loader == "instanttensor"):
                    continue
                yield {
                    "surroundings": surroundings,
                    "use": use,
                    "loader": loader,
                    "device": options.device,
                    "folder": str(options.folder.resolve()),
                    "layers": options.layers,
                    "embedding": [options.rows, EMBEDDING[1]],
                    "rival_path": str(options.rival_path.resolve()) if options.rival_path else None,
                }


def write(options: argparse.Namespace, facts: dict[str, Any], results: list[dict[str, Any]]) -> Path:
    settings = {key: str(value) for key, value in vars(options).items() if key != "child"}
    record = make_record("memory", facts, settings, bar_bytes=BAR, results=results)
    return write_record(Path(os.environ.get("OUT") or RESULTS), record)


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    if options.child:
        print(json.dumps(child(json.loads(options.child))))
        return 0
    cases: list[Case] = []
    results: list[dict[str, Any]] = []
    good = True
    path: Path | None = None
    # Before the first figure, for it makes a context on the device.
    facts = machine.facts(options.folder.parent, device=options.device, commit=options.commit)
    try:
        for name, specs in models(options.layers, (options.rows, EMBEDDING[1])).items():
            cases.append(write_shards(options.folder / name, in_shards(specs, 4 if name == "target" else 1)))
        for request in requests(options):
            found = ask(request)
            results.append(
                {key: request[key] for key in ("surroundings", "use", "loader")} | {"found": found}
            )
            print(f"{results[-1]}", file=sys.stderr, flush=True)
            good = judge(results)
            # After each, so that a run that is cut off leaves what it had.
            path = write(options, facts, results)
    finally:
        for case in cases:
            remove(case)
        with contextlib.suppress(OSError):  # not empty: it was there before
            options.folder.rmdir()
    show(results)
    print(f"written: {path}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
