"""An opened checkpoint: one pass over its tensors, reading ahead of the consumer."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch

from tensorlift import sources
from tensorlift.distributed import Ranks
from tensorlift.engine.trace import traced
from tensorlift.errors import RequestError
from tensorlift.forking.movers import FORKS
from tensorlift.forking.remote import SeedCheckpoint, is_seed
from tensorlift.format.checkpoint import Checkpoint, Names
from tensorlift.format.quoting import plural, quote
from tensorlift.options import LoadOptions
from tensorlift.plan.parts import Slices
from tensorlift.progress import finished, reporter, ticker
from tensorlift.stats import LoadStats, timed
from tensorlift.tensors import devices
from tensorlift.tensors import memory as memories
from tensorlift.tensors.moving import FILES, Batches, Movers
from tensorlift.tensors.transfer import Clock, budget_of, rules_of

__all__ = ["Weights", "find", "movers_of", "read_headers"]


def find(path: Any) -> sources.Found | SeedCheckpoint:
    """What a caller names: files, or what a seed offers now."""
    return SeedCheckpoint(path) if is_seed(path) else sources.find(path)


def movers_of(found: object) -> Movers:
    """What brings the bytes of what find() or read_headers() has returned."""
    return FORKS if isinstance(found, SeedCheckpoint) else FILES


def read_headers(
    found: sources.Found | SeedCheckpoint,
    clock: Clock,
    ranks: Ranks | None,
    meanwhile: Callable[[], object] | None = None,
) -> Checkpoint:
    """The checkpoint; with ranks, once they have said that theirs is the same."""
    if isinstance(found, SeedCheckpoint):
        return found
    with clock.phase("headers"):
        checkpoint = sources.read_headers(found, meanwhile)
    if ranks is None:
        return checkpoint

    def in_order(places: Sequence[int]) -> Checkpoint:
        paths = {source.path: source for source in found.files}
        files = tuple(paths[checkpoint.shards[place].path] for place in places)
        return sources.read_headers(dataclasses.replace(found, files=files))

    return ranks.same_files(checkpoint, in_order)


class Weights:
    """An opened checkpoint: iterate once over (name, tensor) in file order; a context manager, though it need
    not be.

    Tensors are owned by whoever holds them. However the iteration ends, reads under way are stopped and
    waited for, and memory that was read ahead goes back; an exception of the consumer comes out as it is.
    """

    def __init__(
        self,
        path: Any,
        memory: memories.Memory,
        names: Names,
        settings: LoadOptions,
        slices: Slices = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Made by open(), which leaves ``ranks`` to this object to end."""
        begin = time.perf_counter()
        self._memory, self._settings, self._ranks = memory, settings, ranks
        with contextlib.ExitStack() as ending:
            self._clock = Clock(ending.enter_context(traced(settings.trace)))
            with self._clock.phase("headers"):
                found = find(path)
            checkpoint = read_headers(found, self._clock, ranks)
            self._checkpoint, self._rows, self._expected = sources.asked_of(
                checkpoint, names, slices, settings
            )
            self._exchange = (
                None
                if ranks is None
                else ranks.exchange(
                    self._checkpoint, self._rows, memory, settings, budget_of(settings, memory).arena_size
                )
            )
            # From here on the end of the pass, or close(), ends the trace, and this rank's part in the load.
            self._ending = contextlib.ExitStack()
            if ranks is not None:
                self._ending.enter_context(ranks)
            self._ending.push(ending.pop_all())
        self._pass: _Pass | None = None
        self._opening = time.perf_counter() - begin
        self._generator: Callable[[], Generator[tuple[str, torch.Tensor], None, None] | None] = lambda: None
        self._closed = False

    def __repr__(self) -> str:
        """What, where to, and whether it can be iterated over still."""
        state = "closed" if self._closed else "open" if self._pass is None else "iterated over"
        count = plural(len(self._rows), "tensor")
        return f"<Weights of {quote(self._checkpoint.where)}: {count} for {self.device}, {state}>"

    def __enter__(self) -> Weights:
        """Itself."""
        if self._ranks is not None:
            self._ranks.held = True  # what leaves the with statement says more than the end of the iteration
        return self

    def __exit__(self, *exc: Any) -> None:
        """Closes."""
        ranks = self._ranks
        if ranks is not None and exc[1] is not None:
            ranks.leave(exc[1])
        self._end()
        if ranks is not None:
            # Where nothing was raised and there was nothing more to take, that is as good as a loop's end.
            ranks.complete |= ranks.taken
            ranks.__exit__(None, None, None)

    @property
    def device(self) -> torch.device:
        """Where the tensors come to."""
        return self._memory.device

    @property
    def metadata(self) -> dict[str, str] | None:
        """The free-form metadata of the checkpoint; None where there is none."""
        return self._checkpoint.metadata

    @property
    def stats(self) -> LoadStats:
        """What was done so far; time that the consumer took between tensors is not in it."""
        if self._pass is None:
            return LoadStats(seconds={**self._clock.seconds, "total": self._opening})
        stats = self._pass.transfer.stats()
        if self._ranks is not None:
            stats = self._ranks.told(stats)
        return timed(stats, self._opening + self._pass.seconds)

    @property
    def names(self) -> list[str]:
        """Names of the selected tensors, in file order."""
        return [self._checkpoint.names[row] for row in self._rows.tolist()]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Those of the tensors by name, in the same order."""
        every = self._checkpoint.shapes
        return {name: tuple(every[row]) for name, row in zip(self.names, self._rows.tolist(), strict=True)}

    def __len__(self) -> int:
        """Number of selected tensors."""
        return len(self._rows)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Starts reading; raises RequestError the second time and after close()."""
        if self._closed:
            if self._ranks is not None:
                self._ranks.leave(None)  # close() of another thread may be at it still
            raise RequestError("these weights are closed; open the checkpoint again")
        if self._pass is not None:
            raise RequestError(
                "these weights were iterated over already; open the checkpoint again for another pass"
            )
        devices.check_kind(self._memory.device)
        with devices.driver_of(self._memory.device):
            memories.check_no_capture()
        begin = time.perf_counter()
        settings, memory = self._settings, self._memory
        limits = budget_of(settings, memory)
        rules = rules_of(limits, memory, uniform=True)
        try:
            transfer = movers_of(self._checkpoint).batches(
                self._checkpoint,
                self._rows,
                memory,
                settings,
                rules,
                self._clock,
                self._expected,
                self._exchange,
            )
        except BaseException as error:
            if self._ranks is not None:
                self._ranks.leave(error)
            raise
        self._pass = _Pass(transfer, limits.buffer_size, self._ending, self._ranks)
        self._pass.seconds = time.perf_counter() - begin
        generator = self._pass.run(settings)
        # Weakly, and the generator does not know this object: a consumer that drops it ends the pass at once.
        self._generator = weakref.ref(generator)
        # One that was never advanced ends without a word: its ring must go, the other ranks must not wait.
        weakref.finalize(generator, _dropped, transfer, self._ranks, self._ending).atexit = False
        return generator

    def close(self) -> None:
        """Ends the pass: stops reads and waits for them, gives memory back. Tensors handed out stay."""
        self._end()
        if self._ranks is not None:
            self._ranks.leave(None)

    def _end(self) -> None:
        """Ends what is this rank's alone."""
        self._closed = True
        if self._pass is not None:
            # Another thread may be inside the generator; closing the transfer makes its wait fail.
            self._pass.transfer.close()
        generator = self._generator()
        # That of another thread ends by its own next step, which fails now: closed from here it would look as
        # if it had come to its end, or refuse the other thread's step.
        if generator is not None and self._pass is not None and self._pass.thread == threading.get_ident():
            # It runs already where this is called below it, from a signal's handler or to tell of progress.
            with contextlib.suppress(ValueError):
                generator.close()
        self._ending.close()


