"""Child runs: state down, state up, one identity, and what to avoid."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from retinue import (
    Agent,
    BackendProfile,
    CancellationToken,
    Child,
    ChildAgentError,
    Decision,
    ExecutionBackendError,
    Limits,
    Message,
    NullSink,
    ParentContext,
    PersistedState,
    Plugin,
    Registrar,
    RunResult,
    RunStatus,
    Runtime,
    StateKey,
    ToolContext,
    ToolOutput,
    ToolResult,
    Usage,
    run_child_agent,
    run_child_agent_checked,
    tool,
)
from retinue.backends import ExecutionPlan
from retinue.core.backend import RunRequest
from retinue.core.errors import StoreError, UnknownRun
from retinue.core.messages import as_messages
from retinue.core.runs import RunIdentity
from retinue.testing import RecordingSink, ScriptedModel, call, fail, say
from tests.busy import Busy
from tests.waiting import until

from .. import inside

config: StateKey[str, str] = StateKey("config", str)
found: StateKey[list[str], list[str]] = StateKey("found", list[str], persistent=True)
shared: StateKey[str, str] = StateKey("shared", str, persistent=True, scope="thread")
hidden: StateKey[str, str] = StateKey("hidden", str)


class Keys(Plugin):
    name = "keys"

    def register(self, r: Registrar) -> None:
        for key in (config, found, shared, hidden):
            r.key(key)


@tool
async def note(ctx: ToolContext) -> ToolOutput:
    """Write down what the seed says."""
    seen = ctx.state(config)
    return ToolOutput(seen, update={found: [seen], shared: "kept", hidden: "secret"})


def child(*turns: Any, name: str = "child", **options: Any) -> Agent:
    return Agent(name, ScriptedModel(turns or [say("child says hi")]), "You are a child.", **options)


def delegating(function: Any, *others: Agent, **options: Any) -> Runtime:
    """A runtime whose parent calls one tool and then answers."""
    parent = Agent("parent", ScriptedModel([call("delegate", id="c1"), say("done")]), tools=[function], **options)
    return Runtime([parent, *others])


async def outcome_of(agent: Agent, **options: Any) -> tuple[RunResult, RunResult, RecordingSink]:
    """Run an agent as a child of a tool: its outcome, the parent's, and all events."""
    outcomes: list[RunResult] = []

    @tool
    async def delegate(ctx: ToolContext) -> str:
        """Delegate."""
        outcomes.append(await ctx.run_child(agent, "work", **options))
        return outcomes[0].status.value

    sink = RecordingSink()
    result = await delegating(delegate).run("parent", "go", sinks=[sink])
    return outcomes[0], result, sink


