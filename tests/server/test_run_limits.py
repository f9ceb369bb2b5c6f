"""The limits of an agent hold for whoever starts it over a network; what a request gives only narrows them."""

from __future__ import annotations

from typing import Any

import pytest

from retinue import Agent, Limits, Runtime, ToolContext, Usage, tool
from retinue.client import Client
from retinue.errors import LimitReached
from retinue.testing import ScriptedModel, call, say
from retinue.wire.a2a_budget import BUDGET
from tests.server.serving import TOKEN, Site, serving

SPENT = Usage(requests=1, input_tokens=60, output_tokens=40, cost=0.1)
DOORS = ["runs", "tasks", "a2a"]


@tool
async def work() -> str:
    """Work."""
    return "worked"


@tool
async def herd(ctx: ToolContext) -> str:
    """Start children until a limit forbids one."""
    leaf = Agent("leaf", ScriptedModel(lambda request: say("x")))
    for number in range(300):
        try:
            await ctx.run_child(leaf, "go")
        except LimitReached:
            return str(number)
    return "300"


def spender(limits: Limits) -> Agent:
    """An agent that would work for ever, for 0.10 a step."""
    return Agent(
        "spender", ScriptedModel(lambda request: [say("x", usage=SPENT), call("work")]), tools=[work], limits=limits
    )


def shepherd(limits: Limits) -> Agent:
    """An agent that says how many children it could start."""

    def turn(request: Any) -> Any:
        last = request.messages[-1]
        return say(last.text) if last.role == "tool" else call("herd")

    return Agent("shepherd", ScriptedModel(turn), tools=[herd], limits=limits)


async def ask(site: Site, door: str, agent: str, limits: Any) -> dict[str, Any]:
    """Start a run through one of the doors of a server, and return its result."""
    given = {} if limits is None else {"limits": limits}
    if door == "runs":
        run_id = (await site.start(agent, **given))["run_id"]
    elif door == "tasks":
        body = {"task_id": "t1", "agent_id": agent, "input": "go", "context": {}, **given}
        answer = await site.post("/tasks", body)
        assert answer.status == 201, answer
        run_id = answer.body["run_id"]
    else:
        metadata = {} if limits is None else {"metadata": {BUDGET: given}}
        message = {"messageId": "m1", "role": "ROLE_USER", "parts": [{"text": "go"}], **metadata}
        body = {"jsonrpc": "2.0", "id": 7, "method": "SendMessage", "params": {"message": message}}
        answer = await site.post(f"/a2a/{agent}", body, headers={"a2a-version": "1.0"})
        run_id = answer.body["result"]["task"]["id"]
    return await site.result(run_id)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("given", [None, {}, {"cost": 99}, {"cost": None}, {"depth": 9, "tokens": 10**9}])
async def test_no_request_lifts_what_an_agent_sets(door: str, given: Any) -> None:
    async with serving(Runtime([spender(Limits(cost=0.3))])) as site:
        result = await ask(site, door, "spender", given)
    assert (result["termination"], round(result["usage"]["cost"], 6)) == ("limit:cost", 0.2), (
        "a third step would leave nothing for an answer"
    )


@pytest.mark.parametrize("door", DOORS)
async def test_a_request_may_narrow_what_an_agent_sets(door: str) -> None:
    async with serving(Runtime([spender(Limits(cost=0.3))])) as site:
        result = await ask(site, door, "spender", {"steps": 2})
    assert (result["termination"], result["steps"]) == ("limit:steps", 2)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("own", "given", "started"),
    [
        (Limits(), None, "256"),
        (Limits(), {"children": 1_000}, "256"),
        (Limits(children=280), {"children": 1_000}, "280"),
        (Limits(children=280), {"children": 270}, "270"),
    ],
)
async def test_defaults_count_as_set_for_requests(door: str, own: Limits, given: Any, started: str) -> None:
    async with serving(Runtime([shepherd(own)])) as site:
        assert (await ask(site, door, "shepherd", given))["response"] == started


async def test_a_client_is_on_the_other_side_of_a_network_and_the_runtime_is_not() -> None:
    agent, wide = shepherd(Limits()), Limits(children=1_000)
    async with Runtime([agent]) as runtime:
        assert (await runtime.run("shepherd", "go", limits=wide)).response == "300"
    async with serving(Runtime([agent])) as site, Client(site.url, token=TOKEN) as client:
        assert (await client.run("shepherd", "go", limits=wide)).response == "256"


BAD = [
    ({"steps": -1}, "Limits.steps must be at least 0, got -1"),
    ({"parallel": 0}, "Limits.parallel must be at least 1, got 0"),
    ({"steps": "3"}, "$.limits.steps"),
    ({"cost": True}, "$.limits.cost"),
    ({"step": 3}, "unknown field `step`"),
    ({"depth": None}, "$.limits.depth"),
]


@pytest.mark.parametrize(("limits", "said"), BAD)
@pytest.mark.parametrize("door", DOORS)
async def test_limits_that_cannot_hold_are_refused_by_name(door: str, limits: Any, said: str) -> None:
    async with serving(Runtime([spender(Limits(steps=1))])) as site:
        if door == "a2a":
            message = {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": "go"}]}
            params = {"message": {**message, "metadata": {BUDGET: {"limits": limits}}}}
            body = {"jsonrpc": "2.0", "id": 7, "method": "SendMessage", "params": params}
            refused = await site.post("/a2a/spender", body, headers={"a2a-version": "1.0"})
            assert refused.body["error"]["code"] == -32602
            detail = refused.body["error"]["message"]
        else:
            path = "/tasks" if door == "tasks" else "/api/v1/runs"
            more = {"task_id": "t", "agent_id": "spender", "context": {}} if door == "tasks" else {"agent": "spender"}
            refused = await site.post(path, {"input": "go", "limits": limits, **more})
            assert (refused.status, refused.body["code"]) == (422, "invalid_body")
            detail = refused.body["detail"]
        assert said in detail
        assert (await site.get("/api/v1/runs")).body["items"] == []
