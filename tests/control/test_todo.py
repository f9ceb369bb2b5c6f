"""The todo list of a conversation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from retinue import HarnessAgent, Runtime, Todo, tool
from retinue.events import StateDelta
from retinue.testing import RecordingSink, ScriptedModel, call, say


def item(text: str, status: str = "pending") -> dict[str, str]:
    return {"text": text, "status": status}


@tool
def work() -> str:
    """Work."""
    return "worked"


def harness(folder: Path, model: ScriptedModel, **options: Any) -> HarnessAgent[str]:
    return HarnessAgent("a", model, "Do it.", [work], [Todo()], workspace=folder, **options)


async def test_the_list_is_state_of_the_conversation_and_comes_last(tmp_path: Path) -> None:
    plan = [item("look", "in_progress"), item("write")]
    done = [item("look", "completed"), item("write", "completed")]
    model = ScriptedModel(
        [
            call("todo_write", {"items": plan}),
            call("work"),
            say("later"),
            call("todo_write", {"items": done}),
            call("work"),
            say("done"),
        ]
    )
    runtime, sink = Runtime([harness(tmp_path, model, disable_subagents=True)]), RecordingSink()
    first = await runtime.run("a", "go", thread_id="t", sinks=[sink])
    assert first.state.extensions["retinue.todos"] == plan
    deltas: list[StateDelta] = sink.of("state_delta")
    assert [one.delta for one in deltas] == [{"retinue.todos": plan}]
    assert first.messages[2].text == "2 todos: 1 pending, 1 in progress"
    assert (await runtime.run("a", "go on", thread_id="t")).state.extensions["retinue.todos"] == done
    shown = (
        "# Todos\n\n- [>] look\n- [ ] write\n\nKeep the list true with todo_write. The user has not seen this message."
    )
    last = [request.messages[-1].text for request in model.requests]
    assert [text == shown for text in last] == [False, False, True, True, False, False]
    assert len({request.messages[0].text for request in model.requests}) == 1
    assert (await runtime.store.load_thread("t")) is not None


@pytest.mark.parametrize(
    ("items", "problem"),
    [
        ([item("x")] * 201, "there are 201 items, at most 200 may be"),
        ([item("x" * 1001)], "item 1 has 1,001 characters, at most 1,000"),
        ([item("a"), item("  ")], "item 2 has no text"),
        ([item("a", "maybe")], "status"),
        ("a, b", "items"),
    ],
)
async def test_a_bad_list_changes_nothing(tmp_path: Path, items: Any, problem: str) -> None:
    model = ScriptedModel([call("todo_write", {"items": [item("a")]}), call("todo_write", {"items": items}), say("ok")])
    result = await Runtime([harness(tmp_path, model, disable_subagents=True)]).run("a", "go")
    assert problem in result.messages[4].text
    assert result.state.extensions["retinue.todos"] == [item("a")]


async def test_the_last_of_two_lists_counts_and_a_child_has_its_own(tmp_path: Path) -> None:
    def act(request: Any) -> Any:
        is_child = "# Subagent Context" in request.messages[0].text
        results = sum(message.role == "tool" for message in request.messages)
        if is_child:
            return [call("todo_write", {"items": [item("below")]}), call("work"), say("done")][results]
        if results == 0:
            return [call("todo_write", {"items": [item(text)]}) for text in ("first", "second")]
        return call("agent_spawn", {"agent_id": "general-purpose", "task": "go"}) if results == 2 else say("ok")

    model = ScriptedModel(act)
    result = await Runtime([harness(tmp_path, model)]).run("a", "go")
    assert result.state.extensions["retinue.todos"] == [item("second")]
    lists = [request.messages[-1].text for request in model.requests if request.transient]
    assert ["below" in text for text in lists] == [True, False]
