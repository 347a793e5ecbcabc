"""``tensorlift verify``: every difference is listed, and the exit code tells."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.checkpoints import Written, random_checkpoint, random_row, write_safetensors
from support.command_line import run
from support.digests import flip, headers


@pytest.fixture
def written(tmp_path: Path) -> Written:
    made = random_checkpoint(tmp_path / "c", shards=2, tensors=5, seed=2, codes=["U8", "F32"])
    assert run("digest", made.path)[0] == 0
    return made


def test_what_is_right(written: Written) -> None:
    code, out, err = run("verify", written.path)
    assert (code, err) == (0, "")
    assert out.startswith(f"10 tensors match {written.path / 'tensorlift.digests.json'}\n10 tensors")
    code, out, err = run("verify", written.path, "--json")
    assert (code, err, json.loads(out)["differences"]) == (0, "", [])


def test_a_load_that_verified_says_so(written: Written) -> None:
    place = written.path / "tensorlift.digests.json"
    for verify in ("true", place):
        code, out, _ = run("load", written.path, "--verify", verify)
        assert code == 0
        assert out.splitlines()[-1] == f"10 tensors match {place}"
    assert "match" not in run("load", written.path)[1]
    assert json.loads(run("load", written.path, "--verify", "true", "--json")[1])["runs"][0]["verified"] == 10


def test_every_difference_is_listed(written: Written) -> None:
    names = [headers(path).names for path in written.files]
    # The last byte of both files: the last tensors.
    for path in written.files:
        flip(path, -1)
    code, out, err = run("verify", written.path, "--json")
    assert code == 1
    found = json.loads(out)["differences"]
    assert [(one["kind"], one["file"], one["tensor"]) for one in found] == [
        ("changed", path.name, last[-1]) for path, last in zip(written.files, names, strict=True)
    ]
    assert err.startswith("error: DigestError")
    assert "2 differences" in err
    assert names[0][-1] in err
    code, out, _ = run("verify", written.path)
    assert code == 1
    assert [line.split(":")[0] for line in out.splitlines()[:2]] == ["changed", "changed"]


def test_missing_and_extra_tensors(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "m.safetensors", {n: random_row("U8", [9]) for n in "abc"})
    assert run("digest", path)[0] == 0
    write_safetensors(path, {n: random_row("U8", [9]) for n in "bcd"})
    code, out, _ = run("verify", path, "--json")
    assert code == 1
    found = [(one["kind"], one["tensor"]) for one in json.loads(out)["differences"]]
    assert found == [("missing", "a"), ("extra", "d")]


def test_other_digests(written: Written, tmp_path: Path) -> None:
    other = random_checkpoint(tmp_path / "other", tensors=2, seed=7, codes=["U8"])
    code, out, _ = run("verify", other.path, "--digests", written.path / "tensorlift.digests.json", "--json")
    kinds = {one["kind"] for one in json.loads(out)["differences"]}
    # What the other files have is not asked for.
    assert (code, kinds <= {"extra", "changed"}) == (1, True)


def test_one_shard_of_several(written: Written) -> None:
    code, out, err = run("verify", written.files[0])
    assert (code, err) == (0, "")
    assert out.startswith("5 tensors match")
    flip(written.files[0], -1)
    assert len(json.loads(run("verify", written.files[0], "--json")[1])["differences"]) == 1


def test_a_file_that_is_gone_is_one_line(tmp_path: Path) -> None:
    for name in "ab":
        tensors = {f"{name}{i}": random_row("U8", [9]) for i in range(5)}
        write_safetensors(tmp_path / f"{name}.safetensors", tensors)
    assert run("digest", tmp_path)[0] == 0
    (tmp_path / "b.safetensors").unlink()
    code, out, _ = run("verify", tmp_path)
    assert code == 1
    assert out.splitlines()[0] == "missing: b.safetensors: is missing, with 5 tensors"
    assert "missing" not in out.splitlines()[1]


def test_long_lists_are_cut(tmp_path: Path) -> None:
    tensors = {f"t{i}": random_row("U8", [9], i) for i in range(120)}
    path = write_safetensors(tmp_path / "m.safetensors", tensors)
    assert run("digest", path)[0] == 0
    write_safetensors(path, {name: random_row("U8", [9], 999) for name in tensors})
    code, out, _ = run("verify", path)
    assert (code, len(out.splitlines())) == (1, 52)
    assert "... and 70 more" in out
    assert len(json.loads(run("verify", path, "--json")[1])["differences"]) == 120


def test_without_digests(tmp_path: Path) -> None:
    code, out, err = run("verify", random_checkpoint(tmp_path / "c").path)
    assert (code, out) == (1, "")
    assert "tensorlift digest" in err
    (tmp_path / "bad.json").write_text("{}")
    code, out, err = run("verify", tmp_path / "c", "--digests", tmp_path / "bad.json")
    assert (code, out) == (1, "")
    assert "bad.json" in err


def test_a_truncated_file(written: Written) -> None:
    with written.files[0].open("r+b") as file:
        file.truncate(written.files[0].stat().st_size - 1)
    code, _, err = run("verify", written.path)
    assert code == 1
    assert err.startswith("error: TruncatedError")


def test_no_torch_is_needed(written: Written) -> None:
    code = (
        "import sys\nfrom tensorlift.cli.main import main\n"
        f"sys.argv = ['tensorlift', 'verify', {str(written.path)!r}]\n"
        "try:\n    main()\nexcept SystemExit as leaving:\n    assert leaving.code == 0\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
