"""The LangGraph-shaped stream of one agent."""

from __future__ import annotations

from typing import Any

import pytest

from retinue import Agent, Plugin, Registrar, Runtime, StateKey, ToolContext, ToolOutput, tool
from retinue.testing import ScriptedModel, call, say
from retinue.wire.parts import StreamPart

topic: StateKey[str, str] = StateKey("topic", str, persistent=True)


class Topics(Plugin):
    name = "topics"

    def register(self, r: Registrar) -> None:
        r.key(topic)


@tool
async def web_search(query: str, ctx: ToolContext) -> ToolOutput:
    """Search."""
    ctx.emit({"progress": 1})
    return ToolOutput("3 hits", update={topic: query})


async def parts(modes: Any, **options: Any) -> list[StreamPart]:
    model = ScriptedModel(
        [
            [say("Looking."), call("web_search", {"query": "AI"}, id="call_1"), call("web_search", {}, id="call_2")],
            say("It is safe.", chunks=["It is ", "safe."]),
        ]
    )
    runtime = Runtime([Agent("main", model, tools=[web_search], plugins=[Topics()])])
    return [part async for part in runtime.stream("main", "Is AI safe?", **options).parts(modes)]


async def test_updates_are_one_part_a_model_turn_and_one_a_call() -> None:
    found = await parts("updates")
    assert {part["type"] for part in found} == {"updates"}
    assert {part["ns"] for part in found} == {()}
    assert [list(part["data"]) for part in found] == [["model_request"], ["tools"], ["tools"], ["model_request"]]
    (asked,) = found[0]["data"]["model_request"]["messages"]
    assert (asked["type"], asked["content"]) == ("ai", "Looking.")
    assert asked["tool_calls"] == [
        {"name": "web_search", "args": {"query": "AI"}, "id": "call_1"},
        {"name": "web_search", "args": {}, "id": "call_2"},
    ]
    (answer,) = found[1]["data"]["tools"]["messages"]
    assert (answer["type"], answer["content"], answer["name"], answer["tool_call_id"], answer["status"]) == (
        "tool",
        "3 hits",
        "web_search",
        "call_1",
        "success",
    )
    assert found[2]["data"]["tools"]["messages"][0]["status"] == "error"


async def test_messages_are_deltas_with_the_ids_of_the_updates() -> None:
    found = await parts(["messages", "updates"])
    chunks = [part["data"] for part in found if part["type"] == "messages"]
    texts = [chunk["content"] for chunk, _ in chunks if chunk["type"] == "AIMessageChunk"]
    assert [text for text in texts if text] == ["Looking.", "It is ", "safe."]
    whole = [m["id"] for p in found if p["type"] == "updates" for n in p["data"].values() for m in n["messages"]]
    assert list(dict.fromkeys(chunk["id"] for chunk, _ in chunks)) == whole
    assert [(meta["langgraph_node"], meta["langgraph_step"], meta["lc_agent_name"]) for _, meta in chunks] == [
        *[("model_request", 1, "main")] * 5,
        ("tools", 1, "main"),
        ("tools", 1, "main"),
        ("model_request", 2, "main"),
        ("model_request", 2, "main"),
    ]


async def test_values_begin_with_the_input_and_end_with_everything() -> None:
    found = [part["data"] for part in await parts("values")]
    assert [[m["type"] for m in value["messages"]] for value in found] == [
        ["human"],
        ["human", "ai", "tool", "tool"],
        ["human", "ai", "tool", "tool", "ai"],
    ]
    assert [value.get("topic") for value in found] == [None, "AI", "AI"]


async def test_custom_and_tasks() -> None:
    assert [part["data"] for part in await parts("custom")] == [{"progress": 1}]
    tasks = [part["data"] for part in await parts("tasks")]
    begun = [task["id"] for task in tasks if "input" in task]
    ended = [task["id"] for task in tasks if "result" in task]
    assert begun[1:3] == ["call_1", "call_2"]
    assert sorted(begun) == sorted(ended)
    failed = next(task for task in tasks if task["id"] == "call_2" and "error" in task)
    assert failed["error"].startswith("invalid_arguments")


async def test_unknown_modes_are_named() -> None:
    known = "updates, messages, values, custom, tasks, checkpoints, debug"
    with pytest.raises(ValueError, match=f"stream modes are {known}; got events"):
        await parts(["updates", "events"])
    with pytest.raises(ValueError, match=f"stream modes are {known}; got none"):
        await parts(None)  # pyright: ignore[reportArgumentType]


async def test_values_of_a_continued_thread_hold_its_history() -> None:
    model = ScriptedModel([say("one"), say("two")])
    runtime = Runtime([Agent("main", model)])
    await runtime.run("main", "first", thread_id="t")
    found = [part["data"] async for part in runtime.stream("main", "second", thread_id="t").parts("values")]
    assert [[m["content"] for m in value["messages"]] for value in found] == [
        ["first", "one", "second"],
        ["first", "one", "second", "two"],
    ]
