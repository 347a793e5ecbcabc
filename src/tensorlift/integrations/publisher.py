"""What an engine's process offers of its models, from when it serves, and not while their weights change.

Whatever fails here costs the offer, never the instance: the log says why nothing is published.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from tensorlift import instances
from tensorlift.errors import SeedError
from tensorlift.forking.keys import told_key
from tensorlift.forking.manifest import ModelKey
from tensorlift.forking.seed import Seed
from tensorlift.integrations.fork_settings import ForkSettings
from tensorlift.integrations.settings import LOAD_FORMAT
from tensorlift.integrations.state import State
from tensorlift.integrations.weights import rank, world

__all__ = ["Publisher", "publisher"]

# The front is another rank's, which may still be at its own weights. Where it did not come in that time it is
# not offered, and the engine's thread waits no longer for it at each of its updates.
_JOIN_SECONDS, _JOIN_AGAIN_SECONDS = 30.0, 1.0


@dataclasses.dataclass
class _Offer:
    state: State
    key: ModelKey
    weights: str
    settings: ForkSettings
    port: int = 0
    seed: Seed | None = None
    given: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    """What the seed was begun with."""


class Publisher:
    """The models of one process, behind one URL. Called by the thread that the engine changes weights in."""

    def __init__(self) -> None:
        self._offers: list[_Offer] = []
        self._log = logging.getLogger("tensorlift")
        self._serving = self._in_vain = False
        self._lost: set[str] = set()
        """Roles whose weights are, until updates bring them."""
        self._gone = False
        """Memory is, until restore()."""
        self._updating = self._spoiled = False
        self._brings: str | None = None
        """Whose weights the update that is under way is of, "" for all; None: of nothing that is lost."""
        self._came: set[str] = set()
        self._start, self._updates = "", 0
        self._ending = contextlib.ExitStack()
        """Of the update that is under way: lets readers of the seeds in again."""

    def add(
        self,
        state: Callable[[], State],
        key: Callable[[], ModelKey],
        settings: ForkSettings,
        log: logging.Logger,
        weights: str = "",
    ) -> None:
        """A model that will be offered, if the settings say so; one of the same key takes its place.

        Both are made here: what cannot be looked into, or named, is not offered.
        """
        if settings.publish is None:
            return
        self._log = log
        self._start = self._start or _common_start()
        try:
            # Without a name they would count as the same as any others without one.
            offer = _Offer(state(), key(), weights or f"of start {self._start}", settings)
        except Exception as error:  # noqa: BLE001
            why = f"{type(error).__name__}: {error}"
            log.warning("%s: rank %d: a model is not offered: %s", LOAD_FORMAT, rank(), why)
            return
        for old in [old for old in self._offers if old.key == offer.key]:
            self._withdraw(old)
            self._offers.remove(old)
        self._offers.append(offer)

    def serve(self) -> None:
        """The engine is ready: what was added is offered from now on."""
        self._serving = True
        self._offer_all()

    def restore(self) -> None:
        """Memory is there: offers what is not offered, unless its weights are lost; begins no update."""
        self._gone = False
        self._offer_all()

    def _offer_all(self) -> None:
        if not self._serving or self._lost or self._gone or self._updating:
            return
        for offer in self._offers:
            if offer.seed is None:
                try:
                    self._publish(offer)
                # Whatever it is, the instance serves.
                except Exception as error:  # noqa: BLE001
                    self._say_not(offer, f"{type(error).__name__}: {error}")

    def withdraw(self, why: str, *, lost: bool = False, gone: bool = False) -> None:
        """Ends all seeds. An update that is under way goes on behind that.

        ``lost``: an update that begins later has to bring weights before any are offered again. ``gone``: so
        does restore(), memory.
        """
        self._gone = self._gone or gone
        if lost:
            self._lost |= {offer.key.role for offer in self._offers}
            self._brings = None
            self._came.clear()
        for offer in self._offers:
            if offer.seed is not None:
                self._withdraw(offer)
                self._say_not(offer, why)
        # Behind that: it lets readers in again.
        self._let_in()

    def close(self) -> None:
        """The engine ends."""
        for offer in self._offers:
            self._withdraw(offer)
        self._let_in()
        self._offers, self._serving = [], False
        self._lost, self._gone, self._updating = set(), False, False

    @property
    def is_updating(self) -> bool:
        """Between begin_update() and end_update()."""
        return self._updating

    @contextlib.contextmanager
    def updating(self, what: str) -> Iterator[None]:
        """Around a change of the weights: see begin_update(). Inside an update, which goes on behind it."""
        inside = self.is_updating
        try:
            self.begin_update(what)
            yield
        except BaseException:
            self.spoil()
            raise
        finally:
            if not inside:
                self.end_update()

    def begin_update(self, what: str, *, role: str = "") -> None:
        """Nobody reads what changes now; readers begin again behind it, and are not waited for.

        Inside an update this does nothing. Where weights were lost, this brings those of ``role`` ("target",
        "draft", or "" for all), if came() is called.
        """
        if self._updating:
            return
        self._updating, self._spoiled, self._brings, self._came = True, False, role, set()
        self._updates += 1
        for offer in self._offers:
            # All ranks see the same updates, and a fork of several ranks wants one version.
            offer.weights = f"updated {self._start}, {self._updates}"
            if offer.seed is None:
                continue
            if offer.state.is_held:
                self._withdraw(offer)
                self._say_not(offer, f"{what}, and what was offered are the weights of the start")
                continue
            try:
                self._ending.enter_context(offer.seed.updating(timeout=0, weights=offer.weights))
            except Exception as error:  # noqa: BLE001
                self._withdraw(offer)
                self._say_not(offer, f"{what}: {type(error).__name__}: {error}")
        self._offers = [offer for offer in self._offers if not offer.state.is_held]

    def came(self, role: str | None = None) -> None:
        """Of the update under way, or of one role in it: an engine may also refuse, or bring nothing."""
        if self._brings is not None:
            self._came.add(self._brings if role is None else role)

    def spoil(self) -> None:
        """The update has failed half way."""
        self._spoiled = True

    def end_update(self) -> None:
        """The weights are there: they are read again, as tensors of the model that may be other ones now."""
        if not self._updating:
            return
        self._updating = False
        if self._spoiled:
            self.withdraw("an update has failed, and the weights are of no version", lost=True)
            return
        # Drafts may have numbers: "draft 1".
        self._lost = {role for role in self._lost if not role.startswith(tuple(self._came))}
        for offer in self._offers:
            try:
                offer.state.refresh()
                if offer.seed is not None and not _same(offer.given, offer.state.tensors()):
                    self._withdraw(offer)
            except Exception as error:  # noqa: BLE001
                self._withdraw(offer)
                self._say_not(offer, f"{type(error).__name__}: {error}")
        self._let_in()
        self._offer_all()

    def _let_in(self) -> None:
        """Readers of seeds that an update has kept out; where that fails, their seeds end."""
        try:
            self._ending.close()
        except Exception as error:  # noqa: BLE001
            self.withdraw(f"the end of an update has failed: {type(error).__name__}: {error}")

    def _publish(self, offer: _Offer) -> None:
        publish, first = offer.settings.publish, self._offers[0]
        assert publish is not None
        is_front = rank() == 0 and offer is first
        place = publish
        if rank() == 0 and not is_front:
            if first.seed is None:
                raise SeedError(f"it would stand behind {told_key(first.key)}, which is not offered either")
            place = dataclasses.replace(publish, port=first.port)  # which may be any that was free
        join = None if is_front else place.front_url
        tensors = offer.state.tensors()
        in_vain, self._in_vain = self._in_vain, True
        offer.seed = instances.seed(
            tensors,
            key=offer.key,
            port=offer.port or (publish.port if is_front else 0),
            weights=offer.weights,
            join_timeout=_JOIN_AGAIN_SECONDS if in_vain else _JOIN_SECONDS,
            **offer.settings.to_seed(publish, join),
        )
        self._in_vain = False
        offer.given = tensors
        offer.port = int(offer.seed.url.rpartition(":")[2])
        where = f"{offer.seed.url}" + (f", behind {join}" if join else "")
        self._log.info("%s: rank %d: offers %s at %s", LOAD_FORMAT, rank(), told_key(offer.key), where)

    def _withdraw(self, offer: _Offer) -> None:
        seed, offer.seed, offer.given = offer.seed, None, {}
        if seed is not None:
            try:
                seed.close()
            except Exception as error:  # noqa: BLE001
                self._say_not(offer, f"and its end has failed: {type(error).__name__}: {error}")

    def _say_not(self, offer: _Offer, why: str) -> None:
        self._log.warning("%s: rank %d: %s is not offered: %s", LOAD_FORMAT, rank(), told_key(offer.key), why)


def _common_start() -> str:
    """A name of this start of the engine, the same on all its ranks."""
    own = secrets.token_hex(8)
    if world() is None:
        return own
    try:
        # The rank that comes first names it, and none waits for another.
        store: Any = dist.distributed_c10d._get_default_store()
        return str(store.compare_set("tensorlift/start", "", own).decode())
    # Then each rank has a version of its own, and forks of several load from files.
    except Exception:  # noqa: BLE001
        return own


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(one[name].data_ptr() == tensor.data_ptr() for name, tensor in other.items())


publisher = Publisher()
"""This process's."""
atexit.register(publisher.close)
