"""The model of a run: its own, that of the request, its parent's, or that of `Runtime.override`."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from retinue import Agent, ConfigurationError, HarnessAgent, ModelRequest, RunStatus, Runtime
from retinue.testing import ScriptedModel, call, say


def team(*, child_model: Any = None, parent_model: Any = None) -> list[Agent]:
    child = Agent("child", child_model)
    return [Agent("boss", parent_model, subagents=[child]), child]


def both(request: ModelRequest) -> Any:
    """Delegates, as a parent, and answers, as a child."""
    names = [tool.name for tool in request.tools]
    if "task" in names and request.messages[-1].role != "tool":
        return call("task", {"subagent_type": "child", "description": "work"})
    return say("by the boss" if "task" in names else "by the child")


async def test_the_model_of_a_request_reaches_children_without_one() -> None:
    model = ScriptedModel(both)
    result = await Runtime(team()).run("boss", "go", model=model)
    assert [message.text for message in result.messages] == ["go", "", "by the child", "by the boss"]


async def test_a_child_with_a_model_keeps_it() -> None:
    own = ScriptedModel([say("own")])
    result = await Runtime(team(child_model=own)).run("boss", "go", model=ScriptedModel(both))
    assert [message.text for message in result.messages][2] == "own"


async def test_without_any_model_one_sentence_says_so() -> None:
    with pytest.raises(ConfigurationError, match=r"agent 'boss' has no model: give Agent\(model=…\) or run"):
        await Runtime(team()).run("boss", "go")


async def test_override_replaces_every_model_of_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    runtime = Runtime(team(child_model="openai:gpt-5", parent_model="openai:gpt-5"))
    with runtime.override(model=ScriptedModel(both)):
        result = await runtime.run("boss", "go")
        assert [message.text for message in result.messages][2:] == ["by the child", "by the boss"]
        with runtime.override(model=ScriptedModel([say("inner")])):
            assert (await runtime.run("boss", "go")).response == "inner"
        assert runtime.run_sync("boss", "go").response == "by the boss"
    with pytest.raises(ConfigurationError, match="OPENAI_API_KEY"):
        await runtime.run("boss", "go")
    await runtime.close()


async def test_override_holds_for_a_tree_that_outlives_the_block() -> None:
    gate = asyncio.Event()

    async def slow(request: ModelRequest) -> Any:
        await gate.wait()
        return both(request)

    runtime = Runtime(team(child_model="openai:gpt-5", parent_model="openai:gpt-5"))
    with runtime.override(model=ScriptedModel(slow)):
        run = runtime.stream("boss", "go")
    gate.set()
    assert (await run.result()).response == "by the boss"


async def test_override_is_not_stored(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/app.db"
    async with Runtime.open(url, team(child_model="openai:gpt-5", parent_model="openai:gpt-5")) as runtime:
        with runtime.override(model=ScriptedModel(both)):
            run_id = (await runtime.run("boss", "go")).run_id
        stored = await runtime.store.load_run(run_id)
        assert stored is not None
        assert stored.status == "completed"
        assert (await runtime.state_at(run_id, 1)).request.problem is None


async def test_handoffs_keep_the_override_and_a_model_where_the_next_agent_has_none() -> None:
    other = Agent("other", None)
    first = Agent("first", ScriptedModel([call("transfer_to_other"), say("as the other")]), handoffs=[other])
    assert (await Runtime([first]).run("first", "go")).response == "as the other"


async def test_a_missing_key_of_a_sub_agent_is_said_when_the_run_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    runtime = Runtime(team(child_model="openai:gpt-5", parent_model=ScriptedModel(both)))
    with pytest.raises(ConfigurationError, match=r"agent 'child': .*OPENAI_API_KEY") as caught:
        runtime.stream("boss", "go")
    assert "\n" not in str(caught.value)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
    run = runtime.stream("boss", "go")
    await run.cancel()
    assert (await run.result()).status is RunStatus.CANCELLED


async def test_a_declared_sub_agent_follows_an_override(tmp_path: Path) -> None:
    (tmp_path / "subagents").mkdir()
    (tmp_path / "subagents" / "child.md").write_text(
        "---\nname: child\ndescription: Works.\nmodel: openai:gpt-5\n---\nWork."
    )

    def model(request: ModelRequest) -> Any:
        if "agent_spawn" not in [tool.name for tool in request.tools]:
            return say("declared child")
        if request.messages[-1].role == "tool":
            return say("end")
        return call("agent_spawn", {"agent_id": "child", "task": "work"})

    agent = HarnessAgent("boss", "openai:gpt-5", workspace=tmp_path)
    async with Runtime([agent]) as runtime:
        with runtime.override(model=ScriptedModel(model)):
            result = await runtime.run("boss", "go")
    assert "declared child" in [message.text for message in result.messages if message.role == "tool"][0]
