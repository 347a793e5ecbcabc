"""Runs in SGLang's own environment: ``python sglang_jobs.py JOBS.json RESULTS.json``; no test.

JOBS is a list of objects, run one after the other by one model runner in this process, for an import of
SGLang takes longer than all of a tiny model's start:

    model        folder of the checkpoint
    load_format  and ``extra``, the extra configuration
    environ      the variables TENSORLIFT_... while this job runs
    do           "generate", "state" (parameters alone, for what a CPU cannot run; in a fresh model, a draft
                 with ``draft``, and as on a GPU of ``capability``, which is only asked for), or
                 "reload" (what /update_weights_from_disk calls, then generate)
    serve        "alone": what was to be published is, as when a scheduler is made, and nothing of the jobs
                 before; "beside": that too

The first job's ``rank``, ``tp`` and ``port`` are those of the process, ``arguments`` more of the server's.

RESULTS has an object for each: ``tokens`` (greedy), ``logprobs`` (of prefill and of each step), ``state``
(digests of parameters), ``log`` (of our logger), ``error``.
"""

from __future__ import annotations

import array
import contextlib
import copy
import hashlib
import io
import json
import logging
import os
import sys
import time
import traceback
from typing import Any
from unittest import mock

ARGUMENTS = [
    "--device",
    "cpu",
    "--dtype",
    "bfloat16",
    "--max-total-tokens",
    "2048",
    "--mem-fraction-static",
    "0.3",
    "--skip-server-warmup",
    "--attention-backend",
    "torch_native",
    "--disable-overlap-schedule",
]
PROMPT = "hello world the quick"
STEPS = 8


def runner_of(job: dict[str, Any]) -> tuple[Any, Any]:
    """A model runner and the tokenizer; what arguments say is worked out as in the server."""
    rank, own = job["rank"], ["--tp", str(job["tp"]), "--model-path", job["model"]]
    from sglang.benchmark import one_batch
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank
    from sglang.srt.server_args import PortArgs, prepare_server_args

    load_plugins()
    server_args = prepare_server_args([*ARGUMENTS, *own, *job.get("arguments", ())])
    server_args.resolve_once()
    place = spawn_world_rank(server_args, tp_rank=rank, pp_rank=0)
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=place, gpu_id=rank))
    one_batch._init_process_global_configs()
    ports = PortArgs.init_new(server_args)
    ports.nccl_port = job["port"]  # ranks are started apart, and meet there
    runner, tokenizer = one_batch.load_model(server_args, ports, rank, rank)
    return runner.torch_runner, tokenizer


def answer(runner: Any, tokenizer: Any) -> tuple[list[int], list[list[float]]]:
    """Greedy tokens, and the log probabilities of prefill and of each decoding step."""
    import torch
    from sglang.benchmark import one_batch
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    ids = array.array("q", tokenizer.encode(PROMPT))
    request = Req(0, PROMPT, ids, SamplingParams(temperature=0, max_new_tokens=STEPS))
    request.full_untruncated_fill_ids = request.origin_input_ids
    request.logprob_start_len = -1
    request.extend_end = len(ids)
    runner.req_to_token_pool.clear()
    runner.token_to_kv_pool_allocator.clear()
    tokens, logits, batch = one_batch.extend([request], runner)
    chosen, steps = [tokens.tolist()[0]], [logits]
    for _ in range(STEPS):
        tokens, logits = one_batch.decode(tokens, batch, runner)
        chosen.append(tokens.tolist()[0])
        steps.append(logits)
    return chosen, [torch.log_softmax(step.float(), -1)[0].tolist() for step in steps]


def state_of(model: Any) -> dict[str, str]:
    """A digest of the bytes of each parameter, buffer and derived tensor."""
    import torch

    derived = {
        f"{path}.{name}": value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }
    found = {}
    for name, tensor in {**model.state_dict(), **derived}.items():
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        found[name] = hashlib.sha256(raw.numpy().tobytes()).hexdigest()
    return found


def load(model_config: Any, job: dict[str, Any]) -> Any:
    """A model, loaded as a start does it."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import get_model_loader

    model_config = copy.copy(model_config)
    model_config.model_path = job["model"]
    extra = job.get("extra") or {}
    config = LoadConfig(load_format=job["load_format"], model_loader_extra_config=extra, tp_rank=job["rank"])
    loader = get_model_loader(config, model_config)
    with contextlib.ExitStack() as pretended:
        if "capability" in job:
            capability = mock.patch("torch.cuda.get_device_capability", return_value=tuple(job["capability"]))
            pretended.enter_context(capability)
        model = loader.load_model(model_config=model_config, device_config=DeviceConfig("cpu", 0))
    assert loader.counter_after_loading_weights > loader.counter_before_loading_weights > 0
    return model


def run(runner: Any, tokenizer: Any, job: dict[str, Any]) -> dict[str, Any]:
    """What one job gives."""
    from sglang.srt.configs.model_config import ModelConfig

    result: dict[str, Any] = {}
    if job["do"] == "reload":
        updater = runner.weight_updater
        result["reload"] = updater.update_weights_from_disk(job["model"], job["load_format"])
    else:
        own = job["do"] == "state"
        config = runner.model_config
        if own:
            config = ModelConfig(job["model"], dtype="bfloat16", is_draft_model=job.get("draft", False))
        if job.get("serve"):
            from tensorlift.integrations.publisher import publisher

            if job["serve"] == "alone":
                publisher.close()
        begin = time.perf_counter()
        model = load(config, job)
        result["seconds"] = time.perf_counter() - begin
        result["state"] = state_of(model)
        if job.get("serve"):
            publisher.serve()
        if own:
            return result
        runner.model = model
    result["tokens"], result["logprobs"] = answer(runner, tokenizer)
    return result


def main() -> None:
    """Of one rank."""
    with open(sys.argv[1]) as file:
        jobs = json.load(file)
    runner, tokenizer = runner_of(jobs[0])
    log = io.StringIO()
    logging.getLogger("tensorlift").addHandler(logging.StreamHandler(log))
    logging.getLogger("tensorlift").setLevel(logging.INFO)
    results = []
    for job in jobs:
        for name in [name for name in os.environ if name.startswith("TENSORLIFT_")]:
            del os.environ[name]
        os.environ.update(job.get("environ", {}))
        log.seek(0)
        log.truncate()
        try:
            result = run(runner, tokenizer, job)
        except Exception as error:  # noqa: BLE001 - whatever it is, the test is to see it
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"}
        results.append({**result, "log": log.getvalue()})
    with open(sys.argv[2], "w") as file:
        json.dump(results, file)
    sys.stdout.flush()
    os._exit(0)  # SGLang's threads would keep the process


if __name__ == "__main__":
    main()
