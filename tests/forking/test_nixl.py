"""NIXL's own traps, with the real package over TCP; what has to do with a NIC, by what it is asked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import one_sided as support
from tensorlift.engine.abi_fork import Memory
from tensorlift.forking import nixl, topology
from tensorlift.forking.fabrics import FabricError, Part, Wiring
from tensorlift.forking.nixl import Nixl

HOST, NBYTES = "127.0.0.1", 5000


@pytest.fixture(autouse=True)
def _there() -> None:
    support.need("nixl")


def never() -> None:
    """Somebody waits for the read."""


def memory(array: Any) -> Memory:
    return Memory(array.ctypes.data, array.nbytes)


def agent(name: str = "", value: int = 0) -> tuple[Nixl, Any]:
    """An engine, by a name of ours where it has to be one, with registered memory of one value."""
    with pytest.MonkeyPatch.context() as patch:
        if name:
            patch.setattr("secrets.token_hex", lambda count: name)
        made = Nixl(support.OVER_TCP, HOST)
    array = np.full(NBYTES, value, np.uint8)
    made.register([memory(array)])
    return made, array


def read(reader: Nixl, peer: Nixl, there: Any, here: Any) -> int:
    here[:] = 0
    reader.read(peer.session(), [Part(there.ctypes.data, here.ctypes.data, NBYTES)], never)
    return int(here[-1])


def test_regions_that_come_later_and_agents_of_a_name_that_is_known() -> None:
    reader, here = agent()
    peer, first = agent("same", 1)
    before = peer.session()
    reader.meet(before)
    assert read(reader, peer, first, here) == 1
    second = np.full(NBYTES, 2, np.uint8)
    peer.register([memory(second)])
    with pytest.raises(FabricError, match="NIXL's read failed"):
        read(reader, peer, second, here)
    reader.meet(peer.session())
    reader.part(before)
    assert read(reader, peer, second, here) == 2
    reader.part(peer.session())
    peer.close()
    # Restarted under its name: what is known of the one before would be taken for it.
    again, third = agent("same", 3)
    reader.meet(again.session())
    assert read(reader, again, third, here) == 3
    again.close()
    reader.close()


def test_thousands_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    both, _ = agent()
    there, here = np.random.default_rng(2).integers(0, 256, 1 << 20, np.uint8), np.zeros(1 << 20, np.uint8)
    both.register([memory(there), memory(here)])
    both.meet(both.session())
    parts = [Part(there.ctypes.data + k, here.ctypes.data + k, 256) for k in range(0, 1 << 20, 256)]
    both.read(both.session(), parts, never)
    assert np.array_equal(there, here)
    both.close()


def test_a_transfer_has_an_end() -> None:
    """Whoever waits says when; what is said of it by then is nobody's any more."""
    both, there = agent()
    both.meet(both.session())

    class Pending:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def transfer(self, handle: Any) -> str:
            return "PROC"

        def check_xfer_state(self, handle: Any) -> str:
            return "PROC"

    def go_on() -> None:
        raise TimeoutError("no longer")

    real, both._agent = both._agent, Pending()
    with pytest.raises(TimeoutError, match="no longer"):
        both.read(both.session(), [Part(there.ctypes.data, there.ctypes.data, NBYTES)], go_on)
    both._agent = real
    both.close()


def test_a_session_that_is_none() -> None:
    both, _ = agent()
    for session in ("x:!", "x:" + "AAAA", "nothing"):
        with pytest.raises(FabricError, match="NIXL"):
            both.meet(session)
    both.close()


def test_tcp_is_not_taken_for_rdma() -> None:
    if topology.has_nics():
        pytest.skip("there is a NIC for RDMA here")
    before = dict(os.environ)
    with pytest.raises(FabricError, match="NIXL does not begin with UCX rdma"):
        Nixl(Wiring("rdma"), HOST)
    with pytest.raises(FabricError, match="NIXL has no protocol 'quic' here"):
        Nixl(Wiring("quic"), HOST)
    assert dict(os.environ) == before


def test_devices_in_the_terms_of_ucx(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, str] = {}

    class Module:
        class nixl_thread_sync_t:
            NIXL_THREAD_SYNC_STRICT = 1

        @staticmethod
        def nixl_agent_config(**more: Any) -> Any:
            return more

        @staticmethod
        def nixl_agent(name: str, config: Any) -> Any:
            asked.update({key: text for key, text in os.environ.items() if key.startswith("UCX_")})
            return type("Agent", (), {"backends": dict.fromkeys(config["backends"])})()

    for name in [name for name in os.environ if name.startswith("UCX_")]:
        monkeypatch.delenv(name)
    (tmp_path / "mlx5_1").mkdir()
    monkeypatch.setattr(topology, "_NICS", tmp_path)
    monkeypatch.setattr(nixl, "PACKAGES", type("P", (), {"load": lambda self: Module})())
    assert Nixl(Wiring("rdma", ("mlx5_1:2", "eth0")), HOST).how == "UCX, rdma"
    assert asked == {"UCX_TLS": "ib,cuda", "UCX_NET_DEVICES": "mlx5_1:2,eth0"}
    asked.clear()
    assert Nixl(Wiring("efa"), HOST).how == "LIBFABRIC"
    assert asked == {}


def test_a_process_that_had_an_engine_exits_well_and_says_nothing_on_stdout() -> None:
    """The library of UCX' module for NICs, in the packages of NIXL, ends it with SIGSEGV."""
    code = (
        "from tensorlift.forking.nixl import Nixl\nfrom tensorlift.forking.fabrics import Wiring\n"
        "Nixl(Wiring('tcp'), '127.0.0.1').close()\nNixl(Wiring('tcp'), '127.0.0.1')\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (out.returncode, out.stdout) == (0, ""), out.stderr


def test_a_session_that_is_no_text_of_base64() -> None:
    """Whatever a seed says is no other error than that it cannot be read."""
    for session in ("x:!", "x:\u00e9", "x:AAA"):
        with pytest.raises(FabricError, match="no metadata of NIXL"):
            nixl._parted(session)
