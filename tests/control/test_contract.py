"""The tool contract where it is easily broken: what tools and hooks hold cannot change a run behind its back."""

from __future__ import annotations

from typing import Any

import pytest

from retinue import (
    Agent,
    Backend,
    BackendProfile,
    ConfigurationError,
    Decision,
    ExecutionBackendError,
    HookContext,
    Message,
    ParentContext,
    Permissions,
    PersistedState,
    Plugin,
    Registrar,
    RunResult,
    RunStatus,
    Runtime,
    SetResult,
    StateCommand,
    StateKey,
    StreamingPassthroughSink,
    SuspendTicket,
    Tool,
    ToolContext,
    ToolDescriptor,
    ToolError,
    ToolOutput,
    ToolResult,
    run_child_agent,
    tool,
)
from retinue.backends import RunRequest
from retinue.events import Event, TextDelta, ToolCallReady
from retinue.state import MutationBatch
from retinue.testing import ScriptedModel, call, say


async def tool_texts(
    made: Any, *, plugins: list[Plugin] | None = None, args: dict[str, Any] | None = None
) -> list[str]:
    """Call a tool once; return what the model read of it."""
    name = made.name
    agent = Agent("a", ScriptedModel([call(name, args or {}), say("end")]), tools=[made], plugins=plugins or [])
    result = await Runtime([agent]).run("a", "go")
    assert result.status is RunStatus.COMPLETED
    return [message.text for message in result.messages if message.role == "tool"]


async def test_a_context_is_read_only() -> None:
    refused: list[str] = []

    @tool
    async def look(ctx: ToolContext) -> str:
        """Look."""
        given: Any = ctx
        for name in ("call_id", "tool_name", "run", "snapshot", "context", "anything"):
            with pytest.raises(AttributeError, match=f"read-only: '{name}'"):
                setattr(given, name, "x")
            refused.append(name)
        with pytest.raises(TypeError):
            given.context["user"] = "eve"
        return ctx.context["user"]

    mine = {"user": "ann"}
    agent = Agent("a", ScriptedModel([call("look"), say("end")]), tools=[look])
    result = await Runtime([agent]).run("a", "go", context=mine)
    assert [message.text for message in result.messages if message.role == "tool"] == ["ann"]
    assert len(refused) == 6
    assert mine == {"user": "ann"}


@pytest.mark.parametrize("progress", [7, -0.1, "x", float("nan")])
async def test_progress_is_a_part_of_one(progress: Any) -> None:
    @tool
    async def work(ctx: ToolContext) -> str:
        """Work."""
        ctx.report_progress("running", progress=progress)
        return "unreachable"

    assert "progress is a number from 0 to 1" in (await tool_texts(work))[0]


class Described(Tool):
    """A tool whose descriptor is a method."""

    def __init__(self) -> None:
        self.ran: list[dict[str, Any]] = []

    def descriptor(self) -> ToolDescriptor:  # type: ignore[override] # pyright: ignore[reportIncompatibleVariableOverride]
        schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 5, "default": 3}}}
        return ToolDescriptor("counter_v1", "count", "Count.").with_parameters(schema)

    async def execute(self, args: dict[str, Any], ctx: ToolContext) -> Any:
        self.ran.append(args)
        return "counted"


async def test_a_descriptor_may_be_a_method() -> None:
    assert Described().name == "count"
    denied = await tool_texts(Described(), plugins=[Permissions(deny=["count(n=3)"])])
    assert denied[0].startswith("blocked")
    assert await tool_texts(Described(), plugins=[Permissions(deny=["count(n=4)"])]) == ["counted"]


async def test_events_have_the_id_of_a_tool_if_it_is_not_its_name() -> None:
    @tool
    async def plain() -> str:
        """Plain."""
        return "ok"

    model = ScriptedModel([[call("count", id="c1"), call("plain", id="c2")], say("end")])
    run = Runtime([Agent("a", model, tools=[Described(), plain])]).stream("a", "go")
    ready = {event.call_id: event.tool_id async for event in run if isinstance(event, ToolCallReady)}
    assert ready == {"c1": "counter_v1", "c2": None}


class Meddler(Plugin):
    """Changes the arguments of a call in place."""

    def __init__(self, *, optional: bool) -> None:
        self._optional = optional

    def register(self, r: Registrar) -> None:
        def meddle(ctx: HookContext) -> None:
            assert ctx.call is not None
            ctx.call.args["n"] = 1_000_000

        r.hook("before_tool", meddle, optional=self._optional)


async def test_a_hook_that_changes_arguments_fails_the_run() -> None:
    made = Described()
    agent = Agent("a", ScriptedModel([call("count", {"n": 1})]), tools=[made], plugins=[Meddler(optional=False)])
    result = await Runtime([agent]).run("a", "go")
    assert result.status is RunStatus.FAILED
    assert "changed the arguments of the call; return SetResult, Suspend or Block" in (result.error or "")
    assert made.ran == []


