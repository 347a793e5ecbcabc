"""Keys, tokens, versions and numbers as callers give them, checked; and keys as messages show them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from tensorlift.errors import OptionError, RequestError
from tensorlift.forking.manifest import LONGEST_NAME, SPLITS, ModelKey, is_sendable, rank_problem
from tensorlift.format.quoting import clean, quote, shown, some_of

__all__ = [
    "LOOPBACK",
    "check_host",
    "checked_key",
    "checked_texts",
    "checked_token",
    "checked_weights",
    "key_of",
    "told_key",
    "what_is_there",
]

_SHOWN = 20
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def check_host(host: str, token: str, insecure: bool, what: str = "seed") -> None:
    """Raises RequestError for an address that others reach, without a token."""
    if not isinstance(host, str):
        raise OptionError(f"host is {shown(host)}; expected a name or an address, such as 127.0.0.1")
    if host not in LOOPBACK and not token and not insecure:
        raise RequestError(
            f"a {what} on {host} is open to whoever reaches it: give a token, or say insecure=True "
            "(--insecure)"
        )


def checked_key(key: object) -> ModelKey:
    """A name of a model is the key of a whole one: target, one rank. Raises OptionError."""
    if isinstance(key, str) and key:
        key = ModelKey(model=key)
    if not isinstance(key, ModelKey):
        raise OptionError(f"key is {quote(key)}; expected the name of a model or a ModelKey")
    try:
        made = msgspec.convert(msgspec.structs.asdict(key), ModelKey)
        msgspec.json.encode(made)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise OptionError(f"key is no ModelKey that can be sent: {error}") from None
    if problem := rank_problem(made):
        raise OptionError(f"key has {problem}; ranks count from 0")
    return made


def checked_texts(value: object, name: str, expected: str) -> tuple[str, ...]:
    """Several texts, of a list or anything like it. Raises OptionError, also for one text alone."""
    given: object = value
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes, bytearray, Mapping)):
        given = list(value)
        if all(isinstance(one, str) for one in given):
            return tuple(given)
    raise OptionError(f"{name} is {shown(given)}; expected {expected}, in a list")


def key_of(fields: Mapping[str, object]) -> ModelKey:
    """The key that some JSON says. Raises OptionError, also for a field that no key has."""
    known = ModelKey.__struct_fields__
    if unknown := sorted(fields.keys() - set(known)):
        raise OptionError(f"key has {', '.join(map(quote, unknown))}; a key has {', '.join(known)}")
    try:
        return checked_key(msgspec.convert(fields, ModelKey))
    except msgspec.ValidationError as error:
        raise OptionError(f"key is none: {clean(str(error))}") from None


def checked_token(token: str | None) -> str:
    """As it is used inside, where "" is none. Raises OptionError, which does not show it.

    It has to go into a header of HTTP as it is: printable characters of Latin-1 without spaces.
    """
    if token is None:
        return ""
    if not isinstance(token, str):
        raise OptionError(f"token is a {type(token).__name__}; expected a str, or None for none")
    if not token:
        raise OptionError(
            'token is ""; expected some characters, or None for none (is an environment variable not set?)'
        )
    if not all(c <= "\xff" and c.isprintable() and not c.isspace() for c in token):
        raise OptionError(
            "token has characters that cannot go into a header of HTTP; expected printable ones of Latin-1, "
            "no spaces: secrets.token_urlsafe() makes such tokens"
        )
    return token


def checked_weights(weights: str) -> str:
    """A version of weights that every fork can read. Raises OptionError."""
    if not isinstance(weights, str) or not is_sendable(weights):
        raise OptionError(
            f"weights is {quote(weights, 300)}; expected a str of at most {LONGEST_NAME:,} characters of "
            "Unicode"
        )
    return weights


def told_key(key: ModelKey) -> str:
    """Such as 'org/model' (target, tp 0 of 2)."""
    parts = [key.role, key.revision, key.dtype, key.quantization, key.engine]
    shown = [quote(part)[1:-1] for part in parts if part]
    for name in SPLITS:
        rank, size = getattr(key, name)
        if size > 1:
            shown.append(f"{name} {rank} of {size}")
    if not key.processed:
        shown.append("not processed")
    return f"{quote(key.model)} ({', '.join(shown)})"


def what_is_there(keys: Iterable[ModelKey], wanted: ModelKey) -> str:
    """For a message: some of the keys that there are, and why none of them will do where that is known."""
    found = list(keys)
    text = some_of(found, _SHOWN, told_key)
    alike = [key for key in found if (key.model, key.role) == (wanted.model, wanted.role)]
    for name in SPLITS:
        sizes, size = {getattr(key, name)[1] for key in alike}, getattr(wanted, name)[1]
        if sizes and size not in sizes:
            there = " or ".join(str(one) for one in sorted(sizes))
            text += f"; its {name} is {there}, not {size}, and a fork does not split weights anew"
    other = msgspec.structs.replace(wanted, processed=not wanted.processed)
    if other in found:
        text += f"; key={_written(other)} is that one"
    return text


def _written(key: ModelKey) -> str:
    """As a caller writes it."""
    fields = msgspec.structs.fields(ModelKey)
    given = [(one.name, getattr(key, one.name)) for one in fields if getattr(key, one.name) != one.default]
    said = (f"{name}={quote(value) if isinstance(value, str) else value}" for name, value in given)
    return f"ModelKey({', '.join(said)})"
