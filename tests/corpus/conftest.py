"""The cases, written once a session."""

import json
from pathlib import Path

import pytest

from corpus.make_cases import make


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """The folder that the cases are in."""
    out = tmp_path_factory.mktemp("corpus")
    make(out)
    return out


@pytest.fixture(scope="session")
def cases(corpus) -> dict[str, dict]:
    """Every case by its id, read back from cases.json."""
    return {case["id"]: case for case in json.loads((corpus / "cases.json").read_text())}
