"""Values of every kind that is recorded of a run: types, keys, and strategies that make them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypedDict

import msgspec
from hypothesis import strategies as st
from pydantic import BaseModel, field_serializer

from retinue import (
    Message,
    Plugin,
    Registrar,
    ResumeMode,
    Role,
    StateCommand,
    StateKey,
    StateStore,
    SuspendTicket,
    ToolCall,
    ToolCallStatus,
    ToolResult,
    Usage,
    Visibility,
)
from retinue.core.messages import FilePart, ImagePart, ReasoningPart, TextPart
from retinue.core.model import TurnEnd
from retinue.core.plugins import (
    AddContextMessage,
    AddMessage,
    AddSystemText,
    Compact,
    ExcludeTools,
    HandOff,
    IncludeTools,
    OverrideSettings,
    StopRun,
)
from retinue.core.results import ToolStatus
from retinue.loop.outcomes import CallOutcome
from retinue.loop.phases import HookTable
from retinue.loop.turn import Turn


@dataclass
class Point:
    x: int
    y: int = 2
    tags: set[str] = field(default_factory=set[str])


@dataclass
class Point3(Point):
    z: int = 0


class Paper(BaseModel):
    title: str
    years: tuple[int, ...] = ()


class Hidden(BaseModel):
    """Cannot be read from what it is written as."""

    number: int

    @field_serializer("number")
    def _hide(self, number: int) -> str:
        return "*" * number


class Note(msgspec.Struct, frozen=True):
    text: str
    at: Point | None = None


class Entry(TypedDict):
    name: str
    size: int


class Opaque:
    """Nothing can be made of it."""


def newest(old: Any, new: Any) -> Any:
    return new


count: StateKey[int, int] = StateKey("count", int)
ratio: StateKey[float, float] = StateKey("ratio", float)
names: StateKey[list[str], str] = StateKey("names", list[str], update=str, reduce=lambda a, b: [*a, b])
seen: StateKey[list[str], set[str]] = StateKey("seen", list[str], update=set[str], reduce=newest)
pair: StateKey[Any, tuple[int, str]] = StateKey("pair", tuple[int, str])
point: StateKey[str, Point] = StateKey("point", str, update=Point, reduce=newest)
paper: StateKey[dict[str, str], Paper] = StateKey("paper", dict[str, str], update=Paper, reduce=newest)
papers: StateKey[dict[int, Paper], Any] = StateKey("papers", dict[int, Paper])
entry: StateKey[Any, Entry] = StateKey("entry", Entry)
bare: StateKey[Any, Any] = StateKey("bare", list)
anything: StateKey[Any, Any] = StateKey("anything", object)
hidden: StateKey[Any, Hidden] = StateKey("hidden", Hidden)
KEYS: tuple[StateKey[Any, Any], ...] = (
    count,
    ratio,
    names,
    seen,
    pair,
    point,
    paper,
    papers,
    entry,
    bare,
    anything,
    hidden,
)


def ignore(given: Any, ctx: Any) -> None:
    """Carry out nothing."""


class All(Plugin):
    name = "all"

    def register(self, r: Registrar) -> None:
        for key in KEYS:
            r.key(key)
        for kind in (Point, Note, Paper, str, dict, tuple):
            r.action(kind, ignore)
            r.effect(kind, ignore)


def installed(*plugins: Plugin) -> tuple[StateStore, HookTable]:
    store = StateStore()
    return store, HookTable([store.install(plugin) for plugin in plugins])


STORE, HOOKS = installed(All())


texts = st.text(max_size=8)
maybe = st.none() | texts
finite = st.floats(allow_nan=False, allow_infinity=False)
scalars = st.none() | st.booleans() | st.integers() | finite | texts
jsons = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=6
)
objects = st.dictionaries(texts, jsons, max_size=3)
parts = st.one_of(
    st.builds(TextPart, texts),
    st.builds(ReasoningPart, texts, maybe),
    st.builds(ImagePart, url=maybe, data=maybe, media_type=texts),
    st.builds(FilePart, url=maybe, data=maybe, media_type=texts, name=maybe),
)
calls = st.builds(ToolCall, texts, texts, objects, maybe)
messages = st.builds(
    Message,
    role=st.sampled_from(Role),
    parts=st.lists(parts, max_size=3).map(tuple),
    tool_calls=st.lists(calls, max_size=2).map(tuple),
    tool_call_id=maybe,
    name=maybe,
    id=maybe,
    visibility=st.sampled_from(Visibility),
)
counts = st.integers(0, 2**70)
usages = st.builds(
    Usage,
    requests=counts,
    input_tokens=counts,
    output_tokens=counts,
    cached_tokens=counts,
    cache_write_tokens=counts,
    reasoning_tokens=counts,
    cost=finite,
)
turns = st.builds(Turn, messages, st.builds(TurnEnd, texts, usages, texts, st.booleans()))
tickets = st.builds(
    SuspendTicket,
    id=texts,
    action=texts,
    message=texts,
    parameters=jsons,
    response_schema=st.sampled_from([None, {}, {"type": "object", "properties": {"ü": {"type": "string"}}}]),
    resume_mode=st.sampled_from(ResumeMode),
    path=st.lists(texts, max_size=3).map(tuple),
)
results = st.builds(
    ToolResult,
    tool_name=texts,
    status=st.sampled_from(ToolStatus),
    data=jsons,
    message=maybe,
    suspension=st.none() | tickets,
    metadata=objects,
)
points = st.builds(Point, st.integers(), st.integers(), st.sets(texts, max_size=3))
papers_made = st.builds(Paper, title=texts, years=st.lists(st.integers(-(2**60), 2**60), max_size=3).map(tuple))
notes = st.builds(Note, texts, st.none() | points)
updates = st.one_of(
    st.tuples(st.just(count), st.integers()),
    st.tuples(st.just(ratio), finite),
    st.tuples(st.just(names), texts),
    st.tuples(st.just(seen), st.sets(texts, max_size=4)),
    st.tuples(st.just(pair), st.tuples(st.integers(), texts)),
    st.tuples(st.just(point), points),
    st.tuples(st.just(paper), papers_made),
    st.tuples(st.just(papers), st.dictionaries(st.integers(), papers_made, max_size=2)),
    st.tuples(st.just(entry), st.fixed_dictionaries({"name": texts, "size": st.integers()})),
    st.tuples(st.just(bare), st.lists(jsons, max_size=3)),
    st.tuples(st.just(anything), jsons),
)
custom = st.one_of(points, notes, papers_made, texts, objects, st.lists(jsons, max_size=2).map(tuple))
built_in = st.one_of(
    st.builds(AddContextMessage, texts),
    st.builds(AddSystemText, texts),
    st.builds(ExcludeTools, st.lists(texts, max_size=2).map(tuple)),
    st.builds(IncludeTools, st.lists(texts, max_size=2).map(tuple)),
    st.builds(OverrideSettings, objects),
    st.builds(HandOff, texts, texts),
    st.builds(StopRun, texts, texts, st.booleans()),
    st.builds(Compact, st.integers(0, 99), texts),
    st.builds(AddMessage, texts),
)


@st.composite
def commands(draw: st.DrawFn) -> StateCommand:
    made = StateCommand()
    made.patch.base_revision = draw(st.none() | st.integers(0, 99))
    made.patch.updates.extend(draw(st.lists(updates, max_size=4)))
    made.actions.extend(draw(st.lists(built_in | custom, max_size=3)))
    made.effects.extend(draw(st.lists(custom, max_size=3)))
    made.events.extend(draw(st.lists(jsons, max_size=3)))
    return made


def typed(value: Any) -> Any:
    """A value with the classes in it, so that 1 is not True, nor a list a tuple."""
    if isinstance(value, dict):
        return {typed(key): typed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return (type(value), [typed(item) for item in value])
    return (type(value), value)


def said(command: StateCommand | None) -> Any:
    """Everything in a command, as it can be compared."""
    if command is None:
        return None
    patch = command.patch
    written = [(key, typed(value)) for key, value in patch.updates]
    return (patch.base_revision, written, typed(command.actions), typed(command.effects), typed(command.events))


def succeeded(command: StateCommand | None = None, result: ToolResult | None = None) -> CallOutcome:
    return CallOutcome(ToolCallStatus.SUCCEEDED, result or ToolResult("search"), command)
