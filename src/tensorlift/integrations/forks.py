"""An engine's model out of a running instance: all ranks of one version, or all of them from the files."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import msgspec
import torch

from tensorlift import instances
from tensorlift.distributed.board import Board, Failure
from tensorlift.distributed.members import members_of
from tensorlift.distributed.ranks import JOIN_TIMEOUT, PEER_TIMEOUT
from tensorlift.errors import ForkError
from tensorlift.forking.fork import Forked
from tensorlift.forking.keys import told_key
from tensorlift.forking.manifest import ModelKey
from tensorlift.format.quoting import quote
from tensorlift.integrations.settings import LOAD_FORMAT, Settings
from tensorlift.integrations.state import State
from tensorlift.integrations.weights import rank
from tensorlift.progress import Report
from tensorlift.sources.identifying import is_other
from tensorlift.stats import human_bytes

__all__ = ["fork_model"]

Model = TypeVar("Model", bound=torch.nn.Module)


class _Said(msgspec.Struct):
    """What a rank has to say at the end."""

    who: str
    what: str = ""
    """The key, for a message."""
    weights: str = ""
    """The version that came."""
    why: str = ""
    """Why nothing came."""


def fork_model(
    make: Callable[[], Model],
    key: Callable[[], ModelKey],
    settings: Settings,
    *,
    engine: str,
    group: Any,
    log: logging.Logger,
    bar: Callable[[], AbstractContextManager[Report]] | None = None,
    own: Callable[[], str] = lambda: "",
) -> tuple[Model, State, Forked] | None:
    """A model with the weights of a running instance; None: load from files, on all ranks, as the log says.

    make: makes the model with memory for its weights, in the state that ``key()`` says. engine: its package;
    see State. group: as for ``tensorlift.open``: the ranks that have to have one version. bar: as for
    iterate(). own: the version of the files here, see checkpoint_of(). Raises ForkError where files may not
    stand in, RanksError where another rank is gone.
    """
    with _Together(group, settings) as ranks:
        made, said = _made(make, key, settings, engine, bar, own)
        why = ranks.why_not(said)
    if why or made is None:
        told = f"{LOAD_FORMAT}: rank {rank()}: no fork{said.what} from {settings.instances.where}: {why}"
        made = None  # its memory is wanted for the one that is loaded
        _free()
        if not settings.instances.fallback:
            raise ForkError(f"{told}; files may not stand in (fallback is false)")
        log.warning("%s; loading from files", told)
        return None
    log.info("%s", _summary(made[2], said.what))
    return made


def _made(
    make: Callable[[], Model],
    key: Callable[[], ModelKey],
    settings: Settings,
    engine: str,
    bar: Callable[[], AbstractContextManager[Report]] | None,
    own: Callable[[], str],
) -> tuple[tuple[Model, State, Forked] | None, _Said]:
    said = _Said(f"rank {rank()}")
    try:
        wanted = key()
        said.what = f" of {told_key(wanted)}"
        model = make()
        state = State(model, engine)
        came = _forked(state, wanted, settings, bar, functools.cache(own))
        state.take()
    # Whatever it is, also of an engine that cannot process weights that are none: there are files.
    except Exception as error:  # noqa: BLE001
        said.why = f"{type(error).__name__}: {error}"
        return None, said
    # Weights without a name are of one instance where one URL is all that ranks have to choose from.
    said.weights = came.weights or ("" if len(settings.instances.seed) == 1 else f"unnamed of {said.who}")
    return (model, state, came), said


def _forked(
    state: State,
    key: ModelKey,
    settings: Settings,
    bar: Callable[[], AbstractContextManager[Report]] | None,
    own: Callable[[], str],
) -> Forked:
    def unwanted(weights: str) -> str:
        if not is_other(weights, own):
            return ""
        return f"the instance has {weights}, and the files here are {own()}"

    wanted = settings.resolved().progress
    with contextlib.ExitStack() as ending:
        progress: Any = wanted if bar is None or wanted is not None else ending.enter_context(bar())
        given = settings.instances.to_fork()
        return instances.fork(into=state.tensors(), key=key, progress=progress, unwanted=unwanted, **given)


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _summary(came: Forked, what: str) -> str:
    rate = came.bytes / came.seconds if came.seconds else 0.0
    sources = "; ".join(f"{url} ({came.transports.get(url, '')})" for url in came.by_source)
    version = f", version {quote(came.weights)[1:-1]}" if came.weights else ""
    left = f"; left behind: {'; '.join(came.left)}" if came.left else ""
    return (
        f"{LOAD_FORMAT}: rank {rank()}: forked {came.bytes} bytes ({human_bytes(came.bytes)}){what}"
        f"{version} in {came.seconds:.3f} s ({human_bytes(rate)}/s) from {sources}{left}"
    )


class _Together:
    """The ranks of one fork: all have the same version, or all load from files."""

    def __init__(self, group: Any, settings: Settings) -> None:
        members = members_of(group, alone=True)
        options = settings.resolved()
        self._board: Board | None = None
        if members is not None:
            self._board = Board(
                members, options.peer_timeout or PEER_TIMEOUT, options.join_timeout or JOIN_TIMEOUT
            )

    def __enter__(self) -> _Together:
        """Waits for the others to come."""
        if self._board is not None:
            self._guarded(lambda board: board.agree("fork", b"", lambda said: b"", first=True))
        return self

    def why_not(self, said: _Said) -> str:
        """Why all load from files; "" where every rank has the same version."""
        if self._board is None:
            return said.why
        raw = msgspec.json.encode(said)
        return self._guarded(lambda board: board.agree("forked", raw, _decide)).decode()

    def _guarded(self, step: Callable[[Board], bytes]) -> bytes:
        """The others are told where this rank leaves."""
        board = self._board
        assert board is not None
        try:
            return step(board)
        except BaseException as error:
            self._leave(error)
            raise

    def _leave(self, error: BaseException) -> None:
        board, self._board = self._board, None
        if board is not None:
            number = board.members.world_ranks[board.members.rank]
            board.fail(Failure(number, "error", f"rank {number} failed: {type(error).__name__}: {error}"))
            board.close()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._leave(error)
        elif self._board is not None:
            try:
                self._board.end()
            finally:
                self._board.close()


def _decide(raw: Sequence[bytes]) -> bytes:
    said = [msgspec.json.decode(one, type=_Said) for one in raw]
    for one in said:
        if one.why:
            return f"{one.who}: {one.why}".encode()
    if len({one.weights for one in said}) > 1:
        versions = ", ".join(f"{one.who} {quote(one.weights)[1:-1] or 'that of the files'}" for one in said)
        return f"the weights were updated meanwhile, and ranks have several versions: {versions}".encode()
    return b""
