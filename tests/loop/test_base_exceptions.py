"""Exceptions that are not an `Exception`, such as those of `pytest.fail()`: the run ends, and says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from retinue import Agent, HookContext, ModelRequest, Plugin, Registrar, RunStatus, Runtime, tool
from retinue.plugins import PHASES, Phase
from retinue.testing import ScriptedModel, call, say


class Outcome(BaseException):
    """As test frameworks raise them."""


@tool
async def closing() -> None:
    """Raise what a closed generator raises."""
    raise GeneratorExit("from a tool")


@tool
def closing_blocking() -> None:
    """Raise what a closed generator raises."""
    raise GeneratorExit("from a tool")


@tool
async def asynchronous() -> None:
    """Raise."""
    raise Outcome("from a tool")


@tool
def blocking() -> None:
    """Raise."""
    raise Outcome("from a tool")


@tool(timeout=3600, retries=1)
async def repeated() -> None:
    """Raise."""
    raise Outcome("from a tool")


class Raises(Plugin):
    name = "raises"

    def __init__(self, phase: Phase) -> None:
        self.phase: Phase = phase

    def register(self, r: Registrar) -> None:
        r.hook(self.phase, self.fail)

    def fail(self, ctx: HookContext) -> None:
        raise Outcome("from a hook")


def answer_or_raise(request: ModelRequest) -> Any:
    raise Outcome("from a model")


@pytest.fixture(params=["memory", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory:" if request.param == "memory" else f"sqlite:///{tmp_path}/app.db"


async def finish(url: str, agent: Agent) -> Any:
    """Return the result of a run whose log ends with `run_finished`."""
    async with Runtime.open(url, [agent]) as runtime:
        run = runtime.stream(agent.name, "go")
        result = await run.result()
        assert [event.kind async for event in runtime.events(run.run_id)][-1] == "run_finished"
        return result


async def test_a_tool_fails_its_call(url: str) -> None:
    tools = [asynchronous, blocking, repeated]
    agent = Agent("a", ScriptedModel([[call(one.name) for one in tools], say("done")]), tools=tools)
    result = await finish(url, agent)
    assert result.status is RunStatus.COMPLETED
    assert [m.text for m in result.messages if m.role == "tool"] == ["internal: Outcome: from a tool"] * 3


async def test_a_tool_that_raises_generator_exit_fails_its_call() -> None:
    tools = [closing, closing_blocking]
    agent = Agent("a", ScriptedModel([[call(one.name) for one in tools], say("done")]), tools=tools)
    result = await finish("memory:", agent)
    assert result.status is RunStatus.COMPLETED
    assert [m.text for m in result.messages if m.role == "tool"] == ["internal: GeneratorExit: from a tool"] * 2


async def test_a_model_that_raises_generator_exit_fails_its_run() -> None:
    def answer(request: ModelRequest) -> Any:
        raise GeneratorExit("from a model")

    result = await finish("memory:", Agent("a", ScriptedModel(answer)))
    assert (result.status, result.error) == (RunStatus.FAILED, "GeneratorExit: from a model")


async def test_a_model_fails_its_run(url: str) -> None:
    result = await finish(url, Agent("a", ScriptedModel(answer_or_raise)))
    assert (result.status, result.error) == (RunStatus.FAILED, "Outcome: from a model")


async def test_a_child_fails_alone(url: str) -> None:
    child = Agent("child", ScriptedModel(answer_or_raise))
    script = [call("task", {"subagent_type": "child", "description": "go"}), say("done")]
    result = await finish(url, Agent("a", ScriptedModel(script), subagents=[child]))
    assert result.status is RunStatus.COMPLETED
    assert "Outcome: from a model" in next(m.text for m in result.messages if m.role == "tool")


@pytest.mark.parametrize("phase", PHASES)
async def test_a_hook_fails_the_run_and_is_named(phase: Phase) -> None:
    script = [call("asynchronous"), say("done")]
    result = await finish("memory:", Agent("a", ScriptedModel(script), tools=[asynchronous], plugins=[Raises(phase)]))
    assert result.status is RunStatus.FAILED
    assert result.error == f"HookFailed: hook 'fail' of plugin 'raises' failed in {phase}: Outcome: from a hook"
