"""Which NICs a process takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.pci import Machine, eight_and_one, matrix, matrix_of_eight_and_one
from tensorlift.errors import OptionError
from tensorlift.forking import nics
from tensorlift.forking.fabrics import Wiring
from tensorlift.forking.nics import Choice, check_protocol, choose, chosen, custom_topology
from tensorlift.forking.topology import Nic, Tree, parse_matrix, read_tree


@pytest.fixture(params=["sysfs", "nvidia-smi"])
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> Tree:
    """Of eight GPUs with a NIC each, and one more that is far from all."""
    if request.param == "sysfs":
        return read_tree(eight_and_one(tmp_path))
    return parse_matrix(matrix_of_eight_and_one())


def test_engines_are_told_the_active_port_and_who_chose(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.nic("a0", "pci0000:00/0000:00:10.0", ports={1: ("1: DOWN", ""), 2: ("4: ACTIVE", "")})
    tree = read_tree(str(tmp_path))
    assert choose(["a0"], 0, None, tree).wiring("rdma") == Wiring("rdma", ("a0:2",), is_named=True)
    assert choose(None, 0, None, tree).wiring("") == Wiring("", ("a0:2",))
    assert choose(["a0"], 0, None, tree).wiring("").names == ("a0",)


@pytest.mark.parametrize(
    ("transports", "protocol", "says"),
    [
        (["mooncake"], "tpc", r"protocol is 'tpc'; expected one of tcp, rdma, efa, .* \(mooncake\)$"),
        (["nixl", "tcp"], "nvlink", r"protocol is 'nvlink'; expected one of tcp, rdma, efa \(nixl\)$"),
        (["mooncake", "nixl"], "RDMA", r"protocol is 'RDMA'; .* \(mooncake\); tcp, rdma, efa \(nixl\)$"),
    ],
)
def test_a_protocol_that_no_engine_has(transports: list[str], protocol: str, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        chosen(None, transports, 0, None, protocol, environ={})
    check_protocol(["mooncake", "nixl"], "nvlink")
    check_protocol(["mooncake"], "")


def test_each_gpu_takes_the_one_beside_it(tree: Tree) -> None:
    """And nobody the one that is far from all."""
    for rank in (0, 5):
        found = [choose(None, rank, f"GPU{at}", tree) for at in range(8)]
        assert [choice.names for choice in found] == [(f"mlx5_{at + 1}",) for at in range(8)]
    assert found[3].reason == "PIX to GPU3"


def test_named_ones_are_taken_as_they_are(tree: Tree) -> None:
    choice = choose(["mlx5_8"], 0, "GPU0", tree)
    assert (choice.names, choice.reason, choice.ucx) == (("mlx5_8",), "named", "mlx5_8:1")
    assert choose(["mlx5_0"], 0, "GPU0", tree).names == ("mlx5_0",)
    assert choose(("mlx5_2", "mlx5_1", "mlx5_2"), 0, None, tree).ucx == "mlx5_2:1,mlx5_1:1"


def test_exclusions(tree: Tree) -> None:
    found = [choose(["^mlx5_1", "^mlx5_0"], 0, f"GPU{at}", tree) for at in range(8)]
    assert [choice.names for choice in found[1:]] == [(f"mlx5_{at + 1}",) for at in range(1, 8)]
    assert found[0].names == ("mlx5_2",)
    assert found[0].reason == "PHB to GPU0, one of 3 as near and as fast"
    assert choose([f"^mlx5_{at}" for at in range(1, 9)], 0, "GPU0", tree).names == ("mlx5_0",)
    nothing = choose([f"^mlx5_{at}" for at in range(9)], 0, "GPU0", tree)
    assert (nothing.names, nothing.rate, nothing.ucx) == ((), None, "")
    assert nothing.reason.startswith("no RDMA device with an active port is here, mlx5_0, mlx5_1, ")


def test_weights_that_are_on_no_gpu(tree: Tree) -> None:
    """Ranks take turns, and the slow one, which no GPU is near, is not among those."""
    found = [choose(None, rank, None, tree) for rank in range(9)]
    assert [choice.names[0] for choice in found] == [*(f"mlx5_{at + 1}" for at in range(8)), "mlx5_1"]
    assert found[8].reason == "the weights are on no GPU; rank 8 of 8 fast NICs"
    assert choose(None, 1, "0000:ff:00.0", tree).reason.startswith("nobody says where '0000:ff:00.0' is; ")


def test_rates(tmp_path: Path) -> None:
    tree = read_tree(eight_and_one(tmp_path))
    assert choose(None, 0, "GPU7", tree).rate == 50_000_000_000
    assert choose(["mlx5_0", "mlx5_1"], 0, None, tree).rate == 62_500_000_000
    assert choose(["mlx5_1", "lo"], 0, None, tree).rate is None
    assert parse_matrix(matrix_of_eight_and_one()).nics[0].rate is None
    assert Choice((), "none").rate is None


def test_of_those_as_near_the_faster(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.gpu("pci0000:00/0000:00:06.0")
    for name, rate in (("a0", "100 Gb/sec (2X)"), ("a1", "200 Gb/sec (4X HDR)"), ("a2", "nobody knows")):
        machine.nic(name, f"pci0000:00/0000:00:1{name[1]}.0", ports={1: ("4: ACTIVE", rate)})
    machine.nic("a3", "pci0000:00/0000:00:13.0", ports={1: ("1: DOWN", "400 Gb/sec (4X NDR)")})
    tree = read_tree(str(tmp_path))
    assert choose(None, 0, "GPU0", tree).names == ("a1",)
    assert choose(None, 7, None, tree).names == ("a1",)


def test_gpus_that_are_equally_near_take_turns() -> None:
    """A virtual machine, whose tree says nothing; and two sockets with two GPUs and two NICs each."""
    flat = parse_matrix(matrix(4, {f"n{at}": ["PHB"] * 4 for at in range(4)}))
    assert [choose(None, 0, f"GPU{at}", flat).names[0] for at in range(4)] == ["n0", "n1", "n2", "n3"]
    few = parse_matrix(matrix(4, {f"n{at}": ["PHB"] * 4 for at in range(2)}))
    assert [choose(None, 0, f"GPU{at}", few).names[0] for at in range(4)] == ["n0", "n1", "n0", "n1"]
    near, far = ["NODE", "NODE", "SYS", "SYS"], ["SYS", "SYS", "NODE", "NODE"]
    pairs = parse_matrix(matrix(4, {"n0": near, "n1": near, "n2": far, "n3": far}))
    assert [choose(None, 0, f"GPU{at}", pairs).names[0] for at in range(4)] == ["n0", "n1", "n2", "n3"]


def test_interfaces_are_taken_where_they_are_named(tmp_path: Path) -> None:
    tree = read_tree(eight_and_one(tmp_path))
    assert choose(["eth0"], 0, None, tree) == Choice((Nic("eth0", 3_125_000_000, 0),), "named", True)
    assert choose(["eth0", "mlx5_1"], 0, None, tree).ucx == "eth0,mlx5_1:1"
    assert choose(None, 0, None, Tree((), (), {}, tree.interfaces)).names == ()


@pytest.mark.parametrize(
    ("devices", "says"),
    [
        ([""], r"devices is \[''\]; expected names of NICs, such as \[\"mlx5_8\"\], or all but some: \[\"\^"),
        ("mlx5_8", "devices is 'mlx5_8'; expected names"),
        ([8], r"devices is \[8\]; expected names"),
        (["mlx5_1,mlx5_2"], "expected names"),
        (["^mlx5_0", "mlx5_1"], "which has names and exclusions; expected names"),
        (["mlx5_9"], "devices has 'mlx5_9', which this machine does not have; there is eth0, lo, mlx5_0, "),
        (["^mlx5_00"], "devices has 'mlx5_00', which this machine does not have; there is mlx5_0, mlx5_1, "),
        (["off0"], r"devices has 'off0', which has no active port \(POLLING\); name another"),
    ],
)  # fmt: skip
def test_what_is_no_choice(tmp_path: Path, devices: object, says: str) -> None:
    eight_and_one(tmp_path)
    folder = tmp_path / "sys/class/infiniband/off0/ports/1"
    folder.mkdir(parents=True)
    (folder / "state").write_text("2: POLLING\n")
    with pytest.raises(OptionError, match=says):
        choose(devices, 0, None, read_tree(str(tmp_path)))  # type: ignore[arg-type]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine is that one."""
    found = read_tree(eight_and_one(tmp_path))
    monkeypatch.setattr(nics, "tree_here", lambda: found)


