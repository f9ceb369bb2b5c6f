"""Hooks before tools hold for the whole tree below an agent, however the work is delegated."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from retinue import (
    Agent,
    Block,
    Child,
    Decision,
    HarnessAgent,
    HookContext,
    Plugin,
    Registrar,
    RunResult,
    RunStatus,
    Runtime,
    StateCommand,
    StateKey,
    SubagentDeclaration,
    Suspend,
    SuspendTicket,
    ToolContext,
    ToolResult,
    tool,
)
from retinue.plugins import BeforeToolContext, hook
from retinue.testing import ScriptedModel, call, say

seen: StateKey[list[str], str] = StateKey(
    "guard.seen", list[str], update=str, reduce=lambda known, new: [*known, new], merge="commutative", default=list[str]
)


class Guard(Plugin):
    """Blocks refunds, counts calls in its own state, and notes the phases in which it was asked."""

    name = "guard"

    def __init__(self, inherited: bool | None = None) -> None:
        self.inherited = inherited
        self.asked: list[tuple[str, str]] = []

    def register(self, r: Registrar) -> None:
        r.key(seen)
        r.hook("before_tool", self.check)
        r.hook("step_start", self.watch)

    def watch(self, ctx: HookContext) -> None:
        self.asked.append((ctx.agent.name, ctx.phase))

    def check(self, ctx: BeforeToolContext) -> Block | StateCommand:
        self.asked.append((ctx.agent.name, ctx.phase))
        assert ctx.state(seen) is not None
        return Block("ask a manager") if ctx.call.name == "refund" else StateCommand().update(seen, ctx.call.id)


class Till:
    """An agent that delegates, and a clerk that tries to refund."""

    def __init__(self) -> None:
        self.refunds = 0

        @tool
        def refund() -> str:
            """Refund."""
            self.refunds += 1
            return "refunded"

        self.refund = refund

    def clerk(self, name: str = "clerk", **options: Any) -> Agent:
        def turn(request: Any) -> Any:
            last = request.messages[-1]
            has_tried = last.role == "tool" and "goes on from here" not in last.text
            return say(f"clerk: {last.text}") if has_tried else call("refund")

        return Agent(name, ScriptedModel(turn), tools=[self.refund], **options)

    def boss(self, way: str, folder: Path, guard: Plugin) -> Agent:
        if way in ("declared", "general-purpose", "background"):
            return self.harness(way, folder, guard)
        clerk = self.clerk()

        @tool
        async def ask(ctx: ToolContext) -> str:
            """Ask the clerk."""
            if way == "run_children":
                (outcome,) = await ctx.run_children([Child(clerk, "refund")])
            else:
                outcome = await ctx.run_child(clerk, "refund")
            return str(outcome.response)

        first: dict[str, Any] = {
            "task": call("task", {"subagent_type": "clerk", "description": "refund"}),
            "as_tool": call("agent_run_clerk", {"prompt": "refund"}),
            "handoff": call("transfer_to_clerk", {}),
            "two handoffs": call("transfer_to_middle", {}),
            "two levels": call("task", {"subagent_type": "middle", "description": "refund"}),
        }
        model = ScriptedModel([first.get(way, call("ask")), say("done")])
        parts: dict[str, Any] = {"plugins": [guard]}
        if way == "handoff":
            parts["handoffs"] = [clerk]
        elif way == "two handoffs":  # the guard is of the second agent of three
            parts["handoffs"] = [
                Agent("middle", ScriptedModel([call("transfer_to_clerk", {})]), handoffs=[clerk], plugins=[guard])
            ]
            parts["plugins"] = []
        elif way == "as_tool":
            parts["tools"] = [clerk.as_tool()]
        elif way == "task":
            parts["subagents"] = [clerk]
        elif way == "two levels":
            turns = [call("task", {"subagent_type": "clerk", "description": "refund"}), say("ok")]
            parts["subagents"] = [Agent("middle", ScriptedModel(turns), subagents=[clerk])]
        else:
            parts["tools"] = [ask]
        return Agent("boss", model, **parts)

    def harness(self, way: str, folder: Path, guard: Plugin) -> HarnessAgent:
        name = "general-purpose" if way == "general-purpose" else "clerk"
        spawn = {"agent_id": name, "task": "refund", "timeout_seconds": 0 if way == "background" else 60}

        def turn(request: Any) -> Any:
            last = request.messages[-1]
            if "# Subagent Context" in request.messages[0].text:
                return say(last.text) if last.role == "tool" else call("refund")
            has_spawned = any(message.role == "tool" for message in request.messages)  # the last may tell of its end
            return say("done") if has_spawned else call("agent_spawn", spawn)

        declared = [SubagentDeclaration("clerk", "A clerk")]
        return HarnessAgent(
            "boss", ScriptedModel(turn), "Lead.", [self.refund], [guard], workspace=folder, subagents=declared
        )


async def whole(runtime: Runtime, agent: Agent) -> tuple[RunResult, list[Any]]:
    run = runtime.stream(agent, "go", thread_id="t")
    result = await run.result()
    return result, [event async for event in runtime.events(run.run_id)]


WAYS = [
    "task", "two levels", "run_child", "run_children", "as_tool", "handoff", "two handoffs", "declared", "general-purpose"
]  # fmt: skip


@pytest.mark.parametrize("way", [*WAYS, "background"])
async def test_a_hook_before_tools_holds_however_the_work_is_delegated(way: str, tmp_path: Path) -> None:
    till, guard = Till(), Guard()
    agent = till.boss(way, tmp_path, guard)
    async with Runtime([agent]) as runtime:
        _, events = await whole(runtime, agent)
    ends = [event for event in events if event.kind == "tool_call_finished" and event.tool_name == "refund"]
    assert [(event.status, event.message.text) for event in ends] == [("failed", "blocked: ask a manager")]
    assert till.refunds == 0
    above = {"boss", "middle"} if way == "two handoffs" else {"boss"}
    below = {phase for name, phase in guard.asked if name not in above}
    # A mirror of its parent has the plugin itself.
    assert below == ({"before_tool"} if way != "general-purpose" else {"before_tool", "step_start"})


@pytest.mark.parametrize("way", ["task", "run_child", "declared", "background"])
async def test_a_hook_that_is_not_for_children_does_not_hold_for_them(way: str, tmp_path: Path) -> None:
    till, guard = Till(), Guard(inherited=False)
    agent = till.boss(way, tmp_path, guard)
    async with Runtime([agent]) as runtime:
        await whole(runtime, agent)
    assert till.refunds == 1
    assert {name for name, _ in guard.asked} == {"boss"}


async def test_all_phases_are_inherited_where_the_plugin_says_so(tmp_path: Path) -> None:
    till, guard = Till(), Guard(inherited=True)
    agent = till.boss("task", tmp_path, guard)
    await whole(Runtime([agent]), agent)
    assert {phase for name, phase in guard.asked if name == "clerk"} == {"before_tool", "step_start"}


async def test_a_background_child_obeys_after_a_restart(tmp_path: Path) -> None:
    """The runtime closes before the child has called its tool; the next one continues the child under the same hook."""
    till, url, reached = Till(), f"sqlite:///{tmp_path}/app.db", asyncio.Event()

    spawn = {"agent_id": "clerk", "task": "refund", "timeout_seconds": 0}

    def boss(waits: bool) -> HarnessAgent:
        class Waiting:
            name = "testing:waits"

            async def stream(self, request: Any) -> Any:
                last = request.messages[-1]
                if "# Subagent Context" not in request.messages[0].text:
                    has_spawned = any(message.role == "tool" for message in request.messages)
                    turn: Any = say("done") if has_spawned else call("agent_spawn", spawn)
                else:
                    if waits:
                        reached.set()
                        await asyncio.Event().wait()
                    turn = say(last.text) if last.role == "tool" else call("refund")
                async for chunk in ScriptedModel([turn]).stream(request):
                    yield chunk

        declared = [SubagentDeclaration("clerk", "A clerk")]
        model: Any = Waiting()
        return HarnessAgent("boss", model, "Lead.", [till.refund], [Guard()], workspace=tmp_path, subagents=declared)

    async with Runtime.open(url, [boss(True)], on_close="leave") as first:
        run = first.stream("boss", "go", thread_id="t")
        await run.result()
        await reached.wait()
    async with Runtime.open(url, [boss(False)]) as second:
        events: list[Any] = [event async for event in second.events(run.run_id)]
    ends = [event for event in events if event.kind == "tool_call_finished" and event.tool_name == "refund"]
    assert [event.message.text for event in ends] == ["blocked: ask a manager"]
    assert till.refunds == 0


async def test_a_conversation_that_is_continued_later_obeys(tmp_path: Path) -> None:
    """The child is started by one run and gets a message from the next run of the thread."""
    till, guard = Till(), Guard()
    spawn = {"agent_id": "clerk", "task": "look", "timeout_seconds": 60, "label": "a"}
    turns = [
        call("agent_spawn", spawn),
        say("later"),
        call("agent_send", {"message": "refund", "label": "a"}),
        say("done"),
    ]

    def turn(request: Any) -> Any:
        last = request.messages[-1]
        if "# Subagent Context" not in request.messages[0].text:
            return turns.pop(0)
        return call("refund") if last.role == "user" and "refund" in last.text else say(last.text)

    declared = [SubagentDeclaration("clerk", "A clerk")]
    agent = HarnessAgent(
        "boss", ScriptedModel(turn), "Lead.", [till.refund], [guard], workspace=tmp_path, subagents=declared
    )
    url = f"sqlite:///{tmp_path}/app.db"
    async with Runtime.open(url, [agent]) as runtime:
        await whole(runtime, agent)
        guard.asked.clear()
    async with Runtime.open(url, [agent]) as runtime:
        _, events = await whole(runtime, agent)
    ends = [event for event in events if event.kind == "tool_call_finished" and event.tool_name == "refund"]
    assert [event.message.text for event in ends] == ["blocked: ask a manager"]
    assert ("clerk", "before_tool") in guard.asked
    assert till.refunds == 0


@pytest.mark.parametrize("way", ["task", "handoff", "two handoffs"])
async def test_a_run_that_waits_for_a_human_obeys_when_another_process_continues_it(way: str, tmp_path: Path) -> None:
    """Nothing of the first process is left when the answer comes."""
    till, url = Till(), f"sqlite:///{tmp_path}/app.db"

    @tool
    async def ask(ctx: ToolContext) -> Any:
        """Ask a human."""
        return ToolResult.suspended("May I?") if ctx.resume_input is None else str(ctx.resume_input)

    def boss() -> Agent:
        def turn(request: Any) -> Any:
            last = request.messages[-1]
            if last.role == "tool" and last.text == "yes":
                return call("refund")
            return say(last.text) if last.text.startswith("blocked") else call("ask")

        clerk = Agent("clerk", ScriptedModel(turn), tools=[till.refund, ask])
        if way == "task":
            model = ScriptedModel(
                lambda request: (
                    say("done")
                    if request.messages[-1].role == "tool"
                    else call("task", {"subagent_type": "clerk", "description": "x"})
                )
            )
            return Agent("boss", model, plugins=[Guard()], subagents=[clerk])
        if way == "handoff":
            return Agent("boss", ScriptedModel([call("transfer_to_clerk", {})]), plugins=[Guard()], handoffs=[clerk])
        middle = Agent("middle", ScriptedModel([call("transfer_to_clerk", {})]), plugins=[Guard()], handoffs=[clerk])
        return Agent("boss", ScriptedModel([call("transfer_to_middle", {})]), handoffs=[middle])

    async with Runtime.open(url, [boss()]) as first:
        waiting = await first.run("boss", "go")
        assert waiting.status is RunStatus.SUSPENDED
    async with Runtime.open(url, [boss()]) as second:
        (ticket,) = waiting.suspended.values()
        result = await second.resume(waiting.run_id, {"/".join(ticket.path): Decision.resume("yes")})
        events: list[Any] = [event async for event in second.events(waiting.run_id)]
    assert result.status is RunStatus.COMPLETED
    ends = [event for event in events if event.kind == "tool_call_finished" and event.tool_name == "refund"]
    assert [event.message.text for event in ends] == ["blocked: ask a manager"]
    assert till.refunds == 0


# --- state of the agent above


async def test_keys_of_the_agent_above_have_defaults_below_and_writes_are_dropped_and_reported() -> None:
    """The hook counts calls in its own state. A child without that key is not failed by it."""

    @tool
    def look() -> str:
        """Look."""
        return "nothing"

    class Count(Plugin):
        name = "count"

        def register(self, r: Registrar) -> None:
            r.key(seen)
            r.hook("before_tool", self.count)

        def count(self, ctx: BeforeToolContext) -> StateCommand:
            known.append((ctx.agent.name, len(ctx.state(seen)), ctx.snapshot.get(seen)))
            return StateCommand().update(seen, ctx.call.name).event({"counted": ctx.call.name}).schedule(Odd())

    class Odd:
        """An action that only the agent above has a handler for."""

    class Handles(Plugin):
        name = "handles"

        def register(self, r: Registrar) -> None:
            r.action(Odd, lambda action, ctx: None)

    known: list[Any] = []
    child = Agent("clerk", ScriptedModel([call("look"), call("look"), say("found")]), tools=[look])
    model = ScriptedModel([call("task", {"subagent_type": "clerk", "description": "x"}), say("done")])
    agent = Agent("boss", model, plugins=[Count(), Handles()], subagents=[child])
    result, events = await whole(Runtime([agent]), agent)
    assert (result.status, result.response) == (RunStatus.COMPLETED, "done")
    assert known == [("boss", 0, None), ("clerk", 0, None), ("clerk", 0, None)]
    (reported,) = [event.message for event in events if event.kind == "error"]
    assert reported == (
        "hook 'count' of plugin 'count' is inherited, and agent 'clerk' does not register state key 'guard.seen', "
        "action Odd: dropped. Give the agent a plugin that registers it"
    )
    counted = [event.data for event in events if event.kind == "custom"]
    assert counted == [{"counted": name} for name in ("look", "look", "task")]


async def test_a_plugin_that_parent_and_child_share_asks_once() -> None:
    @hook("before_tool")
    def approve(ctx: BeforeToolContext) -> Suspend | None:
        asked.append(ctx.agent.name)
        wanted = ctx.call.name == "refund" and ctx.decision is None
        return Suspend(SuspendTicket("t", "approve", "Refund?")) if wanted else None

    asked: list[str] = []
    till = Till()
    clerk = till.clerk(plugins=[approve])
    model = ScriptedModel([call("task", {"subagent_type": "clerk", "description": "x"}), say("done")])
    runtime = Runtime([Agent("boss", model, plugins=[approve], subagents=[clerk])])
    waiting = await runtime.run("boss", "go")
    assert asked == ["boss", "clerk"]
    result = await runtime.resume(waiting.run_id, {"t": Decision.approve()})
    assert (result.status, till.refunds) == (RunStatus.COMPLETED, 1)
    assert asked.count("clerk") == 2
