"""`@hook` makes a plugin from one function."""

from __future__ import annotations

from retinue import Agent, Block, Runtime, StateCommand, tool
from retinue.plugins import AddSystemText, BeforeToolContext, InferenceContext, hook
from retinue.testing import ScriptedModel, call, say


@hook("before_tool", inherited=True)
def no_refunds(ctx: BeforeToolContext) -> Block | None:
    return Block("ask a manager") if ctx.call.name == "refund" else None


@hook("before_inference", priority=10)
async def remind(ctx: InferenceContext) -> StateCommand:
    return StateCommand().schedule(AddSystemText(f"{len(ctx.request.messages)} messages so far."))


@tool
async def refund() -> str:
    """Refund."""
    return "refunded"


async def test_hook_holds_for_the_agent_and_below() -> None:
    clerk = Agent("clerk", ScriptedModel([call("refund"), say("not I")]), tools=[refund])
    model = ScriptedModel(
        [[call("refund"), call("task", {"subagent_type": "clerk", "description": "refund"})], say("no")]
    )
    till = Agent("till", model, "Help.", tools=[refund], plugins=[no_refunds, remind], subagents=[clerk])
    run = Runtime([till]).stream("till", "Refund it.")
    blocked = [
        (e.agent, e.message.text) async for e in run if e.kind == "tool_call_finished" and e.tool_name == "refund"
    ]
    assert sorted(blocked) == [("clerk", "blocked: ask a manager"), ("till", "blocked: ask a manager")]
    assert model.requests[0].messages[0].text == "Help.\n\n2 messages so far."


def test_a_hook_is_named_and_callable_like_its_function() -> None:
    assert (no_refunds.name, no_refunds.inherited) == ("no_refunds", True)
    assert (remind.name, remind.inherited) == ("remind", False)
