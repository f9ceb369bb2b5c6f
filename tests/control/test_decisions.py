"""Decisions on approvals: approve, approve with other arguments, reject, answer in place of the tool."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, field_validator

from retinue import (
    Agent,
    Decision,
    DecisionRefused,
    Permissions,
    Plugin,
    Registrar,
    ResumeMode,
    RunResult,
    RunStatus,
    Runtime,
    SetResult,
    Suspend,
    SuspendTicket,
    ToolContext,
    ToolResult,
    tool,
)
from retinue.plugins import AfterToolContext, BeforeToolContext
from retinue.testing import ScriptedModel, call, say

WITHIN_RULES = Permissions(ask=["pay"], deny=["pay(to=mallory)"])


class Bank:
    """An agent whose payments a human allows, in one process after another."""

    def __init__(self, url: str = "memory:") -> None:
        self.paid: list[tuple[str, int]] = []
        self.url = url

        @tool
        async def pay(to: str, amount: int) -> str:
            """Pay."""
            self.paid.append((to, amount))
            return f"paid {amount} to {to}"

        self.tool = pay

    def runtime(self, *turns: Any) -> tuple[Runtime, ScriptedModel]:
        model = ScriptedModel(turns)
        agent = Agent("bank", model, tools=[self.tool], plugins=[WITHIN_RULES])
        return Runtime.open(self.url, [agent], recover=False), model

    async def ask(self) -> RunResult:
        runtime, _ = self.runtime(call("pay", {"to": "ann", "amount": 5}, id="c1"))
        async with runtime:
            return await runtime.run("bank", "pay")


@pytest.fixture
def bank(tmp_path: Path) -> Bank:
    return Bank(f"sqlite:///{tmp_path}/bank.db")


async def decide(bank: Bank, decision: Decision) -> tuple[str, ScriptedModel]:
    """Ask in one runtime, answer in another; return what the model reads."""
    waiting = await bank.ask()
    assert waiting.status is RunStatus.SUSPENDED
    runtime, model = bank.runtime(say("done"))
    async with runtime:
        result = await runtime.resume(waiting.run_id, {"c1": decision})
    assert (result.status, result.response) == (RunStatus.COMPLETED, "done")
    return next(m.text for m in result.messages if m.role == "tool"), model


async def test_approve(bank: Bank) -> None:
    text, model = await decide(bank, Decision.approve())
    assert (text, bank.paid) == ("paid 5 to ann", [("ann", 5)])
    assert len(model.requests[0].messages) == 3


async def test_approve_with_other_arguments(bank: Bank) -> None:
    text, model = await decide(bank, Decision.approve({"to": "bob", "amount": 3}))
    assert (text, bank.paid) == ("paid 3 to bob", [("bob", 3)])
    said = 'A human changed the arguments of pay to {"to":"bob","amount":3}.'
    assert model.requests[0].messages[-1].text == said


async def test_an_event_has_the_arguments_that_a_human_gave(bank: Bank) -> None:
    waiting = await bank.ask()
    runtime, _ = bank.runtime(say("done"))
    async with runtime:
        await runtime.resume(waiting.run_id, {"c1": Decision.approve({"to": "bob", "amount": 3})})
        (resumed,) = [e async for e in runtime.events(waiting.run_id) if e.kind == "tool_call_resumed"]
    assert (resumed.args, resumed.decision and resumed.decision.action) == ({"to": "bob", "amount": 3}, "resume")


@pytest.mark.parametrize("is_elsewhere", [False, True])
async def test_arguments_that_do_not_fit_are_refused_and_the_call_waits(bank: Bank, is_elsewhere: bool) -> None:
    runtime, _ = bank.runtime(call("pay", {"to": "ann", "amount": 5}, id="c1"), say("done"))
    async with runtime:
        waiting = await runtime.run("bank", "pay")
        other, _ = bank.runtime(say("done"))
        async with other if is_elsewhere else runtime as answering:
            with pytest.raises(DecisionRefused, match='args: "amount" is a required property'):
                await answering.resume(waiting.run_id, {"c1": Decision.approve({"to": "bob"})})
            assert (await answering.result(waiting.run_id)).status is RunStatus.SUSPENDED
            result = await answering.resume(waiting.run_id, {"c1": Decision.approve({"to": "bob", "amount": 1})})
    assert (result.status, bank.paid) == (RunStatus.COMPLETED, [("bob", 1)])


class Place(BaseModel):
    """A place, with a rule that no schema can say."""

    city: str

    @field_validator("city")
    @classmethod
    def known(cls, city: str) -> str:
        if city == "Atlantis":
            raise ValueError("no such city")
        return city


async def test_arguments_that_only_python_can_refuse_make_the_call_wait_again() -> None:
    went: list[str] = []

    @tool
    async def go(place: Place) -> str:
        """Go."""
        went.append(place.city)
        return "there"

    model = ScriptedModel([call("go", {"place": {"city": "Rome"}}, id="c1"), say("ok")])
    runtime = Runtime([Agent("a", model, tools=[go], plugins=[Permissions(ask=["go"])])])
    waiting = await runtime.run("a", "go")
    with pytest.raises(DecisionRefused, match=r'args.place.city: 5 is not of type "string"'):
        await runtime.resume(waiting.run_id, {"c1": Decision.approve({"place": {"city": 5}})})
    for _ in range(2):
        again = await runtime.resume(waiting.run_id, {"c1": Decision.approve({"place": {"city": "Atlantis"}})})
        assert again.status is RunStatus.SUSPENDED
        question, why = again.suspended["c1"].message.splitlines()[:2]
        assert question == "May a call go?"
        assert why.startswith("The new arguments are not valid: place:")
    result = await runtime.resume(waiting.run_id, {"c1": Decision.approve({"place": {"city": "Oslo"}})})
    assert (result.status, went) == (RunStatus.COMPLETED, ["Oslo"])


@pytest.mark.parametrize(
    ("decision", "asked", "fitting"),
    [
        (Decision.approve(), "tool", r"Decision.resume\(value\) answers it"),
        (Decision.reject(), "tool", r"Decision.cancel\(reason\) refuses the call"),
        (Decision.reject(), "hook", r"Decision.cancel\(reason\) refuses the call"),
        (Decision.approve({"to": "bob"}), "hook", r"Decision.approve\(\) without args lets it go on"),
        (Decision.approve(), "hook", None),
    ],
)
async def test_a_ticket_that_asks_no_permission_says_what_fits(
    decision: Decision, asked: str, fitting: str | None
) -> None:
    @tool
    async def send(to: str, ctx: ToolContext) -> Any:
        """Send."""
        return "sent" if ctx.resume_input or asked == "hook" else ToolResult.suspended("To whom?")

    class Ask(Plugin):
        def register(self, r: Registrar) -> None:
            r.hook("before_tool", lambda ctx: Suspend(SuspendTicket("t", "ask", "Go on?")) if asked == "hook" else None)

    model = ScriptedModel([call("send", {"to": "ann"}, id="c1"), say("ok")])
    runtime = Runtime([Agent("a", model, tools=[send], plugins=[Ask()])])
    waiting = await runtime.run("a", "go")
    if fitting is None:
        assert (await runtime.resume(waiting.run_id, {"c1": decision})).status is RunStatus.COMPLETED
        return
    with pytest.raises(DecisionRefused, match=fitting):
        await runtime.resume(waiting.run_id, {"c1": decision})
    assert (await runtime.result(waiting.run_id)).status is RunStatus.SUSPENDED


DENIED = "pay is not permitted with these arguments"


@pytest.mark.parametrize("is_elsewhere", [False, True])
async def test_arguments_that_a_rule_denies_are_refused_and_the_call_waits(bank: Bank, is_elsewhere: bool) -> None:
    runtime, _ = bank.runtime(call("pay", {"to": "ann", "amount": 5}, id="c1"), say("done"))
    async with runtime:
        waiting = await runtime.run("bank", "pay")
        other, _ = bank.runtime(say("done"))
        async with other if is_elsewhere else runtime as answering:
            with pytest.raises(DecisionRefused, match=f"ticket 'permission_c1' is refused: {DENIED}"):
                await answering.resume(waiting.run_id, {"c1": Decision.approve({"to": "mallory", "amount": 3})})
            assert (await answering.result(waiting.run_id)).status is RunStatus.SUSPENDED
            result = await answering.resume(waiting.run_id, {"c1": Decision.approve({"to": "bob", "amount": 1})})
            kinds = [event.kind async for event in answering.events(waiting.run_id)]
    assert (result.status, bank.paid) == (RunStatus.COMPLETED, [("bob", 1)])
    assert (kinds.count("run_started"), kinds.count("tool_call_resumed")) == (2, 1)


@dataclass
class Payment:
    to: str
    amount: int = 1000


class Payments:
    """A tool whose call a human changes, under rules."""

    def __init__(self, rules: Permissions, *, below: bool = False) -> None:
        self.paid: list[Payment] = []

        @tool
        def pay(payment: Payment, note: str = "urgent") -> str:
            """Pay."""
            self.paid.append(payment)
            return "paid"

        turns = [call("pay", {"payment": {"to": "ann", "amount": 5}, "note": "x"}, id="c1"), say("done")]
        agent = Agent("bank", ScriptedModel(turns), tools=[pay], plugins=[Permissions(ask=["pay"]) if below else rules])
        if below:
            ask = call("task", {"subagent_type": "bank", "description": "x"}, id="c0")
            agent = Agent("boss", ScriptedModel([ask, say("done")]), subagents=[agent], plugins=[rules])
        self.runtime, self.agent = Runtime([agent]), agent

    async def change(self, args: dict[str, Any]) -> RunResult:
        self.waiting = await self.runtime.run(self.agent.name, "pay")
        return await self.runtime.resume(self.waiting.run_id, {"c1": Decision.approve(args)})


@pytest.mark.parametrize(
    "rules",
    [
        Permissions(ask=["pay"], deny=["pay(note=urgent)"]),  # a default that the decision leaves out
        Permissions(ask=["pay(note=x)"], allow=["task"], default="deny"),  # what no rule names
    ],
)
@pytest.mark.parametrize("below", [False, True])
async def test_denied_changes_are_found_by_defaults_and_by_rules_above(rules: Permissions, below: bool) -> None:
    payments = Payments(rules, below=below)
    with pytest.raises(DecisionRefused, match=DENIED):
        await payments.change({"payment": {"to": "ann"}})
    assert payments.paid == []


async def test_a_change_that_only_the_tool_can_complete_makes_the_call_wait_again() -> None:
    payments = Payments(Permissions(ask=["pay"], deny=['pay(payment={"to": "ann", "amount": 1000})']))
    result = await payments.change({"payment": {"to": "ann"}})
    assert (result.status, payments.paid) == (RunStatus.SUSPENDED, [])
    assert result.suspended["c1"].message == f"May bank call pay?\nThe new arguments are refused: {DENIED}"
    result = await payments.runtime.resume(result.run_id, {"c1": Decision.reject()})
    assert [message.text for message in result.messages if message.role == "tool"] == ["blocked: a human said no"]


async def test_a_rejection_with_arguments_is_a_rejection(bank: Bank) -> None:
    payload = {"approved": False, "args": {"to": "mallory", "amount": 3}, "message": "never"}
    assert (await decide(bank, Decision.resume(payload)))[0] == "blocked: never"


async def test_arguments_that_a_tool_asks_for_are_under_the_rules_too() -> None:
    paid: list[str] = []

    @tool
    async def pay(to: str, ctx: ToolContext) -> Any:
        """Pay."""
        if ctx.resume_input is None:
            ticket = SuspendTicket("t", "ask", "To whom?", resume_mode=ResumeMode.PASS_DECISION)
            return ToolResult.suspended("To whom?", ticket)
        paid.append(to)
        return "paid"

    model = ScriptedModel([call("pay", {"to": "ann"}, id="c1"), say("ok")])
    runtime = Runtime([Agent("a", model, tools=[pay], plugins=[Permissions(deny=["pay(to=mallory)"])])])
    waiting = await runtime.run("a", "go")
    with pytest.raises(DecisionRefused, match=DENIED):
        await runtime.resume(waiting.run_id, {"c1": Decision.resume({"to": "mallory"})})
    assert (await runtime.resume(waiting.run_id, {"c1": Decision.resume({"to": "bob"})})).response == "ok"
    assert paid == ["bob"]


async def test_a_message_with_an_approval_reaches_the_model(bank: Bank) -> None:
    text, model = await decide(bank, Decision.resume({"approved": True, "message": "this once"}))
    assert (text, bank.paid) == ("paid 5 to ann", [("ann", 5)])
    assert model.requests[0].messages[-1].text == "A human said of the call of pay: this once"


async def test_reject(bank: Bank) -> None:
    assert (await decide(bank, Decision.reject()))[0] == "blocked: a human said no"
    assert bank.paid == []


async def test_reject_with_a_message(bank: Bank) -> None:
    assert (await decide(bank, Decision.reject("ask her first")))[0] == "blocked: ask her first"
    assert bank.paid == []


async def test_answer_in_place_of_the_tool(bank: Bank) -> None:
    text, _ = await decide(bank, Decision.answer({"receipt": 7}))
    assert (text, bank.paid) == ('{"receipt":7}', [])


@pytest.mark.parametrize(
    ("payload", "field"),
    [
        ({"approved": True, "argz": {}}, "argz"),
        ({"approved": True, "args": [1]}, "object"),
        ({"args": {}}, "approved"),
        ("yes", "object"),
    ],
)
async def test_what_is_no_approval_is_refused(bank: Bank, payload: Any, field: str) -> None:
    waiting = await bank.ask()
    runtime, _ = bank.runtime()
    async with runtime:
        with pytest.raises(DecisionRefused, match=field):
            await runtime.resume(waiting.run_id, {"c1": Decision.resume(payload)})
        assert (await runtime.result(waiting.run_id)).status is RunStatus.SUSPENDED


@pytest.mark.parametrize("mode", list(ResumeMode))
async def test_an_answer_counts_in_every_mode_and_is_not_checked(mode: ResumeMode) -> None:
    runs = 0

    @tool
    async def work(size: int) -> ToolResult:
        """Work."""
        nonlocal runs
        runs += 1
        ticket = SuspendTicket("t", "work", response_schema={"type": "object"}, resume_mode=mode)
        return ToolResult.suspended("wait", ticket)

    agent = Agent("a", ScriptedModel([call("work", {"size": 1}, id="c1"), say("ok")]), tools=[work])
    runtime = Runtime([agent])
    waiting = await runtime.run("a", "go")
    result = await runtime.resume(waiting.run_id, {"t": Decision.answer("mine")})
    assert (runs, result.messages[-2].text) == (1, "mine")


async def test_hooks_see_an_answer_as_a_result() -> None:
    seen: list[tuple[str, Any]] = []

    class Watch(Plugin):
        def register(self, r: Registrar) -> None:
            r.hook("before_tool", self.before, priority=200)
            r.hook("after_tool", self.after)

        def before(self, ctx: BeforeToolContext) -> SetResult | None:
            seen.append((ctx.phase, ctx.call.args))
            return None

        def after(self, ctx: AfterToolContext) -> None:
            seen.append((ctx.phase, ctx.result.data))

    bank = Bank()
    model = ScriptedModel([call("pay", {"to": "ann", "amount": 5}, id="c1"), say("ok")])
    runtime = Runtime([Agent("bank", model, tools=[bank.tool], plugins=[WITHIN_RULES, Watch()])])
    waiting = await runtime.run("bank", "pay")
    await runtime.resume(waiting.run_id, {"c1": Decision.answer("mine")})
    assert seen == [("before_tool", {"to": "ann", "amount": 5}), ("after_tool", "mine")]


async def test_a_plain_value_is_no_decision() -> None:
    bank = Bank()
    runtime, _ = bank.runtime(call("pay", {"to": "ann", "amount": 5}, id="c1"))
    waiting = await runtime.run("bank", "pay")
    with pytest.raises(DecisionRefused, match=r"write Decision.approve\(\)"):
        await runtime.resume(waiting.run_id, {"c1": True})  # pyright: ignore[reportArgumentType]
