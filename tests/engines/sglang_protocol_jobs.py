"""Runs in SGLang's environment: its functions read a seed of ours, and a fork of ours what they publish."""

from __future__ import annotations

import dataclasses
import json
import socket
import sys
import threading
import time
from types import SimpleNamespace

import torch
import uvicorn
from mooncake.engine import TransferEngine
from sglang.srt.entrypoints import http_server
from sglang.srt.entrypoints.engine_info_bootstrap_server import EngineInfoBootstrapServer
from sglang.srt.model_executor.model_runner_components import (
    remote_instance_weight_transporter as transporter,
)
from sglang.srt.model_loader import remote_instance_weight_loader_utils as utils
from sglang.srt.model_loader.loader import RemoteInstanceModelLoader

import tensorlift


def model(value: float) -> torch.nn.Module:
    made = torch.nn.Sequential(*(torch.nn.Linear(100, 100, dtype=torch.bfloat16) for _ in range(20)))
    with torch.no_grad():
        for at, parameter in enumerate(made.parameters()):
            parameter.fill_(value + at)
    return made


def alike(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def engine() -> TransferEngine:
    made = TransferEngine()
    assert made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    return made


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def theirs_from_ours() -> bool:
    """As an SGLang with --load-format remote_instance reads from the URL that it is given."""
    here, reader = model(100), engine()
    with tensorlift.seed(model(1), key="m", transports=["mooncake"], protocol="tcp") as seed:
        utils.register_memory_region_v1(here, reader)
        loader = object.__new__(RemoteInstanceModelLoader)
        done = loader.load_model_from_remote_instance_by_transfer_engine(here, reader, seed.url, 0)
        return done and alike(here, model(1))


def ours_from_theirs() -> bool:
    """From the route of SGLang's server, behind which is what a rank of it has registered and published."""
    there, here, seed = model(2), model(100), engine()
    bootstrap = EngineInfoBootstrapServer("127.0.0.1", free_port())
    rank = object.__new__(transporter.RemoteInstanceWeightTransporter)
    rank.tp_rank, rank.session_id = 0, f"127.0.0.1:{seed.get_rpc_port()}"
    rank.weight_info = utils.register_memory_region_v1(there, seed)
    # What both ask the process's configuration.
    transporter.get_parallel = lambda: SimpleNamespace(dist_init_addr=None)
    transporter.get_model = lambda: SimpleNamespace(engine_info_bootstrap_port=bootstrap.port)
    while not bootstrap._server.started:
        time.sleep(0.01)
    rank._register_to_engine_info_bootstrap()
    arguments = SimpleNamespace(engine_info_bootstrap_url=f"http://127.0.0.1:{bootstrap.port}")
    http_server._global_state = SimpleNamespace(tokenizer_manager=SimpleNamespace(server_args=arguments))
    port = free_port()
    routes = http_server.FastAPI()
    path = "/get_remote_instance_transfer_engine_info"
    routes.get(path)(http_server.get_remote_instance_transfer_engine_info)
    server = uvicorn.Server(uvicorn.Config(routes, host="127.0.0.1", port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        came = tensorlift.fork(f"sglang+http://127.0.0.1:{port}", into=here, protocol="tcp")
        print(dataclasses.asdict(came)["transports"], flush=True)
        return alike(here, there)
    finally:
        server.should_exit = True
        thread.join()
        bootstrap.close()


if __name__ == "__main__":
    with open(sys.argv[1], "w") as out:
        json.dump({"theirs_from_ours": theirs_from_ours(), "ours_from_theirs": ours_from_theirs()}, out)
