"""A model that an engine's process offers, and what a fork gets of it."""

from __future__ import annotations

import logging
from typing import Any

import torch

import tensorlift
from tensorlift.forking.manifest import ModelKey
from tensorlift.integrations.fork_settings import ForkSettings, Publish
from tensorlift.integrations.state import State

LOG = logging.getLogger("tests.offers")
SETTINGS = ForkSettings(publish=Publish(), transports=("tcp",))
KEY = ModelKey(model="m")


class Model(torch.nn.Module):
    """A weight of equal values, and a number beside it."""

    def __init__(self, value: float, size: int = 8) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((size,), value), requires_grad=False)
        self.scale = value


def url_of(caplog: Any, at: int = -1) -> str:
    """Where a seed is, as the log says it."""
    said = [record.getMessage() for record in caplog.records if " offers " in record.getMessage()]
    return str(said[at].rpartition(" at ")[2].partition(",")[0])


def forked(url: str, key: ModelKey = KEY, ca: str | None = None) -> tuple[float, float, str]:
    """What a fork gets: (value of the weights, the number beside them, their version)."""
    model = Model(0.0)
    state = State(model, "tests")
    came = tensorlift.fork(url, into=state.tensors(), key=key, ca=ca)
    state.take()
    return float(model.weight[0]), model.scale, came.weights
