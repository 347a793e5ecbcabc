"""README and the pages under docs/ as code blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from support.tree import ROOT

# Its blocks are what errors look like; test_errors_page.py makes each of them.
_TESTED_ELSEWHERE = ("docs/errors.md",)
_BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One of them, and where it stands."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        """Its name among the tests."""
        return f"{self.page}:{self.line}"


def blocks(language: str | None = None) -> Iterator[Block]:
    """All, or those in one language."""
    pages = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").glob("*.md"))]
    for page in ["README.md", *pages]:
        if page in _TESTED_ELSEWHERE:
            continue
        text = (ROOT / page).read_text()
        for found in _BLOCK.finditer(text):
            if language in (None, found[1]):
                yield Block(page, text.count("\n", 0, found.start()) + 1, found[1], found[2])


class Model(torch.nn.Module):
    """A small one, with names as the pages have them."""

    def __init__(self) -> None:
        super().__init__()
        layers = [torch.nn.ModuleDict({"o_proj": torch.nn.Linear(16, 16, bias=False)}) for _ in range(2)]
        self.model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers)})


def write_model(folder: Path) -> Path:
    """Its checkpoint, in the folder as the pages call it."""
    (folder / "model").mkdir()
    save_file(Model().state_dict(), folder / "model" / "model.safetensors")
    return folder
