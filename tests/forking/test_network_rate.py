"""Rates of interfaces, as the kernel tells them or not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorlift.forking import network_rate
from tensorlift.forking.network_rate import link_rate


@pytest.fixture
def interfaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Those of a machine with two that have a speed; lo has 127.0.0.1 on the real one, and ::1."""
    monkeypatch.setattr(network_rate, "_INTERFACES", tmp_path)
    inet6 = tmp_path / "if_inet6"
    inet6.write_text(
        "00000000000000000000000000000001 01 80 10 80       lo\n"
        "fd000000000000000000000000000007 02 40 00 80    fast0\n"
    )
    monkeypatch.setattr(network_rate, "_INET6", inet6)
    for name, speed in (("fast0", "200000\n"), ("lo", "1000\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "speed").write_text(speed)
    return tmp_path


def test_by_address(interfaces: Path) -> None:
    assert link_rate("fd00::7") == 25_000_000_000
    assert link_rate("127.0.0.1") == link_rate("::1") == 125_000_000


def test_of_all_the_fastest(interfaces: Path) -> None:
    assert link_rate("0.0.0.0") == link_rate("::") == 25_000_000_000


@pytest.mark.parametrize("said", ["-1\n", "0\n", "", "fast\n", None])
def test_what_the_kernel_does_not_say(interfaces: Path, said: str | None) -> None:
    file = interfaces / "lo" / "speed"
    file.unlink() if said is None else file.write_text(said)
    assert link_rate("127.0.0.1") is None


@pytest.mark.parametrize("host", ["localhost", "", "10.255.255.254", "fd00::8"])
def test_no_address_of_this_machine(interfaces: Path, host: str) -> None:
    assert link_rate(host) is None


def test_without_ipv6(interfaces: Path) -> None:
    (interfaces / "if_inet6").unlink()
    assert link_rate("127.0.0.1") == 125_000_000
    assert link_rate("fd00::7") is None
