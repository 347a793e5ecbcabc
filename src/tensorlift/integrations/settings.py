"""From an engine's extra configuration to the settings of a load.

An engine hands over what stands after ``--model-loader-extra-config``: the fields of LoadOptions, whichever
those are, and the few settings of the load format itself. Nothing is dropped silently: what is unknown, what
the engine decides and what belongs to its own loaders is refused by name. No torch in here: this runs while
arguments are parsed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from tensorlift.errors import OptionError
from tensorlift.format.quoting import quote
from tensorlift.integrations.fork_settings import NAMES, ForkSettings, parse_forks, unknown
from tensorlift.options import LoadOptions

__all__ = ["LOAD_FORMAT", "Settings", "parse"]

LOAD_FORMAT = "tensorlift"
"""What follows --load-format."""

# What the engine itself passes to the library, for each load anew.
_ENGINES = {
    "filename": "the files are those that the engine has found",
    "path": "the files are those that the engine has found",
    "framework": "it is always torch",
    "device": "it is the worker's current one",
    "process_group": "it is chosen by how the engine loads (see the setting exchange)",
    "copy": "every tensor owns its memory",
    "names": "the engine says which tensors it needs",
    "slices": "the engine cuts tensors itself",
}
# Of the engines' own loaders, each with what to set instead.
_GENERIC = {
    "enable_multithread_load": "tensorlift reads with several threads anyway; leave it out",
    "num_threads": "the setting is called threads here",
    "enable_weights_track": "the setting is called strict here, and is true unless set",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """A checked extra configuration."""

    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of LoadOptions as they were given; those that are null or absent are not in it."""
    strict: bool = True
    """Whether weights that are missing end the start, or are only warned of."""
    instances: ForkSettings = dataclasses.field(default_factory=ForkSettings)
    """Whom to fork from, and whether to be a seed."""

    def resolved(self) -> LoadOptions:
        """With the environment, which explicit values override."""
        return LoadOptions.resolve(**self.options)


def parse(extra: object, engine: str) -> Settings:
    """The settings in an extra configuration: a mapping, JSON text of one, or None.

    Raises OptionError, naming ``engine`` and key, for whatever cannot be followed; values are checked too,
    those of the environment among them, so that a start fails before anything is loaded.
    """
    where = f"{engine}'s extra configuration for load format {LOAD_FORMAT!r}"
    given = _as_mapping(extra, where)
    fields = [field.name for field in dataclasses.fields(LoadOptions)]
    own = ["strict", *NAMES]
    for key in given:
        if key not in fields and key not in own:
            raise OptionError(f"{where}: {_why_not(key, [*fields, *own])}")
    strict = given.get("strict")
    if not isinstance(strict, bool) and strict is not None:
        raise OptionError(f"{where}: strict is {quote(strict)}; expected true, false or null")
    options = {key: value for key, value in given.items() if key in fields and value is not None}
    try:
        settings = Settings(options, strict is not False, parse_forks(given))
        settings.resolved()
    except OptionError as error:
        raise OptionError(f"{where}: {error}") from None
    return settings


def _as_mapping(extra: object, where: str) -> Mapping[str, Any]:
    if extra is None:
        return {}
    if isinstance(extra, str):
        try:
            extra = json.loads(extra, object_pairs_hook=_once)
        except RecursionError:
            raise OptionError(f"{where} is JSON that is nested too deeply") from None
        except ValueError as error:
            raise OptionError(f"{where} is no JSON ({error})") from None
    if not isinstance(extra, Mapping) or not all(isinstance(key, str) for key in extra):
        raise OptionError(
            f"{where} is {quote(extra)}; expected a JSON object with the names of settings as keys"
        )
    return extra


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; of two values for one setting, one would be dropped silently."""
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise ValueError(f"{quote(key)} comes twice")
        table[key] = value
    return table


def _why_not(key: str, known: Iterable[str]) -> str:
    if key in _ENGINES:
        return f"{key!r} is set by the engine and cannot be given: {_ENGINES[key]}"
    if key in _GENERIC:
        return f"{key!r} belongs to the engine's own loaders: {_GENERIC[key]}"
    return unknown(key, known)
