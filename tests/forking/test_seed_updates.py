"""Updates of a seed that are interrupted, come twice or find it closed; names that no fork could read."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

import tensorlift.forking.seed as module
from support import leaks
from support.waiting import SECONDS, until
from tensorlift.errors import ForkError, OptionError, RequestError, SeedError
from tensorlift.forking.client import SeedClient
from tensorlift.forking.fork import fork_into
from tensorlift.forking.manifest import ModelKey
from tensorlift.forking.seed import Seed

KEY = ModelKey(model="org/model")


def model() -> dict[str, torch.Tensor]:
    return {f"t{k}": torch.arange(100 + k) for k in range(5)}


def reads(seed: Seed) -> bool:
    found = {name: torch.zeros_like(tensor) for name, tensor in model().items()}
    fork_into(found, seed.url, patience=60.0)
    return all(torch.equal(found[name], tensor) for name, tensor in model().items())


@pytest.fixture
def seed() -> Iterator[Seed]:
    with leaks.nothing_left():
        made = Seed(model(), KEY)
        yield made
        made.close()


def test_ctrl_c_while_an_update_waits(seed: Seed, monkeypatch: pytest.MonkeyPatch) -> None:
    client = SeedClient(seed.url)

    def interrupted(timeout: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(seed, "_wait_for_readers", interrupted)
    with pytest.raises(KeyboardInterrupt), seed.updating():
        pytest.fail("it has not begun")
    assert client.lease(10).epoch == client.manifest().epoch
    assert reads(seed)


def test_an_update_without_a_name_is_like_no_other(seed: Seed) -> None:
    """Or bytes of two seeds that both have changed would be taken for those of one version."""
    client, found = SeedClient(seed.url), set()
    for _ in range(2):
        with seed.updating():
            pass
        found.add(client.manifest().weights)
    with Seed(model(), KEY) as other:
        with other.updating():
            pass
        found.add(SeedClient(other.url).manifest().weights)
    assert len(found - {""}) == 3


def test_a_seed_that_is_closed_in_an_update(seed: Seed) -> None:
    assert reads(seed)
    sent = seed.stats()["sent_bytes"]
    twice = pytest.raises(RequestError, match="these weights are being updated already")
    with seed.updating(), twice, seed.updating():
        pass
    with seed.updating():
        seed.close()
    assert (seed.stats()["sent_bytes"], seed.stats()["connections"]) == (sent, 0)
    with pytest.raises(RequestError, match="this seed is closed"), seed.updating():
        pass


def test_memory_of_a_closed_seed_is_not_digested(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = Seed(model(), KEY, digests=True)
    monkeypatch.setattr(module, "made_digests", lambda offering: pytest.fail("it may be gone"))
    with closed.updating():
        closed.close()


def test_ctrl_c_while_digests_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The update ends all the same, without digests; the next one makes them."""

    def interrupted(offering: object) -> None:
        raise KeyboardInterrupt

    with Seed(model(), KEY, digests=True) as seed:
        with monkeypatch.context() as patched:
            patched.setattr(module, "made_digests", interrupted)
            with pytest.raises(KeyboardInterrupt), seed.updating():
                pass
        assert not SeedClient(seed.url).manifest().digests
        assert reads(seed)
        with seed.updating():
            pass
        assert set(SeedClient(seed.url).manifest().digests) == set(model())


@pytest.mark.parametrize("text", ["x" * 5000, "half \ud800"])
def test_what_no_fork_could_read_is_not_offered(seed: Seed, text: str) -> None:
    with pytest.raises(OptionError, match="weights is "):
        Seed(model(), KEY, weights=text)
    with pytest.raises(OptionError, match="weights is "), seed.updating(weights=text):
        pass
    with pytest.raises(RequestError, match="is no name that can be sent"):
        Seed({text: torch.ones(1)}, KEY)
    with pytest.raises(OptionError, match="no ModelKey that can be sent"):
        Seed(model(), ModelKey(model="m", role=text))


def test_a_child_does_not_end_the_seed_of_its_parent(seed: Seed) -> None:
    """It leaves the block that the seed is closed behind, as the parent will."""
    child = os.fork()
    if not child:
        try:
            seed.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert reads(seed)


def freed(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def replaced(tensor: torch.Tensor) -> None:
    tensor.data = torch.empty_like(tensor)


@pytest.mark.parametrize("change", [freed, replaced])
def test_an_update_that_gives_a_tensor_other_memory(
    seed: Seed, change: Callable[[torch.Tensor], None]
) -> None:
    """A fork had the seed read memory that was gone, which ended its process."""
    tensors = {one.name: one.tensor for one in seed._named}
    said = "'t0' has other memory than before the update.*This seed has ended"
    with pytest.raises(RequestError, match=said), seed.updating(timeout=0):
        change(tensors["t0"])
    with pytest.raises(SeedError):
        SeedClient(seed.url).lease(10)


@pytest.mark.parametrize("with_what", ["module", "mapping"])
def test_an_update_that_gives_a_model_another_tensor(with_what: str) -> None:
    """Forks would have got the one before it, under the name of the new version."""
    linear = torch.nn.Linear(3, 3)
    given = {"weight": linear.weight, "bias": linear.bias}
    with leaks.nothing_left(), Seed(linear if with_what == "module" else given, KEY) as seed:
        with seed.updating(timeout=0, weights="2"), torch.no_grad():
            linear.weight.add_(1)
            given["more"] = torch.ones(2)
        with pytest.raises(RequestError, match="'weight' has other memory"), seed.updating(timeout=0):
            linear.weight = given["weight"] = torch.nn.Parameter(torch.ones(3, 3))


@pytest.mark.parametrize(
    "other",
    [torch.nn.UninitializedParameter(), torch.nn.Parameter(torch.eye(3).to_sparse())],
    ids=["uninitialized", "sparse"],
)
def test_an_update_that_gives_a_model_a_tensor_without_a_place(other: torch.nn.Parameter) -> None:
    linear = torch.nn.Linear(3, 3)
    with (
        leaks.nothing_left(),
        Seed(linear, KEY) as seed,
        pytest.raises(RequestError, match="'weight' has other memory"),
        seed.updating(timeout=0),
    ):
        linear.weight = other


def test_an_update_behind_which_a_mapping_has_something_else(seed: Seed) -> None:
    with seed.updating(timeout=0):
        seed._model["t0"] = "nothing"  # type: ignore[index]
    assert reads(seed)


def test_a_signals_handler_ends_the_seed_amid_what_its_thread_does_with_it(seed: Seed) -> None:
    """Who is asked then waits for the lock of the thread that is interrupted, and the handler for him."""

    def ask() -> None:
        with contextlib.suppress(ForkError):
            reads(seed)

    def interrupted() -> None:
        with seed._changed:
            asking.start()
            until(lambda: bool(seed._http._talking))
            seed.close()

    asking = threading.Thread(target=ask, daemon=True)
    ending = threading.Thread(target=interrupted, daemon=True)
    ending.start()
    ending.join(SECONDS)
    assert not ending.is_alive()
    asking.join(SECONDS)
