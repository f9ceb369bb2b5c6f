"""Agents that place their children, with answers that follow from the conversation alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retinue import (
    Agent,
    Block,
    HarnessAgent,
    Permissions,
    Plugin,
    Registrar,
    StateKey,
    ToolContext,
    ToolOutput,
    tool,
)
from retinue.core.messages import Role
from retinue.core.model import ModelRequest
from retinue.core.runs import Usage
from retinue.plugins import BeforeToolContext, hook
from retinue.tasks import TaskRepository
from retinue.testing import ScriptedModel, call, say
from retinue.testing.model import ScriptedTurn

from .crew import asked, clerk, echo, make_mark, pay, results, walker

NOTES: StateKey[list[str], str] = StateKey(
    "notes", list[str], update=str, reduce=lambda old, new: [*old, new], default=list[str], persistent=True
)


class Notes(Plugin):
    """State that goes down as a seed and comes up with the result."""

    name = "notes"

    def register(self, r: Registrar) -> None:
        r.key(NOTES)
        r.tool(note)


@tool
def note(text: str, ctx: ToolContext) -> ToolOutput:
    """Write something down."""
    return ToolOutput(f"noted after {ctx.state(NOTES)}", {NOTES: text})


def scribe(request: ModelRequest) -> ScriptedTurn:
    """Notes its input, then says what it was told."""
    said = results(request)
    return say(said[-1]) if said else call("note", {"text": asked(request)}, id="note_1")


@dataclass
class Answer:
    number: int


@hook("before_tool")
def no_payments(ctx: BeforeToolContext) -> Block | None:
    return Block("no payments today") if ctx.call.name == "pay" else None


@tool(idempotent=True)
async def consult(question: str, ctx: ToolContext) -> ToolOutput:
    """Ask the scribe, with state, and the counter, who answers with a number."""
    told = await ctx.run_child("far_scribe", question, seed={NOTES: ["above"]})
    counted = await ctx.run_child("far_counter", question)
    assert isinstance(counted.output, Answer)
    return ToolOutput(f"{told.response}; {told.state.extensions}; {counted.output}; {ctx.context}")


def delegate(*names: str, prefix: str = "task") -> Callable[[ModelRequest], ScriptedTurn]:
    """Give the input to other agents, all at once, then say what they said."""

    def model(request: ModelRequest) -> ScriptedTurn:
        said = [message.text for message in request.messages if message.role is Role.TOOL]
        if said:
            return say(" | ".join(said))
        args = [{"subagent_type": name, "description": asked(request)} for name in names]
        return [call("task", one, id=f"{prefix}_{place}") for place, one in enumerate(args, 1)]

    return model


def remember(request: ModelRequest) -> ScriptedTurn:
    """Say all that was ever said to it."""
    return say(" + ".join([message.text for message in request.messages if message.role is Role.USER]))


def talker(request: ModelRequest) -> ScriptedTurn:
    """Spawns the listener on the first message, and sends it every other."""
    said, text = results(request), asked(request)
    if said:
        return say(said[-1])
    keys = [
        line.removeprefix("agent_key: ")
        for message in request.messages
        if message.role is Role.TOOL
        for line in message.text.splitlines()
        if line.startswith("agent_key: ")
    ]
    number = sum(message.role is Role.USER for message in request.messages)
    if not keys:
        return call("agent_spawn", {"agent_id": "far_listener", "task": text}, id="spawn_1")
    return call("agent_send", {"agent_key": keys[0], "message": text}, id=f"send_{number}")


def spender(request: ModelRequest) -> ScriptedTurn:
    """Marks steps for ever; each answer costs 100 tokens."""
    done = len(results(request))
    if any(message.text.startswith("[limit:") for message in request.messages):
        return say(f"stopped after {done}", usage=Usage(requests=1, output_tokens=100))
    return [say("", usage=Usage(requests=1, output_tokens=100)), call("mark", {"step": done}, id=f"mark_{done}")]


def breeder(request: ModelRequest) -> ScriptedTurn:
    """Starts as many children as it is asked to, one after the other, and says how many there were."""
    said, wanted = results(request), int(asked(request))
    if len(said) >= wanted or any("limit" in text for text in said):
        return say(f"{sum(text.startswith('echo') for text in said)} of {wanted}")
    return call("task", {"subagent_type": "echo", "description": "x"}, id=f"task_{len(said)}")


def crew(folder: Path | None = None, workspace: Path | None = None, tasks: TaskRepository | None = None) -> list[Agent]:
    """All agents. Those named `far_…` have the queue "gpu"."""
    mark = make_mark(folder)
    near = Agent("echo", ScriptedModel(echo))
    far = {
        agent.name: agent
        for agent in (
            Agent("far_echo", ScriptedModel(echo), queue="gpu"),
            Agent("far_clerk", ScriptedModel(clerk), tools=[pay], plugins=[Permissions(ask=["pay"])], queue="gpu"),
            Agent("far_payer", ScriptedModel(clerk), tools=[pay], queue="gpu"),
            Agent("far_walker", ScriptedModel(walker), tools=[mark], max_steps=1_000, queue="gpu"),
            Agent("far_scribe", ScriptedModel(scribe), plugins=[Notes()], queue="gpu"),
            Agent("far_counter", ScriptedModel(lambda _: say('{"number": 7}')), output=Answer, queue="gpu"),
            Agent("far_listener", ScriptedModel(remember), description="listens", queue="gpu"),
            Agent("far_spender", ScriptedModel(spender), tools=[mark], max_steps=1_000, queue="gpu"),
            Agent("far_breeder", ScriptedModel(breeder), subagents=[near], max_steps=1_000, queue="gpu"),
        )
    }

    def boss(name: str, *names: str, **options: Any) -> Agent:
        return Agent(name, ScriptedModel(delegate(*names)), subagents=[far[one] for one in names], **options)

    made = [
        boss("boss", "far_echo"),
        boss("chief", "far_clerk"),
        Agent("namesake", ScriptedModel(delegate("far_clerk", prefix="pay")), subagents=[far["far_clerk"]]),
        boss("guard", "far_payer", plugins=[Permissions(ask=["pay"])]),
        boss("watch", "far_payer", plugins=[no_payments]),
        boss("guide", "far_walker"),
        boss("pair", "far_spender", "far_spender"),
        boss("solo", "far_spender"),
        boss("herd", "far_breeder", "far_breeder"),
        Agent("reader", ScriptedModel(_consult), tools=[consult]),
        Agent("once", ScriptedModel(_walk_once), tools=[walk_once], subagents=[far["far_walker"]]),
        far["far_scribe"],
        far["far_counter"],
    ]
    if workspace is not None:
        given: Any = {"workspace": workspace, "general_purpose": False, "task_repository": tasks}
        subagents = [far["far_listener"], far["far_clerk"], far["far_walker"]]
        made.append(HarnessAgent("talker", ScriptedModel(talker), subagents=subagents, **given))
        made.append(HarnessAgent("sender", ScriptedModel(sender), subagents=subagents, **given))
    return made


def _consult(request: ModelRequest) -> ScriptedTurn:
    said = results(request)
    return say(said[-1]) if said else call("consult", {"question": asked(request)}, id="consult_1")


@tool
async def walk_once(steps: str, ctx: ToolContext) -> str:
    """Have a walk made, by a call that may not be made twice."""
    return (await ctx.run_child("far_walker", steps)).response or ""


def _walk_once(request: ModelRequest) -> ScriptedTurn:
    said = results(request)
    return say(said[-1]) if said else call("walk_once", {"steps": asked(request)}, id="walk_1")


def sender(request: ModelRequest) -> ScriptedTurn:
    """Has `agent task` done in the background, or says what is new."""
    agent, _, task = asked(request).partition(" ")
    news = [message.text for message in request.messages if message.text.startswith("<task-notification>")]
    if results(request) or news:
        return say(news[-1] if news else "begun")
    return call("agent_spawn", {"agent_id": agent, "task": task, "timeout_seconds": 0}, id="spawn_1")


def agents_of_process() -> list[Agent]:
    """The agents of a worker process. $CREW_FOLDER is where steps leave marks."""
    return crew(Path(os.environ["CREW_FOLDER"]) if "CREW_FOLDER" in os.environ else None)
