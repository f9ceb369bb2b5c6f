"""What is fuzzed: a table of names, each with its examples and a check that raises where a promise is broken."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, cast

from hypothesis import strategies as st

from retinue import (
    Agent,
    Child,
    ConfigurationError,
    Decision,
    LocalFilesystem,
    Message,
    ModelRequest,
    RunStatus,
    Runtime,
    StateKey,
    ToolContext,
    ToolOutput,
    ToolResult,
    tool,
)
from retinue.core.content import clean_text, to_json_value
from retinue.errors import DecisionRefused, ModelError, StateError, TaskStoreError, UnknownRun
from retinue.messages import DataPart
from retinue.models import CallChunk, ReasoningChunk, TextChunk, TurnEnd
from retinue.models.anthropic import AnthropicWire
from retinue.models.chat import ChatWire
from retinue.models.http import Endpoint, Heard, HttpClient
from retinue.models.responses import ResponsesWire
from retinue.models.wire import WireModel
from retinue.plugins import Plugin
from retinue.tasks import MemoryTaskRepository, WorkspaceTaskRepository
from retinue.tasks.task import TaskStatus, finish
from retinue.testing import KnownCall, KnownTurn, ScriptedModel, call, fail, say
from retinue.testing.tasks import S1, task_record
from tests.models.streams import RENDER

from .files import check_front_matter, check_pattern, front_matter, patterns
from .strategies import damaged, ids, texts, values


class World:
    """What the examples of one part share: a runtime in memory, one on a database, and a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.numbers = count(1)
        self._runtimes: dict[str, Runtime] = {}

    async def runtimes(self) -> list[Runtime]:
        for url in ("memory:", f"sqlite:///{self.folder}/fuzz.db"):
            if url not in self._runtimes:
                self._runtimes[url] = await Runtime.open(url, [_echo, _asker]).__aenter__()
        return list(self._runtimes.values())

    def thread(self) -> str:
        """A thread that twenty examples share: one that is left locked is noticed."""
        return f"t{next(self.numbers) // 20}"

    async def close(self) -> None:
        for runtime in self._runtimes.values():
            await runtime.close()


class Part(NamedTuple):
    """One thing to fuzz. `check` gets one example; what it raises is a finding."""

    examples: st.SearchStrategy[Any]
    check: Callable[[World, Any], Awaitable[None]]


_echo = Agent("echo", ScriptedModel(lambda request: say(request.messages[-1].text or "nothing")))


class _Asking:
    """A model that asks for the calls that its input names: id, tool and arguments."""

    name = "fuzz:asking"

    async def stream(self, request: ModelRequest) -> AsyncIterator[Any]:
        last = request.messages[-1]
        if last.role != "user":
            yield TextChunk("end")
            return
        for number, (call_id, name, args) in enumerate(json.loads(last.text)):
            yield CallChunk(number, call_id, name, json.dumps(args))


@tool
async def pay(to: str, ctx: ToolContext) -> Any:
    """Pay."""
    return ToolResult.suspended(f"pay {to}?") if ctx.resume_input is None else f"paid {to}"


@tool
async def both(ctx: ToolContext) -> str:
    """Have two children."""
    outcomes = await ctx.run_children([Child("echo", "1"), Child("echo", "2")])
    return "+".join([str(outcome.response) for outcome in outcomes])


_asker = Agent("asker", _Asking(), tools=[pay, both])


# --- content: one hostile value enters at one of many places


class _Chunks:
    name = "fuzz:chunks"

    def __init__(self, *chunks: Any) -> None:
        self.chunks: Any = chunks

    async def stream(self, request: Any) -> AsyncIterator[Any]:
        for chunk in self.chunks:
            yield chunk
        self.chunks = (TextChunk("end"),)


def _in_tool(act: Callable[[ToolContext], Any]) -> Agent:
    @tool
    async def work(ctx: ToolContext) -> Any:
        """Work."""
        return act(ctx)

    return Agent("a", ScriptedModel([call("work"), say("ok")]), tools=[work], plugins=[_Keys()])


_any = StateKey("any", object, persistent=True)
_text = StateKey("text", str, persistent=True)


class _Keys(Plugin):
    name = "keys"

    def register(self, r: Any) -> None:
        r.key(_any)
        r.key(_text)


def _raising(text: str) -> Callable[[ToolContext], Any]:
    def act(ctx: ToolContext) -> None:
        raise ValueError(text)

    return act


