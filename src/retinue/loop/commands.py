"""What tools and hooks ask for beside a result, as JSON that another process can go on with."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Protocol, get_args

import msgspec
from msgspec import Raw, Struct

from ..core.codec import AnyCodec, Codec, ScalarCodec, codec_for, to_json_bytes, to_json_value
from ..core.errors import RecordUnreadable, RecordUnwritable
from ..core.plugins import (
    AddContextMessage,
    AddSystemText,
    Block,
    Intercept,
    OverrideSettings,
    RunAction,
    SetResult,
    StepAction,
    Suspend,
)
from ..core.state import MutationBatch, StateCommand, StateKey
from ..core.statestore import StateStore

_BUILT_IN: tuple[type, ...] = (*get_args(StepAction), *get_args(RunAction))
_FOR_ONE_REQUEST = (AddContextMessage, AddSystemText, OverrideSettings)

_json = msgspec.json.Decoder().decode


class Handlers(Protocol):
    """Which actions and effects somebody carries out."""

    @property
    def actions(self) -> Mapping[type, Any]: ...

    @property
    def effects(self) -> Mapping[type, Any]: ...


class Said(Struct, omit_defaults=True):
    """What one hook returned: a command, or an intercept."""

    place: int
    command: PaperCommand | None = None
    block: Block | None = None
    suspend: Suspend | None = None
    set_result: SetResult | None = None


class PaperCommand(Struct, omit_defaults=True):
    """A StateCommand on paper: keys and types by name, values as JSON."""

    base_revision: int | None = None
    updates: list[tuple[str, Any]] = []
    actions: list[tuple[str, Any]] = []
    effects: list[tuple[str, Any]] = []
    events: list[Any] = []


def on_paper(command: StateCommand) -> PaperCommand:
    return PaperCommand(
        base_revision=command.patch.base_revision,
        updates=[
            (key.name, _faithful(key.update_codec, update, f"an update of state key {key.name!r}"))
            for key, update in command.patch.updates
        ],
        actions=[_named(action, "action") for action in command.actions],
        effects=[_named(effect, "effect") for effect in command.effects],
        events=[_event(event) for event in command.events],
    )


def _named(asked: Any, what: str) -> tuple[str, Raw]:
    """An action or effect with the name of its type."""
    kind: type = asked.__class__
    name = _name_of(kind)
    if what == "action" and isinstance(asked, _BUILT_IN) and kind not in _BUILT_IN:
        raise RecordUnwritable(f"{what} {name!r}", "it is a subclass of an action of the loop, schedule that instead")
    return name, _faithful(_codec_of(kind), asked, f"{what} {name!r}")


def _event(data: Any) -> Any:
    try:
        return to_json_value(data)
    except Exception as exc:
        raise RecordUnwritable("an event of a command", reason_of(exc)) from exc


def _faithful(codec: Codec, value: Any, what: str) -> Raw:
    """The JSON of a value, once it is known to be read back as what it is."""
    try:
        data = to_json_bytes(codec.encode(value))
        back = codec.decode(_json(data))
        # Not every class can be compared; what is of the same class counts as the same, but for mere JSON.
        loose = isinstance(codec, ScalarCodec | AnyCodec)
        if (loose or back.__class__ is not value.__class__) and back != value:
            raise TypeError(f"{shown(value)} would be read back as {shown(back)}")
    except Exception as exc:
        raise RecordUnwritable(what, reason_of(exc)) from exc
    return Raw(data)


def from_paper(read: PaperCommand, state: StateStore, hooks: Handlers) -> StateCommand:
    patch = MutationBatch(read.base_revision, [_update(name, value, state) for name, value in read.updates])
    return StateCommand(
        patch,
        [_asked(name, value, "action", (*_BUILT_IN, *hooks.actions)) for name, value in read.actions],
        [_asked(name, value, "effect", hooks.effects) for name, value in read.effects],
        read.events,
    )


def _update(name: str, value: Any, state: StateStore) -> tuple[StateKey[Any, Any], Any]:
    key = state.key(name)
    if key is None:
        raise RecordUnreadable(f"an update of state key {name!r}", "no plugin of this agent registers that key now")
    return key, _decoded(key.update_codec, value, f"an update of state key {name!r}")


def _asked(name: str, value: Any, what: str, known: Iterable[type]) -> Any:
    """The action or effect of that name, if exactly one type has it."""
    found = [kind for kind in dict.fromkeys(known) if _name_of(kind) == name]
    if len(found) != 1:
        count = "several types have that name" if found else f"no plugin of this agent registers that {what} now"
        raise RecordUnreadable(f"{what} {name!r}", count)
    return _decoded(_codec_of(found[0]), value, f"{what} {name!r}")


def _decoded(codec: Codec, value: Any, what: str) -> Any:
    try:
        return codec.decode(value)
    except Exception as exc:
        raise RecordUnreadable(what, reason_of(exc)) from exc


def encode_said(said: Iterable[tuple[int, StateCommand | Intercept]], *, asked: bool = False) -> bytes:
    """What the hooks of a phase returned, by their places; with `asked`, without what only the next request reads."""
    return to_json_bytes([_said(place, returned, asked) for place, returned in said])


def _said(place: int, returned: StateCommand | Intercept, asked: bool) -> Said:
    if isinstance(returned, StateCommand):
        paper = on_paper(returned)
        if asked:
            kept = [not isinstance(action, _FOR_ONE_REQUEST) for action in returned.actions]
            paper.actions = [action for action, keep in zip(paper.actions, kept, strict=True) if keep]
        return Said(place, paper)
    if isinstance(returned, Block):
        return Said(place, block=returned)
    return Said(place, suspend=returned) if isinstance(returned, Suspend) else Said(place, set_result=returned)


def decode_said(data: bytes, state: StateStore, hooks: Handlers) -> dict[int, StateCommand | Intercept]:
    """What hooks returned, by their places, for a run with these keys and handlers."""
    try:
        read = _all_said(data)
    except (ValueError, TypeError, RecursionError) as exc:
        raise RecordUnreadable("what hooks returned", reason_of(exc)) from exc
    found: dict[int, StateCommand | Intercept] = {}
    for one in read:
        intercept = one.block or one.suspend or one.set_result
        if one.command is not None:
            found[one.place] = from_paper(one.command, state, hooks)
        elif intercept is not None:
            found[one.place] = intercept
    return found


def digest_of(asked: Any) -> str:
    """A few letters that tell an action or effect from another."""
    data = to_json_bytes(_named(asked, "effect"))
    return hashlib.blake2b(data, digest_size=8).hexdigest()


@cache
def _codec_of(kind: type) -> Codec:
    return codec_for(kind)


@cache
def _name_of(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def shown(value: Any) -> str:
    """A value as it can stand in a message."""
    text = repr(value)
    return f"{type(value).__name__} {text}" if len(text) <= 80 else f"{type(value).__name__} {text[:80]}…"


def reason_of(exc: Exception) -> str:
    """What is wrong, in one line."""
    if isinstance(exc, RecordUnreadable):
        return exc.reason
    text = " ".join(str(exc).split())
    return text if isinstance(exc, ValueError | TypeError) and text else f"{type(exc).__name__}: {text}"


_all_said = msgspec.json.Decoder(list[Said]).decode
