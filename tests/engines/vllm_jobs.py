"""Runs vLLM in its own environment: ``python vllm_jobs.py JOBS.json RESULTS.json``; no test itself.

JOBS is a list of objects, run one after the other in this process, for an import of vLLM takes longer than
all of a tiny model's start:

    model         folder of the checkpoint
    load_format   and ``extra``, the extra configuration (null: none is given)
    environ       variables to set while this job runs
    do            "generate" (greedy tokens and log probabilities), "state" (parameters after vLLM's loader,
                  without a forward), "reload" (generate, load ``reload`` in place, generate) or "fork" (the
                  state after vLLM's processing of three models: by vLLM's own loader, of a seed, of its fork)
    handles       true: vLLM hides weights in handles of oneDNN, as it does on a CPU, else not: for "fork"
    tp, more      ranks, and further arguments of vllm.LLM

RESULTS has an object for each: what was asked for or ``error``, ``log``, the lines of our own logger, and
``load_seconds`` of each load, measured around vLLM's own loader, whichever that is.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

# One process with little memory: what a tiny model needs, on a machine without a GPU.
SETTINGS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
PROMPTS = ["hello world the", "the quick brown fox jumps"]


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if record.name.endswith("tensorlift") or "weights took" in line:
            self.lines.append(f"{record.levelname} {line}")


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def generated(llm: Any) -> list[Any]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=8, logprobs=5, prompt_logprobs=5, ignore_eos=True)
    results = []
    for output in llm.generate(PROMPTS, sampling, use_tqdm=False):
        prefill = [_logprobs(step) for step in output.prompt_logprobs]
        (choice,) = output.outputs
        results.append(
            {
                "tokens": list(choice.token_ids),
                "prefill": prefill,
                "decode": [_logprobs(step) for step in choice.logprobs],
            }
        )
    return results


def _logprobs(step: Any) -> dict[str, float]:
    return {str(token): value.logprob for token, value in sorted((step or {}).items())}


def _state(model: Any) -> dict[str, str]:
    import torch

    derived = {
        f"{path}.{name}": value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }
    return {
        name: hashlib.sha256(
            tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for name, tensor in {**model.state_dict(), **derived}.items()
    }


def state(job: dict[str, Any]) -> dict[str, Any]:
    """Parameters as the loader leaves them, before anything is done to them for a kernel."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = EngineArgs(**_arguments(job)).create_engine_config()
    rank, ranks = job.get("rank", 0), job.get("tp", 1)
    config.parallel_config.rank = rank
    with set_current_vllm_config(config):
        init_distributed_environment(ranks, rank, f"tcp://127.0.0.1:{job['port']}", 0, backend="gloo")
        initialize_model_parallel(ranks, 1)
        with set_default_torch_dtype(config.model_config.dtype):
            model = initialize_model(vllm_config=config)
            get_model_loader(config.load_config).load_weights(model, config.model_config)
    return {"state": _state(model)}


def fork(job: dict[str, Any]) -> dict[str, Any]:
    """As on a device, where vLLM's processing leaves tensors: three models, none of which runs."""
    from unittest import mock

    from vllm import _custom_ops
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader

    import tensorlift.integrations.vllm_forks  # noqa: F401 - to be patched
    from tensorlift.integrations.publisher import publisher

    states = {}
    ways = {
        "plain": ("safetensors", {}),
        "seed": ("tensorlift", {"publish": {"port": job["seed_port"]}}),
        "fork": ("tensorlift", {"seed": f"http://127.0.0.1:{job['seed_port']}"}),
    }
    with (
        mock.patch("tensorlift.integrations.vllm_forks.hides_weights", return_value=False),
        mock.patch.object(_custom_ops, "_supports_onednn", job.get("handles", False)),
        mock.patch("torch.accelerator.empty_cache"),  # as the worker of CPUs has it
    ):
        for name, (load_format, extra) in ways.items():
            arguments = _arguments({**job, "load_format": load_format, "extra": extra})
            config = EngineArgs(**arguments).create_engine_config()
            with set_current_vllm_config(config):
                if not states:
                    init_distributed_environment(1, 0, f"tcp://127.0.0.1:{job['port']}", 0, backend="gloo")
                    initialize_model_parallel(1, 1)
                loader = get_model_loader(config.load_config)
                model = loader.load_model(vllm_config=config, model_config=config.model_config)
            publisher.serve()
            states[name] = _state(model)
    publisher.close()
    return {"states": states}


def _arguments(job: dict[str, Any]) -> dict[str, Any]:
    arguments = {
        "model": job["model"],
        "load_format": job["load_format"],
        "dtype": "bfloat16",
        "max_model_len": 128,
        "enforce_eager": True,
        "tensor_parallel_size": job.get("tp", 1),
        "disable_log_stats": True,
        "seed": 0,
        **job.get("more", {}),
    }
    if job.get("extra") is not None:
        arguments["model_loader_extra_config"] = job["extra"]
    return arguments


def serve(job: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM

    begin, before = time.perf_counter(), resident()
    llm = LLM(**_arguments(job))
    try:
        result: dict[str, Any] = {
            "ready_seconds": time.perf_counter() - begin,
            "memory": resident() - before,
            "kv_tokens": llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
            * llm.llm_engine.vllm_config.cache_config.block_size,
            "outputs": generated(llm),
        }
        if job["do"] == "reload":
            try:
                llm.collective_rpc("reload_weights", kwargs={"weights_path": job["reload"]})
            except Exception as error:  # noqa: BLE001 - it is what is to be shown
                result["reload_error"] = f"{type(error).__name__}: {error}"
            result["reloaded"] = generated(llm)
        return result
    finally:
        with contextlib.suppress(Exception):
            llm.llm_engine.engine_core.shutdown()
        del llm


def run(job: dict[str, Any]) -> dict[str, Any]:
    # Before a handler is added: vLLM sets its logging up when it is imported.
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    loads: list[float] = []
    original = DefaultModelLoader.load_weights

    def timed(self: Any, *arguments: Any) -> None:
        begin = time.perf_counter()
        original(self, *arguments)
        loads.append(time.perf_counter() - begin)

    kept = Lines()
    for name in ("vllm", "tensorlift"):
        logging.getLogger(name).addHandler(kept)
    DefaultModelLoader.load_weights = timed
    try:
        with environment(job.get("environ", {})):
            begin = time.perf_counter()
            try:
                result = {"state": state, "fork": fork}.get(job["do"], serve)(job)
            except BaseException as error:  # noqa: BLE001 - it is what is to be shown
                traceback.print_exc()
                result = {"error": f"{type(error).__name__}: {error}"}
            result["seconds"] = time.perf_counter() - begin
    finally:
        DefaultModelLoader.load_weights = original
        for name in ("vllm", "tensorlift"):
            logging.getLogger(name).removeHandler(kept)
    gc.collect()
    cleanup_dist_env_and_memory()
    if loads:  # elsewhere where workers are processes of their own
        result["load_seconds"] = loads
    return result | {"log": kept.lines}


def main() -> None:
    os.environ.update(SETTINGS)
    with open(sys.argv[1]) as file:
        jobs = json.load(file)
    results = []
    for job in jobs:
        results.append(run(job))
        with open(sys.argv[2], "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
