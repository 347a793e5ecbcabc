"""What a fork lacks, out of a checkpoint's files: never a mixture of two versions, never a hole.

Nothing that a seed says of itself can prove that its weights are those of some files, and that some tensors
are alike proves nothing of the others. So whatever the seeds' version is, the outcome is that of the files:
a tensor that came whole from seeds stays if its bytes have the digest that ``tensorlift digest`` wrote beside
the files, and all others are read, and compared with theirs. Where there are no digests, all are read; so
are tensors of a device, whose bytes the host cannot digest.

Files have what a model saves. Buffers that it does not save keep what they had before the fork; what is
computed behind a load (derived tensors) is in no file, and nobody but the model's engine can say what it is.
So a fork that lacks it fails and says so, unless its caller gives a function that loads the model as a whole.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tensorlift import sources
from tensorlift.engine.abi_fork import Places, tensor_digest
from tensorlift.engine.digesting import check_built
from tensorlift.engine.trace import traced
from tensorlift.errors import ForkError, OptionError, TensorliftError
from tensorlift.forking.manifest import ITEM_BYTES, NOWHERE, Tensor, place_of, span_bytes
from tensorlift.forking.offering import Named, Offering
from tensorlift.format.checkpoint import Checkpoint
from tensorlift.format.digests import Expected
from tensorlift.format.dtypes import ALL
from tensorlift.format.quoting import clean, plural, quote, shown, some_of
from tensorlift.options import LoadOptions
from tensorlift.plan.extents import Extents, merge_extents
from tensorlift.plan.parts import Asked
from tensorlift.progress import Report, SourceReport
from tensorlift.tensors.destinations import tensors_of
from tensorlift.tensors.filling import fill
from tensorlift.tensors.transfer import Clock

__all__ = ["FILES", "Fallback", "FromFiles", "stood_in"]

FILES = "files"
"""The name of this source in a report."""
_SHOWN = 20


class FromFiles(NamedTuple):
    """What came of it."""

    by_source: dict[str, int]
    """Bytes of tensors: what was kept by the seed that brought it, and what was read."""
    own: tuple[str, ...]
    """Buffers that no file has, as they were before the fork."""


def stood_in(
    files: Fallback | None,
    error: ForkError,
    brought: Mapping[str, Sequence[Places]],
    progress: SourceReport | None,
) -> FromFiles:
    """What came of files for seeds that cannot bring all, for this reason; it is raised where there are none.
    See Fallback.run().
    """
    if files is None:
        raise error
    try:
        return files.run(brought, progress)
    except Exception as problem:
        # Why files had to stand in is told with what is wrong with them.
        raise problem from error


def _checked(path: object) -> Any:
    """A path, paths or a function. Raises OptionError now, and not where all seeds have failed."""
    if callable(path) or isinstance(path, (str, bytes, os.PathLike)):
        return path
    if isinstance(path, Iterable) and not isinstance(path, (Mapping, bytearray)):
        path = list(path)
        if all(isinstance(one, (str, bytes, os.PathLike)) for one in path):
            return path
    raise OptionError(
        f"fallback is {shown(path)}; expected a file, a list of files, a folder, a Hub id, or a function "
        "that is given the model"
    )


class Fallback:
    """What a model can be filled from; made before the first byte of a fork is written."""

    def __init__(self, path: Any, model: object, named: Sequence[Named], ours: Offering) -> None:
        """Opens nothing yet. Copies the buffers that are not saved.

        ``path``: or a function that loads the whole model, which finds derived tensors as they were too.
        """
        self._path, self._model, self._ours = _checked(path), model, ours
        self._saved = tensors_of(model)
        kinds = ("buffer", "derived") if callable(path) else ("buffer",)
        self._own = [
            (one, one.tensor.detach().clone())
            for one in named
            if one.kind in kinds and one.name not in self._saved
        ]

    def run(self, brought: Mapping[str, Sequence[Places]], progress: SourceReport | None) -> FromFiles:
        """Fills the model. ``brought``: where chunks of each seed went; nothing writes to the model any more.
        ``progress``: told of what stays as done.

        Raises ForkError for tensors that no file has, and what load_into or the caller's function does.
        """
        for one, before in self._own:
            one.tensor.detach().copy_(before)
        if callable(self._path):
            self._path(self._model)
            nbytes = _merged_spans(self._spans(self._with_bytes())).nbytes
            if progress is not None:
                progress(nbytes, nbytes, by_source={FILES: nbytes})
            return FromFiles({FILES: nbytes}, ())
        options = LoadOptions.resolve()
        with traced(options.trace) as trace:
            clock = Clock(trace)
            with clock.phase("headers"):
                checkpoint = sources.read_headers(sources.find(self._path))
            self._refuse_holes(checkpoint)
            came = _merged(places for some in brought.values() for places in some)
            kept, expected = self._kept(checkpoint, came, options)
            spans = _merged_spans(self._spans(kept))
            stays = {name: _common(_merged(places), spans) for name, places in brought.items()}
            if progress is not None:
                options = dataclasses.replace(options, progress=_behind(stays, progress))
            if expected is None:
                asked, wanted = sources.asked_of(checkpoint, None, None, options), None
            else:
                options = dataclasses.replace(options, verify=options.verify or True)
                # Ties of what is kept, which the checkpoint does not have by their own names.
                ties = [one for one in self._saved_tensors() if one.name not in checkpoint]
                settled = {one.name for one in kept} | {one.name for one in self._inside(ties, spans)}

                def wanted(name: str) -> bool:
                    return name not in settled

                asked = Asked(checkpoint, checkpoint.select(wanted), expected)
            filled = fill(self._model, lambda _: asked, wanted, True, options, clock)
        by_source = stays | {FILES: filled.stats.bytes}
        return FromFiles(
            {name: nbytes for name, nbytes in by_source.items() if nbytes},
            tuple(one.name for one, _ in self._own),
        )

    def _kept(
        self, checkpoint: Checkpoint, came: Extents, options: LoadOptions
    ) -> tuple[list[Tensor], Expected | None]:
        """Tensors that came whole from seeds and are those of the files; None: nothing says so of any."""
        try:
            check_built()
            proof = dataclasses.replace(options, verify=options.verify or True)
            expected = sources.expected_digests(checkpoint, checkpoint.select(), proof, whole=True)
        except TensorliftError:
            return [], None
        assert expected is not None
        named = [one for one in self._saved_tensors() if one.name in checkpoint]
        same = {one.name for one in self._inside(named, came) if self._is_same(one, checkpoint, expected)}
        # What is read must not be written over something that stays.
        others = _merged_spans(self._spans(one for one in named if one.name not in same))
        kept = [
            one
            for one, hit in zip(named, _touching(self._spans(named), others), strict=True)
            if one.name in same and not hit
        ]
        return kept, expected if kept else None

    def _is_same(self, tensor: Tensor, checkpoint: Checkpoint, expected: Expected) -> bool:
        row = checkpoint.index(tensor.name)
        dtype, shape = ALL[int(checkpoint.dtypes[row])], tuple(checkpoint.shapes[row])
        if shape and dtype.elements > 1:
            shape = (*shape[:-1], shape[-1] // dtype.elements)
        if (tensor.dtype, tensor.shape) != (dtype.torch_name, shape) or not _is_contiguous(tensor):
            return False
        if self._ours.regions[tensor.region].device != "cpu":
            return False
        ((start, stop),) = self._spans([tensor])
        wanted: bytes = expected.digests[row].tobytes()
        return tensor_digest(start, stop - start) == wanted

    def _with_bytes(self) -> list[Tensor]:
        return [one for one in self._ours.tensors if one.region != NOWHERE]

    def _saved_tensors(self) -> list[Tensor]:
        """Those with bytes that a load fills by their names."""
        found = [one for one in self._with_bytes() if one.name in self._saved]
        # A module may save something else under the name than it has there.
        return [
            one
            for one, (address, _) in zip(found, self._spans(found), strict=True)
            if self._saved[one.name].data_ptr() == address
        ]

    def _refuse_holes(self, checkpoint: Checkpoint) -> None:
        """ForkError for what neither the files have nor the model has of its own."""
        own = {one.name for one, _ in self._own}
        saved = self._saved_tensors()
        all_ = self._with_bytes()
        there = [one for one in saved if one.name in checkpoint]
        there += [one for one in all_ if one.name in own]
        places = {place_of(one) for one in there}
        # Files fill no holes between elements.
        covered = _merged_spans(self._spans(one for one in there if _is_dense(one)))
        # What is saved is looked for by name when the files are read.
        known = own | {one.name for one in saved}
        rest = [one for one in all_ if one.name not in known and place_of(one) not in places]
        inside = {one.name for one in self._inside(rest, covered)}
        if lacking := [one.name for one in rest if one.name not in inside]:
            raise ForkError(
                f"{clean(checkpoint.where)} cannot stand in for the seeds: {plural(len(lacking), 'tensor')} "
                f"of the model are in no file: {some_of(lacking, _SHOWN, quote)}; they are "
                "computed behind a load: fork again, or give a fallback that is a function which loads the "
                "model as its engine does"
            )

    def _spans(self, tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
        """First address and end of each."""
        begins = [(one, self._ours.memories[one.region].address + one.offset) for one in tensors]
        return [(begin, begin + span_bytes(one.dtype, one.shape, one.stride)) for one, begin in begins]

    def _inside(self, tensors: Sequence[Tensor], extents: Extents) -> list[Tensor]:
        """Those all of whose bytes are in one of the ranges, which are merged."""
        found = []
        for one, (start, stop) in zip(tensors, self._spans(tensors), strict=True):
            at = int(np.searchsorted(extents.starts, start, side="right")) - 1
            if at >= 0 and extents.stops[at] >= stop:
                found.append(one)
        return found


def _behind(stays: Mapping[str, int], progress: SourceReport) -> Report:
    """Tells of what is read as what comes on top of what seeds have brought."""
    before = sum(stays.values())
    there = {name: nbytes for name, nbytes in stays.items() if nbytes}
    return lambda done, total: progress(before + done, before + total, by_source=there | {FILES: done})


def _is_dense(tensor: Tensor) -> bool:
    """No byte between its elements belongs to something else."""
    return span_bytes(tensor.dtype, tensor.shape, tensor.stride) == (
        math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
    )


def _is_contiguous(tensor: Tensor) -> bool:
    """Its bytes are in the order of a file."""
    step = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride), strict=True):
        if size > 1 and stride != step:
            return False
        step *= size
    return True


def _merged_spans(spans: Iterable[tuple[int, int]]) -> Extents:
    columns = np.array(list(spans), np.int64).reshape(-1, 2)
    return merge_extents(Extents(columns[:, 0], columns[:, 1]))


def _merged(places: Iterable[Places]) -> Extents:
    """Where bytes went: see fetch_chunk()."""
    rows = np.concatenate([np.zeros((0, 3), np.uint64), *places]).astype(np.int64)
    return merge_extents(Extents(rows[:, 2], rows[:, 2] + rows[:, 1]))


def _touching(spans: Sequence[tuple[int, int]], extents: Extents) -> list[bool]:
    """Whether each shares a byte with one of the ranges, which are merged."""
    found = []
    for start, stop in spans:
        # The last of those that begin before its end.
        at = int(np.searchsorted(extents.starts, stop, side="left")) - 1
        found.append(at >= 0 and bool(extents.stops[at] > start))
    return found


def _common(one: Extents, other: Extents) -> int:
    """Bytes that are in both, each of which is merged."""
    both = Extents(*(np.concatenate(pair) for pair in zip(one, other, strict=True)))
    return one.nbytes + other.nbytes - merge_extents(both).nbytes
