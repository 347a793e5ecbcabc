"""Each block of Python on README and the pages runs as it stands there, among the names that it speaks of.

Only devices, addresses and counts of a machine are others than a reader's.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import tensorlift
from support import child, pages, registries
from support.models import saved
from support.pages import Model
from support.ports import nobody
from tensorlift.forking.manifest import ModelKey
from tensorlift.forking.seed import Seed

TOKEN = "not-so-secret"
# What stands on a page, and what stands in its place here: always, and then on that page alone.
SWAPS = {
    '"cuda:0"': '"cpu"',
    '"cuda"': '"cpu"',
    '"http://127.0.0.1:40123"': "seed.url",
    "port=8000": "port=0",
    "join=front_url": "join=front.url",
    '"http://10.0.0.7:8000", into=target': "front.url, into=target",
    '"http://10.0.0.1:7700"': "registry_url",
    '"tensorlift://10.0.0.7:7000/Qwen/Qwen3-30B-A3B"': "checkpoint_url",
    '"tensorlift://10.0.0.7:7000/"': "checkpoint_url",
    '"10.0.0.7"': '"127.0.0.1"',
    '"10.0.0.8"': '"127.0.0.1"',
    'devices=["mlx5_1"]': 'protocol="tcp"',
    "node * 8, node * 8 + 8": "node, node + 1",
    "get_rank() // 8": "get_rank()",
    'tp_plan="auto"': 'tp_plan="auto", tp_size=1',
}


class Names:
    """What the names of a block stand for, where it does not make them itself."""

    model = other = third = target = draft = property(lambda self: Model())
    key = "org/model"
    token = TOKEN
    rank, nodes = 0, 1
    tensorlift, dist = tensorlift, dist
    safe_open, load_file = tensorlift.safe_open, tensorlift.load_file

    def __init__(self, ending: contextlib.ExitStack) -> None:
        self._ending = ending

    def _seed(self, weights: Any, key: Any, **more: Any) -> Any:
        seed = tensorlift.seed(weights, key=key, weights="step 1", **more)
        self._ending.callback(seed.close)
        return seed

    @property
    def seed(self) -> Any:
        return self._seed(Model(), self.key)

    @property
    def first_url(self) -> str:
        return self._seed(Model(), self.key, token=TOKEN).url

    @property
    def urls(self) -> list[str]:
        return [self.first_url]

    @property
    def front_url(self) -> str:
        return nobody()

    @property
    def checkpoint_url(self) -> str:
        key = ModelKey(model="org/model", processed=False)
        url = self._seed(Model().state_dict(), key).url
        return url.replace("http://", "tensorlift://") + "/org/model"

    @property
    def registry_url(self) -> str:
        registry = self._ending.enter_context(registries.serving(token=TOKEN))
        self._seed(Model(), self.key, token=TOKEN, registry=registry.url)
        return registry.url

    @property
    def stage_group(self) -> Any:
        return dist.group.WORLD


def run(page: str, line: int, folder: str) -> None:
    """In a child: the block of the page that begins in that line."""
    (block,) = (one for one in pages.blocks("python") if (one.page, one.line) == (page, line))
    text = block.text
    for there, here in SWAPS.items():
        text = text.replace(there, here)
    os.chdir(folder)
    with contextlib.ExitStack() as ending:
        if "dist." in text or "process_group" in text:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            ending.callback(dist.destroy_process_group)
        names = Names(ending)
        used = set(re.findall(r"\w+", text))
        own = set(re.findall(r"^(?:def )?(\w+)(?: = |\()", text, re.MULTILINE))
        known = {name: getattr(names, name) for name in used - own if hasattr(Names, name)}
        exec(compile(text, str(block), "exec"), known)
        for made in known.values():
            if isinstance(made, Seed):
                made.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pages.write_model(tmp_path_factory.mktemp("python"))


@pytest.fixture(scope="module")
def folder_of_transformers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("transformers")
    saved("llama", folder / "model")
    return folder


@pytest.mark.parametrize("block", list(pages.blocks("python")), ids=str)
def test_block_runs(block: pages.Block, request: pytest.FixtureRequest) -> None:
    fixture = "folder_of_transformers" if "transformers" in block.page else "folder"
    child.call(run, block.page, block.line, str(request.getfixturevalue(fixture)))


def test_every_block_says_what_it_is() -> None:
    """Those in Python and those of a shell are run; text is a drawing, a formula."""
    assert {block.language for block in pages.blocks()} == {"python", "sh", "text"}
