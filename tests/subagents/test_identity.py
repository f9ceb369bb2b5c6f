"""The id of the call is the identity of the sub-agent, from its first event to its result."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from retinue import Agent, Runtime, ToolContext, tool
from retinue.testing import ScriptedModel, call, say
from retinue.wire.parts import StreamPart


@tool
async def web_search(query: str) -> str:
    """Search."""
    return f"hits for {query}"


def team() -> Runtime:
    researcher_model = ScriptedModel(
        [[say("Researching..."), call("web_search", {"query": "AI"}, id="call_xyz789")], say("## AI Safety Report")]
    )
    researcher = Agent("researcher", researcher_model, "You research.", [web_search], description="Researches a topic.")
    task = call("task", {"subagent_type": "researcher", "description": "Research AI safety"}, id="call_abc123")
    main = Agent("main", ScriptedModel([task, say("Here's the report...")]), subagents=[researcher])
    return Runtime([main])


def brief(part: StreamPart) -> Any:
    if part["type"] == "messages":
        chunk, _ = part["data"]
        pieces = chunk.get("tool_call_chunks", [])
        return "messages", part["ns"], [(piece["id"], piece["args"]) for piece in pieces] or chunk["content"]
    ((node, update),) = part["data"].items()
    (message,) = update["messages"]
    calls = [(c["name"], c["id"]) for c in message.get("tool_calls", [])]
    return node, part["ns"], calls or (message["content"], message.get("tool_call_id"))


async def test_the_sequence_of_the_page() -> None:
    parts = [part async for part in team().stream("main", "Go").parts(["updates", "messages"])]
    child = ("tools:call_abc123",)
    assert [brief(part) for part in parts] == [
        ("messages", (), [("call_abc123", "")]),
        ("messages", (), [(None, '{"subagent_type":"researcher","description":"Research AI safety"}')]),
        ("model_request", (), [("task", "call_abc123")]),
        ("messages", child, "Researching..."),
        ("messages", child, [("call_xyz789", "")]),
        ("messages", child, [(None, '{"query":"AI"}')]),
        ("model_request", child, [("web_search", "call_xyz789")]),
        ("messages", child, "hits for AI"),
        ("tools", child, ("hits for AI", "call_xyz789")),
        ("messages", child, "## AI Safety Report"),
        ("model_request", child, ("## AI Safety Report", None)),
        ("messages", (), "## AI Safety Report"),
        ("tools", (), ("## AI Safety Report", "call_abc123")),
        ("messages", (), "Here's the report..."),
        ("model_request", (), ("Here's the report...", None)),
    ]
    first = parts[2]["data"]["model_request"]["messages"][0]["tool_calls"][0]
    assert first == {
        "name": "task",
        "args": {"subagent_type": "researcher", "description": "Research AI safety"},
        "id": "call_abc123",
    }


class FrontEnd:
    """The page's handler, in Python: it follows sub-agents by nothing but the parts."""

    def __init__(self) -> None:
        self.subagents: dict[str, dict[str, Any]] = {}
        self.rendered: dict[str, list[Any]] = {}

    def handle(self, part: StreamPart) -> None:
        if part["type"] == "updates" and not part["ns"]:
            for message in part["data"].get("model_request", {}).get("messages", [])[:1]:
                for one in message["tool_calls"]:
                    if one["name"] == "task":
                        self.subagents[one["id"]] = {**one["args"], "status": "running"}
        if part["ns"] and part["ns"][0].startswith("tools:"):
            self.rendered.setdefault(part["ns"][0].split(":")[1], []).append(part)
        if part["type"] == "updates" and "tools" in part["data"]:
            for message in part["data"]["tools"]["messages"]:
                if message["name"] == "task" and message["tool_call_id"] in self.subagents:
                    self.subagents[message["tool_call_id"]].update(status="complete", result=message["content"])


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=12, max_size=12))
def test_a_front_end_tracks_ten_parallel_and_two_nested_sub_agents(delays: list[int]) -> None:
    async def work(request: Any) -> Any:
        number = int(request.messages[-1].text.split()[-1]) if request.messages[-1].role == "user" else 0
        for _ in range(delays[number % 12]):
            await asyncio.sleep(0)
        if request.messages[-1].role == "tool":
            return say(f"report by {request.messages[-1].text}")
        if number in (3, 7):
            nested = {"subagent_type": "helper", "description": f"help with {number}"}
            return call("task", nested, id=f"nested_{number}")
        return say(f"report {number}", chunks=["report ", str(number)])

    async def main() -> FrontEnd:
        helper = Agent("helper", ScriptedModel(lambda r: say(f"helped: {r.messages[-1].text}")))
        worker = Agent("worker", ScriptedModel(work), subagents=[helper])
        calls = [
            call("task", {"subagent_type": "worker", "description": f"item {n}"}, id=f"call_{n}") for n in range(10)
        ]
        boss = Agent("boss", ScriptedModel([calls, say("all done")]), subagents=[worker])
        page = FrontEnd()
        async for part in Runtime([boss]).stream("boss", "go").parts(["updates", "messages"]):
            page.handle(part)
        return page

    page = asyncio.run(main())
    assert set(page.subagents) == {f"call_{n}" for n in range(10)}
    for n in range(10):
        info = page.subagents[f"call_{n}"]
        assert (info["status"], info["description"]) == ("complete", f"item {n}")
        expected = f"report by helped: help with {n}" if n in (3, 7) else f"report {n}"
        assert info["result"] == expected
        mine = page.rendered[f"call_{n}"]
        texts = "".join(p["data"][0]["content"] for p in mine if p["type"] == "messages" and len(p["ns"]) == 1)
        assert str(n) in texts
        deeper = {p["ns"] for p in mine if len(p["ns"]) > 1}
        assert deeper == ({(f"tools:call_{n}", f"tools:nested_{n}")} if n in (3, 7) else set())