def load_research_example() -> Any:
    """A fresh copy of the example, with its scripted models at their beginning."""
    path = Path(__file__).parents[2] / "examples/research.py"
    spec = importlib.util.spec_from_file_location("research_example", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


async def test_the_research_example_whole() -> None:
    research = load_research_example()
    runtime = Runtime([research.parent, research.researcher])
    result = await runtime.run("parent", "What is new?")
    assert result.state[research.summary] == research.ResearchSummary(
        "rust", ["source 1 on rust: news", "source 2 on rust: news"]
    )
    assert research.config not in result.state
    (told,) = [m.text for m in result.messages if m.role == "tool"]
    assert '"child_status":"completed"' in told


async def test_a_child_that_does_not_complete_exports_nothing_though_the_tool_succeeds() -> None:
    research = load_research_example()
    model = ScriptedModel([call("search", {"query": "x"}), fail(OSError("gone"))])
    failing = Agent("researcher", model, "", [research.search], [research.ResearchPlugin()])
    result = await Runtime([research.parent, failing]).run("parent", "go")
    (told,) = [m.text for m in result.messages if m.role == "tool"]
    assert '"child_status":"failed"' in told
    assert research.summary not in result.state


async def test_a_seed_is_seen_inside_the_childs_own_tool_and_findings_come_back() -> None:
    agent = child(call("note"), say("noted"), tools=[note], plugins=[Keys()])
    outcome, _, _ = await outcome_of(agent, seed={config: "rust"})
    assert outcome.status is RunStatus.COMPLETED
    assert (outcome.state[found], outcome.state[shared]) == (["rust"], "kept")
    assert hidden not in outcome.state
    assert config not in outcome.state
    assert (outcome.response, outcome.steps) == ("noted", 2)


@pytest.mark.parametrize(
    ("seed", "problem"),
    [
        ({StateKey("unknown", int): 1}, "'unknown' is not registered"),
        (PersistedState(extensions={"found": 5}), "'found' does not fit its type"),
    ],
)
async def test_a_bad_seed_ends_the_child_before_it_begins(seed: Any, problem: str) -> None:
    agent = child(plugins=[Keys()])
    raised: list[Exception] = []

    @tool
    async def delegate(ctx: ToolContext) -> str:
        """Delegate."""
        try:
            await ctx.run_child(agent, "work", seed=seed)
        except ExecutionBackendError as exc:
            raised.append(exc)
        return "ok"

    sink = RecordingSink()
    await delegating(delegate).run("parent", "go", sinks=[sink])
    assert problem in str(raised[0])
    assert "agent 'child' could not be run" in str(raised[0])
    assert {e.agent for e in sink.events} == {"parent"}
    assert sink.of("child_started") == []
    model: Any = agent.model
    assert model.requests == []


async def test_an_unknown_agent_is_named_with_those_there_are() -> None:
    @tool
    async def delegate(ctx: ToolContext) -> str:
        """Delegate."""
        await ctx.run_child("ghost", "work")
        return "never"

    result = await delegating(delegate, child()).run("parent", "go")
    (text,) = [m.text for m in result.messages if m.role == "tool"]
    assert text == "internal: agent 'ghost' could not be run: unknown agent 'ghost'; known: child, parent"


class RemoteBackend:
    """Takes any run and answers at once."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.sent: list[str] = []

    def profile(self) -> BackendProfile:
        return BackendProfile.remote_stateless_text()

    async def run(self, request: Any) -> RunResult:
        self.requests.append(request)
        self.sent.extend([message.text for message in request.remote_messages()])
        state = PersistedState()
        identity = request.identity
        return RunResult(
            status=RunStatus.COMPLETED,
            run_id=identity.run_id,
            thread_id=identity.thread_id,
            response="far away",
            state=state,
        )

    async def abort(self, run_id: str) -> None: ...


class RemoteResolver:
    def __init__(self) -> None:
        self.backend = RemoteBackend()
        self.resolved = 0

    def resolve(self, agent: Any) -> ExecutionPlan:
        self.resolved += 1
        return ExecutionPlan(Agent(agent), self.backend, is_local=False)


async def test_a_seed_is_refused_by_a_backend_that_is_not_local() -> None:
    resolver: Any = RemoteResolver()
    with pytest.raises(ExecutionBackendError, match="not local and takes no state seed"):
        await run_child_agent(resolver, "far", "x", parent=ParentContext(), seed={config: "x"})
    assert resolver.backend.requests == []
    outcome = await run_child_agent(resolver, "far", "x", parent=ParentContext())
    assert (outcome.response, resolver.resolved) == ("far away", 2)


async def test_a_remote_child_is_sent_what_the_user_said_and_has_a_local_run_id() -> None:
    resolver: Any = RemoteResolver()
    said = [
        Message.system("secret instructions"),
        Message.user("hello"),
        Message.assistant("earlier answer"),
        Message.user("for the model only", visibility="internal"),
        Message.tool("a result", tool_call_id="c"),
        Message.user("work"),
    ]
    outcome = await run_child_agent(resolver, "far", said, parent=ParentContext())
    assert resolver.backend.sent == ["hello", "work"]
    assert outcome.run_id == resolver.backend.requests[0].identity.run_id


def test_profiles_name_every_mismatch() -> None:
    local, remote = BackendProfile.full_local(), BackendProfile.remote_stateless_text()
    needs = {"continuation": "in_process", "transcript": "full", "output": "text"}
    assert local.check({"continuation": "in_process", "transcript": "full"}) == []
    assert remote.check(needs) == [
        "continuation: needs 'in_process', has 'none'",
        "transcript: needs 'full', has 'single_prompt'",
    ]
    assert remote.check({"telepathy": "yes"}) == ["unknown capability 'telepathy'"]


@pytest.mark.parametrize(
    ("turns", "options", "status"),
    [
        ([say("ok")], {}, RunStatus.COMPLETED),
        ([[say("partly"), fail(OSError("gone"))]], {}, RunStatus.FAILED),
        ([[say("once"), call("note")], [say("partly"), call("note")]], {"max_steps": 2}, RunStatus.FAILED),
    ],
)
async def test_every_end_is_a_result_with_what_there_was(turns: Any, options: Any, status: RunStatus) -> None:
    agent = child(*turns, tools=[note], plugins=[Keys()], **options)
    outcome, parent, _ = await outcome_of(agent, seed={config: "rust"})
    assert outcome.status is status
    assert outcome.response in ("ok", "partly")
    if options:
        assert outcome.state[found] == ["rust"]
    assert parent.status is RunStatus.COMPLETED


async def test_a_timeout_is_a_result_and_stops_the_child() -> None:
    stopped = asyncio.Event()

    @tool
    async def hang() -> None:
        """Hang."""
        try:
            await asyncio.sleep(60)
        finally:
            stopped.set()

    outcome, parent, sink = await outcome_of(child(call("hang"), tools=[hang]), timeout=0.03)
    assert (outcome.status, outcome.termination) == (RunStatus.TIMEOUT, "timeout")
    assert stopped.is_set()
    assert parent.status is RunStatus.COMPLETED
    assert [e.status for e in sink.of("run_finished")] == ["timeout", "completed"]


async def test_checked_raises_with_the_result() -> None:
    agent = child(fail(OSError("gone")))
    caught: list[ChildAgentError] = []

    @tool
    async def delegate(ctx: ToolContext) -> str:
        """Delegate."""
        try:
            await run_child_agent_checked(ctx.resolver, agent, "x", parent=ParentContext.of(ctx))
        except ChildAgentError as exc:
            caught.append(exc)
        return "ok"

    await delegating(delegate).run("parent", "go")
    assert caught[0].result.status is RunStatus.FAILED
    assert str(caught[0]) == "child agent did not complete: failed: OSError: gone"


async def test_the_childs_input_is_fresh_and_lineage_goes_down() -> None:
    seen: list[Any] = []

    @tool
    async def look(ctx: ToolContext) -> str:
        """Look."""
        seen.append((ctx.run, ctx.context))
        return "ok"

    agent = child(call("look"), say("ok"), tools=[look])

    @tool
    async def delegate(ctx: ToolContext) -> str:
        """Delegate."""
        await ctx.run_child(agent, [Message.user("only this")])
        return "ok"

    runtime = delegating(delegate)
    result = await runtime.run("parent", "a long story", user_id="u1", context={"tenant": 7})
    model: Any = agent.model
    assert [m.text for m in model.requests[0].messages] == ["You are a child.", "only this"]
    ((run, context),) = seen
    assert (run.parent_run_id, run.parent_thread_id, run.parent_tool_call_id) == (result.run_id, result.thread_id, "c1")
    assert (run.user_id, run.depth, context) == ("u1", 1, {"tenant": 7})
    assert run.thread_id != result.thread_id


async def test_without_lineage_a_child_is_the_root_of_its_own_log() -> None:
    own = RecordingSink()

    @tool
    async def delegate(ctx: ToolContext) -> str:
        """Delegate."""
        outcome = await run_child_agent(ctx.resolver, child(), "x", parent=ParentContext(), sink=own)
        return outcome.response or ""

    sink = RecordingSink()
    result = await delegating(delegate).run("parent", "go", sinks=[sink])
    assert [m.text for m in result.messages if m.role == "tool"] == ["child says hi"]
    assert {e.agent for e in sink.events} == {"parent"}
    assert [e.seq for e in own.events] == list(range(1, len(own.events) + 1))
    assert {e.ns for e in own.events} == {()}


@pytest.mark.parametrize("url", ["memory:", "sqlite"])
async def test_without_lineage_a_child_is_read_and_answered_as_a_root(url: str, tmp_path: Path) -> None:
    outcomes: list[RunResult] = []
    own = RecordingSink()

    @tool
    async def ask(ctx: ToolContext) -> Any:
        """Ask."""
        return ctx.resume_input or ToolResult.suspended("sure?")

    @tool
    async def delegate(ctx: ToolContext) -> str:
        """Delegate."""
        outcomes.append(await run_child_agent(ctx.resolver, "child", "x", parent=ParentContext(), sink=own))
        return outcomes[0].status

    asking = child(call("ask", id="q1"), say("done"), tools=[ask])
    parent = Agent("parent", ScriptedModel([call("delegate", id="c1"), say("end")]), tools=[delegate])
    place = url if url == "memory:" else f"sqlite:///{tmp_path}/app.db"
    async with Runtime.open(place, [parent, asking]) as runtime:
        result = await runtime.run("parent", "go")
        assert [m.text for m in result.messages if m.role == "tool"] == ["suspended"]
        run_id = outcomes[0].run_id
        seen = [event.kind async for event in runtime.stream_resume(run_id, {"q1": Decision.resume("yes")})]
        assert seen[-1] == "run_finished"
        assert (await runtime.result(run_id)).response == "done"
        events = [event async for event in runtime.events(run_id)]
        assert [event.kind for event in events][: len(own.events)] == [event.kind for event in own.events]
        assert {(event.run_id, event.ns, event.parent_run_id) for event in events} == {(run_id, (), None)}


@pytest.mark.parametrize("url", ["memory:", "sqlite"])
@pytest.mark.parametrize("how", ["timeout", "token", "parent"])
async def test_without_lineage_a_child_ends_with_its_call(url: str, how: str, tmp_path: Path) -> None:
    begun, token, own = asyncio.Event(), CancellationToken(), RecordingSink()

    @tool
    async def hang() -> None:
        """Hang."""
        begun.set()
        await asyncio.Event().wait()

    @tool
    async def delegate(ctx: ToolContext) -> str:
        """Delegate."""
        given: dict[str, Any] = {"cancellation": token} if how == "token" else {"cancellation": ctx.cancellation}
        if how == "timeout":
            given["timeout"] = 0.01
        outcome = await run_child_agent(ctx.resolver, "child", "x", parent=ParentContext(), sink=own, **given)
        return outcome.status

    hanging = child(call("hang"), tools=[hang])
    parent = Agent("parent", ScriptedModel([call("delegate", id="c1"), say("end")]), tools=[delegate])
    place = url if url == "memory:" else f"sqlite:///{tmp_path}/app.db"
    async with Runtime.open(place, [parent, hanging]) as runtime:
        run = runtime.stream("parent", "go")
        if how != "timeout":
            await begun.wait()
        if how == "token":
            token.set("enough")
        result = await (run.cancel() if how == "parent" else run.result())
        expected = "timeout" if how == "timeout" else "cancelled"
        assert own.events[-1].kind == "run_finished"
        assert (await runtime.result(own.events[0].run_id)).status == expected
        if how != "parent":
            assert [m.text for m in result.messages if m.role == "tool"] == [expected]


@pytest.mark.parametrize("url", ["memory:", "sqlite"])
async def test_without_lineage_a_child_that_was_never_awaited_does_not_run(url: str, tmp_path: Path) -> None:
    asked: list[str] = []

    def turn(request: Any) -> Any:
        asked.append(request.messages[-1].text)
        return say("done")

    agent = Agent("child", ScriptedModel(turn))
    place = url if url == "memory:" else f"sqlite:///{tmp_path}/app.db"
    async with Runtime.open(place, [agent]) as runtime:
        backend = inside.local_backend(runtime)
        identity = RunIdentity(run_id="alone", thread_id="t", agent="child")
        token = CancellationToken()
        request = RunRequest(agent=agent, identity=identity, messages=as_messages("never"), cancellation=token)
        work = asyncio.create_task(backend.run(request))
        work.cancel()  # before its first step
        with pytest.raises(asyncio.CancelledError):
            await work
        await runtime.run("child", "after it", thread_id="t")
        assert asked == ["after it"]
        with pytest.raises(UnknownRun):
            await runtime.result("alone")


async def test_a_failing_cancel_of_a_child_without_lineage_does_not_hide_the_cancellation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, outcome = asyncio.Event(), list[str]()

    @tool
    async def hang() -> None:
        """Hang."""
        begun.set()
        await asyncio.Event().wait()

    @tool
    async def delegate(ctx: ToolContext) -> str:
        """Delegate."""
        try:
            await run_child_agent(ctx.resolver, "child", "x", parent=ParentContext())
        except BaseException as exc:
            outcome.append(type(exc).__name__)
            raise
        return ""

    async def fail(*args: object) -> None:
        raise StoreError("the database", "the disk is full")

    parent = Agent("parent", ScriptedModel([call("delegate", id="c1"), say("end")]), tools=[delegate])
    runtime = Runtime([parent, child(call("hang"), tools=[hang])])
    run = runtime.stream("parent", "go")
    await begun.wait()
    (alone,) = [live for live in inside.owned_runs(runtime) if live.run_id != run.run_id]
    monkeypatch.setattr(alone, "cancel", fail)
    assert (await run.cancel()).status is RunStatus.CANCELLED
    assert outcome == ["CancelledError"]


async def test_a_child_that_is_cancelled_before_its_first_step_has_an_end() -> None:
    @tool
    async def delegate(ctx: ToolContext) -> str:
        """Delegate."""
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().call_soon(task.cancel)  # before the asyncio task of the child begins
        return (await ctx.run_child("child", "x", cancellation=CancellationToken())).status

    sink = RecordingSink()
    runtime = Runtime([Agent("parent", ScriptedModel([call("delegate", id="c1")]), tools=[delegate]), child()])
    assert (await runtime.run("parent", "go", sinks=[sink])).status is RunStatus.CANCELLED
    ends = [(e.kind, e.agent) for e in sink.events if e.kind.startswith(("run_", "child_"))]
    assert ends == [
        ("run_started", "parent"),
        ("child_started", "parent"),
        ("run_started", "child"),
        ("run_finished", "child"),
        ("child_finished", "parent"),
        ("run_finished", "parent"),
    ]


async def test_cancelling_the_parent_cancels_the_child_and_its_tools() -> None:
    begun, stopped = asyncio.Event(), asyncio.Event()

    @tool
    async def hang() -> None:
        """Hang."""
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            stopped.set()

    grandchild = child(call("hang"), name="grandchild", tools=[hang])
    middle = child(call("task", {"subagent_type": "grandchild", "description": "x"}), subagents=[grandchild])
    after: list[str] = []

    @tool
    async def delegate(ctx: ToolContext) -> str:
        """Delegate."""
        await ctx.run_child(middle, "work")
        after.append("went on")
        return "ok"

    runtime = delegating(delegate)
    run = runtime.stream("parent", "go")
    await begun.wait()
    result = await run.cancel()
    assert result.status is RunStatus.CANCELLED
    assert stopped.is_set()
    assert after == []
    events = [e async for e in run]
    ended = [(e.agent, e.status) for e in events if e.kind == "run_finished"]  # pyright: ignore[reportAttributeAccessIssue]
    assert ended == [("grandchild", "cancelled"), ("child", "cancelled"), ("parent", "cancelled")]


async def test_a_token_of_ones_own_cancels_only_the_child() -> None:
    token = CancellationToken()
    begun = asyncio.Event()

    @tool
    async def hang() -> None:
        """Hang."""
        begun.set()
        await asyncio.sleep(60)

    @tool
    async def delegate(ctx: ToolContext) -> str:
        """Delegate."""
        agent = child(call("hang"), tools=[hang])
        outcome = await run_child_agent(
            ctx.resolver, agent, "x", parent=ParentContext.of(ctx), sink=NullSink(), cancellation=token
        )
        return f"{outcome.status}: {outcome.error}"

    run = delegating(delegate).stream("parent", "go")
    await begun.wait()
    token.set("enough")
    result = await run.result()
    assert [m.text for m in result.messages if m.role == "tool"] == ["cancelled: enough"]
    assert result.status is RunStatus.COMPLETED


async def test_usage_adds_up_and_cost_is_priced() -> None:
    spent = Usage(requests=1, input_tokens=10, output_tokens=5)
    agent = child(say("ok", usage=spent))

    @tool
    async def delegate(ctx: ToolContext) -> str:
        """Delegate."""
        await ctx.run_children([Child(agent_n, "x") for agent_n in ("child", "child2")])
        return "ok"

    second = child(say("ok", usage=spent), name="child2")
    model = ScriptedModel([[say("x", usage=spent), call("delegate")], say("done", usage=spent)])
    runtime = Runtime([Agent("parent", model, tools=[delegate]), agent, second], price=lambda model, usage: 0.5)
    result = await runtime.run("parent", "go")
    assert (result.usage.requests, result.usage.input_tokens, result.usage.cost) == (4, 40, 2.0)
    limited = Runtime([agent], price=lambda model, usage: 0.5)
    assert (await limited.run("child", "go", limits=Limits(cost=0))).termination == "limit:cost"


async def test_children_run_side_by_side_in_order_with_a_limit() -> None:
    running, most = 0, 0

    async def answer(request: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        number = int(request.messages[-1].text)
        await asyncio.sleep(0.01 if number % 2 else 0)
        running -= 1
        return say(f"answer {number}")

    agent = Agent("child", ScriptedModel(answer))

    @tool
    async def delegate(ctx: ToolContext) -> list[str]:
        """Delegate."""
        outcomes = await ctx.run_children([Child(agent, str(n)) for n in range(10)], limit=3)
        return [outcome.response or "" for outcome in outcomes]

    sink = RecordingSink()
    result = await delegating(delegate).run("parent", "go", sinks=[sink])
    (text,) = [m.text for m in result.messages if m.role == "tool"]
    assert text == str([f"answer {n}" for n in range(10)]).replace("'", '"').replace(", ", ",")
    assert most == 3
    spaces = {e.ns for e in sink.events if e.agent == "child"}
    assert spaces == {("tools:c1",), *[(f"tools:c1~{n}",) for n in range(2, 11)]}


async def test_one_failing_child_fails_nobody_else_unless_asked() -> None:
    asked: list[str] = []

    async def answer(request: Any) -> Any:
        asked.append(request.messages[-1].text)
        if asked[-1] == "bad":
            await until(lambda: len(asked) == 3)
            raise OSError("boom")
        if on_error == "cancel_siblings":
            await asyncio.sleep(3600)
        return say("fine")

    agent = Agent("child", ScriptedModel(answer))
    statuses: dict[str, list[str]] = {}
    for on_error in ("collect", "cancel_siblings"):
        asked.clear()

        @tool
        async def delegate(ctx: ToolContext, on_error: Any = on_error) -> str:
            """Delegate."""
            outcomes = await ctx.run_children([Child(agent, t) for t in ("a", "bad", "b")], on_error=on_error)
            statuses[on_error] = [str(outcome.status) for outcome in outcomes]
            return "ok"

        assert (await delegating(delegate).run("parent", "go")).status is RunStatus.COMPLETED
    assert statuses == {
        "collect": ["completed", "failed", "completed"],
        "cancel_siblings": ["cancelled", "failed", "cancelled"],
    }


async def test_depth_children_and_parallel_are_limits_of_the_tree() -> None:
    def nested(request: Any) -> Any:
        if request.messages[-1].role == "tool":
            return say(request.messages[-1].text)
        return call("task", {"subagent_type": "agent", "description": "deeper"})

    agent = Agent("agent", ScriptedModel(nested), subagents=["agent"])
    sink = RecordingSink()
    result = await Runtime([agent]).run("agent", "go", sinks=[sink])
    assert max(len(e.ns) for e in sink.events) == 3
    assert result.response == "limit: [limit:depth] agents may be nested 3 deep: do this yourself"
    refused = await Runtime([agent]).run("agent", "go", limits=Limits(children=1))
    assert "[limit:children] this tree may start 1 children" in (refused.response or "")


@pytest.mark.parametrize(
    ("own", "given", "steps"), [(3, None, 3), (3, Limits(), 3), (3, Limits(steps=9), 3), (3, Limits(steps=2), 2)]
)
async def test_limits_given_with_a_call_only_narrow_those_of_the_child(
    own: int, given: Limits | None, steps: int
) -> None:
    @tool
    async def work() -> str:
        """Work."""
        return "worked"

    child = Agent("child", ScriptedModel(lambda request: call("work")), tools=[work], limits=Limits(steps=own))
    outcomes: list[RunResult] = []

    @tool
    async def go(ctx: ToolContext) -> str:
        """Run the child in both ways."""
        outcomes.append(await ctx.run_child(child, "go", limits=given))
        outcomes.extend(await ctx.run_children([Child(child, "go", limits=given)]))
        return "ok"

    agent = Agent("agent", ScriptedModel([call("go"), say("done")]), tools=[go])
    await Runtime([agent]).run("agent", "go", limits=Limits(steps=100))
    assert [(one.termination, one.steps) for one in outcomes] == [("limit:steps", steps)] * 2


async def test_parallel_holds_for_the_whole_tree_and_cannot_wait_for_itself() -> None:
    busy = Busy(0.002)

    def worker(request: Any) -> Any:
        return say("ok") if request.messages[-1].role == "tool" else [call("work") for _ in range(3)]

    sub = Agent("sub", ScriptedModel(worker), tools=[busy.tool])
    fan_out = [call("task", {"subagent_type": "sub", "description": str(n)}) for n in range(6)]
    parent = Agent("parent", ScriptedModel([fan_out, say("done")]), subagents=[sub], limits=Limits(parallel=2))
    result = await asyncio.wait_for(Runtime([parent]).run("parent", "go"), 90)
    assert (result.response, busy.most) == ("done", 2)
