"""SGLang's protocol between instances, both ways, with the real package's own functions."""

from __future__ import annotations

import json
from pathlib import Path

from support import engines
from support.sglang_runs import MARKS, OWN, PYTHON

pytestmark = MARKS


def test_both_ways(tmp_path: Path) -> None:
    said, found = tmp_path / "said.txt", tmp_path / "found.json"
    process = engines.start(PYTHON, "sglang_protocol_jobs.py", found, folder=tmp_path, said=said, environ=OWN)
    assert process.wait(600) == 0, said.read_text(errors="replace")[-3000:]
    assert json.loads(found.read_text()) == {"theirs_from_ours": True, "ours_from_theirs": True}
