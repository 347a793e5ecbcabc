"""Mooncake's own traps, with the real package over TCP; what has to do with a NIC, by what it is asked."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support import one_sided as support
from tensorlift.engine.abi_fork import Memory
from tensorlift.errors import ForkError
from tensorlift.forking import mooncake, one_sided, topology
from tensorlift.forking.fabrics import ANY, FabricError, Part, Wiring
from tensorlift.forking.fork import fork_into
from tensorlift.forking.mooncake import Mooncake, protocol_of

HOST, PATIENCE = "127.0.0.1", 60.0
ITEMS = 200_000


@pytest.fixture(scope="module")
def engine() -> Mooncake:
    """One for the module: ending it takes a second."""
    support.need("mooncake")
    return Mooncake(support.OVER_TCP, HOST)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No variable of Mooncake's."""
    for name in list(os.environ):
        if name.startswith(("MC_", "MOONCAKE_")):
            monkeypatch.delenv(name)
    return monkeypatch


def never() -> None:
    """Somebody waits for the read."""


def memory(array: Any) -> Memory:
    return Memory(array.ctypes.data, array.nbytes)


def test_thousands_of_parts_go_in_calls_that_are_not_refused(engine: Mooncake) -> None:
    there = np.random.default_rng(2).integers(0, 256, 1 << 20, np.uint8)
    here = np.zeros_like(there)
    engine.register([memory(there), memory(here)])
    at = range(0, there.nbytes, 256)
    parts = [Part(there.ctypes.data + k, here.ctypes.data + k, 256) for k in at]
    assert len(parts) > 3 * 1024
    real, sizes = engine._engine, []

    class Counted:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def batch_transfer_sync_read(self, session: str, *lists: list[int]) -> int:
            sizes.append(len(lists[0]))
            return int(real.batch_transfer_sync_read(session, *lists))

    engine._engine = Counted()
    try:
        engine.read(engine.session(), parts, never)
    finally:
        engine._engine = real
    assert max(sizes) == 1024
    assert np.array_equal(there, here)
    engine.unregister([memory(there), memory(here)])


def test_a_region_that_came_later_and_one_that_went(engine: Mooncake) -> None:
    """Neither is hidden by a descriptor that was seen before."""
    first, second, here = np.full(5000, 1, np.uint8), np.full(5000, 2, np.uint8), np.zeros(5000, np.uint8)
    engine.register([memory(first), memory(here)])

    def read(array: Any) -> int:
        here[:] = 0
        engine.read(engine.session(), [Part(array.ctypes.data, here.ctypes.data, 5000)], never)
        return int(here[0])

    assert read(first) == 1
    engine.register([memory(second)])
    assert read(second) == 2
    engine.unregister([memory(second)])
    with pytest.raises(FabricError, match="failed: it may be gone, or have changed"):
        read(second)
    assert here[0] == 0
    engine.unregister([memory(first), memory(here)])


def test_a_read_past_its_region_is_an_error(engine: Mooncake) -> None:
    there, here = np.ones(5000, np.uint8), np.zeros(5000, np.uint8)
    engine.register([memory(there), memory(here)])
    with pytest.raises(FabricError):
        engine.read(engine.session(), [Part(there.ctypes.data + 10, here.ctypes.data, 5000)], never)
    engine.unregister([memory(there), memory(here)])


def test_another_engine_at_the_address_of_one_that_is_known(engine: Mooncake) -> None:
    """It would be read by what is known of the one before."""
    engine.meet("10.0.0.1:15001/one")
    engine.meet("10.0.0.1:15001/one")
    engine.meet("10.0.0.1:15002/other")
    with pytest.raises(FabricError, match="for who did before"):
        engine.meet("10.0.0.1:15001/next")


def test_what_was_never_registered(engine: Mooncake) -> None:
    stray = np.ones(100, np.uint8)
    with pytest.raises(FabricError, match="does not let go of 1 regions of 100 bytes"):
        engine.unregister([memory(stray)])


@pytest.mark.parametrize("protocol", ["rdma", "efa"])
def test_tcp_is_not_taken_for_what_was_asked(plain: pytest.MonkeyPatch, protocol: str) -> None:
    """Left to itself it takes TCP and says that all is well, and so it does where that is forced."""
    support.need("mooncake")
    if topology.has_nics():
        pytest.skip("there is a NIC for RDMA here")
    plain.setenv("MC_FORCE_TCP", "1" if protocol == "rdma" else "")
    before = dict(os.environ)
    with pytest.raises(
        FabricError, match=f"does not begin with {protocol}|for {protocol} and has installed tcp"
    ):
        Mooncake(Wiring(protocol), HOST)
    assert dict(os.environ) == before


class Engine:
    """Says what it was asked for."""

    asked: tuple[str, ...] = ()
    environment: dict[str, str]

    def TransferEngine(self) -> Engine:
        return self

    def initialize(self, *asked: str) -> int:
        self.asked = asked
        self.environment = {name: text for name, text in os.environ.items() if name.startswith("MC_")}
        return 0

    def get_rpc_port(self) -> int:
        return 1


@pytest.fixture
def fake(plain: pytest.MonkeyPatch, tmp_path: Path) -> Engine:
    made = Engine()
    plain.setattr(mooncake, "PACKAGES", type("P", (), {"load": lambda self: made})())
    plain.setattr(topology, "_NICS", tmp_path / "infiniband")
    return made