async def test_an_unknown_type_gets_an_error_that_lists_the_known_ones() -> None:
    model = ScriptedModel([call("task", {"subagent_type": "wizard", "description": "x"}), say("ok")])
    main = Agent("main", model, subagents=[Agent("a", ScriptedModel([])), Agent("b", ScriptedModel([]))])
    run = Runtime([main]).stream("main", "go")
    events = [e async for e in run]
    result = await run.result()
    (text,) = [m.text for m in result.messages if m.role == "tool"]
    assert text == "[unknown_subagent] there is no sub-agent 'wizard'; known: a, b"
    assert {e.ns for e in events} == {()}


async def test_the_childs_only_message_is_the_description_word_for_word() -> None:
    runtime = team()
    await runtime.run("main", "a long story about something else")
    researcher: Any = runtime.agents["researcher"].model
    assert [m.text for m in researcher.requests[0].messages] == ["You research.", "Research AI safety"]


async def test_live_handles_follow_children_recursively() -> None:
    leaf = Agent("leaf", ScriptedModel(lambda r: say(f"leaf {r.messages[-1].text}", chunks=None)))
    middle_model = ScriptedModel(
        [call("task", {"subagent_type": "leaf", "description": "x"}, id="inner"), say("middle done")]
    )
    middle = Agent("middle", middle_model, subagents=[leaf])
    task = {"subagent_type": "middle", "description": "go"}
    boss = Agent("boss", ScriptedModel([[call("task", task, id="outer")], say("done")]), subagents=[middle])
    run = Runtime([boss]).stream("boss", "go")
    seen: list[Any] = []
    async for child in run.children:
        seen.append((child.name, child.call_id, child.ns, await child.text, (await child.result()).status.value))
        async for inner in child.children:
            pieces = [piece async for piece in inner.text]
            seen.append((inner.name, inner.call_id, inner.ns, "".join(pieces), (await inner.result()).status.value))
    assert seen == [
        ("middle", "outer", ("tools:outer",), "middle done", "completed"),
        ("leaf", "inner", ("tools:outer", "tools:inner"), "leaf x", "completed"),
    ]


async def test_delegation_is_a_tool_of_one_agent() -> None:
    helper = Agent("helper", ScriptedModel(lambda r: say(f"did {r.messages[-1].text}")), description="Helps.")
    model = ScriptedModel([call("agent_run_helper", {"prompt": "it"}, id="c1"), say("ok")])
    run = Runtime([Agent("main", model, tools=[helper.as_tool()])]).stream("main", "go")
    events = [e async for e in run]
    result = await run.result()
    assert [m.text for m in result.messages if m.role == "tool"] == ["did it"]
    assert {e.ns for e in events if e.agent == "helper"} == {("tools:c1",)}
    assert model.requests[0].tools[0].description == "Helps."


async def test_no_event_of_a_child_has_its_parents_ns_even_when_the_parents_sink_is_passed_by_mistake() -> None:
    child = Agent("child", ScriptedModel([say("leak?")]))

    @tool
    async def delegate(ctx: ToolContext) -> str:
        """Delegate."""
        await ctx.run_child(child, "x", sink=ctx.sink)
        return "ok"

    run = Runtime([Agent("main", ScriptedModel([call("delegate", id="c1"), say("mine")]), tools=[delegate])]).stream(
        "main", "go"
    )
    events: list[Any] = [e async for e in run]
    assert [e.delta for e in events if e.kind == "text_delta" and e.ns == ()] == ["mine"]
    assert [e.kind for e in events if e.ns == ()].count("run_finished") == 1
    assert [e.kind for e in events if e.ns == ("tools:c1",)][-1] == "run_finished"
