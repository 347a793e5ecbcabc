"""The verbs on real files: data on stdout, the rest on stderr, exit codes, errors without a traceback."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.checkpoints import Written, random_checkpoint, random_row, write_raw, write_safetensors
from support.command_line import run
from tensorlift.options import BACKENDS


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return random_checkpoint(tmp_path_factory.mktemp("verbs"), shards=2, tensors=6, seed=3)


def program(*arguments: object, **more: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tensorlift", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **more)  # type: ignore[call-overload,no-any-return]


def total(written: Written) -> int:
    return sum(len(raw) for _, _, raw in written.tensors.values())


def test_load_reports_each_run_as_json(written: Written) -> None:
    code, out, err = run("load", written.path, "--repeat", "3", "--json")
    assert (code, err) == (0, "")
    record = json.loads(out)
    assert len(record["runs"]) == 3
    assert {r["bytes"] for r in record["runs"]} == {total(written)}
    assert {r["tensors"] for r in record["runs"]} == {len(written.tensors)}


def test_load_takes_a_list_of_files(written: Written) -> None:
    code, out, _ = run("load", *written.files, "--json")
    assert code == 0
    assert json.loads(out)["runs"][0]["files"] == 2


def test_backends_may_be_separated_by_commas(written: Written) -> None:
    for names in (["--backend", "PREAD,URING"], ["--backend", "PREAD", "--backend", "URING"]):
        code, out, _ = run("load", written.path, *names, "--json")
        assert (code, json.loads(out)["runs"][0]["bytes"]) == (0, total(written))
    assert run("load", written.path, "--backend", "PREAD,URINGG")[0] == 2


def test_load_says_median_for_people(written: Written) -> None:
    code, out, err = run("load", written.path, "--repeat", "2")
    assert (code, err) == (0, "")
    assert f"{len(written.tensors)} tensors" in out
    assert "median of 2:" in out


def test_load_takes_only_wanted_names(written: Written) -> None:
    first = next(iter(written.tensors))
    code, out, _ = run("load", written.path, "--name", first, "--json")
    assert code == 0
    assert json.loads(out)["runs"][0]["tensors"] == 1


def test_backend_of_the_command_line_is_used(written: Written) -> None:
    code, out, _ = run("load", written.path, "--backend", "MMAP", "--backend", "PREAD", "--json")
    assert code == 0
    assert list(json.loads(out)["runs"][0]["readers"]) == ["MMAP"]


def test_bar_goes_to_stderr_when_asked_for(written: Written) -> None:
    code, out, err = run("load", written.path, "--json", "--progress")
    assert code == 0
    assert json.loads(out)
    assert "loading" in err


def test_the_command_line_wins_over_the_environment(written: Written) -> None:
    env = {"TENSORLIFT_PROGRESS": "1", "FORCE_COLOR": "1"}
    assert run("load", written.path, "--json", "--no-progress", **env)[2] == ""
    assert "loading" in run("load", written.path, "--json", **env)[2]


def test_no_color_is_honoured(written: Written) -> None:
    done = program("show", written.path, env=os.environ | {"NO_COLOR": "1", "FORCE_COLOR": "1"})
    assert done.returncode == 0
    assert "\x1b[3" not in done.stdout


def test_show_sums_up(written: Written) -> None:
    code, out, err = run("show", written.path, "--json", "--tensors", "--depth", "1")
    assert (code, err) == (0, "")
    facts = json.loads(out)
    assert (facts["tensors"], facts["bytes"]) == (len(written.tensors), total(written))
    assert sum(entry["bytes"] for entry in facts["dtypes"].values()) == total(written)
    assert facts["prefixes"] == {"layers.…": {"tensors": len(written.tensors), "bytes": total(written)}}
    shown = {row["name"]: (row["dtype"], tuple(row["shape"]), row["bytes"]) for row in facts["list"]}
    assert shown == {
        name: (code, tuple(shape), len(raw)) for name, (code, shape, raw) in written.tensors.items()
    }
    for row in facts["list"]:
        with open(row["file"], "rb") as stream:
            stream.seek(row["offset"])
            assert stream.read(row["bytes"]) == written.tensors[row["name"]][2]


def test_show_collapses_numbers(written: Written) -> None:
    _, out, _ = run("show", written.path, "--json", "--depth", "3")
    assert list(json.loads(out)["prefixes"]) == ["layers.*.*.…"]


def test_show_for_people_names_every_tensor(written: Written) -> None:
    code, out, _ = run("show", written.path, "--tensors")
    assert code == 0
    assert all(name in out for name in written.tensors)
    assert all(file.name in out for file in written.files)


@pytest.mark.parametrize("verb", ["load", "show", "doctor"])
def test_missing_path_is_1(verb: str, tmp_path: Path) -> None:
    code, out, err = run(verb, tmp_path / "gone")
    assert (code, out) == (1, "")
    assert err.startswith("error: CheckpointNotFoundError\n  ")
    assert "Traceback" not in err


@pytest.mark.parametrize("verb", ["load", "show"])
def test_broken_header_is_1(verb: str, tmp_path: Path) -> None:
    file = write_raw(tmp_path / "broken.safetensors", b'{"a": ')
    code, _, err = run(verb, file)
    assert code == 1
    assert err.startswith("error: HeaderError\n")
    assert "broken.safetensors" in err


def test_unknown_device_and_tensor_are_2(written: Written) -> None:
    assert run("load", written.path, "--device", "toaster")[0] == 2
    code, _, err = run("load", written.path, "--name", "no.such.tensor")
    assert code == 2
    assert "no.such.tensor" in err


def test_library_that_is_not_there_is_3(written: Written, tmp_path: Path) -> None:
    # In processes of their own: one that has loaded the library keeps it.
    gone = os.environ | {"TENSORLIFT_LIBRARY": str(tmp_path / "gone.so")}
    done = program("load", written.path, env=gone)
    assert done.returncode == 3
    assert done.stderr.startswith("error: LibraryError\n")
    done = program("doctor", written.path, "--json", env=gone)
    assert done.returncode == 3
    assert json.loads(done.stdout)["library"]["works"] is False


def test_doctor_tells_of_readers_and_devices(written: Written) -> None:
    # In a process of its own: the library remembers a driver that it did not find, and tests of the device
    # path bring theirs later.
    done = program("doctor", written.path, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    facts = json.loads(done.stdout)
    assert {row["name"] for row in facts["backends"]} == set(BACKENDS) - {"AUTO", "BUFFERED"}
    assert all(row["works"] or row["reason"] for row in facts["backends"] + facts["devices"])
    assert facts["file"]["path"].startswith(str(written.path))
    assert facts["load"]["readers"]


def test_doctor_without_a_path_makes_its_own() -> None:
    done = program("doctor")
    assert done.returncode == 0
    assert "probe.safetensors" in done.stdout


@pytest.mark.parametrize("form", ["--json", None])
def test_closed_pipe_is_quiet(tmp_path: Path, form: str | None) -> None:
    many = random_checkpoint(tmp_path, tensors=3000, elements=4)
    command = [sys.executable, "-m", "tensorlift", "show", str(many.path), "--tensors"]
    command += [form] if form else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.read(1)
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait(60) == 141


@pytest.mark.parametrize("verb", [("show", "--json"), ("show",), ("load",), ("doctor",)])
def test_a_full_disk_behind_the_output_is_3(written: Written, verb: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "tensorlift", verb[0], str(written.path), *verb[1:]]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 3
    assert done.stderr.startswith("error: OSError\n  the output could not be written:")
    assert "bug" not in done.stderr


def test_doctor_without_room_for_its_file_says_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(self: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Path, "write_bytes", full)
    code, out, err = run("doctor")
    assert (code, out) == (3, "")
    assert str(tmp_path) in err
    assert "TMPDIR" in err
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Children get SIGINT also where this run was started in the background, where shells have it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_is_130_without_a_traceback(written: Written) -> None:
    command = [sys.executable, "-m", "tensorlift", "load", str(written.path), "--repeat", "1000000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        # The first run is over: the process is in the middle of its work.
        child.stdout.readline()
        child.stdout.readline()
        child.send_signal(signal.SIGINT)
        child.stdout.read()
        err = child.stderr.read()
        assert child.wait(60) == 130
    assert err == "interrupted\n"


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_that_meets_a_finaliser_is_sent_again() -> None:
    program = """
import os, signal, time
from tensorlift.cli import main
class Last:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
main.app = lambda: (str(Last()), time.sleep(60))
main.main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert done.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in done.stderr


def test_names_out_of_files_do_nothing_to_a_terminal(tmp_path: Path) -> None:
    evil = "\x1b[31mred\x07"
    folder = os.fsencode(tmp_path) + b"/\xff"
    os.mkdir(folder)
    path = os.fsdecode(folder + b"/m.safetensors")
    write_safetensors(Path(path), {evil: random_row("U8", [4])}, {evil: evil})
    for verb in (("show", "--tensors"), ("show", "--tensors", "--json"), ("load",), ("doctor",)):
        done = program(verb[0], path, *verb[1:], env=os.environ | {"TENSORLIFT_BACKEND": "URING,MMAP"})
        assert done.returncode == 0, done.stderr
        assert not set("\x1b\x07") & set(done.stdout + done.stderr)
    for error in (program("load", path, "--name", evil + "x"), program("load", path, "--device", "cuda:0")):
        assert error.returncode == 2
        assert not set("\x1b\x07") & set(error.stdout + error.stderr)
