"""Random calls, hooks, conflicts, suspensions and decisions against a model that is too simple to be wrong."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, Literal

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct

from retinue import (
    Agent,
    Block,
    Decision,
    HookContext,
    Plugin,
    Registrar,
    RunStatus,
    Runtime,
    SetResult,
    StateCommand,
    StateKey,
    Suspend,
    SuspendTicket,
    ToolContext,
    ToolOutput,
    ToolResult,
    tool,
)
from retinue.testing import ScriptedModel, call, say

from ..effort import share

finished: StateKey[int, int] = StateKey(
    "finished", int, reduce=lambda a, b: a + b, merge="commutative", persistent=True
)
judged: StateKey[int, int] = StateKey("judged", int, reduce=lambda a, b: a + b, merge="commutative", persistent=True)
owner: StateKey[str, str] = StateKey("owner", str, persistent=True)


class Plan(Struct, frozen=True):
    """What one call does, and what is done to it."""

    id: str
    does: Literal["work", "raise", "error"]
    waits: int
    claims: bool
    hook: Literal["none", "block", "set", "suspend"]
    answers: tuple[bool, ...]
    """Resume (True) or cancel, each time it waits."""

    @property
    def stops(self) -> int:
        """How often it waits for a human before it ends, if nobody cancels."""
        if self.hook in ("block", "set"):
            return 0
        return self.waits + (self.hook == "suspend")

    @property
    def cancelled(self) -> bool:
        return not all(self.answers[: self.stops])


def plans(prefix: str) -> Any:
    return st.builds(
        Plan,
        id=st.just(prefix),
        does=st.sampled_from(["work", "work", "raise", "error"]),
        waits=st.sampled_from([0, 0, 1, 2]),
        claims=st.booleans(),
        hook=st.sampled_from(["none", "none", "block", "set", "suspend"]),
        answers=st.tuples(*[st.sampled_from([True, True, False])] * 3),
    )


steps = st.lists(st.integers(1, 4), min_size=1, max_size=3).flatmap(
    lambda sizes: st.tuples(*[st.tuples(*[plans(f"c{i}-{j}") for j in range(n)]) for i, n in enumerate(sizes)])
)


class Judge(Plugin):
    """Intercepts as planned, and counts what it sees in state."""

    name = "judge"

    def __init__(self, by_id: dict[str, Plan]) -> None:
        self.by_id = by_id

    def register(self, r: Registrar) -> None:
        for key in (finished, judged, owner):
            r.key(key)
        r.hook("before_tool", self.intercept)
        r.hook("after_tool", self.count)
        r.hook("after_tool", self.count, priority=1)

    def intercept(self, ctx: HookContext) -> Any:
        assert ctx.call is not None
        match self.by_id[ctx.call.id].hook:
            case "block":
                return Block("planned")
            case "set":
                return SetResult(ToolResult.success("set"))
            case "suspend" if ctx.decision is None:
                return Suspend(SuspendTicket(f"hook-{ctx.call.id}", "ask", "?"))
            case _:
                return None

    def count(self, ctx: HookContext) -> StateCommand:
        return StateCommand().update(judged, 1)


def make_tool(by_id: dict[str, Plan], ran: Counter[str]) -> Any:
    @tool
    async def act(ctx: ToolContext) -> Any:
        """Act as planned."""
        plan = by_id[ctx.call_id]
        ran[plan.id] += 1
        await asyncio.sleep(0)
        if ran[plan.id] <= plan.waits:
            return ToolResult.suspended("wait", ticket=SuspendTicket(f"tool-{plan.id}", "ask", "?"))
        if plan.does == "raise":
            raise RuntimeError("planned")
        result = ToolResult.error("planned") if plan.does == "error" else ToolResult.success("worked")
        update: dict[Any, Any] = {finished: 1, owner: plan.id} if plan.claims else {finished: 1}
        return ToolOutput(result, update=update)

    return act


async def play(plan: tuple[tuple[Plan, ...], ...], order: list[int]) -> tuple[Any, list[Any], Counter[str]]:
    """Run the plan, answering what waits in an order drawn by hypothesis, some at a time."""
    by_id = {one.id: one for step in plan for one in step}
    ran: Counter[str] = Counter()
    script = [*[[call("act", id=one.id) for one in step] for step in plan], say("done")]
    agent = Agent("a", ScriptedModel(script), tools=[make_tool(by_id, ran)], plugins=[Judge(by_id)])
    runtime = Runtime([agent])
    result = await runtime.run("a", "go")
    answered: Counter[str] = Counter()
    turn = 0
    while result.status is RunStatus.SUSPENDED:
        waiting = list(result.suspended)
        count = order[turn % len(order)] % len(waiting) + 1
        start = order[(turn + 1) % len(order)] % len(waiting)
        chosen = (waiting * 2)[start : start + count]
        turn += 1
        decisions: dict[str, Decision] = {}
        for call_id in chosen:
            go_on = by_id[call_id].answers[answered[call_id]]
            answered[call_id] += 1
            target = call_id if turn % 2 else result.suspended[call_id].id
            decisions[target] = Decision.resume({}) if go_on else Decision.cancel("planned")
        result = await runtime.resume(result.run_id, decisions)
        again = await runtime.resume(result.run_id, decisions)
        assert again == result
    return result, [event async for event in runtime.events(result.run_id)], ran


def expected_texts(step: tuple[Plan, ...]) -> list[set[str]]:
    """For each call what the model may read; of two claims of one key in a step, one wins."""
    texts: list[set[str]] = []
    for one in step:
        if one.hook == "block":
            texts.append({"blocked: planned"})
        elif one.hook == "set":
            texts.append({"set"})
        elif one.cancelled:
            texts.append({"cancelled: planned"})
        elif one.does == "raise":
            texts.append({"internal: RuntimeError: planned"})
        else:
            said = "worked" if one.does == "work" else "planned"
            texts.append({said, "conflict"} if one.claims else {said})
    return texts


@settings(max_examples=share(150), deadline=None)
@given(steps, st.lists(st.integers(0, 5), min_size=2, max_size=6))
def test_no_call_ends_twice_and_none_is_lost(plan: tuple[tuple[Plan, ...], ...], order: list[int]) -> None:
    result, events, ran = asyncio.run(play(plan, order))
    assert result.status is RunStatus.COMPLETED
    calls = [one for step in plan for one in step]
    ended = Counter(
        e.call_id for e in events if e.kind == "tool_call_finished" and e.status in ("succeeded", "failed", "cancelled")
    )
    assert ended == Counter(one.id for one in calls)
    messages = [m for m in result.messages if m.role == "tool"]
    assert [m.tool_call_id for m in messages] == [one.id for one in calls]
    texts = {m.tool_call_id: "conflict" if "already written" in m.text else m.text for m in messages}
    for step in plan:
        for one, allowed in zip(step, expected_texts(step), strict=True):
            assert texts[one.id] in allowed, one
        claims = [one for one in step if one.claims and texts[one.id] in ("worked", "planned", "conflict")]
        if claims:
            assert any(texts[one.id] != "conflict" for one in claims)
        if claims and not any(one.stops for one in step):
            assert sum(texts[one.id] != "conflict" for one in claims) == 1
    for one in calls:
        assert ran[one.id] == (0 if one.hook in ("block", "set") else _times_run(one))
    done = [one for one in calls if texts[one.id] in ("worked", "planned") and one.hook in ("none", "suspend")]
    assert result.state.get(finished, 0) == len(done)
    assert [e.seq for e in events] == list(range(1, len(events) + 1))
    legs = [e.kind for e in events if e.kind in ("run_started", "run_finished")]
    assert legs == ["run_started", "run_finished"] * (len(legs) // 2)


def _times_run(one: Plan) -> int:
    """How often the tool itself runs: once for each time it may go on."""
    answers = one.answers[: one.stops]
    go_ons = answers.index(False) if False in answers else len(answers)
    hook = one.hook == "suspend"
    if hook and go_ons == 0:
        return 0
    return go_ons + (0 if hook else 1) if False in answers else one.waits + 1
