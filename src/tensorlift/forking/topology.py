"""A machine's NICs and GPUs, and how near they are to each other: from sysfs, or from ``nvidia-smi topo -m``.

Everything is read below a root folder, so that a recorded tree of another machine can be asked as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import itertools
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tensorlift.errors import RequestError

__all__ = ["Gpu", "Link", "Nic", "Tree", "has_nics", "parse_matrix", "read_tree", "tree_here"]

_NICS = Path("/sys/class/infiniband")

# Display controllers and processing accelerators (PCI class codes) of who makes GPUs that torch runs on.
_GPU_CLASSES, _GPU_VENDORS = ("0x03", "0x12"), ("0x10de", "0x1002")
_RATE = re.compile(r"(\d+(?:\.\d+)?) Gb/sec\b")
_ACTIVE = "ACTIVE"
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_NVIDIA_SMI_SECONDS = 20.0


class Link(enum.IntEnum):
    """What lies between a GPU and a NIC, the nearest first; the words are those of ``nvidia-smi topo -m``."""

    PIX = 0
    """At most one PCIe switch."""
    PXB = 1
    """Several, and no host bridge."""
    PHB = 2
    """One host bridge."""
    NODE = 3
    """Two host bridges of one NUMA node."""
    SYS = 4
    """Two NUMA nodes, or nobody says."""


@dataclass(frozen=True, slots=True)
class Nic:
    """An RDMA device, or an interface of the network."""

    name: str
    rate: int | None = None
    """Bytes a second; None where nobody says."""
    port: int | None = 1
    """The first one that is active; 0 for an interface, which has none."""
    state: str = _ACTIVE
    """Of that port; where none is active, of the first."""
    address: str = ""
    """On the PCI bus."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, numbered as nvidia-smi does: by its address."""

    name: str
    address: str = ""
    """On the PCI bus; empty where a matrix is all that is known."""


@dataclass(frozen=True, slots=True)
class Tree:
    """What a machine has."""

    nics: tuple[Nic, ...]
    gpus: tuple[Gpu, ...]
    links: Mapping[tuple[str, str], Link]
    """By the names of GPU and NIC."""
    interfaces: tuple[Nic, ...] = ()
    """Of the network, RDMA or not: for transports over TCP, where they are named."""

    def gpu(self, wanted: str | None) -> Gpu | None:
        """By name or by address on the PCI bus."""
        found = (gpu for gpu in self.gpus if wanted and _address(wanted) in (gpu.name.lower(), gpu.address))
        return next(found, None)


def has_nics() -> bool:
    """Whether this machine has an RDMA device, of whatever state."""
    return bool(_listed(_NICS))


def tree_here() -> Tree:
    """This machine's. Where sysfs shows NICs and no GPU, nvidia-smi is asked, if it is there."""
    found = read_tree()
    if found.gpus or not found.nics:
        return found
    with contextlib.suppress(OSError, subprocess.SubprocessError, RequestError):
        matrix = parse_matrix(_nvidia_smi("topo", "-m"))
        addresses = _nvidia_smi("--query-gpu=pci.bus_id", "--format=csv,noheader").split()
        gpus = (Gpu(gpu.name, _address(text)) for gpu, text in zip(matrix.gpus, addresses, strict=False))
        return dataclasses.replace(found, gpus=tuple(gpus), links=matrix.links)
    return found


def _nvidia_smi(*arguments: str) -> str:
    done = subprocess.run(
        ["nvidia-smi", *arguments], capture_output=True, timeout=_NVIDIA_SMI_SECONDS, check=True
    )
    return done.stdout.decode("utf-8", "replace")


def read_tree(root: str = "/") -> Tree:
    """What sysfs shows below ``root``; what is not there, or not for us, is left out."""
    base, devices = Path(root, "sys"), Path(root, _NICS.relative_to("/"))
    nics = tuple(_nic(folder) for folder in _listed(devices))
    cards = sorted(folder for folder in _listed(base / "bus/pci/devices") if _is_gpu(folder))
    gpus = tuple(Gpu(f"GPU{number}", card.name.lower()) for number, card in enumerate(cards))
    ends = [_end(card) for card in cards]
    links = {
        (gpu.name, nic.name): _link(end, _end(devices / nic.name / "device"))
        for gpu, end in zip(gpus, ends, strict=True)
        for nic in nics
    }
    return Tree(nics, gpus, links, tuple(_interface(folder) for folder in _listed(base / "class/net")))


