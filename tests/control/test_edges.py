"""Where control meets bad luck: each of these went wrong once."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from retinue import (
    Agent,
    Block,
    Decision,
    HookContext,
    LocalFilesystem,
    Permissions,
    Plugin,
    Registrar,
    RunResult,
    RunStatus,
    Runtime,
    SetResult,
    StateCommand,
    StateKey,
    Suspend,
    SuspendTicket,
    ToolCall,
    ToolContext,
    ToolOutput,
    ToolResult,
    tool,
)
from retinue.errors import DecisionRefused
from retinue.plugins import AddContextMessage, ResultFiles, TransferTo
from retinue.stores import MemoryStore
from retinue.testing import RecordingSink, ScriptedModel, call, fail, say
from tests.control.test_hooks import Hooks
from tests.waiting import let_others_run

from .. import inside

count: StateKey[int, int] = StateKey("count", int, persistent=True)


class Counts(Plugin):
    name = "counts"

    def register(self, r: Registrar) -> None:
        r.key(count)


@tool
async def work() -> str:
    """Work."""
    return "worked"


async def run(script: Any, *plugins: Plugin, tools: Any = (work,), **options: Any) -> RunResult:
    agent = Agent("a", ScriptedModel(script), "", tools, plugins)
    return await Runtime([agent]).run("a", "go", **options)


def texts(result: RunResult) -> list[str]:
    return [m.text for m in result.messages if m.role == "tool"]


ONE = [call("work", id="c1"), say("done")]


@dataclass
class Letter:
    to: str


async def test_nothing_of_a_refused_command_is_carried_out() -> None:
    commands = [
        StateCommand().emit(Letter("x")),
        StateCommand().update(StateKey("nowhere", int), 1).schedule(AddContextMessage("SHOULD NOT")),
    ]
    for command in commands:

        @tool
        async def write(command: Any = command) -> ToolOutput:
            """Write."""
            return ToolOutput.with_command(ToolResult.success("x"), command)

        model = ScriptedModel([call("write"), say("done")])
        result = await Runtime([Agent("a", model, tools=[write])]).run("a", "go")
        assert result.status is RunStatus.COMPLETED
        assert texts(result)[0].startswith("execution_failed: ")
        assert "SHOULD NOT" not in str(model.requests[1].messages)


async def test_hooks_before_a_tool_that_write_one_key_lose_nothing() -> None:
    def add(n: int) -> Any:
        return lambda ctx: StateCommand().update(count, ctx.state(count) + n)

    result = await run(ONE, Counts(), Hooks(("before_tool", add(1)), ("before_tool", add(10))))
    assert result.state[count] == 11


async def test_a_hook_that_was_set_aside_may_still_block() -> None:
    def first(ctx: HookContext) -> StateCommand:
        return StateCommand().update(count, 1)

    def second(ctx: HookContext) -> Any:
        return Block("too many") if ctx.state(count) else StateCommand().update(count, 1)

    result = await run(ONE, Counts(), Hooks(("before_tool", first), ("before_tool", second)))
    assert texts(result) == ["blocked: too many"]


async def test_hooks_after_parallel_tools_count_each_of_them() -> None:
    def bump(ctx: HookContext) -> StateCommand:
        return StateCommand().update(count, ctx.state(count) + 1)

    result = await run([[call("work") for _ in range(3)], say("done")], Counts(), Hooks(("after_tool", bump)))
    assert texts(result) == ["worked"] * 3
    assert result.state[count] == 3


async def test_what_hooks_return_wrongly_fails_the_run_with_their_name() -> None:
    for phase, returned, problem in (
        ("before_tool", "stop", "TypeError: returned str"),
        ("after_tool", Block("no"), "returned Block, which only before_tool may"),
    ):
        result = await run(ONE, Hooks((phase, lambda ctx, r=returned: r), name="odd"))
        assert result.status is RunStatus.FAILED
        assert problem in (result.error or "")
        assert "plugin 'odd'" in (result.error or "")


async def test_a_result_without_json_form_fails_the_call_and_such_a_decision_is_refused() -> None:
    result = await run(ONE, Hooks(("before_tool", lambda ctx: SetResult(ToolResult.success(object())))))
    assert result.status is RunStatus.COMPLETED
    assert "cannot be written as JSON" in texts(result)[0]

    @tool
    async def ask(ctx: ToolContext) -> ToolResult:
        """Ask."""
        return ToolResult.suspended("?", SuspendTicket("t", "ask", resume_mode="use_decision"))  # pyright: ignore[reportArgumentType]

    runtime = Runtime([Agent("a", ScriptedModel([call("ask", id="c1"), say("done")]), tools=[ask])])
    waiting = await runtime.run("a", "go")
    with pytest.raises(DecisionRefused, match="a value of type object has no JSON form"):
        await runtime.resume(waiting.run_id, {"t": Decision.resume(object())})
    result = await runtime.resume(waiting.run_id, {"t": Decision.resume("fine")})
    assert (result.status, texts(result)) == (RunStatus.COMPLETED, ["fine"])


async def test_a_hook_that_suspends_has_its_answer_once_it_was_given() -> None:
    for mode, expected in (("replay", "worked"), ("use_decision", '{"x":1}')):
        ticket = SuspendTicket("t1", "ask", "?", resume_mode=mode)  # pyright: ignore[reportArgumentType]
        plugin = Hooks(("before_tool", lambda ctx, t=ticket: Suspend(t)))
        runtime = Runtime([Agent("a", ScriptedModel(ONE), "", [work], [plugin])])
        waiting = await runtime.run("a", "go")
        result = await runtime.resume(waiting.run_id, {"t1": Decision.resume({"x": 1})})
        assert (result.status, texts(result)) == (RunStatus.COMPLETED, [expected])


async def test_two_hooks_may_ask_one_after_the_other() -> None:
    def ask(name: str) -> Any:
        return lambda ctx: Suspend(SuspendTicket(f"{name}-{ctx.call.id}", "ask", name))

    plugin = Hooks(*[("before_tool", ask(name)) for name in ("first", "second")])
    runtime = Runtime([Agent("a", ScriptedModel(ONE), "", [work], [plugin])])
    result = await runtime.run("a", "go")
    seen: list[str] = []
    while result.status is RunStatus.SUSPENDED:
        seen.append(result.suspended["c1"].message)
        result = await runtime.resume(result.run_id, {"c1": Decision.resume({})})
    assert (seen, texts(result)) == (["first", "second"], ["worked"])


async def test_after_permission_a_tool_may_ask_its_own_question() -> None:
    @tool
    async def pay(ctx: ToolContext) -> Any:
        """Pay."""
        return (
            ToolResult.suspended("which card?")
            if ctx.resume_input in (None, {"approved": True, "message": "fine"})
            else "paid"
        )

    model = ScriptedModel([call("pay", id="c1"), say("done")])
    runtime = Runtime([Agent("a", model, "", [pay], [Permissions(ask=["pay"])])])
    waiting = await runtime.run("a", "go")
    second = await runtime.resume(waiting.run_id, {"c1": Decision.resume({"approved": True, "message": "fine"})})
    assert second.suspended["c1"].message == "which card?"
    result = await runtime.resume(waiting.run_id, {"c1": Decision.resume("visa")})
    assert texts(result) == ["paid"]


def test_a_path_cannot_be_spelled_around_a_rule() -> None:
    rules = Permissions(deny=["write(path=secrets/*)"], allow=["write(path=public/*)"], default="ask")
    for path in ("secrets/a", "./secrets/a", "x/../secrets/a", "secrets//a", "public/../secrets/a"):
        assert rules.verdict(ToolCall("c", "write", {"path": path})) == "deny"
    assert rules.verdict(ToolCall("c", "write", {"path": "public/../other"})) == "ask"
    assert rules.verdict(ToolCall("c", "write", {"path": "public/a"})) == "allow"


async def test_denied_tools_of_plugins_are_hidden_too() -> None:
    class Toolkit(Plugin):
        name = "kit"

        def register(self, r: Registrar) -> None:
            r.tool(work)

    model = ScriptedModel([say("ok")])
    await Runtime([Agent("a", model, "", (), [Toolkit(), Permissions(deny=["work"])])]).run("a", "go")
    assert model.requests[0].tools == ()


async def test_blocking_the_run_needs_no_answer_to_what_waits() -> None:
    def judge(ctx: HookContext) -> Any:
        assert ctx.call is not None
        return Block("stop", end_run=True) if ctx.call.id == "c1" else Suspend(SuspendTicket("t", "ask"))

    result = await run([[call("work", id="c1"), call("work", id="c2")]], Hooks(("before_tool", judge)))
    assert (result.status, result.termination) == (RunStatus.FAILED, "blocked")
    assert texts(result) == ["blocked: stop", "cancelled: the call was cancelled before it finished"]


async def test_a_handoff_on_the_last_step_lets_the_other_agent_answer() -> None:
    def hand_over(ctx: HookContext) -> StateCommand | None:
        return StateCommand().schedule(TransferTo("b"))

    b = Agent("b", ScriptedModel([say("from b")]))
    a = Agent("a", ScriptedModel([say("from a")]), plugins=[Hooks(("after_inference", hand_over))], handoffs=[b])
    assert (await Runtime([b, a]).run("a", "go")).response == "from b"
    assert list(Runtime([a, b]).agents) == ["a", "b"]


async def test_an_agent_given_as_an_object_can_be_handed_back_to() -> None:
    b = Agent("b", ScriptedModel([call("transfer_to_a")]), handoffs=["a"])
    a = Agent("a", ScriptedModel([call("transfer_to_b"), say("back")]), handoffs=[b])
    assert (await Runtime().run(a, "go")).response == "back"


async def test_values_that_cannot_be_copied_or_kept_fail_the_call_only() -> None:
    lock: StateKey[Any, Any] = StateKey("lock", object)
    odd: StateKey[Any, Any] = StateKey("odd", object, scope="thread")
    for key, value in ((lock, threading.Lock()), (odd, {1, 2} | {object()})):

        @tool
        async def write(key: Any = key, value: Any = value) -> ToolOutput:
            """Write."""
            return ToolOutput("x", update={key: value})

        result = await run([call("write"), say("done")], Hooks(register=lambda r, k=key: r.key(k)), tools=[write])
        assert (result.status, result.response) == (RunStatus.COMPLETED, "done")
        assert key.name in texts(result)[0]


async def test_a_result_that_cannot_be_kept_is_still_cut(tmp_path: Path) -> None:
    class Broken(LocalFilesystem):
        def write(self, path: str, data: bytes) -> None:
            raise OSError("disk full")

    @tool(result_limit=20)
    async def dump() -> str:
        """Dump."""
        return "x" * 100

    for files, note in ((Broken(tmp_path), "could not be kept"), (LocalFilesystem(tmp_path), "tool_results/")):
        script = [call("dump", id="a/../../../b"), say("done")]
        result = await run(script, ResultFiles(files), tools=[dump])
        assert result.status is RunStatus.COMPLETED
        assert note in texts(result)[0]
    (kept,) = (tmp_path / "tool_results").iterdir()
    assert kept.name.startswith("call_run_")  # the id was not a legal one


def nested(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (nested(101), "the JSON of the arguments is refused: it is nested more than 100 deep"),
        (nested(5000), "the JSON of the arguments is refused: it is nested more than 100 deep"),
        ('{"a":' * 5000, "the arguments are not a JSON object: {"),
        (
            f'{{"a": [{"1," * 100_001}1]}}',
            "the JSON of the arguments is refused: it is too large: more than 100,000 items",
        ),
        (f'{{"a": [{"[]," * 80_001}1]}}', "is refused: it is too large: more than 80,000 opening brackets"),
        ('{"a": 1}}', "the arguments are not a JSON object: {"),
        ('["a"]', "the arguments are not a JSON object: ["),
    ],
    ids=["deep", "very deep", "cut off", "many items", "many lists", "broken", "a list"],
)
async def test_arguments_that_cannot_be_used_are_called_what_they_are(arguments: str, problem: str) -> None:
    result = await run([call("work", arguments), say("done")])
    assert result.status is RunStatus.COMPLETED
    assert problem in texts(result)[0][:200]
    assert texts(result)[0].startswith("invalid_arguments: ")


async def test_no_conversation_is_left_with_an_unanswered_call() -> None:
    def broken(ctx: HookContext) -> None:
        if ctx.messages[-1].tool_calls:
            raise OSError("boom")

    model = ScriptedModel([call("work", id="c1"), say("again")])
    runtime = Runtime([Agent("a", model, "", [work], [Hooks(("after_inference", broken))])])
    first = await runtime.run("a", "go", thread_id="t")
    assert texts(first) == ["cancelled: the run ended before this call was made"]
    await runtime.run("a", "more", thread_id="t")
    asked = [c.id for m in model.requests[1].messages for c in m.tool_calls]
    assert asked == [m.tool_call_id for m in model.requests[1].messages if m.role == "tool"]


async def test_a_model_that_fails_while_it_asks_ends_what_it_began() -> None:
    sink = RecordingSink()
    await run([[call("work", id="c1"), fail(OSError("gone"))]], sinks=[sink])
    assert [e.status for e in sink.of("tool_call_finished")] == ["cancelled"]


async def test_run_end_hooks_run_however_a_run_ends() -> None:
    seen: list[str] = []
    for script in ([fail(OSError("gone"))], [say("ok")]):
        await run(script, Hooks(("run_end", lambda ctx: seen.append("end"))))
    assert seen == ["end", "end"]


async def test_handles_of_earlier_legs_speak_for_the_run() -> None:
    hanging = asyncio.Event()

    @tool
    async def ask(ctx: ToolContext) -> Any:
        """Ask."""
        if ctx.resume_input is None:
            return ToolResult.suspended("?")
        if ctx.resume_input == "hang":
            hanging.set()
            await asyncio.sleep(3600)
        return "ok"

    for payload, status in (("go", RunStatus.COMPLETED), ("hang", RunStatus.CANCELLED)):
        runtime = Runtime([Agent("a", ScriptedModel([call("ask", id="c1"), say("done")]), tools=[ask])])
        run = runtime.stream("a", "go")
        waiting = await run.result()
        leg = runtime.stream_resume(waiting.run_id, {"c1": Decision.resume(payload)})
        if payload == "go":
            await leg.result()
        else:
            await hanging.wait()
        assert (await run.cancel()).status is status
        assert (await leg.result()).status is status
        kinds = [e.kind async for e in runtime.events(run.run_id)]
        assert kinds[-1] == "run_finished"


class HeldStore(MemoryStore):
    """A store of which one operation begins and waits for a gate."""

    def __init__(self, held: str) -> None:
        super().__init__()
        self.held, self.begun, self.gate = held, asyncio.Event(), asyncio.Event()

    async def _pass(self, name: str) -> None:
        if name == self.held:
            self.begun.set()
            await self.gate.wait()

    async def load_thread(self, thread_id: str) -> Any:
        await self._pass("load")
        return await super().load_thread(thread_id)

    async def save_thread(self, record: Any) -> None:
        await self._pass("save")
        await super().save_thread(record)


async def test_cancelling_while_the_end_is_stored_loses_nothing() -> None:
    store = HeldStore("save")
    runtime = Runtime([Agent("a", ScriptedModel([say("answer")]))], store=store)
    run = runtime.stream("a", "go", thread_id="t")
    await store.begun.wait()
    asked = asyncio.gather(run.cancel(), run.cancel(), run.result())
    await let_others_run()
    store.gate.set()
    assert {result.status for result in await asked} == {RunStatus.COMPLETED}
    thread = await store.load_thread("t")
    assert [m.text for m in thread.messages] == ["go", "answer"]


async def test_cancelling_a_run_whose_thread_does_not_load_is_bounded() -> None:
    store = HeldStore("load")
    runtime = Runtime([Agent("a", ScriptedModel([]))], store=store)
    run = runtime.stream("a", "go", thread_id="t")
    await store.begun.wait()
    result = await asyncio.wait_for(run.cancel(grace=0.02), 90)
    assert result.status is RunStatus.CANCELLED
    assert [e async for e in run] == []


async def test_a_run_that_waits_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    inside.keep_ended_logs(monkeypatch, 3)

    def answer(request: Any) -> Any:
        return say("ok") if request.messages[-1].role == "tool" or request.messages[-1].text == "x" else call("ask")

    @tool
    async def ask(ctx: ToolContext) -> Any:
        """Ask."""
        return "ok" if ctx.resume_input else ToolResult.suspended("?")

    runtime = Runtime([Agent("a", ScriptedModel(answer), tools=[ask])])
    waiting = await runtime.run("a", "go")
    for _ in range(10):
        await runtime.run("a", "x")
    (call_id,) = waiting.suspended
    assert (await runtime.resume(waiting.run_id, {call_id: Decision.resume(1)})).status is RunStatus.COMPLETED


async def test_words_will_do_for_enums_everywhere() -> None:
    from retinue import Message, ToolStatus
    from retinue.messages import Role, Visibility

    assert ToolResult(status="error").is_error()  # pyright: ignore[reportArgumentType]
    assert ToolResult(status="success").status is ToolStatus.SUCCESS  # pyright: ignore[reportArgumentType]
    message = Message(role="assistant", visibility="internal")  # pyright: ignore[reportArgumentType]
    assert (message.role, message.visibility) == (Role.ASSISTANT, Visibility.INTERNAL)
    assert message.role is Role.ASSISTANT


async def test_odd_input_is_refused_in_words() -> None:
    runtime = Runtime([Agent("a", ScriptedModel(lambda r: say(str(len(r.messages)))))])
    assert (await runtime.run("a", ["one", "two"])).response == "2"  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="input is text, a Message or a list of them, not 5"):
        runtime.stream("a", [5])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="agent 'x' has two plugins named 'counts'"):
        Agent("x", plugins=[Counts(), Counts()])


async def test_tools_cannot_change_what_was_asked_or_said() -> None:
    @tool
    async def greedy(items: list[int], ctx: ToolContext) -> str:
        """Change everything."""
        items.append(99)
        data = {"a": [1]}
        ctx.emit(data)
        data["a"].append(2)
        return "ok"

    sink = RecordingSink()
    result = await run([call("greedy", {"items": [1]}), say("done")], tools=[greedy], sinks=[sink])
    assert sink.of("tool_call_ready")[0].args == {"items": [1]}
    assert sink.of("custom")[0].data == {"a": [1]}
    assert result.messages[1].tool_calls[0].args == {"items": [1]}


async def test_a_tool_that_comes_back_late_has_timed_out() -> None:
    @tool(timeout=0.02)
    async def stubborn() -> str:
        """Ignore being cancelled."""
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.02)
        return "late"

    assert texts(await run([call("stubborn"), say("done")], tools=[stubborn])) == ["timeout: no result after 0.02 s"]