def _dropped(transfer: Batches, ranks: Ranks | None, ending: contextlib.ExitStack) -> None:
    """An iterator is gone, and no other can be had."""
    if ranks is None or not ranks.held:
        transfer.close()  # before the trace ends
        ending.close()


class _Pass:
    """One pass over a transfer, reading ahead."""

    def __init__(
        self, transfer: Batches, buffer_size: int, ending: contextlib.ExitStack, ranks: Ranks | None
    ) -> None:
        self.transfer, self._buffer_size, self._ending, self._ranks = transfer, buffer_size, ending, ranks
        self.seconds = 0.0
        self.thread = 0
        """Of the consumer's last step."""

    def run(self, settings: LoadOptions) -> Generator[tuple[str, torch.Tensor], None, None]:
        transfer = self.transfer
        begin = time.perf_counter()
        self.thread = threading.get_ident()
        try:
            with self._ending, reporter(settings.progress) as report:
                # Before the trace ends: it wants what the engine has kept.
                self._ending.callback(transfer.close)
                for batch in range(transfer.batch_count):
                    self._read_ahead(batch)
                    transfer.wait(batch, ticker(report, transfer.bytes_done, transfer.nbytes))
                    # Popped one by one: a tensor that the consumer drops is gone while the pass goes on.
                    tensors = transfer.tensors(batch)
                    tensors.reverse()
                    for name in transfer.names(batch):
                        self.seconds += time.perf_counter() - begin
                        if self._ranks is not None:
                            self._ranks.taken = batch + 1 == transfer.batch_count and len(tensors) == 1
                        transfer.follow(batch)
                        yield name, tensors.pop()
                        begin = time.perf_counter()
                        self.thread = threading.get_ident()
                    transfer.finish(batch)
                transfer.close_well()
                finished(report, transfer.nbytes)
                if self._ranks is not None:
                    self._ranks.complete = True
        except BaseException as error:
            # Where close() of another thread ends this rank's part, that has to be over before the consumer
            # goes on: it may use the group.
            if self._ranks is not None and not (self._ranks.held and isinstance(error, GeneratorExit)):
                self._ranks.leave(error)
            raise
        finally:
            self.seconds += time.perf_counter() - begin

    def _read_ahead(self, batch: int) -> None:
        """Submits as many batches as the bound allows, in one go; the one that is due in any case."""
        transfer = self.transfer
        count, ahead = 0, transfer.held_bytes
        while (due := transfer.submitted + count) < transfer.batch_count:
            cost = transfer.cost(due)
            if due > batch and ahead + cost > self._buffer_size:
                break
            ahead += cost
            count += 1
        if count:
            transfer.submit(count)