@pytest.mark.parametrize(
    ("wiring", "environment", "expected"),
    [
        (ANY, {}, ("tcp", "")),
        (ANY, {"MOONCAKE_PROTOCOL": "rdma", "MOONCAKE_DEVICE": "mlx5_2"}, ("rdma", "mlx5_2")),
        (ANY, {"MOONCAKE_DEVICE": "mlx5_2"}, ("rdma", "mlx5_2")),
        (ANY, {"MOONCAKE_DEVICE": "auto-discovery"}, ("tcp", "")),
        (ANY, {"MOONCAKE_PROTOCOL": "RDMA ", "MOONCAKE_DEVICE": " auto-discovery"}, ("rdma", "")),
        (Wiring("", ("mlx5_1:1", "mlx5_3:2")), {"MOONCAKE_DEVICE": "mlx5_2"}, ("rdma", "mlx5_1,mlx5_3")),
        (Wiring("tcp"), {"MOONCAKE_PROTOCOL": "rdma"}, ("tcp", "")),
        (ANY, {"MC_FORCE_HCA": "1"}, ("rdma", "")),
        (ANY, {"MC_FORCE_TCP": "1", "MOONCAKE_DEVICE": "mlx5_2"}, ("tcp", "mlx5_2")),
        (Wiring("rdma", ("mlx5_1",)), {"MOONCAKE_PROTOCOL": "tcp", "MC_FORCE_TCP": "1"}, ("rdma", "mlx5_1")),
        (Wiring("", ("mlx5_1:1",)), {"MOONCAKE_PROTOCOL": "tcp"}, ("tcp", "")),
        (Wiring("", ("mlx5_1:1",)), {"MC_FORCE_TCP": "1"}, ("tcp", "")),
    ],
)
def test_options_go_before_variables(
    fake: Engine, plain: pytest.MonkeyPatch, wiring: Wiring, environment: dict[str, str], expected: Any
) -> None:
    for name, text in environment.items():
        plain.setenv(name, text)
    made = Mooncake(wiring, HOST)
    assert fake.asked == (HOST, "P2PHANDSHAKE", *expected)
    assert made.how == expected[0]
    forced = {name: fake.environment.get(name) for name in ("MC_FORCE_TCP", "MC_FORCE_HCA")}
    is_tcp = expected[0] == "tcp"
    assert forced == {"MC_FORCE_TCP": "1" if is_tcp else None, "MC_FORCE_HCA": None if is_tcp else "1"}


def test_a_nic_that_is_there_is_meant(plain: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain.setattr(topology, "_NICS", tmp_path)
    assert protocol_of(ANY) == "tcp"
    (tmp_path / "mlx5_0").mkdir()
    assert protocol_of(ANY) == "rdma"


def test_devices_mean_nothing_over_tcp(fake: Engine) -> None:
    with pytest.raises(FabricError, match="over tcp Mooncake lets nobody choose mlx5_1"):
        Mooncake(Wiring("tcp", ("mlx5_1:1",), is_named=True), HOST)


def test_a_protocol_that_there_is_not(fake: Engine, plain: pytest.MonkeyPatch) -> None:
    plain.setenv("MOONCAKE_PROTOCOL", "tpc")
    with pytest.raises(FabricError, match="Mooncake has no protocol 'tpc'; expected one of tcp, rdma, efa, "):
        Mooncake(ANY, HOST)
    assert fake.asked == ()


def test_a_package_without_cuda_is_not_given_a_device(engine: Mooncake) -> None:
    """It would copy from that address as from the host's."""
    with pytest.raises(FabricError, match="non-cuda cannot read a device's memory"):
        engine.register([Memory(0x1000, 10, 1, 0)])


# A seed, until its standard input ends: port, version.
SEED = f"""
import sys, torch, tensorlift
model = {{"w": torch.arange({ITEMS}) * int(sys.argv[2])}}
port = int(sys.argv[1])
with tensorlift.seed(model, key="k", port=port, transports=["mooncake"], protocol="tcp") as seed:
    print("[]", seed.url, flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def child(code: str, *more: object) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    made = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, more)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        yield made, support.said(made).split()[1:]
    finally:
        made.kill()
        made.communicate()


def fork(url: str, **more: Any) -> torch.Tensor:
    into = {"w": torch.zeros(ITEMS, dtype=torch.int64)}
    options = {"transports": ["mooncake"], "protocol": "tcp", "patience": PATIENCE, **more}
    fork_into(into, url, **options)
    return into["w"]


def test_a_seed_that_is_stopped_in_the_middle_and_one_that_was_restarted(engine: Mooncake) -> None:
    """No wait without an end; a fresh engine reads from it when it goes on, and then from another process
    that listens at its port.
    """
    with child(SEED, 0, 1) as (process, (url,)):
        assert torch.equal(fork(url), torch.arange(ITEMS))
        real = one_sided.OneSidedConnection._read
        stopped = []

        def stopping(*given: Any) -> Any:
            if not stopped:
                process.send_signal(signal.SIGSTOP)
                stopped.append(True)
            return real(*given)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(one_sided.OneSidedConnection, "_read", stopping)
            with pytest.raises(ForkError, match="bytes could not be had"):
                fork(url, patience=1.0)
        process.send_signal(signal.SIGCONT)
        assert torch.equal(fork(url), torch.arange(ITEMS))
    port = url.rpartition(":")[2]
    with child(SEED, port, 2) as (_, (again,)):
        assert again == url
        assert torch.equal(fork(url), torch.arange(ITEMS) * 2)
