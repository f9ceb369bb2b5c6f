"""Plugins and phases."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from retinue import (
    Agent,
    Block,
    HookContext,
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
    ToolOutput,
    ToolResult,
    tool,
)
from retinue.plugins import AddContextMessage, AddSystemText, ExcludeTools, IncludeTools, OverrideSettings
from retinue.testing import RecordingSink, ScriptedModel, call, say

total: StateKey[int, int] = StateKey("total", int, reduce=lambda a, b: a + b, merge="commutative", persistent=True)
owner: StateKey[str, str] = StateKey("owner", str, persistent=True)


class Hooks(Plugin):
    """A plugin of given hooks: (phase, function) or (phase, function, options)."""

    def __init__(self, *hooks: Any, name: str = "hooks", register: Any = None) -> None:
        self.name, self._hooks, self._register = name, hooks, register

    def register(self, r: Registrar) -> None:
        if self._register:
            self._register(r)
        for phase, function, *options in self._hooks:
            given: dict[str, Any] = options[0] if options else {}
            r.hook(phase, function, **given)


def keys(r: Registrar) -> None:
    r.key(total)
    r.key(owner)


@tool
async def work(name: str = "x") -> str:
    """Work."""
    return f"worked on {name}"


async def run(script: Any, *plugins: Plugin, tools: Any = (work,), sink: Any = None, **options: Any) -> RunResult:
    agent = Agent("a", ScriptedModel(script), "Sys.", tools, [Hooks(name="keys", register=keys), *plugins], **options)
    return await Runtime([agent]).run("a", "go", sinks=[sink] if sink else [])


ONE_CALL = [call("work", id="c1"), say("done")]


async def test_phases_come_in_order_and_priorities_count() -> None:
    seen: list[str] = []

    def note(label: str) -> Any:
        def hook(ctx: HookContext) -> None:
            seen.append(f"{label}{ctx.phase}")

        return hook

    phases = "run_start step_start before_inference after_inference before_tool after_tool step_end run_end".split()
    late = Hooks(*[(p, note("2 "), {"priority": 200}) for p in phases], name="late")
    early = Hooks(*[(p, note("1 ")) for p in phases], name="early")
    await run(ONE_CALL, late, early)
    order = [*phases[:7], *phases[1:4], "step_end", "run_end"]
    assert seen == [f"{n} {phase}" for phase in order for n in (1, 2)]


async def test_what_each_phase_has() -> None:
    seen: dict[str, HookContext] = {}

    async def hook(ctx: HookContext) -> None:
        await asyncio.sleep(0)
        seen.setdefault(ctx.phase, ctx)

    phases = "run_start before_inference after_inference before_tool after_tool run_end".split()
    result = await run(ONE_CALL, Hooks(*[(phase, hook) for phase in phases]))
    assert all(ctx.run.run_id == result.run_id and ctx.agent.name == "a" for ctx in seen.values())
    assert [m.text for m in seen["run_start"].messages] == ["go"]
    assert seen["before_inference"].request is not None
    assert seen["after_inference"].messages[-1].tool_calls[0].id == "c1"
    before, after = seen["before_tool"], seen["after_tool"]
    assert (before.call and before.call.id, before.result) == ("c1", None)
    assert after.result
    assert after.result.data == "worked on x"
    assert seen["run_end"].messages[-1].text == "done"


async def test_hooks_of_a_phase_see_one_snapshot_and_make_one_commit() -> None:
    seen: list[int] = []

    def add(ctx: HookContext) -> StateCommand:
        seen.append(ctx.state(total))
        return StateCommand().update(total, 1).event({"added": 1})

    sink = RecordingSink()
    out = await run([say("ok")], Hooks(("run_start", add), ("run_start", add), ("run_start", add)), sink=sink)
    assert seen == [0, 0, 0]
    assert out.state[total] == 3
    assert [e.revision for e in sink.of("state_delta")] == [1]
    assert len(sink.of("custom")) == 3


async def test_a_hook_that_wrote_what_another_wrote_runs_again_on_fresh_state() -> None:
    seen: list[tuple[str, str]] = []

    def claim(name: str) -> Any:
        def hook(ctx: HookContext) -> StateCommand | None:
            seen.append((name, ctx.state(owner)))
            return None if ctx.state(owner) == "ann" and name == "cem" else StateCommand().update(owner, name)

        return hook

    out = await run([say("ok")], Hooks(*[("run_start", claim(name)) for name in ("ann", "bob", "cem")]))
    assert seen == [("ann", ""), ("bob", ""), ("cem", ""), ("bob", "ann"), ("cem", "bob")]
    assert out.state[owner] == "cem"


async def test_after_tool_is_part_of_the_calls_one_commit() -> None:
    @tool
    async def write() -> ToolOutput:
        """Write."""
        return ToolOutput("wrote", update={owner: "tool"})

    def count(ctx: HookContext) -> StateCommand:
        return StateCommand().update(total, 1)

    sink = RecordingSink()
    hooks = Hooks(("before_tool", count), ("after_tool", count))
    out = await run([call("write", id="c1"), say("ok")], hooks, tools=[write], sink=sink)
    (delta,) = sink.of("state_delta")
    assert delta.delta == {"owner": "tool", "total": 2}
    assert out.state[owner] == "tool"


async def test_a_hook_that_raises_fails_the_run_with_its_name() -> None:
    def broken(ctx: HookContext) -> None:
        raise LookupError("no such thing")

    for phase in ("run_start", "before_inference", "before_tool", "after_tool", "step_end", "run_end"):
        out = await run(ONE_CALL, Hooks((phase, broken), name="shaky"))
        assert out.status is RunStatus.FAILED
        assert out.error == (
            f"HookFailed: hook 'broken' of plugin 'shaky' failed in {phase}: LookupError: no such thing"
        )


async def test_an_optional_hook_fails_alone() -> None:
    def broken(ctx: HookContext) -> None:
        raise LookupError("no such thing")

    def bad(ctx: HookContext) -> StateCommand:
        return StateCommand().update(StateKey("nowhere", int), 1)

    sink = RecordingSink()
    out = await run(
        ONE_CALL, Hooks(("after_tool", broken, {"optional": True}), ("after_tool", bad, {"optional": True})), sink=sink
    )
    assert out.status is RunStatus.COMPLETED
    assert [e.code for e in sink.of("error")] == ["hook_failed", "hook_failed"]


def test_an_unknown_phase_is_refused_at_once() -> None:
    from retinue import StateStore

    with pytest.raises(ValueError, match="plugin 'hooks': there is no phase 'before_lunch'; phases are run_start"):
        StateStore().install(Hooks(("before_lunch", print)))


# -- intercepts


async def intercepted(*returned: Any, script: Any = ONE_CALL) -> tuple[RunResult, str, RecordingSink]:
    ran: list[str] = []

    @tool
    async def work() -> str:
        """Work."""
        ran.append("work")
        return "worked"

    after: list[Any] = []
    hooks = [("before_tool", lambda ctx, r=r: r) for r in returned]
    sink = RecordingSink()
    out = await run(
        script, Hooks(*hooks, ("after_tool", lambda ctx: after.append(ctx.result))), tools=[work], sink=sink
    )
    if any(returned):
        assert ran == []
        assert bool(after) == isinstance(_strongest(returned), SetResult)
    texts = [e.message.text for e in sink.of("tool_call_finished")]
    return out, texts[0], sink


def _strongest(returned: Any) -> Any:
    return next((r for kind in (Block, Suspend, SetResult) for r in returned if isinstance(r, kind)), None)


TICKET = SuspendTicket("t1", "approve", "May I?")


async def test_block_fails_the_call_and_the_run_goes_on() -> None:
    out, text, _ = await intercepted(Block("not on Sundays"))
    assert text == "blocked: not on Sundays"
    assert out.status is RunStatus.COMPLETED


async def test_block_may_end_the_run() -> None:
    out, text, _ = await intercepted(Block("stop everything", end_run=True), script=ONE_CALL[:1])
    assert text == "blocked: stop everything"
    assert (out.status, out.termination, out.error) == (RunStatus.FAILED, "blocked", "stop everything")


async def test_set_result_skips_the_tool_but_not_the_hooks_after_it() -> None:
    out, text, _ = await intercepted(SetResult(ToolResult.success({"cached": True})))
    assert text == '{"cached":true}'
    assert out.status is RunStatus.COMPLETED


@pytest.mark.parametrize(
    ("returned", "status", "text"),
    [
        ((SetResult(ToolResult.success("set")), Suspend(TICKET), Block("no")), "completed", "blocked: no"),
        ((SetResult(ToolResult.success("set")), Suspend(TICKET)), "suspended", "May I?"),
        ((None, SetResult(ToolResult.success("set")), None), "completed", "set"),
    ],
)
async def test_block_beats_suspend_beats_set_result(returned: Any, status: str, text: str) -> None:
    out, got, _ = await intercepted(*returned)
    assert (out.status, got) == (status, text)


async def test_ties_keep_the_first_and_say_so() -> None:
    _, text, sink = await intercepted(Block("first"), Block("second"))
    assert text == "blocked: first"
    (error,) = sink.of("error")
    assert error.code == "intercept_tie"


async def test_intercepts_belong_to_before_tool() -> None:
    out = await run([say("x")], Hooks(("run_start", lambda ctx: Block("no"))))
    assert "returned Block, which only before_tool may" in (out.error or "")


async def test_wrong_arguments_never_reach_the_hooks() -> None:
    seen: list[Any] = []
    out = await run([call("work", {"name": 5}), say("ok")], Hooks(("before_tool", seen.append)))
    assert seen == []
    assert out.status is RunStatus.COMPLETED


# -- actions and effects


@dataclass
class Ping:
    left: int


@dataclass
class Mail:
    to: str


async def test_step_actions_change_the_next_request_only() -> None:
    def once(ctx: HookContext) -> StateCommand | None:
        if ctx.request and len(ctx.request.messages) > 2:
            return None
        return (
            StateCommand()
            .schedule(AddContextMessage("It is late."))
            .schedule(ExcludeTools(("work",)))
            .schedule(OverrideSettings({"temperature": 0}))
        )

    model = ScriptedModel(ONE_CALL)
    agent = Agent("a", model, "Sys.", [work], [Hooks(("before_inference", once))], settings={"top_p": 1})
    out = await Runtime([agent]).run("a", "go")
    first, second = model.requests
    assert [m.text for m in first.messages] == ["Sys.", "go", "It is late."]
    assert (first.tools, dict(first.settings)) == ((), {"top_p": 1, "temperature": 0})
    refused = "not_found: there is no tool named 'work'; available: none"
    assert [m.text for m in second.messages] == ["Sys.", "go", "", refused]
    assert ([t.name for t in second.tools], dict(second.settings)) == (["work"], {"top_p": 1})
    assert [m.text for m in out.messages] == ["go", "", refused, "done"]


async def test_a_hook_before_inference_sees_the_request_with_what_step_start_has_added() -> None:
    seen: list[Any] = []

    def add(ctx: HookContext) -> StateCommand:
        return StateCommand().schedule(AddSystemText("Be brief.")).schedule(ExcludeTools(("work",)))

    def look(ctx: HookContext) -> None:
        seen.append(ctx.request)

    model = ScriptedModel([say("done")])
    agent = Agent("a", model, "Sys.", [work], [Hooks(("step_start", add), ("before_inference", look))])
    await Runtime([agent]).run("a", "go")
    assert [m.text for m in seen[0].messages] == ["Sys.\n\nBe brief.", "go"]
    assert seen == model.requests


async def test_include_tools_offers_only_those() -> None:
    @tool
    async def other() -> str:
        """Other."""
        return "other"

    def only(ctx: HookContext) -> StateCommand:
        return StateCommand().schedule(IncludeTools(("other",)))

    model = ScriptedModel([say("ok")])
    await Runtime([Agent("a", model, "", [work, other], [Hooks(("run_start", only))])]).run("a", "go")
    assert [t.name for t in model.requests[0].tools] == ["other"]


async def test_actions_run_until_none_is_left_and_effects_after_the_commit() -> None:
    seen: list[Any] = []

    def ping(action: Ping, ctx: HookContext) -> StateCommand:
        seen.append((action.left, ctx.state(total)))
        command = StateCommand().update(total, 1)
        return command.schedule(Ping(action.left - 1)) if action.left else command.emit(Mail("ann"))

    async def send(effect: Mail, ctx: HookContext) -> None:
        seen.append((effect.to, ctx.state(total)))

    def handlers(r: Registrar) -> None:
        r.action(Ping, ping)
        r.effect(Mail, send)

    def begin(ctx: HookContext) -> StateCommand:
        return StateCommand().schedule(Ping(2))

    out = await run([say("ok")], Hooks(("run_start", begin), register=handlers))
    assert seen == [(2, 0), (1, 1), (0, 2), ("ann", 3)]
    assert out.state[total] == 3


async def test_a_failing_action_is_a_dead_letter_and_endless_ones_end_the_run() -> None:
    def fail(action: Any, ctx: HookContext) -> None:
        raise OSError("mailbox full")

    def again(action: Ping, ctx: HookContext) -> StateCommand:
        return StateCommand().schedule(Ping(1))

    def handlers(r: Registrar) -> None:
        r.action(Mail, fail)
        r.action(Ping, again)

    sink = RecordingSink()
    hook = ("run_start", lambda ctx: StateCommand().schedule(Mail("x")))
    out = await run([say("ok")], Hooks(hook, register=handlers), sink=sink)
    assert out.status is RunStatus.COMPLETED
    assert [e.message for e in sink.of("error")] == ["action Mail failed: mailbox full"]
    hook = ("run_start", lambda ctx: StateCommand().schedule(Ping(1)))
    out = await run([say("ok")], Hooks(hook, register=handlers))
    assert "still scheduling others after 16 rounds" in (out.error or "")


async def test_actions_and_effects_nobody_carries_out_are_refused_whole() -> None:
    @tool
    async def write() -> ToolOutput:
        """Write."""
        return ToolOutput.with_command(ToolResult.success("ok"), StateCommand().update(total, 1).schedule(Ping(1)))

    sink = RecordingSink()
    out = await run([call("write"), say("ok")], tools=[write], sink=sink)
    assert total not in out.state
    (finished,) = sink.of("tool_call_finished")
    assert "nobody carries out the action 'Ping': register a handler" in finished.message.text


async def test_tools_of_a_plugin_are_the_agents() -> None:
    class Toolkit(Plugin):
        def register(self, r: Registrar) -> None:
            r.tool(work)

    out = await run(ONE_CALL, Toolkit(), tools=())
    assert [m.text for m in out.messages if m.role == "tool"] == ["worked on x"]
    with pytest.raises(ValueError, match="agent 'a' has two tools named 'work'"):
        await run(ONE_CALL, Toolkit())


class Toolkit(Plugin):
    name = "toolkit"

    def register(self, r: Registrar) -> None:
        r.tool(double)


def double(n: int) -> int:
    """Double a number."""
    return 2 * n


async def test_a_plugin_may_give_a_plain_function_as_a_tool() -> None:
    agent = Agent("a", ScriptedModel([call("double", {"n": 4}), say("done")]), plugins=[Toolkit()])
    result = await Runtime([agent]).run("a", "go")
    assert [m.text for m in result.messages if m.role == "tool"] == ["8"]
