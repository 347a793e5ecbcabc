"""Runs inside an environment that has SGLang: one rank, one model runner, several loads, without a server.

    python sglang_program.py RANK RANKS PORT < cases.json > results.json

Each case is loaded by the loader that SGLang chooses for it, put into the same runner, and asked for tokens.
What a case gives: greedy tokens, log probabilities of each step, a digest of each parameter, the log, or the error.
"""

from __future__ import annotations

import array
import hashlib
import io
import json
import logging
import os
import sys

ARGUMENTS = [
    "--device",
    "cpu",
    "--dtype",
    "bfloat16",
    "--max-total-tokens",
    "2048",
    "--mem-fraction-static",
    "0.3",
    "--attention-backend",
    "torch_native",
    "--disable-overlap-schedule",
    "--skip-server-warmup",
    "--load-format",
]
PROMPT = "hello world the quick"
STEPS = 8


def runner_of(path, load_format, rank, ranks, port):
    """A model runner whose first load is by ``load_format``; the arguments are parsed as the server's are."""
    from sglang.benchmark import one_batch
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank
    from sglang.srt.server_args import PortArgs, prepare_server_args

    load_plugins()
    arguments = [*ARGUMENTS, load_format, "--tp", str(ranks), "--model-path", path]
    server_args = prepare_server_args(arguments)
    if ranks > 1:
        # Of several ranks each is started on its own here: they meet at the same place.
        server_args.__dict__.setdefault("_", None)
    server_args.resolve_once()
    place = spawn_world_rank(server_args, tp_rank=rank, pp_rank=0)
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=place, gpu_id=rank))
    one_batch._init_process_global_configs()
    ports = PortArgs.init_new(server_args)
    ports.nccl_port = port
    runner, tokenizer = one_batch.load_model(server_args, ports, rank, rank)
    return runner.torch_runner, tokenizer


def answer(runner, tokenizer):
    """Greedy tokens, and the log probabilities of prefill and of each decoding step."""
    import torch
    from sglang.benchmark import one_batch
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    ids = tokenizer.encode(PROMPT)
    settings = SamplingParams(temperature=0, max_new_tokens=STEPS)
    request = Req(
        rid=0, origin_input_text=PROMPT, origin_input_ids=array.array("q", ids), sampling_params=settings
    )
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


def digests(model):
    """Of the bytes of each parameter."""
    import torch

    found = {}
    for name, tensor in model.state_dict().items():
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        found[name] = hashlib.sha256(raw.numpy().tobytes()).hexdigest()
    return found


def load(runner, case):
    """The model of a case, loaded as a start does it."""
    import copy

    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import get_model_loader

    model_config = copy.copy(runner.model_config)
    model_config.model_path = case["path"]
    config = LoadConfig(
        load_format=case["format"], model_loader_extra_config=case.get("extra", {}), tp_rank=case["rank"]
    )
    loader = get_model_loader(config, model_config)
    return loader.load_model(model_config=model_config, device_config=DeviceConfig("cpu", 0))


def run(runner, tokenizer, case, log):
    """What a case gives."""
    from sglang.srt.arg_groups.overrides import resolving_view  # noqa: F401 - as early as in the server

    for name in [name for name in os.environ if name.startswith("TENSORLIFT_")]:
        del os.environ[name]
    os.environ.update(case.get("environment", {}))
    log.seek(0)
    log.truncate()
    result = {}
    try:
        if case.get("reload"):
            result["reload"] = runner.weight_updater.update_weights_from_disk(case["path"], case["format"])
        else:
            runner.model = load(runner, case)
        result["digests"] = digests(runner.model)
        result["tokens"], result["logprobs"] = answer(runner, tokenizer)
    except Exception as error:  # told, whatever it is
        result["error"] = f"{type(error).__name__}: {error}"
    result["log"] = log.getvalue()
    return result


def main():
    rank, ranks, port = map(int, sys.argv[1:4])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # SGLang prints where it likes
    cases = json.load(sys.stdin)
    runner, tokenizer = runner_of(cases[0]["path"], cases[0]["format"], rank, ranks, port)
    log = io.StringIO()
    logging.getLogger("tensorlift").addHandler(logging.StreamHandler(log))
    logging.getLogger("tensorlift").setLevel(logging.INFO)
    json.dump([run(runner, tokenizer, {**case, "rank": rank}, log) for case in cases], out)
    out.flush()
    os._exit(0)  # without SGLang's threads


if __name__ == "__main__":
    main()
