"""The exceptions of tensorlift.

    TensorliftError                     everything this package raises on purpose
    |- FileError                        a file or checkpoint is not what it should be
    |  |- HeaderError                   the header of a safetensors file breaks a rule of the format
    |  |- TruncatedError                a file is shorter than its header says, or became so
    |  |- DigestError                   a tensor is not what its digest says, or a file of digests is wrong
    |  |- CheckpointError               files do not make a checkpoint: index, shards, names
    |  '- CheckpointNotFoundError       nothing at that path (also a FileNotFoundError)
    |- MachineError                     this machine could not do it
    |  |- ReadError                     a read failed (also an OSError, with errno)
    |  |- BackendError                  every allowed way of reading was refused, each with its reason
    |  |- DriverError                   a call of the device's driver failed
    |  |- LibraryError                  the native library is missing, does not load or has another version
    |  '- OutOfMemoryError              host or device memory could not be had (also a MemoryError)
    |- RanksError                       ranks that load together cannot go on
    |  |- DisagreementError             they were asked for different things
    |  '- PeerError                     another rank failed, left or is gone
    |- ForkError                        weights cannot be taken out of a running instance
    |  |- ManifestError                 what it says of its weights is not right
    |  '- SeedError                     it, or a registry, cannot be reached, refuses, or ended
    '- RequestError                     what was asked for cannot be done (also a ValueError)
       |- OptionError                   an unknown option or a value that does not fit
       |- DeviceError                   a device that is not there or not supported
       |- DtypeError                    a dtype that this torch cannot express
       |- TensorNotFoundError           no tensor of that name (also a KeyError)
       '- MismatchError                 checkpoint and model do not fit: names, shapes

A message says what happened, where (file, tensor, bytes), what was expected and found, and what can be done.
"""

from __future__ import annotations

__all__ = [
    "BackendError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "DeviceError",
    "DigestError",
    "DisagreementError",
    "DriverError",
    "DtypeError",
    "FileError",
    "ForkError",
    "HeaderError",
    "LibraryError",
    "MachineError",
    "ManifestError",
    "MismatchError",
    "OptionError",
    "OutOfMemoryError",
    "PeerError",
    "RanksError",
    "ReadError",
    "RequestError",
    "SeedError",
    "TensorNotFoundError",
    "TensorliftError",
    "TruncatedError",
]


class TensorliftError(Exception):
    """The root of all errors of this package."""


class FileError(TensorliftError):
    """A file or checkpoint is not what it should be."""


class HeaderError(FileError):
    """The header of a safetensors file breaks a rule of the format."""


class TruncatedError(FileError):
    """A file is shorter than its header says, or became so while it was read."""


class DigestError(FileError):
    """A tensor is not what its digest says, or there are no digests that fit the checkpoint."""


class CheckpointError(FileError):
    """Files do not make a checkpoint: the index, a shard or a name is wrong."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is nothing at the path, and no such model in the local Hub cache."""


class MachineError(TensorliftError):
    """This machine could not do what was asked."""


class ReadError(MachineError, OSError):
    """A read failed; ``errno`` says how the kernel called it."""


class BackendError(MachineError):
    """Every way of reading that the options allow was refused; the message has each reason."""


class DriverError(MachineError):
    """A call of the device's driver failed."""


class LibraryError(MachineError, ImportError):
    """The native library is missing, does not load or has another version."""


class OutOfMemoryError(MachineError, MemoryError):
    """Host or device memory could not be had."""


class RanksError(TensorliftError):
    """Ranks that load one checkpoint together cannot go on."""


class DisagreementError(RanksError):
    """Ranks that load together have different files, or were asked for different things."""


class PeerError(RanksError):
    """Another rank failed, left or is gone; ``rank`` is its number in the world (-1: not known)."""

    def __init__(self, message: str, rank: int = -1) -> None:
        """``rank``: whose fault it is."""
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[type[PeerError], tuple[str, int]]:
        """With the rank, which an exception's own pickle would lose."""
        return type(self), (str(self), self.rank)


class ForkError(TensorliftError):
    """Weights cannot be taken out of a running instance."""


class ManifestError(ForkError):
    """What a running instance publishes about its weights is no manifest, or contradicts itself."""


class SeedError(ForkError):
    """A running instance or registry cannot be reached, refuses, or ended; ``retry_seconds``: when to ask
    again; ``answered``: whether anybody was there.
    """

    def __init__(self, message: str, retry_seconds: float | None = None, answered: bool = True) -> None:
        """``retry_seconds``: None where asking again will not help."""
        super().__init__(message)
        self.retry_seconds, self.answered = retry_seconds, answered

    def __reduce__(self) -> tuple[type[SeedError], tuple[str, float | None, bool]]:
        """With what an exception's own pickle would lose."""
        return type(self), (str(self), self.retry_seconds, self.answered)


class RequestError(TensorliftError, ValueError):
    """What was asked for cannot be done."""


class OptionError(RequestError):
    """An option is unknown or its value does not fit."""


class DeviceError(RequestError):
    """A device that is not there, or that tensorlift does not support."""


class DtypeError(RequestError):
    """A dtype of the format that this torch cannot express, or not convert to the one that is wanted."""


class TensorNotFoundError(RequestError, KeyError):
    """No tensor of that name is in the checkpoint."""

    def __str__(self) -> str:
        # KeyError would show the message in quotes, with its line ends escaped.
        return str(self.args[0]) if self.args else ""


class MismatchError(RequestError):
    """Checkpoint and model do not fit together: names or shapes differ."""
