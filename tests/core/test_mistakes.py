"""Mistakes that beginners make: each raises one sentence that says what to write instead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from retinue import (
    Agent,
    Block,
    ConfigurationError,
    Decision,
    DecisionRefused,
    HarnessAgent,
    Limits,
    LocalFilesystem,
    Message,
    Permissions,
    PersistedState,
    Plugin,
    Registrar,
    Runtime,
    SetResult,
    StateCommand,
    StateKey,
    StateStore,
    Suspend,
    SuspendTicket,
    ToolDescriptor,
    ToolOutput,
    ToolResult,
    UnknownAgent,
    tool,
)
from retinue.plugins import StopAfterSteps, StopOnTool
from retinue.state import MutationBatch
from retinue.testing import ScriptedModel, fail, say


def override(model: Any) -> None:
    with Runtime().override(model=model):
        pass


def model() -> ScriptedModel:
    return ScriptedModel([say("hi")])


class P(Plugin):
    """A plugin."""

    def method(self, text: str) -> str:
        """Do something."""
        return text


async def f(text: str) -> str:
    """Do something."""
    return text


async def pieces() -> Any:
    """Yield."""
    yield "a"


def run(**options: Any) -> Any:
    return Runtime([Agent("a", model())]).stream("a", options.pop("input", "hi"), **options)


any_agent: Any = Agent
any_harness: Any = HarnessAgent
any_key: Any = StateKey
any_store: Any = StateStore
any_result: Any = ToolResult
any_output: Any = ToolOutput
any_ticket: Any = SuspendTicket
any_descriptor: Any = ToolDescriptor
any_block: Any = Block

MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "instructions first": (lambda: any_agent("a", "You are helpful", model()), "model is 'provider:model', such as"),
    "model last": (
        lambda: any_agent("a", "openai:gpt-4o", model()),
        "instructions is text, not .*: write Agent\\(name",
    ),
    "model class": (lambda: any_agent("a", ScriptedModel), "a Model object, not <class"),
    "no name": (lambda: any_agent(None, model()), "agent name None: use a letter"),
    "plugin class": (lambda: any_agent("a", model(), plugins=[P]), r"is not a plugin object: write P\(\)"),
    "plugin function": (lambda: any_agent("a", model(), plugins=[f]), "is not a plugin object: subclass Plugin"),
    "one plugin": (lambda: any_agent("a", model(), plugins=P()), r"plugins is a list, even of one: write \["),
    "one tool": (lambda: any_agent("a", model(), tools=f), r"tools is a list, even of one: write \[<function f"),
    "tool by name": (lambda: any_agent("a", model(), tools=["search"]), "not a tool: 'search'; use @tool"),
    "tool called": (lambda: any_agent("a", model(), tools=[f("x")]), r"f\(\) was called: give the function f itself"),
    "tool lambda": (lambda: any_agent("a", model(), tools=[lambda: 1]), "write a function with def"),
    "tool that yields": (
        lambda: any_agent("a", model(), tools=[pieces]),
        r"show pieces with ctx.stream_output\(text\)",
    ),
    "@tool with a name": (lambda: tool("search"), r"write @tool or @tool\(name="),  # pyright: ignore[reportArgumentType, reportCallIssue]
    "one sub-agent": (
        lambda: any_agent("a", model(), subagents="bob"),
        r"subagents is a list, even of one: write \['b",
    ),
    "one handoff": (lambda: any_agent("a", model(), handoffs=Agent("b")), "handoffs is a list, even of one"),
    "sub-agent of a number": (lambda: any_agent("a", model(), subagents=[3]), "has agents or their names, not 3"),
    "handoff to a number": (lambda: any_agent("a", model(), handoffs=[3]), "handoffs has agents or their names, not 3"),
    "description of a number": (lambda: any_agent("a", model(), description=3), "description is text, not 3"),
    "steps as a truth": (lambda: any_agent("a", model(), max_steps=True), "max_steps must be at least 1, got True"),
    "one tool of a harness": (lambda: any_harness("a", model(), tools=f), "tools is a list, even of one"),
    "one plugin of a harness": (lambda: any_harness("a", model(), plugins=P()), "plugins is a list, even of one"),
    "one sub-agent of a harness": (
        lambda: any_harness("a", model(), subagents="bob"),
        r"subagents is a list, even of one: write \['bob'\]",
    ),
    "one context file": (lambda: any_harness("a", model(), context_files="NOTES.md"), "context_files is a list"),
    "one workspace root": (lambda: any_harness("a", model(), workspace_roots="/x"), "workspace_roots is a list"),
    "a number of files": (
        lambda: any_harness("a", model(), filesystem=5),
        "filesystem is a LocalFilesystem, .*, not 5",
    ),
    "a class of files": (lambda: any_harness("a", model(), filesystem=LocalFilesystem), "not <class"),
    "a number of tasks": (lambda: any_harness("a", model(), task_repository=5), "task_repository is a .*, not 5"),
    "a path for tasks": (
        lambda: any_harness("a", model(), task_repository="x.db"),
        "task_repository is a .*, not 'x.db'",
    ),
    "no result": (
        lambda: any_harness("a", model(), tool_result_limit=0),
        "result_limit must be at least 1 character, got 0",
    ),
    "result as text": (
        lambda: any_agent("a", model(), result_limit="9"),
        "result_limit must be at least 1 .*, got '9'",
    ),
    "list of factories": (
        lambda: any_harness("a", model(), subagent_factories=[f]),
        "subagent_factories is a dict {name: function}, not",
    ),
    "result of text": (lambda: SetResult("x"), r"SetResult takes a ToolResult, not 'x': write ToolResult.success\("),  # pyright: ignore[reportArgumentType]
    "suspended by text": (lambda: Suspend("x"), "Suspend takes a SuspendTicket, not 'x'"),  # pyright: ignore[reportArgumentType]
    "output as text": (lambda: any_agent("a", model(), output="int"), "output is a type, such as int, .* not 'int'"),
    "output as a list": (lambda: any_agent("a", model(), output=[int]), "output is a type, such as int, list"),
    "steps as text": (
        lambda: any_agent("a", model(), max_steps="3"),
        "max_steps must be at least 1, got '3'",
    ),
    "limits as a dict": (lambda: any_agent("a", model(), limits={"depth": 1}), r"write Limits\(depth="),
    "limit as text": (lambda: Limits(depth="x"), "Limits.depth must be at least 0, got 'x': give a whole number"),  # pyright: ignore[reportArgumentType, reportCallIssue]
    "half a step": (lambda: Limits(steps=1.5), "Limits.steps must be .*: give a whole number"),  # pyright: ignore[reportArgumentType, reportCallIssue]
    "no depth": (lambda: Limits(depth=None), "Limits.depth must be .*: give a whole number"),  # pyright: ignore[reportArgumentType, reportCallIssue]
    "cost as text": (lambda: Limits(cost="1"), "Limits.cost must be at least 0, got '1': give a number"),  # pyright: ignore[reportArgumentType, reportCallIssue]
    "an empty thread": (lambda: run(thread_id=""), "thread_id is empty: give an id, or leave it out"),
    "an empty user": (lambda: run(user_id=""), "user_id is empty: give an id, or leave it out"),
    "thread as a number": (lambda: run(thread_id=3), "thread_id is text, not 3: write thread_id='3'"),
    "user as a number": (lambda: run(user_id=3), "user_id is text, not 3: write user_id='3'"),
    "nothing said": (lambda: run(input=[]), 'the input is empty: give text, such as "Hello"'),
    "a dict said": (lambda: run(input={"role": "user"}), r"input is text, a Message .*: write Message.user\("),
    "None said": (lambda: run(input=None), "input is text, a Message or a list of them, not None"),
    "state by name": (lambda: run(state={"topic": 1}), "with StateKey objects, not 'topic'"),
    "state as text": (lambda: run(state="topic"), "with StateKey objects, not 'topic'"),
    "limits of a run": (lambda: run(limits={"depth": 1}), r"write Limits\(depth="),
    "context as text": (lambda: run(context="me"), "context is a dict of values for tools, not 'me'"),
    "one agent": (lambda: Runtime(Agent("a", model())), "agents is a list, even of one"),  # pyright: ignore[reportArgumentType, reportCallIssue]
    "agent by name": (lambda: Runtime(["a"]), "not an agent: 'a'"),  # pyright: ignore[reportArgumentType, reportCallIssue]
    "store as a URL": (
        lambda: Runtime(store="sqlite:///runs.db"),  # pyright: ignore[reportArgumentType]
        r"store is a Store object, not 'sqlite:///runs.db': write Runtime.open\('sqlite:///runs.db'\)",
    ),
    "one sink": (lambda: Runtime(sinks=print), r"sinks is a list, even of one: write \[<built-in function print>\]"),  # pyright: ignore[reportArgumentType]
    "message without parts": (lambda: Message("user", "x"), r"not text: write Message.user\('x'\)"),  # pyright: ignore[reportArgumentType]
    "message of a number": (lambda: Message.user(3), "a message is text or a list of parts, not 3"),  # pyright: ignore[reportArgumentType, reportCallIssue]
    "key without a type": (lambda: any_key("k", "Findings"), "give a type, such as int or list.str., not 'Findings'"),
    "key of a value": (lambda: any_key("k", []), r"give a type, such as int or list\[str\], not \[\]"),
    "key without a name": (lambda: any_key(int, int), "a StateKey needs a name, as text"),
    "output by name": (lambda: ToolOutput("x", update={"k": 1}), "with StateKey objects, not 'k'"),  # pyright: ignore[reportArgumentType, reportCallIssue]
    "command by name": (lambda: StateCommand().update("k", 1), "with StateKey objects, not 'k'"),  # pyright: ignore[reportArgumentType, reportCallIssue]
    "batch by name": (lambda: MutationBatch().update("k", 1), "with StateKey objects, not 'k'"),  # pyright: ignore[reportArgumentType, reportCallIssue]
    "tool on a method": (lambda: tool(P.method), "is a method: give the bound method instead"),
    "rules as text": (lambda: Permissions(deny="pay"), "Permissions: deny is a list, even of one"),
    "store first": (lambda: Runtime("sqlite:///x.db"), "for a store write Runtime.open"),  # pyright: ignore[reportArgumentType, reportCallIssue]
    "agents first": (lambda: Runtime.open([], "sqlite:///x.db"), "the URL of the store comes first"),  # pyright: ignore[reportArgumentType, reportCallIssue]
    "override by class": (lambda: override(ScriptedModel), "a Model object, not <class"),
    "override by nothing": (lambda: override(None), "a Model object, not None"),
    "hook called": (lambda: Registrar(P()).hook("before_tool", Block("no")), "a hook is a function of a HookContext"),  # pyright: ignore[reportArgumentType, reportCallIssue]
    "hook of no phase": (lambda: Registrar(P()).hook("before", print), "there is no phase 'before'; phases are"),  # pyright: ignore[reportArgumentType, reportCallIssue]
    "approve True": (lambda: Decision.approve(True), r"args is a dict of new arguments, .* write Decision.approve\(\)"),  # pyright: ignore[reportArgumentType]
    "stop after text": (lambda: StopAfterSteps("x"), "must be a number of more than 0, not 'x'"),  # pyright: ignore[reportArgumentType]
    "stop on no name": (lambda: StopOnTool(f), "give the name of a tool, as text"),  # pyright: ignore[reportArgumentType]
    "thread": (lambda: run(thread="t"), "a run has no option 'thread': write thread_id$"),
    "an option of nothing": (lambda: run(zzz=1), "a run has no option 'zzz': write thread_id, user_id, "),
    "price that is a number": (lambda: Runtime(price=5), "price is a function of a model and its usage, not 5"),  # pyright: ignore[reportArgumentType]
    "backend that is none": (
        lambda: Runtime(backends={"far": 5}),  # pyright: ignore[reportArgumentType]
        "backend 'far' is an object with profile, run and abort",
    ),
    "async sink": (lambda: Runtime(sinks=[asyncio.sleep]), "Runtime: a sink is a function of one event, .* not async"),  # pyright: ignore[reportArgumentType]
    "async sink of a run": (lambda: run(sinks=[asyncio.sleep]), "run: a sink is a function of one event, .* not async"),
    "sink of nothing": (lambda: run(sinks=["x"]), "run: a sink is a function of one event, .*, not 'x'"),
    "one sink of a run": (lambda: run(sinks=print), "run: sinks is a list, even of one"),
    "run with a number": (lambda: run(model=3), "a 'provider:model' string or a Model object, not 3"),
    "for in a run": (lambda: list(run()), "`async for event in run`, or use runtime.stream_sync"),
    "timeout as text": (lambda: tool(timeout="x")(f), "timeout is a number of seconds, such as timeout=30, not 'x'"),  # pyright: ignore[reportArgumentType]
    "retries as text": (lambda: tool(retries="x")(f), "retries is a whole number, such as retries=3, not 'x'"),  # pyright: ignore[reportArgumentType]
    "name as a number": (lambda: tool(name=3)(f), "name is text, not 3: write name='3'"),  # pyright: ignore[reportArgumentType]
    "key of a number": (lambda: any_key("k", 3), r"give a type, such as int or list\[str\], not 3"),
    "settings as a list": (
        lambda: any_agent("a", model(), settings=[1]),
        'settings is a dict, such as {"temperature": 0}',
    ),
    "empty text": (lambda: run(input=" "), 'the input is empty: give text, such as "Hello"'),
    "script of text": (lambda: ScriptedModel(["hi"]), r"turn 1 of a ScriptedModel has 'hi': write say\('hi'\)"),  # pyright: ignore[reportArgumentType]
    "failure as text": (lambda: fail("down"), r"fail takes an exception, not 'down': write fail\(RuntimeError"),  # pyright: ignore[reportArgumentType]
    "text of None": (lambda: say(None), "say takes text, not None"),  # pyright: ignore[reportArgumentType]
    "events after an event": (lambda: Runtime().events("r", "x"), r"number of an event \(event.seq\), not 'x'"),  # pyright: ignore[reportArgumentType]
    "script of None": (lambda: ScriptedModel([None]), "has None: use say, call, think or fail"),  # pyright: ignore[reportArgumentType]
    "script as text": (lambda: ScriptedModel("hi"), "script is a list, even of one"),  # pyright: ignore[reportArgumentType]
    "output as a number": (lambda: any_agent("a", model(), output=3), "output is a type, such as int, .* not 3"),
    "commit of a dict": (
        lambda: any_store().commit({}),
        r"updates are a MutationBatch, not {}: MutationBatch\(\).update\(key, value\)",
    ),
    "extend by a dict": (lambda: StateCommand().extend({}), "updates are a MutationBatch, not {}"),  # pyright: ignore[reportArgumentType]
    "install of a class": (lambda: any_store().install(P), r"is not a plugin object: write P\(\)"),
    "restore of a dict": (lambda: any_store().restore_persisted({}), "takes a PersistedState, not {}"),
    "state read by name": (lambda: any_store().snapshot()["k"], "with StateKey objects, not 'k'"),
    "state as a list": (lambda: PersistedState.of([]), r"with StateKey objects, not \[\]"),  # pyright: ignore[reportArgumentType]
    "update as a number": (lambda: ToolOutput("x", update=3), "with StateKey objects, not 3"),  # pyright: ignore[reportArgumentType]
    "limit that is no number": (lambda: Limits(seconds=float("nan")), "must be at least 0, got nan: give a number"),
    "name of the tool before an error": (
        lambda: ToolResult.error("greet", "could not"),
        r"not 'could not': write ToolResult.error\('could not', code='not_found'\). A result does not name its tool",
    ),
    "code before an error": (lambda: ToolResult.error("not_found", "No such file."), "not 'No such file.': write"),
    "code in capitals": (
        lambda: ToolResult.error("no file", "E42"),
        "of lower-case letters, digits and _ . : / -, not",
    ),
    "code of nothing": (lambda: ToolResult.error("no file", ""), "lower-case letters"),
    "code as a number": (lambda: any_result.error("no file", 404), "lower-case letters, .*, not 404"),
    "ticket of parameters": (
        lambda: any_ticket("t1", "refund", {"amount": 5}),
        r"SuspendTicket: message is text, not {'amount': 5}: write SuspendTicket\(id, action, message, parameters\)",
    ),
    "ticket of nothing": (lambda: any_ticket(None, "refund"), "SuspendTicket: id is text, not None"),
    "descriptor of a schema": (
        lambda: any_descriptor("lookup", "lookup", {"type": "object"}),
        r"description is text, not {'type': 'object'}: write ToolDescriptor\(id, name, description\)",
    ),
    "descriptor with options as a dict": (
        lambda: any_descriptor("lookup", "lookup", "Find", options={"timeout": 3}),
        r"options is not {'timeout': 3}: write ToolDescriptor\(…\).with_options\(timeout=30\)",
    ),
    "idempotent as text": (lambda: tool(idempotent="yes")(f), "idempotent is True or False, not 'yes'"),  # pyright: ignore[reportArgumentType]
    "blocked by a truth": (lambda: any_block(True), r"Block takes a reason, as text, .*: write Block\('why'\)"),
    "reducer by name": (lambda: any_key("k", int, reduce="add"), "reduce is a function, not 'add': write reduce="),
    "key by name": (lambda: Registrar(P()).key("k"), "with StateKey objects, not 'k'"),  # pyright: ignore[reportArgumentType, reportCallIssue]
}


@pytest.mark.parametrize("name", MISTAKES)
async def test_a_mistake_says_what_to_write(name: str) -> None:
    make, sentence = MISTAKES[name]
    with pytest.raises(ConfigurationError, match=sentence) as caught:
        make()
    assert "\n" not in str(caught.value)


async def test_a_run_is_not_awaited() -> None:
    handle: Any = run()
    with pytest.raises(ConfigurationError, match=r"write `await run.result\(\)`"):
        await handle


def test_a_stream_needs_a_loop() -> None:
    with pytest.raises(ConfigurationError, match=r"or write runtime.stream_sync\(…\)"):
        run()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: any_result.error(ValueError("x")), r"the message is text, not ValueError: write str\(…\)"),
        (lambda: any_result.suspended(None), "the message is text, not NoneType"),
        (lambda: any_result.suspended("ok?", ticket="t1"), "the ticket is a SuspendTicket, not str"),
        (lambda: any_result.suspended("greet", "ok?"), r"write ToolResult.suspended\('ok\?'\). A result does not name"),
        (
            lambda: any_result.success("greet", {"name": "Ann"}),
            r"the message is text, not dict: write ToolResult.success\({'name': 'Ann'}\). A result does not name its tool",
        ),
        (lambda: any_result({"name": "Ann"}), r"tool_name is text, not dict: write ToolResult.success\(data\)"),
        (lambda: any_result(message=3), "the message is text, not int"),
        (lambda: any_result(suspension="t1"), "the suspension is a SuspendTicket, not str"),
        (lambda: ToolOutput(ToolOutput("x")), r"not ToolOutput: write ToolOutput.with_command\(result, command\)"),
        (lambda: ToolOutput(StateCommand()), r"not StateCommand: write ToolOutput.with_command\(result, command\)"),
        (lambda: any_output("x", StateCommand()), "not StateCommand: write ToolOutput.with_command"),
    ],
)
def test_a_result_of_wrong_types_is_refused_where_it_is_made(make: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(TypeError, match=sentence):
        make()


async def test_a_decision_on_a_tuple_says_how_a_path_is_written() -> None:
    runtime = Runtime([Agent("a", model())])
    result = await runtime.run("a", "hi")
    decisions: Any = {("c1", "c2"): Decision.approve()}
    with pytest.raises(DecisionRefused, match=r'is for a call id, a ticket id or "/".join\(path\), not for'):
        await runtime.resume(result.run_id, decisions)


@pytest.mark.parametrize("option", ["subagents", "handoffs"])
async def test_an_agent_that_nobody_has_is_named_before_the_run(option: str) -> None:
    runtime = Runtime([any_agent("a", model(), **{option: ["ghost"]})])
    with pytest.raises(UnknownAgent, match="unknown agent 'ghost'; known: a"):
        await runtime.run("a", "hi")


async def test_decisions_without_a_call() -> None:
    runtime = Runtime([Agent("a", model())])
    result = await runtime.run("a", "hi")
    decision: Any = Decision.approve()
    with pytest.raises(DecisionRefused, match="decisions are given as {call id: Decision}"):
        await runtime.resume(result.run_id, decision)


def test_a_key_that_does_not_leave_its_run_says_so() -> None:
    state = Runtime([Agent("a", ScriptedModel([say("x")]))]).run_sync("a", "go").state
    with pytest.raises(KeyError, match="persistent=True"):
        state[StateKey("k", int)]
    assert state[StateKey("k", int, persistent=True)] == 0