async def test_an_optional_hook_that_changes_arguments_changes_nothing() -> None:
    """Neither for the tool, nor for hooks after it, nor in the conversation."""
    made, seen = Described(), list[Any]()

    class Watcher(Plugin):
        def register(self, r: Registrar) -> None:
            def watch(ctx: HookContext) -> None:
                seen.append(None if ctx.call is None else dict(ctx.call.args))

            r.hook("before_tool", watch)
            r.hook("after_tool", watch)

    plugins = [Meddler(optional=True), Watcher()]
    agent = Agent("a", ScriptedModel([call("count", {"n": 1}), say("end")]), tools=[made], plugins=plugins)
    result = await Runtime([agent]).run("a", "go")
    assert made.ran == [{"n": 1}]
    assert seen == [{"n": 1}, {"n": 1}]
    assert [one.args for message in result.messages for one in message.tool_calls] == [{"n": 1}]


async def test_a_hook_that_sets_a_waiting_result_is_asked_once() -> None:
    class Asker(Plugin):
        def register(self, r: Registrar) -> None:
            r.hook("before_tool", lambda ctx: SetResult(ToolResult.suspended("may it?")))

    made = Described()
    agent = Agent("a", ScriptedModel([call("count", id="c1"), say("end")]), tools=[made], plugins=[Asker()])
    runtime = Runtime([agent])
    waiting = await runtime.run("a", "go")
    assert waiting.suspended["c1"].message == "may it?"
    result = await runtime.resume(waiting.run_id, {"c1": Decision.resume(True)})
    assert (result.status, result.response) == (RunStatus.COMPLETED, "end")
    assert made.ran == [{}]


class Checked(Described):
    def validate_args(self, args: dict[str, Any]) -> Any:
        args["n"] = 1_000_000
        return ToolResult.error("no")


class Later(Described):
    async def validate_args(self, args: dict[str, Any]) -> None:  # type: ignore[override] # pyright: ignore[reportIncompatibleMethodOverride]
        raise AssertionError


class Blocking(Described):
    def execute(self, args: dict[str, Any], ctx: ToolContext) -> Any:  # type: ignore[override] # pyright: ignore[reportIncompatibleMethodOverride]
        return "never awaited"


async def test_misuse_of_a_tool_class_is_named() -> None:
    assert "validate_args of 'count' returned a value: it raises InvalidArguments" in (await tool_texts(Checked()))[0]
    assert "its execute is not async; write `async def execute(self, args, ctx)`" in (await tool_texts(Blocking()))[0]
    with pytest.raises(ConfigurationError, match="validate_args of 'count' is async"):
        Agent("a", tools=[Later()])
    wrong = Described()
    wrong.descriptor = "hi"  # type: ignore[assignment,method-assign]
    with pytest.raises(ConfigurationError, match="has a str as its descriptor: give it a ToolDescriptor"):
        Agent("a", tools=[wrong])


KEY = StateKey("k", int)
BATCH: Any = MutationBatch().update(KEY, 3)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda: ToolOutput.with_command(ToolResult.success(1), BATCH), "takes a StateCommand"),
        (lambda: StateCommand().update(KEY, 3), "return ToolOutput.with_command(result, command) instead"),
        (lambda: ToolError("no"), "returned a ToolError: raise it instead"),
    ],
)
async def test_a_wrong_return_value_fails_its_call_only(returned: Any, said: str) -> None:
    @tool
    async def give() -> Any:
        """Give."""
        return returned()

    assert said in (await tool_texts(give))[0]


def test_state_is_read_by_name_as_json() -> None:
    state = PersistedState(extensions={"retinue.remote": {"task_id": "t"}})
    assert state["retinue.remote"] == {"task_id": "t"}
    assert state.get("retinue.remote") == {"task_id": "t"}
    assert state.get("other", 1) == 1
    with pytest.raises(KeyError):
        state["other"]


async def test_what_a_backend_cannot_do_says_what_to_do_instead() -> None:
    @tool
    async def ask(ctx: ToolContext) -> str:
        """Ask."""
        with pytest.raises(ExecutionBackendError) as caught:
            await ctx.run_child("kid", [Message.user("one"), Message.user("two")])
        return str(caught.value)

    result = await parent_of(ask, Far()).run("p", "go")
    assert "has 'single_prompt': give it one user message" in result.messages[-2].text


def test_parameters_have_names() -> None:
    wrong = Described()
    made = ToolDescriptor("count", "count", "Count.").with_parameters({"type": "array"})
    wrong.descriptor = made  # type: ignore[assignment,method-assign]
    with pytest.raises(ConfigurationError, match="the parameters of 'count' must be of type object"):
        Agent("a", tools=[wrong])


def test_a_profile_has_known_levels() -> None:
    with pytest.raises(ConfigurationError, match=r"BackendProfile\(waits='bogus'\): it is one of none, input"):
        BackendProfile(waits="bogus")  # type: ignore[arg-type]


# --- children


