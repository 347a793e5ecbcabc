"""The script that compares ways of from_pretrained, with a tiny model on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from support.programs import program_of


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = program_of("benchmarks/transformers_load.py")
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "own").touch()
    given = ["--device", "cpu", "--layers", "2", "--hidden", "64", "--runs", "1", "--folder", str(folder)]
    assert script.main(given) == 0
    printed = capsys.readouterr().out
    assert "from_pretrained, as stored" in "".join(printed.splitlines()[-5:])
    assert [path.name for path in folder.iterdir()] == ["own"]
    (path,) = (tmp_path / "out").iterdir()
    record = json.loads(path.read_text())
    assert [row["name"] for row in record["rows"]] == [
        "from_pretrained, as stored",
        "from_pretrained, float16",
    ]
    assert all(len(series["seconds"]) == 2 for row in record["rows"] for series in row["series"])
