"""The cases about surroundings and lifetimes, each with what its 'right' says."""

import os
import shutil
from pathlib import Path

import pytest
import torch

import tensorlift
from corpus.checks import check_case, check_file, nothing_left, resident_bytes, threads
from support import child, seccomp

pytestmark = pytest.mark.timeout(120)
needs_filters = pytest.mark.skipif(seccomp.supported() is not None, reason=str(seccomp.supported()))


@pytest.fixture
def good(corpus) -> Path:
    return corpus / "d_good"


@pytest.fixture
def copy(good, tmp_path) -> Path:
    """Files of its own for a test that spoils them."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in good.iterdir():
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
    return folder


def load_under(rules: list[str], path: str, cases_file: str, case_id: str, options: dict) -> dict:
    """In a child: installs the rules, loads, checks every byte there."""
    import json

    import tensorlift

    tensorlift.load(path)
    seccomp.install([rule for name in rules for rule in getattr(seccomp, name)])
    case = next(c for c in json.loads(Path(cases_file).read_text()) if c["id"] == case_id)
    state = tensorlift.load(path, **options)
    check_case(state, case)
    return {"readers": dict(state.stats.readers), "fallbacks": list(state.stats.fallbacks)}


def under(corpus, rules, case_id, **options):
    return child.call(load_under, rules, str(corpus / "d_good"), str(corpus / "cases.json"), case_id, options)


@needs_filters
def test_no_io_uring(corpus):
    answer = under(corpus, ["NO_URING"], "d_no_io_uring")
    assert answer["readers"].get("URING_DIRECT", 0) == 0
    arguments = (["NO_URING"], str(corpus / "d_good"), str(corpus / "cases.json"), "d_no_io_uring")
    refused = child.caught(load_under, *arguments, {"backend": "URING"})
    assert refused["error"] == "BackendError"
    assert "io_uring" in refused["message"]


@needs_filters
def test_no_o_direct(corpus):
    answer = under(corpus, ["NO_DIRECT_OPEN"], "d_no_o_direct")
    assert set(answer["readers"]) <= {"PREAD_BUFFERED"}


def test_tmpfs(good, cases):
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK) or shutil.disk_usage(shm).free < 100 << 20:
        pytest.skip("no 100 MiB of /dev/shm to write to")
    folder = shm / f"tensorlift-test-{os.getpid()}"
    try:
        shutil.copytree(good, folder, ignore=shutil.ignore_patterns("many_shards"))
        check_case(tensorlift.load(folder), cases["d_tmpfs"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def load_on_one_cpu(path: str, cases_file: str) -> dict:
    """In a child that may use one CPU: the most threads seen while tensors come."""
    import json

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    import torch

    import tensorlift

    torch.set_num_threads(1)
    case = next(c for c in json.loads(Path(cases_file).read_text()) if c["id"] == "d_one_cpu")
    before, most, tensors = threads(), 0, {}
    with tensorlift.open(path) as weights:
        for name, tensor in weights:
            most = max(most, threads())
            tensors[name] = tensor
        copying = weights.stats.threads
    check_case(tensors, case)
    return {"before": before, "most": most, "threads": copying, "after": threads()}


def test_one_cpu(good, corpus):
    """Copying threads follow the CPUs; nothing stays when the load is done."""
    answer = child.call(load_on_one_cpu, str(good), str(corpus / "cases.json"))
    assert answer["after"] <= answer["before"] + 1


def test_keep_all(good, cases):
    with tensorlift.open(good) as weights:
        kept = list(weights)
    check_case(dict(kept), cases["d_keep_all"])
    again = tensorlift.load(good)
    check_case(dict(reversed(kept)), cases["d_keep_all"])
    del again
    check_case(dict(kept), cases["d_keep_all"])


def test_early_break(good, cases):
    def once():
        with tensorlift.open(good) as weights:
            for _ in weights:
                break

    for _ in range(3):
        once()
    before = resident_bytes()
    with nothing_left():
        for _ in range(50):
            once()
            for _name, _tensor in tensorlift.open(good):
                break
    assert resident_bytes() - before < 64 << 20  # one load is 34 MB: far less than one a round
    check_case(tensorlift.load(good), cases["d_early_break"])


def consume(weights, error):
    for count, _ in enumerate(weights):
        if count == 2:
            raise error


def test_consumer_raises(good, cases):
    tensorlift.load(good)
    error = ValueError("the consumer's own")
    with nothing_left():
        with pytest.raises(ValueError, match="own") as caught, tensorlift.open(good) as weights:
            consume(weights, error)
        assert caught.value is error
        weights = tensorlift.open(good)
        with pytest.raises(ValueError, match="own") as caught:
            consume(weights, error)
        assert caught.value is error
        error.__traceback__ = None  # it holds the frame, and with it the iterator
        del weights, caught
    check_case(tensorlift.load(good), cases["d_consumer_raises"])


def test_rewritten_after(copy, cases):
    state = tensorlift.load(copy)
    for file in copy.glob("*.safetensors"):
        nbytes = file.stat().st_size
        with open(file, "r+b") as f:
            f.write(bytes(nbytes))
            f.flush()
            os.fsync(f.fileno())
    check_case(state, cases["d_rewritten_after"])


def test_truncated_meanwhile(copy, cases):
    """With a buffer of one arena, the last file has not been read when the first tensor comes."""
    case = cases["d_truncated_meanwhile"]
    last = sorted(copy.glob("*.safetensors"))[-1]
    got = {}

    def read():
        with tensorlift.open(copy, arena_size="2MiB", buffer_size="2MiB") as weights:
            for name, tensor in weights:
                if not got:
                    os.truncate(last, last.stat().st_size // 2)
                got[name] = tensor

    with nothing_left(), pytest.raises(tensorlift.TruncatedError) as caught:
        read()
    assert str(last) in str(caught.value)
    whole = {file: rows for file, rows in case["tensors"].items() if Path(file).name != last.name}
    rows = {row["name"]: (file, row) for file, rs in case["tensors"].items() for row in rs}
    for file in whole:
        names = {row["name"] for row in whole[file]}
        if names <= set(got):
            check_file({name: got[name] for name in names}, case, file)
    for name in got:  # of the damaged file, only what was there
        _, row = rows[name]
        assert not (row["nbytes"] and not bool(got[name].view(torch.uint8).any()))


def test_leak_200(good):
    for _ in range(10):
        tensorlift.load(good)
    before = resident_bytes()
    with nothing_left():
        for _ in range(200):
            tensorlift.load(good)
    assert resident_bytes() - before < 64 << 20  # 200 loads are 6.8 GB


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_device_forms(good, cases, device):
    check_case(tensorlift.load(good, device), cases["d_device_forms"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "device", ["cuda", "cuda:0", "cuda:7", 0, torch.device("cuda"), "meta", "mps", "xyz"]
)
def test_a_device_that_is_not_there_is_refused_before_any_file(device, tmp_path):
    nowhere = tmp_path / "nothing"
    for way in (
        lambda: tensorlift.load(nowhere, device),
        lambda: tensorlift.open(nowhere, device),
        lambda: tensorlift.safe_open(nowhere, "pt", device),
    ):
        with pytest.raises(tensorlift.DeviceError) as caught:
            way()
        assert str(device).split(":")[0] in str(caught.value) or "cuda" in str(caught.value)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, torch.device("cuda")])
def test_device_forms_with_a_gpu(good, cases, device):
    state = tensorlift.load(good, device)
    assert {str(tensor.device) for tensor in state.values()} == {"cuda:0"}
    check_case({name: tensor.cpu() for name, tensor in state.items()}, cases["d_device_forms"])


def test_small_after_big(good):
    """A file of 4 KiB takes no ring, and no more than one thread."""
    tensorlift.load(good)
    before = resident_bytes()
    state = tensorlift.load(good / "many_shards" / "model-00001-of-00200.safetensors")
    assert resident_bytes() - before < 16 << 20
    assert state.stats.pinned_peak_bytes == 0
    assert state.stats.threads <= 1
