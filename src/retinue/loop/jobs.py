"""Jobs: actions and effects of plugins as JSON, so that another process can carry them out."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, get_args

import msgspec

from ..core.codec import AnyCodec, Codec, ScalarCodec, codec_for, to_json_bytes
from ..core.errors import RecordUnreadable, RecordUnwritable
from ..core.rows import LoopAction

LOOP_ACTIONS: tuple[type, ...] = get_args(LoopAction)

_json = msgspec.json.Decoder().decode


@cache
def name_of(kind: type) -> str:
    """The name by which a type is stored."""
    return f"{kind.__module__}:{kind.__qualname__}"


@cache
def _codec_of(kind: type) -> Codec:
    return codec_for(kind)


def encode_job(given: Any, what: str) -> Any:
    """The JSON of an action or effect, once it is known to be read back as what it is."""
    kind: type = given.__class__
    codec = _codec_of(kind)
    try:
        encoded = _json(to_json_bytes(codec.encode(given)))
        back = codec.decode(encoded)
        # Not every class can be compared: the same class counts as the same, except for mere JSON.
        loose = isinstance(codec, ScalarCodec | AnyCodec)
        if (loose or back.__class__ is not kind) and back != given:
            raise TypeError(f"{shown(given)} would be read back as {shown(back)}")
    except Exception as exc:
        raise RecordUnwritable(f"{what} {name_of(kind)!r}", reason_of(exc)) from exc
    return encoded


def decode_job(name: str, given: Any, what: str, known: Iterable[type]) -> Any:
    """The action or effect of that name, if exactly one registered type has it."""
    found = [kind for kind in dict.fromkeys(known) if name_of(kind) == name]
    if len(found) != 1:
        problem = "several types have that name" if found else f"no plugin of this agent registers that {what} now"
        raise RecordUnreadable(f"{what} {name!r}", problem)
    if isinstance(given, found[0]):
        return given
    try:
        return _codec_of(found[0]).decode(given)
    except Exception as exc:
        raise RecordUnreadable(f"{what} {name!r}", reason_of(exc)) from exc


def shown(value: Any) -> str:
    """A value as it can stand in a message."""
    text = repr(value)
    return f"{type(value).__name__} {text}" if len(text) <= 80 else f"{type(value).__name__} {text[:80]}…"


def reason_of(exc: Exception) -> str:
    """The reason of an error, in one line."""
    if isinstance(exc, RecordUnreadable):
        return exc.reason
    text = " ".join(str(exc).split())
    return text if isinstance(exc, ValueError | TypeError) and text else f"{type(exc).__name__}: {text}"
