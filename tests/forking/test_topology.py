"""Which NICs and GPUs a machine has, and what lies between them."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.pci import Machine, eight_and_one, matrix, matrix_of_eight_and_one
from tensorlift.errors import RequestError
from tensorlift.forking import topology
from tensorlift.forking.topology import Gpu, Link, Nic, parse_matrix, read_tree, tree_here


def test_a_tree_and_its_matrix_say_the_same(tmp_path: Path) -> None:
    """The machine of eight pairs and a NIC that is far from all, as sysfs has it and as nvidia-smi does."""
    tree, told = read_tree(eight_and_one(tmp_path)), parse_matrix(matrix_of_eight_and_one())
    assert tree.links == told.links
    assert len(tree.links) == 72
    assert [nic.name for nic in tree.nics] == [nic.name for nic in told.nics]
    assert [gpu.name for gpu in tree.gpus] == [gpu.name for gpu in told.gpus]
    for at in range(8):
        assert tree.links[f"GPU{at}", "mlx5_0"] == Link.SYS
        assert tree.links[f"GPU{at}", f"mlx5_{at + 1}"] == Link.PIX
    assert tree.links["GPU0", "mlx5_2"] == Link.PHB
    assert tree.links["GPU0", "mlx5_5"] == Link.SYS
    assert tree.nics[0] == Nic("mlx5_0", 12_500_000_000, 1, "ACTIVE", "0000:f1:00.0")
    assert tree.nics[8].rate == 50_000_000_000
    assert tree.gpus[1] == Gpu("GPU1", "0000:2a:00.0")
    assert tree.interfaces == (Nic("eth0", 3_125_000_000, 0), Nic("lo", None, 0))


@pytest.mark.parametrize(
    ("nic", "node", "link"),
    [
        ("pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:01.0/0000:14:00.0", 0, Link.PIX),  # the same switch
        # Another function of the same card.
        ("pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:00.0/0000:13:00.1", 0, Link.PIX),
        (
            "pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:01.0/0000:15:00.0/0000:16:00.0/0000:17:00.0",
            0,
            Link.PXB,
        ),
        ("pci0000:10/0000:10:02.0/0000:21:00.0", 0, Link.PHB),
        ("pci0000:30/0000:30:01.0/0000:31:00.0", 0, Link.NODE),
        ("pci0000:50/0000:50:01.0/0000:51:00.0", 1, Link.SYS),
        ("pci0000:50/0000:50:01.0/0000:51:00.0", -1, Link.SYS),
        ("platform/rdma", 1, Link.SYS),
        (None, 0, Link.SYS),
    ],
)
def test_links(tmp_path: Path, nic: str | None, node: int, link: Link) -> None:
    machine = Machine(tmp_path)
    machine.gpu("pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:00.0/0000:13:00.0", 0)
    machine.nic("mlx5_0", nic, node)
    assert read_tree(str(tmp_path)).links == {("GPU0", "mlx5_0"): link}


def test_a_virtual_machine_shows_one_bridge_and_no_node(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    for at in ("0a", "08"):
        machine.gpu(f"pci0000:00/0000:00:{at}.0")
        machine.nic(f"mlx5_{at}", f"pci0000:01/0000:01:{at}.0")
        machine.nic(f"mlx5_1{at}", f"pci0000:00/0000:00:1{at[1]}.0")
    tree = read_tree(str(tmp_path))
    assert {link for (_, nic), link in tree.links.items() if "_1" in nic} == {Link.PHB}
    assert [gpu.address for gpu in tree.gpus] == ["0000:00:08.0", "0000:00:0a.0"]


def test_ports(tmp_path: Path) -> None:
    """The first that is active counts; the kernel says its rate."""
    machine = Machine(tmp_path)
    down, up = ("1: DOWN", "40 Gb/sec (4X QDR)"), ("4: ACTIVE", "200 Gb/sec (4X HDR)")
    machine.nic("mlx5_10", None, 0, {1: down, 2: up})
    machine.nic("mlx5_9", None, 0, {1: ("2: INIT", "2.5 Gb/sec (1X SDR)"), 2: down})
    machine.nic("rxe0", None, 0, {1: ("4: ACTIVE", "fast")})
    (tmp_path / "sys/class/infiniband/bare").mkdir()
    machine.interface("off0", "1000", "down")
    machine.interface("slow0", "-1")
    tree = read_tree(str(tmp_path))
    assert tree.nics == (
        Nic("bare", None, None, "no port"),
        Nic("mlx5_9", None, None, "INIT"),
        Nic("mlx5_10", 25_000_000_000, 2),
        Nic("rxe0", None, 1),
    )
    assert tree.interfaces == (Nic("off0", 125_000_000, None, "DOWN"), Nic("slow0", None, 0))


def test_cards_that_are_no_gpus(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.card("pci0000:00/0000:00:02.0", ("0x1a03", "0x030000"), 0)  # the console of a server
    machine.card("pci0000:00/0000:00:03.0", ("0x10de", "0x040300"), 0)  # sound
    machine.card("pci0000:00/0000:00:05.0", ("0x1002", "0x120000"), 0)
    assert read_tree(str(tmp_path)).gpus == (Gpu("GPU0", "0000:00:05.0"),)


def test_nothing_there(tmp_path: Path) -> None:
    tree = read_tree(str(tmp_path))
    assert (tree.nics, tree.gpus, tree.links, tree.interfaces) == ((), (), {}, ())


def test_by_name_and_address(tmp_path: Path) -> None:
    tree = read_tree(eight_and_one(tmp_path))
    for wanted in ("GPU1", "0000:2a:00.0", "00000000:2A:00.0"):
        assert tree.gpu(wanted) == tree.gpus[1]
    for other in (None, "", "GPU8", "0000:ff:00.0"):
        assert tree.gpu(other) is None
        assert parse_matrix(matrix_of_eight_and_one()).gpu(other) is None


def test_matrices() -> None:
    words = {"mlx5_bond_0": ["NODE"]}
    for text in (matrix(1, words), matrix(1, words, underlined=False).expandtabs()):
        assert parse_matrix(text).links == {("GPU0", "mlx5_bond_0"): Link.NODE}
    assert parse_matrix(matrix(2, {})).links == {}
    old = "\tGPU0\tGPU1\tmlx5_0\tCPU Affinity\nGPU0\t X \tPHB\tPIX\t0-7\nGPU1\tPHB\t X \tSYS\t0-7\n"
    assert parse_matrix(old).links == {("GPU0", "mlx5_0"): Link.PIX, ("GPU1", "mlx5_0"): Link.SYS}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it has no matrix"),
        ("NVIDIA-SMI has failed", "it has no matrix"),
        (matrix(2, {"mlx5_0": ["PIX", "FAR"]}), "between GPU1 and NIC0 is 'FAR'"),
        (matrix(2, {"mlx5_0": ["PIX", "SYS"]}).replace("\nGPU1", "\nGPU2"), "between GPU1 and NIC0 is ''"),
    ],
)
def test_what_is_no_matrix(text: str, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        parse_matrix(text)


class Asked:
    """nvidia-smi, which says what a test wants."""

    def __init__(self, answers: list[Any]) -> None:
        self.answers = answers
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], **_: object) -> Any:
        self.commands.append(command)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return subprocess.CompletedProcess(command, 0, answer.encode())


@pytest.mark.parametrize(
    ("answers", "gpus"),
    [
        ([matrix(1, {"mlx5_0": ["PIX"]}), "00000000:3B:00.0\n"], (Gpu("GPU0", "0000:3b:00.0"),)),
        ([FileNotFoundError()], ()),
        ([subprocess.TimeoutExpired("nvidia-smi", 1)], ()),
        (["no devices were found"], ()),
    ],
)
def test_nvidia_smi_is_asked_where_sysfs_shows_no_gpu(
    monkeypatch: pytest.MonkeyPatch, answers: list[Any], gpus: tuple[Gpu, ...]
) -> None:
    here = topology.Tree((Nic("mlx5_0", 1000),), (), {})
    monkeypatch.setattr(topology, "read_tree", lambda: here)
    monkeypatch.setattr(topology.subprocess, "run", Asked(answers))
    tree = tree_here()
    assert (tree.nics, tree.gpus) == (here.nics, gpus)
    assert tree.links == ({("GPU0", "mlx5_0"): Link.PIX} if gpus else {})


def test_nvidia_smi_is_not_asked_without_need(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = Asked([])
    monkeypatch.setattr(topology.subprocess, "run", asked)
    for tree in (read_tree(eight_and_one(tmp_path)), topology.Tree((), (), {})):
        monkeypatch.setattr(topology, "read_tree", lambda tree=tree: tree)
        assert tree_here() is tree
    assert asked.commands == []