VALUES: dict[str, Callable[[Any], Agent]] = {
    "emit": lambda value: _in_tool(lambda ctx: ctx.emit(value)),
    "activity": lambda value: _in_tool(lambda ctx: ctx.report_activity("x", value)),
    "delta": lambda value: _in_tool(lambda ctx: ctx.report_activity_delta("x", value)),
    "progress": lambda value: _in_tool(lambda ctx: ctx.report_progress("running", None, value)),
    "result": lambda value: _in_tool(lambda ctx: value),
    "metadata": lambda value: _in_tool(lambda ctx: ToolResult(metadata={"x": value})),
    "state": lambda value: _in_tool(lambda ctx: ToolOutput("x", update={_any: value})),
    "stream": lambda value: _in_tool(lambda ctx: ctx.stream_output(value)),
}
TEXTS: dict[str, Callable[[str], Agent]] = {
    "text result": lambda text: _in_tool(lambda ctx: text),
    "text state": lambda text: _in_tool(lambda ctx: ToolOutput("x", update={_text: text})),
    "raise": lambda text: _in_tool(_raising(text)),
    "error": lambda text: _in_tool(lambda ctx: ctx.report_error(text, text)),
    "model text": lambda text: Agent("a", _Chunks(TextChunk(text), TurnEnd(text or "stop", model=text))),
    "reasoning": lambda text: Agent("a", _Chunks(ReasoningChunk(text, text), TextChunk("x"))),
    "call": lambda text: Agent("a", _Chunks(CallChunk(0, text, text, text))),
    "arguments": lambda text: Agent("a", _Chunks(CallChunk(0, "c", "x", json.dumps({text: [text]})))),
    "model error": lambda text: Agent("a", ScriptedModel([fail(RuntimeError(text))])),
}
INPUTS = ("input", "part", "user", "thread", "seed")


async def _check_content(world: World, example: tuple[str, Any]) -> None:
    place, value = example
    thread = world.thread()
    outcomes = [await _outcome(runtime, thread, place, value) for runtime in await world.runtimes()]
    assert outcomes[0] == outcomes[1], f"the stores differ: {outcomes}"


async def _outcome(runtime: Runtime, thread: str, place: str, value: Any) -> Any:
    options: dict[str, Any] = {"thread_id": thread}
    agent, given = _echo, "go"
    try:
        if place == "input":
            given = value
        elif place == "part":
            given = Message.user([DataPart(value)])
        elif place in ("user", "thread"):
            options[f"{place}_id"] = value
        elif place == "seed":
            agent, options["state"] = Agent("b", _echo.model, plugins=[_Keys()]), {_any: value}
        else:
            agent = (VALUES.get(place) or TEXTS[place])(value)
        result = await runtime.run(agent, given, **options)
    except (ConfigurationError, StateError) as exc:
        return type(exc)
    assert result.status in (RunStatus.COMPLETED, RunStatus.FAILED)
    events = [event async for event in runtime.events(result.run_id)]
    said = [to_json_value(message.parts, exact=True) for message in result.messages]
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    # A call id may be made of the run id, and be part of a message.
    heard = json.dumps(said).replace(result.run_id, "run")
    return result.status, heard, [event.kind for event in events], _plain(result.state.extensions)


def _plain(state: dict[str, Any]) -> Any:
    return {name: to_json_value(value, exact=True) for name, value in state.items()}


_content = (
    st.tuples(st.sampled_from(list(VALUES)), values())
    | st.tuples(st.sampled_from(list(TEXTS)), texts(200))
    | st.tuples(st.sampled_from(INPUTS[:1] + INPUTS[2:4]), texts(200))
    | st.tuples(st.sampled_from(INPUTS), values())
)


# --- ids: calls with any ids wait, have children, and are answered by the keys that are shown


async def _check_ids(world: World, wanted: list[tuple[str, bool]]) -> None:
    asked = [
        (name, "both", {}) if has_children else (name, "pay", {"to": str(n)})
        for n, (name, has_children) in enumerate(wanted)
    ]
    for runtime in await world.runtimes():
        result = await runtime.run("asker", json.dumps(asked), thread_id=world.thread())
        first = result
        while result.status is RunStatus.SUSPENDED:
            key, ticket = next(iter(result.suspended.items()))
            before = len(result.suspended)
            result = await runtime.resume(first.run_id, {key: Decision.resume("yes")})
            assert len(result.suspended) == before - 1
            assert f"paid {ticket.message[4:-1]}" in [message.text for message in result.messages]
        assert (result.status, result.response) == (RunStatus.COMPLETED, "end")
        read = [message.text for message in result.messages if message.role == "tool"]
        assert read == ["1+2" if has_children else f"paid {n}" for n, (_, has_children) in enumerate(wanted)]
        events = [event async for event in runtime.events(first.run_id)]
        places = {event.run_id: event.ns for event in events}
        assert len(set(places.values())) == len(places)
        made = [message.tool_call_id or "" for message in result.messages if message.role == "tool"]
        assert len(set(made)) == len(made)
        for name in made:
            assert 0 < len(name) <= 256
            assert not set(name) & set(":|~/\\\0 \t\r\n")


# --- decisions: anything is said to a run that waits


_decisions = st.dictionaries(
    texts() | st.sampled_from(["c1", "c2", "ticket_c1"]),
    st.one_of(
        st.builds(lambda v, i: Decision.resume(v, id=i), values(), texts() | st.none()),
        st.builds(lambda v, i: Decision.answer(v, id=i), values(), texts() | st.none()),
        st.builds(lambda r, i: Decision.cancel(r, id=i), texts(), texts() | st.none()),
        values(),
    ),
    max_size=3,
)