@pytest.mark.usefixtures("here")
def test_what_the_environment_says_comes_behind_what_the_caller_does() -> None:
    said = {"MOONCAKE_DEVICE": "mlx5_3, mlx5_4"}
    both = ("mooncake", "nixl")
    assert chosen(None, both, 0, "GPU0", environ={}).names == ("mlx5_1",)
    found = chosen(None, both, 0, "GPU0", environ=said)
    assert (found.names, found.reason) == (("mlx5_3", "mlx5_4"), "MOONCAKE_DEVICE says so")
    assert chosen(["mlx5_8"], both, 0, "GPU0", environ=said).names == ("mlx5_8",)
    assert chosen(["^mlx5_1"], both, 0, "GPU0", environ=said).names == ("mlx5_2",)
    assert chosen(None, ("nixl",), 0, "GPU0", environ=said).names == ("mlx5_1",)
    for text in ("", " ", "auto-discovery"):
        assert chosen(None, both, 0, "GPU0", environ={"MOONCAKE_DEVICE": text}).names == ("mlx5_1",)
    with pytest.raises(
        OptionError, match="MOONCAKE_DEVICE is 'mlx9': devices has 'mlx9', which this machine"
    ):
        chosen(None, both, 0, "GPU0", environ={"MOONCAKE_DEVICE": "mlx9"})