def parse_matrix(text: str) -> Tree:
    """What ``nvidia-smi topo -m`` prints. It knows neither rates nor ports: those count as active.

    Raises RequestError for what is no such text.
    """
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in text.splitlines()]
    head = next((at for at, line in enumerate(lines) if line[:1] == ["GPU0"]), len(lines))
    columns = list(itertools.takewhile(lambda name: name != "CPU", lines[head])) if lines[head:] else []
    legend = {line[0].rstrip(":"): line[1] for line in lines if len(line) == 2 and line[0].endswith(":")}
    rows = {line[0]: dict(zip(columns, line[1:], strict=False)) for line in lines[head + 1 :] if line}
    gpus = [name for name in columns if name.startswith("GPU")]
    nics = {name: legend.get(name, name) for name in columns[len(gpus) :]}
    links = {}
    for gpu, nic in itertools.product(gpus, nics):
        word = rows.get(gpu, {}).get(nic, "")
        if word not in Link.__members__:
            raise RequestError(
                f"no output of 'nvidia-smi topo -m': between {gpu} and {nic} is {word!r}; expected one of "
                + ", ".join(Link.__members__)
            )
        links[gpu, nics[nic]] = Link[word]
    if not gpus:
        raise RequestError("no output of 'nvidia-smi topo -m': it has no matrix that begins with GPU0")
    return Tree(tuple(map(Nic, nics.values())), tuple(map(Gpu, gpus)), links)


def _listed(folder: Path) -> list[Path]:
    """What is in a folder, by name, numbers by their value."""
    try:
        return sorted(folder.iterdir(), key=lambda path: _by_number(path.name))
    except OSError:
        return []


def _by_number(name: str) -> list[tuple[str, int]]:
    return [(text, int(part or 0)) for text, part in re.findall(r"(\D*)(\d*)", name)]


def _nic(folder: Path) -> Nic:
    ports = [
        (int(port.name), _text(port / "state").rpartition(": ")[2], _gigabits(_text(port / "rate")))
        for port in _listed(folder / "ports")
        if port.name.isdigit()
    ]
    number, state, rate = next(
        (port for port in ports if port[1] == _ACTIVE), (None, ports[0][1] if ports else "no port", None)
    )
    return Nic(folder.name, rate, number, state, _path(folder / "device")[-1])


def _interface(folder: Path) -> Nic:
    speed, state = _text(folder / "speed"), _text(folder / "operstate").upper()
    rate = int(speed) * 125_000 if speed.isdigit() and int(speed) else None
    # The kernel says of some, the loopback among them, that it does not know.
    is_up = state in ("UP", "UNKNOWN", "")
    return Nic(folder.name, rate, 0 if is_up else None, _ACTIVE if is_up else state)


def _gigabits(text: str) -> int | None:
    """Bytes a second of what a port says, such as "400 Gb/sec (4X NDR)"."""
    match = _RATE.match(text)
    return int(float(match[1]) * 125_000_000) or None if match else None


def _is_gpu(folder: Path) -> bool:
    return _text(folder / "class").startswith(_GPU_CLASSES) and _text(folder / "vendor") in _GPU_VENDORS


def _path(device: Path) -> tuple[str, ...]:
    """From the host bridge down to the device; ("",) for what is on no PCI bus."""
    names = device.resolve().parts
    first = next((at for at, name in enumerate(names) if re.fullmatch(r"pci[0-9a-f]+:[0-9a-f]+", name)), None)
    return ("",) if first is None else names[first:]


def _end(device: Path) -> tuple[Sequence[str], str]:
    """Path and NUMA node; the node is empty where the firmware does not say (-1)."""
    node = _text(device / "numa_node")
    return _path(device), node if node.isdigit() else ""


def _link(one: tuple[Sequence[str], str], other: tuple[Sequence[str], str]) -> Link:
    (path, node), (path_other, node_other) = one, other
    common = sum(1 for _ in _same(path, path_other))
    if common > 1:
        # A switch is a port above, which both share, and one below for each device.
        return Link.PIX if max(len(path), len(path_other)) - common <= 2 else Link.PXB
    if common and path[0]:
        return Link.PHB
    return Link.NODE if node and node == node_other else Link.SYS


def _same(one: Sequence[str], other: Sequence[str]) -> Iterator[str]:
    """How they begin alike."""
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            return
        yield mine


def _address(text: str) -> str:
    """As sysfs has it: nvidia-smi writes the domain with eight digits, and in capitals."""
    text = text.lower()
    return text[-12:] if _ADDRESS.fullmatch(text) else text


def _text(path: Path) -> str:
    """The content of a small file; empty where it is not there or not for us."""
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