async def _check_decisions(world: World, given: dict[str, Any]) -> None:
    runtimes = await world.runtimes()
    for runtime in runtimes:
        asked = [("c1", "pay", {"to": "ann"}), ("c2", "pay", {"to": "bob"})]
        waiting = await runtime.run("asker", json.dumps(asked))
        try:
            result = await runtime.resume(waiting.run_id, given)
        except DecisionRefused:
            unchanged = await runtime.cancel(waiting.run_id)
            assert not [message for message in unchanged.messages if message.text.startswith("paid")]
            result = unchanged
        if result.status is RunStatus.SUSPENDED:
            result = await runtime.cancel(waiting.run_id)
        assert result.status in (RunStatus.COMPLETED, RunStatus.CANCELLED), result.error
        for name in given:
            try:
                await runtime.resume(name, {"c1": Decision.resume(1)})
            except UnknownRun:
                continue
            raise AssertionError(f"run {name!r} was found")


# --- task records: hostile fields are stored and read back; a damaged file is an error that names it


_fields = st.fixed_dictionaries(
    {name: texts(100) for name in ("input", "agent_key", "result", "error_message", "awaiting", "node")}
)
_lines = [
    b'{"t1": {"taskId": "t1", "subAgentId": "w", "parentAgentId": "boss", "parentSessionId": "s1", "userId": "u1", ',
    b'"status": "RUNNING", "input": "x", ',
    b'"createdAt": "2030-01-01T00:00:00Z", "lastUpdatedAt": "2030-01-01T00:00:00Z", "version": 1}}',
]


async def _check_records(world: World, example: tuple[dict[str, str], bytes, str]) -> None:
    fields, data, name = example
    number = next(world.numbers)
    files = LocalFilesystem(world.folder / f"w{number % 50}-{number}")
    for repository in (MemoryTaskRepository(), WorkspaceTaskRepository(files, "boss")):
        await repository.add(task_record("t1", **cast("Any", fields)))
        clean = {field: clean_text(text) for field, text in fields.items()}
        found = await repository.get(S1, "t1")
        assert found is not None
        assert {field: clean_text(getattr(found, field) or "") for field in fields} == clean
        end = partial(finish, status=TaskStatus.COMPLETED, now=0, result=fields["result"])
        done = await repository.update(S1, "t1", end)
        assert done is not None
        assert await repository.get(S1, name) is None or name == "t1"
    path = f"agents/boss/tasks/{S1.session_id}.json"
    files.write(path, data)
    damaged = WorkspaceTaskRepository(files, "boss")
    try:
        await damaged.list(S1)
        await damaged.get(S1, name)
        await damaged.add(task_record("t2"))
    except TaskStoreError:
        assert files.read(path) == data  # nothing of it was lost


# --- model wires: a damaged answer is chunks or a ModelError


class _Canned(HttpClient):
    """A connection on which these bytes arrive, in pieces."""

    def __init__(self, data: bytes, size: int) -> None:
        super().__init__(Endpoint("fuzz:model", "http://localhost", {}))
        self.data, self.size = data, size

    async def post(self, path: str, body: bytes, is_done: Callable[[], bool], heard: Heard) -> AsyncIterator[bytes]:
        for place in range(0, len(self.data), self.size):
            await asyncio.sleep(0)  # as from a socket
            yield self.data[place : place + self.size]
            if is_done():
                return


_turn = KnownTurn(text=("Hel", "lo"), calls=(KnownCall("c1", "look", ('{"a":', "1}")), KnownCall("c2", "look")))
_ask = ModelRequest(messages=(Message.user("go"),))


def _wire(name: str, make: Callable[[], Any]) -> Part:
    async def check(world: World, example: tuple[bytes, int]) -> None:
        data, size = example
        model = WireModel("m", make(), _Canned(data, size))
        ended = False
        try:
            async for chunk in model.stream(_ask):
                assert not ended, "a chunk after the end"
                ended = isinstance(chunk, TurnEnd)
            assert ended, "an answer without an end"
        except ModelError:
            pass
        # The same answer through the loop: the run ends, whatever the chunks are.
        agent = Agent("a", WireModel("m", make(), _Canned(data, size)), max_steps=2)
        result = await (await world.runtimes())[0].run(agent, "go")
        assert result.status in (RunStatus.COMPLETED, RunStatus.FAILED)
        assert math.isfinite(result.usage.cost)
        assert result.usage.tokens >= 0

    return Part(st.tuples(damaged(RENDER[name](_turn)), st.sampled_from([5, 64, 1000, 10_000])), check)


PARTS: dict[str, Part] = {
    "content": Part(_content, _check_content),
    "ids": Part(st.lists(st.tuples(ids(), st.booleans()), min_size=1, max_size=6), _check_ids),
    "decisions": Part(_decisions, _check_decisions),
    "records": Part(st.tuples(_fields, damaged(_lines), texts()), _check_records),
    "patterns": Part(patterns, check_pattern),
    "frontmatter": Part(front_matter, check_front_matter),
    "chat": _wire("chat", ChatWire),
    "responses": _wire("responses", ResponsesWire),
    "anthropic": _wire("anthropic", AnthropicWire),
}
