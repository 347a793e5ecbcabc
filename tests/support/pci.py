"""Machines as sysfs shows them, made of a short description."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

GPU = ("0x10de", "0x030200")
NIC = ("0x15b3", "0x020700")
_RATE = "400 Gb/sec (4X NDR)"


class Machine:
    """Devices below a folder; paths are those of sysfs, from the host bridge down."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for folder in ("sys/bus/pci/devices", "sys/class/infiniband", "sys/class/net"):
            (root / folder).mkdir(parents=True)

    def card(self, path: str, kind: tuple[str, str], node: int) -> Path:
        """A device on the PCI bus."""
        folder = self.root / "sys/devices" / path
        folder.mkdir(parents=True)
        for name, text in zip(("vendor", "class", "numa_node"), (*kind, node), strict=True):
            (folder / name).write_text(f"{text}\n")
        (self.root / "sys/bus/pci/devices" / folder.name).symlink_to(folder)
        return folder

    def gpu(self, path: str, node: int = -1) -> None:
        """One of NVIDIA's."""
        self.card(path, GPU, node)

    def nic(
        self, name: str, path: str | None, node: int = -1, ports: Mapping[int, tuple[str, str]] | None = None
    ) -> None:
        """An RDMA device; ``ports``: state and rate of each; ``path``: None for one that is only software."""
        folder = self.root / "sys/class/infiniband" / name
        folder.mkdir()
        if path is not None:
            (folder / "device").symlink_to(self.card(path, NIC, node))
        for number, (state, rate) in (ports or {1: ("4: ACTIVE", _RATE)}).items():
            port = folder / "ports" / str(number)
            port.mkdir(parents=True)
            (port / "state").write_text(f"{state}\n")
            (port / "rate").write_text(f"{rate}\n")

    def interface(self, name: str, speed: str | None, state: str = "up") -> None:
        """Of the network; ``speed``: in megabits a second."""
        folder = self.root / "sys/class/net" / name
        folder.mkdir()
        (folder / "operstate").write_text(f"{state}\n")
        if speed is not None:
            (folder / "speed").write_text(f"{speed}\n")


def eight_and_one(root: Path) -> str:
    """Two sockets with four pairs of GPU and NIC each, a pair behind one switch, and a slow NIC elsewhere:
    GPU i and mlx5_(i+1) are PIX, other pairs of a socket PHB, those of two SYS, and so is all with mlx5_0.
    """
    machine = Machine(root)
    machine.nic(
        "mlx5_0", "pci0000:f0/0000:f0:01.0/0000:f1:00.0", -1, {1: ("4: ACTIVE", "100 Gb/sec (4X EDR)")}
    )
    for at in range(8):
        bus = 0x18 + 0x10 * at
        bridge, socket = ("pci0000:15", 0) if at < 4 else ("pci0000:97", 1)
        switch = f"{bridge}/0000:{bridge[-2:]}:{at % 4 + 1:02x}.0/0000:{bus:02x}:00.0"
        machine.gpu(f"{switch}/0000:{bus + 1:02x}:00.0/0000:{bus + 2:02x}:00.0", socket)
        machine.nic(f"mlx5_{at + 1}", f"{switch}/0000:{bus + 1:02x}:01.0/0000:{bus + 3:02x}:00.0", socket)
    machine.interface("eth0", "25000")
    machine.interface("lo", None, "unknown")
    return str(root)


def matrix(gpus: int, nics: Mapping[str, list[str]], underlined: bool = True) -> str:
    """As ``nvidia-smi topo -m`` prints it; ``nics``: for each its word to each GPU."""
    names = [f"GPU{at}" for at in range(gpus)] + [f"NIC{at}" for at in range(len(nics))]
    head = "\t".join([*names, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])
    lines = ["\t" + (f"\x1b[4m{head}\x1b[0m" if underlined else head)]
    for at in range(gpus):
        cells = [" X " if at == other else "NV18" for other in range(gpus)]
        lines.append(
            "\t".join([f"GPU{at}", *cells, *(words[at] for words in nics.values()), "0-31", "0", "N/A"])
        )
    for at, words in enumerate(nics.values()):
        cells = [" X " if at == other else "SYS" for other in range(len(nics))]
        lines.append("\t".join([f"NIC{at}", *words, *cells, "", ""]))
    lines += [
        "",
        "Legend:",
        "",
        "  X    = Self",
        "  PIX  = Connection traversing at most a single PCIe bridge",
    ]
    lines += ["", "NIC Legend:", ""] + [f"  NIC{at}: {name}" for at, name in enumerate(nics)]
    return "\n".join(lines) + "\n"


def matrix_of_eight_and_one() -> str:
    """That of eight_and_one()."""
    words = {"mlx5_0": ["SYS"] * 8}
    for at in range(8):
        words[f"mlx5_{at + 1}"] = [
            "PIX" if at == gpu else "PHB" if at // 4 == gpu // 4 else "SYS" for gpu in range(8)
        ]
    return matrix(8, words)
