"""A checkpoint compared with a sidecar: which of its records count, what differs, what rows have to have."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tensorlift.errors import DigestError, TensorNotFoundError
from tensorlift.format.checkpoint import Checkpoint
from tensorlift.format.digests import DIGEST_BYTES, Digests, Expected, Sidecar, TensorRecord, listed
from tensorlift.format.dtypes import ALL
from tensorlift.format.quoting import clean, plural, quote

__all__ = ["Difference", "Scope", "differences", "expect", "expect_given"]


@dataclass(frozen=True, slots=True)
class Difference:
    """What a checkpoint has otherwise than its digests say. ``kind``: "missing", "extra" or "changed"."""

    kind: str
    file: str
    tensor: str | None
    """None: the file itself."""
    what: str

    def __str__(self) -> str:
        """One line for people."""
        tensor = "" if self.tensor is None else f" tensor {quote(self.tensor)}:"
        return f"{clean(self.file)}:{tensor} {self.what}"


@dataclass(frozen=True, slots=True)
class Scope:
    """Which files of a sidecar a checkpoint has, and which it has to have."""

    present: Mapping[str, tuple[int, int]]
    """Index of the shard and its real size, by the name in the sidecar."""
    wanted: frozenset[str]
    """Names in the sidecar of the files whose tensors all have to be there."""

    @classmethod
    def of(cls, sidecar: Sidecar, checkpoint: Checkpoint, all_files: bool) -> Scope:
        """The files that are read count; all where the sidecar is of this very checkpoint (``all_files``).

        Names in a sidecar are below a folder that need not be the checkpoint's, so a path has to end with
        one; the longest such name is meant. Files that were all renamed are the same where they are as many.
        """
        names = frozenset(file.name for file in sidecar.files)
        present: dict[str, tuple[int, int]] = {}
        for index, shard in enumerate(checkpoint.shards):
            parts = clean(os.fsdecode(shard.absolute)).split("/")
            endings = ("/".join(parts[at:]) for at in range(len(parts)))
            name = next((ending for ending in endings if ending in names), None)
            if name is not None:
                present[name] = index, shard.nbytes
        renamed = not present and len(names) == len(checkpoint.shards)
        return cls(present, names if all_files or renamed else frozenset(present))

    def resized(self, sidecar: Sidecar) -> list[Difference]:
        """Files that have another size."""
        return [
            Difference("changed", file.name, None, f"has {plural(nbytes, 'byte')}, expected {file.nbytes:,}")
            for file in sidecar.files
            for _, nbytes in [self.present.get(file.name, (0, file.nbytes))]
            if nbytes != file.nbytes
        ]

    def missing(self, sidecar: Sidecar, there: Container[str]) -> list[Difference]:
        """Tensors that are not ``there``; a file that is gone with all of them is one difference."""
        held = Counter(tensor.file for tensor in sidecar.tensors)
        lacking = [t for t in sidecar.tensors if t.name not in there and t.file in self.wanted]
        counts = Counter(tensor.file for tensor in lacking)
        # Where no name fits, files were renamed, and it cannot be told which is gone.
        lost = counts.keys() - self.present.keys() if self.present else set()
        gone = {name for name in lost if counts[name] == held[name]}
        files = [
            Difference("missing", name, None, f"is missing, with {plural(counts[name], 'tensor')}")
            for name in counts
            if name in gone
        ]
        return files + [
            Difference("missing", tensor.file, tensor.name, "is missing")
            for tensor in lacking
            if tensor.file not in gone
        ]


def differences(expected: Sidecar, found: Sidecar, scope: Scope) -> list[Difference]:
    """All differences: files whose size changed, what is missing, tensors that changed, extra ones last.

    A tensor that moved to another file, or a file of another name, is none as long as the tensors are equal.
    """
    there = {tensor.name: tensor for tensor in found.tensors}
    result = scope.resized(expected) + scope.missing(expected, there)
    for old in expected.tensors:
        new = there.pop(old.name, None)
        if new is not None and (what := _changed(old, new)):
            result.append(Difference("changed", new.file, old.name, what))
    result += [Difference("extra", new.file, new.name, "has no digest") for new in there.values()]
    return result


def _changed(old: TensorRecord, new: TensorRecord) -> str:
    for what in ("dtype", "shape", "nbytes", "digest"):
        before, after = getattr(old, what), getattr(new, what)
        if before != after:
            return f"{what} is {quote(after)}, expected {quote(before)}"
    return ""


def expect(
    sidecar: Sidecar,
    checkpoint: Checkpoint,
    rows: Iterable[int],
    where: str,
    *,
    whole: bool = False,
    all_files: bool = False,
) -> Expected:
    """What the given rows have to have by a sidecar.

    whole: the rows are all of the checkpoint, and none that the sidecar has may be gone; ``all_files`` as for
        Scope.of().

    Raises DigestError that names file and tensor where it lacks one of them, has another dtype or shape, or
    where one of their files has another size.
    """
    records = {tensor.name: tensor for tensor in sidecar.tensors}
    digests, known = _nothing(checkpoint)
    wrong: list[str] = []
    wanted = list(rows)
    for row in wanted:
        name = checkpoint.names[row]
        record, code = records.get(name), ALL[int(checkpoint.dtypes[row])].code
        who = f"{clean(checkpoint.shards[int(checkpoint.shard_of[row])].path)}: tensor {quote(name)}:"
        if record is None:
            wrong.append(f"{who} has no digest")
        elif (record.dtype, record.shape) != (code, checkpoint.shapes[row]):
            wrong.append(
                f"{who} is {code} {quote(checkpoint.shapes[row])}, expected {quote(record.dtype)[1:-1]} "
                f"{quote(record.shape)}"
            )
        else:
            digests[row] = np.frombuffer(bytes.fromhex(record.digest), np.uint8)
            known[row] = True
    scope = Scope.of(sidecar, checkpoint, all_files)
    used = set(np.unique(checkpoint.shard_of[wanted]).tolist())
    wrong += [str(one) for one in scope.resized(sidecar) if scope.present[one.file][0] in used]
    if whole:
        wrong += map(str, scope.missing(sidecar, set(checkpoint.names)))
    if wrong:
        raise DigestError(
            f"{clean(where)} does not fit {clean(checkpoint.where)}: of {plural(len(wanted), 'tensor')} "
            f"{plural(len(wrong), 'difference')}; are these the digests of another model, or older than the "
            f"files?\n  {listed(wrong)}"
        )
    return Expected(digests, known, where)


def expect_given(given: Mapping[str, str], checkpoint: Checkpoint) -> Expected:
    """What a caller's own digests ask for: only the tensors that they name are checked.

    Raises TensorNotFoundError for a name that is not in the checkpoint, DigestError for text that is no
    digest.
    """
    digests, known = _nothing(checkpoint)
    for name, text in given.items():
        try:
            row = checkpoint.index(name)
        except TensorNotFoundError as error:
            raise TensorNotFoundError(f"{error} (verify= has a digest for it)") from None
        try:
            raw = bytes.fromhex(text)
        except (TypeError, ValueError):
            raw = b""
        if len(raw) != DIGEST_BYTES:
            raise DigestError(
                f"verify: the digest of {quote(name)} is {quote(text)}; expected {2 * DIGEST_BYTES} "
                "hexadecimal digits, as 'tensorlift digest' writes them"
            )
        digests[row], known[row] = np.frombuffer(raw, np.uint8), True
    return Expected(digests, known, "verify=")


def _nothing(checkpoint: Checkpoint) -> tuple[Digests, npt.NDArray[np.bool_]]:
    return np.zeros((len(checkpoint), DIGEST_BYTES), np.uint8), np.zeros(len(checkpoint), bool)