class Far:
    """A backend that streams, or asks a question and waits."""

    def __init__(self, *, asks: bool = False) -> None:
        self.asks, self.told = asks, list[str]()

    def profile(self) -> BackendProfile:
        return BackendProfile(
            cancellation="remote_abort", decisions="durable", persistence="stored", waits="input_and_auth"
        )

    async def abort(self, run_id: str) -> None:
        self.told.append("abort")

    async def run(self, request: RunRequest) -> RunResult:
        self.told.append(f"stop: {request.cancellation.reason}" if request.cancellation.is_set() else "run")
        if request.accepted is not None:
            request.accepted()
        questions: dict[str, SuspendTicket] = {}
        if request.cancellation.is_set():
            status = RunStatus.CANCELLED
        elif self.asks:
            status = RunStatus.WAITING_INPUT
            questions = {"q": SuspendTicket("q1", "input", "which?", path=("q",))}
        else:
            status = RunStatus.COMPLETED
            if request.emit is not None:
                request.emit(TextDelta(delta="Hel"))
                request.emit(TextDelta(delta="lo"))
        return RunResult(
            status=status,
            run_id=request.identity.run_id,
            thread_id=request.identity.thread_id,
            response="Hello" if status is RunStatus.COMPLETED else None,
            state=PersistedState(),
            suspended=questions,
        )


def parent_of(given: Any, far: Backend) -> Runtime:
    parent = Agent("p", ScriptedModel([call(given.name, id="c1"), say("end")]), tools=[given])
    return Runtime([parent, Agent("kid", backend="far")], backends={"far": far})


@pytest.mark.parametrize("fails", [False, True])
async def test_a_child_elsewhere_that_waits_is_stopped_when_its_call_ends(fails: bool) -> None:
    far = Far(asks=True)

    @tool
    async def ask(ctx: ToolContext) -> str:
        """Ask."""
        outcome = await ctx.run_child("kid", "x")
        if fails:
            raise ValueError("enough")
        return str(outcome.status)

    run = parent_of(ask, far).stream("p", "go")
    ends = [(event.ns, event.status) async for event in run if event.kind == "run_finished"]
    assert far.told == ["run", "stop: the call that started it has ended"]
    assert ends[:2] == [(("tools:c1",), RunStatus.WAITING_INPUT), (("tools:c1",), RunStatus.CANCELLED)]
    assert (await run.result()).response == "end"


async def test_a_child_elsewhere_without_lineage_streams_to_its_sink() -> None:
    heard: list[Event] = []

    @tool
    async def ask(ctx: ToolContext) -> str:
        """Ask."""
        sink = StreamingPassthroughSink(ctx.call_id, ctx.tool_name, ctx.sink)

        def both(event: Event) -> None:
            heard.append(event)
            sink(event)

        await run_child_agent(ctx.resolver, "kid", "x", parent=ParentContext(), sink=both)
        return sink.buffer

    result = await parent_of(ask, Far()).run("p", "go")
    assert [message.text for message in result.messages if message.role == "tool"] == ["Hello"]
    assert [(event.seq, event.agent, event.ns) for event in heard] == [(1, "kid", ()), (2, "kid", ())]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda ctx: {"resolver": ctx}, "the first argument is ctx.resolver, not ctx"),
        (lambda ctx: {"resolver": None}, "the first argument is ctx.resolver, not None"),
        (lambda ctx: {"parent": ctx}, "write ParentContext.of(ctx)"),
        (lambda ctx: {"parent": ParentContext(parent_run_id=ctx.run.run_id)}, "parent_run_id and parent_tool_call_id"),
        (lambda ctx: {"parent": ParentContext(parent_tool_call_id="c1")}, "parent_run_id and parent_tool_call_id"),
        (lambda ctx: {"sink": "nope"}, "sink is a function of one event"),
        (lambda ctx: {"timeout": -1}, "timeout is a number of seconds, not -1"),
    ],
)
async def test_arguments_of_a_child_that_cannot_work_are_refused(change: Any, said: str) -> None:
    @tool
    async def ask(ctx: ToolContext) -> str:
        """Ask."""
        given = {"resolver": ctx.resolver, "parent": ParentContext.of(ctx), **change(ctx)}
        with pytest.raises(ExecutionBackendError) as caught:
            await run_child_agent(given.pop("resolver"), "kid", "x", **given)
        return str(caught.value)

    assert said in (await tool_texts(ask))[0]


async def test_a_child_has_user_context_and_depth_of_its_parent() -> None:
    """Also if its caller gives the three ids of the lineage only."""
    seen: list[Any] = []

    @tool
    async def look(ctx: ToolContext) -> str:
        """Look."""
        seen.append((ctx.run.user_id, dict(ctx.context), ctx.run.depth, ctx.run.parent_thread_id))
        return "ok"

    @tool
    async def ask(ctx: ToolContext) -> str:
        """Ask."""
        lineage = ParentContext(parent_run_id=ctx.run.run_id, parent_tool_call_id=ctx.call_id)
        return str((await run_child_agent(ctx.resolver, "kid", "x", parent=lineage)).response)

    kid = Agent("kid", ScriptedModel([call("look"), say("seen")]), tools=[look])
    parent = Agent("p", ScriptedModel([call("ask"), say("end")]), tools=[ask])
    await Runtime([parent, kid]).run("p", "go", user_id="ann", context={"a": 1}, thread_id="t")
    assert seen == [("ann", {"a": 1}, 1, "t")]
