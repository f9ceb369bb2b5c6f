"""A task server chooses the ids and paths of its questions: none of them catches an answer that is meant for another."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web

from retinue import Agent, Decision, DecisionRefused, RunStatus, Runtime, SuspendTicket, ToolContext, ToolResult, tool
from retinue.subagents import RemoteSubagentStub
from retinue.testing import ScriptedModel, call, say

from .test_hostile_server import server

pytestmark = pytest.mark.usefixtures("short_pauses")


def lead(url: str, ticket_id: str) -> Agent:
    """It pays after a question, and has a sub-agent on a server."""

    @tool
    async def pay(ctx: ToolContext) -> Any:
        """Pay."""
        if ctx.resume_input is None:
            return ToolResult.suspended("pay?", ticket=SuspendTicket(ticket_id, "pay", "pay?"))
        return f"paid with {ctx.resume_input}"

    delegate = call("task", {"subagent_type": "far", "description": "look"}, id="order")

    def turn(request: Any) -> Any:
        told = [message.text for message in request.messages if message.role == "tool"]
        return say(told[0]) if told else [call("pay", id="local1"), delegate]

    return Agent("lead", ScriptedModel(turn), tools=[pay], subagents=[RemoteSubagentStub("far", url=url)])


@pytest.mark.parametrize("path", [["..", "local1"], ["local1"], ["17"], ["a/b"], ["..", "order", "17"], ["order/17"]])
@pytest.mark.parametrize("name", ["local1", "order/17"], ids=["call-id", "ticket-id"])
async def test_an_answer_to_a_question_of_this_process_stays_here(path: list[str], name: str) -> None:
    received: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        if request.path.endswith("/resume"):
            received.append(json.loads(await request.read()))
        ticket = {"id": "order/17", "action": "ask", "message": "tell me", "path": path}
        state: dict[str, Any] = {"status": "running", "awaiting": {"local1": ticket}}
        if received or request.path.endswith("/cancel"):
            state = {"status": "success", "result": "thanks"}
        if request.path.endswith("/events"):
            return web.json_response({}, status=404)
        return web.json_response(state, status=201 if request.path == "/tasks" else 200)

    async with server(answer) as url, Runtime([lead(url, "order/17")]) as runtime:
        waiting = await runtime.run("lead", "go")
        assert {ticket.message for ticket in waiting.suspended.values()} == {"pay?", "tell me"}
        shown = {ticket.message: key for key, ticket in waiting.suspended.items()}
        decision = {name: Decision.resume("PASSWORD")}
        if name == "/".join(["order", *path]):  # the path of the server's question is a name of the local one
            assert shown["tell me"] == "order"
            with pytest.raises(DecisionRefused, match="more than one call is meant by 'order/17'"):
                await runtime.resume(waiting.run_id, decision)
            decision = {"local1": Decision.resume("PASSWORD")}
        half = await runtime.resume(waiting.run_id, decision)
        assert [ticket.message for ticket in half.suspended.values()] == ["tell me"]
        for again in (name, "local1", "17", "order/17"):
            if again != shown["tell me"]:
                with pytest.raises(DecisionRefused, match="answered already|does not wait for|more than one"):
                    await runtime.resume(waiting.run_id, {again: Decision.resume("PASSWORD")})
        assert received == []
        result = await runtime.resume(waiting.run_id, {shown["tell me"]: Decision.resume("me")})
        assert (result.status, len(received)) == (RunStatus.COMPLETED, 1)
        assert result.response == "paid with PASSWORD"