@pytest.mark.usefixtures("here")
def test_the_log_says_which_and_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tensorlift")
    chosen(None, ("mooncake", "nixl", "tcp"), 0, "GPU2", environ={})
    assert caplog.messages == ["mooncake and nixl: mlx5_3 (PIX to GPU2)"]


@pytest.mark.usefixtures("here")
def test_over_tcp_none_is_chosen() -> None:
    said = {"MOONCAKE_PROTOCOL": " TCP "}
    tcp = Choice((), "over tcp none is chosen")
    assert chosen(None, ("mooncake",), 0, "GPU0", environ=said) == tcp
    assert chosen(None, ("mooncake",), 0, "GPU0", environ={"MC_FORCE_TCP": "1"}) == tcp
    assert chosen([], ("mooncake", "nixl"), 0, "GPU0", "tcp", {"MOONCAKE_DEVICE": "mlx5_3"}) == tcp
    assert chosen(["mlx5_8"], ("mooncake",), 0, "GPU0", environ=said).names == ("mlx5_8",)
    # NIXL is not told, and has use for one; Mooncake leaves it out.
    both = chosen(None, ("mooncake", "nixl"), 0, "GPU0", environ=said)
    assert both.wiring("") == Wiring("", ("mlx5_1:1",))
    assert chosen(None, ("mooncake",), 0, "GPU0", "rdma", said).names == ("mlx5_1",)
    rdma = {"MOONCAKE_PROTOCOL": "rdma"}
    assert chosen(None, ("mooncake",), 0, "GPU0", environ=rdma).names == ("mlx5_1",)


@pytest.mark.usefixtures("here")
def test_a_tree_of_the_users_own() -> None:
    said = {"MC_CUSTOM_TOPO_JSON": "/tree.json", "MOONCAKE_DEVICE": "mlx5_3"}
    assert chosen(None, ("mooncake",), 0, "GPU0", environ=said) == Choice(
        (), "MC_CUSTOM_TOPO_JSON says which"
    )
    assert chosen(None, ("nixl",), 0, "GPU0", environ=said).names == ("mlx5_1",)
    with pytest.raises(OptionError, match=r"MC_CUSTOM_TOPO_JSON is set, .* leave one of both out"):
        chosen(["mlx5_8"], ("mooncake",), 0, "GPU0", environ=said)


def test_who_takes_none() -> None:
    assert chosen(None, ("shm", "tcp"), 0, None, environ={"MOONCAKE_DEVICE": "mlx5_3"}).names == ()
    with pytest.raises(OptionError, match=r"no transport here takes NICs \(shm, tcp\); name one that does"):
        chosen(["mlx5_8"], ("shm", "tcp"), 0, None, environ={})


def test_a_file_for_mooncake(tree: Tree) -> None:
    found = json.loads(custom_topology(None, tree))
    assert list(found) == [f"cuda:{at}" for at in range(8)]
    assert found["cuda:2"] == [["mlx5_3"], [f"mlx5_{at}" for at in range(9) if at != 3]]
    assert json.loads(custom_topology(["^mlx5_0"], tree))["cuda:0"][1] == [f"mlx5_{at}" for at in range(2, 9)]
    assert json.loads(custom_topology(["mlx5_8"], tree)) == {
        f"cuda:{at}": [["mlx5_8"], []] for at in range(8)
    }
