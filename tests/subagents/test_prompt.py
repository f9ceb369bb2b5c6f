"""What models read about sub-agents: the section of the prompt, the block of a child, the schemas of the tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inline_snapshot import snapshot

from retinue import HookContext, Plugin, Registrar, Runtime, StateCommand, SubagentDeclaration
from retinue.plugins import AddSystemText
from retinue.subagents.prompt import SUBAGENT_CONTEXT
from retinue.testing import call, say
from tests.subagents.stage import declare, harness, send, spawn, stage, system, write

SPAWNING = ("agent_spawn", "agent_send", "agent_list", "agent_close")


async def test_the_section_about_sub_agents(tmp_path: Path) -> None:
    agent = harness(tmp_path, subagents=[SubagentDeclaration("reviewer", " Reviews\n  one\tfile. ")])
    await Runtime([agent]).run("boss", "go")
    assert system(stage(agent).requests[0]) == snapshot("""\
# Sub-agents

You can give work to sub-agents. Each has a conversation of its own, sees nothing of yours, and answers every message with one report.

Use one when a task stands on its own and would fill your context, when several tasks can be done side by side, or when only the outcome matters. Do small things yourself, and things whose every step you need to see.

- agent_spawn(agent_id, task, label, timeout_seconds) starts one and waits for its report, 30 s unless you say how long. Write the whole task: what to do, what is known, what to give back. Several calls in one step work side by side. Without a task it waits for agent_send.
- Some work in your folder, others in one of their own and see none of your files: write what they need into the task, and ask for the outcome in the report.
- Keep the agent_key of the answer: agent_send(agent_key, message) goes on with the same sub-agent, which remembers. It takes the full agent_key or the label, not the agent_id, session_id or task_id.
- With timeout_seconds=0 it works in the background, and so does what takes longer than you wait (status timeout_promoted, nothing is lost). You get a task_id and are told when the task has ended: do not wait for it in a loop, do not ask right after starting it, and do not start the same task again. Go on, or answer the user.
- task_output(task_id, block=false) shows how a task stands, task_cancel(task_id) stops it, task_list() shows all of them. What was said of a task earlier may be old; after a break, call task_list() first.
- agent_list() shows those you have, agent_close(agent_key) lets one go and frees its label.
- The user sees none of their reports: say yourself what came of them.

Available agent ids:
- `general-purpose`: Works as you do, with your tools and in your workspace, on a task of several steps whose details you need not see: a search over many files, a piece of work that stands on its own. Returns a short report.
- `reviewer`: Reviews one file.\
""")


def test_the_block_that_every_declared_child_reads() -> None:
    assert SUBAGENT_CONTEXT == snapshot("""\
# Subagent Context

You are a sub-agent: another agent has given you a task, in the first message, and may write again. Work on what it asks for and nothing else.
- Your last message is your report. It goes to the agent that asked; nobody else reads along, and nobody answers questions meanwhile.
- Say in it what you did or found, with the details that matter (paths, names, numbers), in plain text and briefly. If you could not finish, say what is missing and why.
- Start no side work and no other agents, and do not speak as the main agent.
- You may be stopped at any time, so do what matters first.
- Where a tool's output was cut, read on in smaller pieces.\
""")


async def test_the_schemas_of_the_tools(tmp_path: Path) -> None:
    agent = harness(tmp_path)
    await Runtime([agent]).run("boss", "go")
    tools = {tool.name: tool for tool in stage(agent).requests[0].tools}
    assert [{"description": tools[name].description, **tools[name].parameters} for name in SPAWNING] == snapshot(
        [
            {
                "description": """\
Start a sub-agent and, with a task, wait for its report or let it work in the background.

The answer has its agent_key: keep it to go on with the same sub-agent by agent_send.\
""",
                "type": "object",
                "properties": {
                    "agent_id": {
                        "type": "string",
                        "description": "Which one: an id from the list of available agent ids.",
                    },
                    "task": {
                        "anyOf": [{"type": "string"}, {"type": "null"}],
                        "description": "The whole task. The sub-agent sees nothing else. Without one it waits for agent_send.",
                        "default": None,
                    },
                    "label": {
                        "anyOf": [{"type": "string"}, {"type": "null"}],
                        "description": "A name of your choice for agent_send, unique among your sub-agents.",
                        "default": None,
                    },
                    "timeout_seconds": {
                        "anyOf": [{"type": "integer"}, {"type": "null"}],
                        "description": "How long to wait for the report: 30 if not given, 600 at most. 0 lets it work in the background; what takes longer than you wait goes on there too.",
                        "default": None,
                    },
                },
                "required": ["agent_id"],
                "additionalProperties": False,
            },
            {
                "description": """\
Send a sub-agent another message. It remembers its conversation with you. One that works in the background reads it
at its next step, and the answer is only `status: delivered`; if it is busy otherwise, your message waits.\
""",
                "type": "object",
                "properties": {
                    "message": {"type": "string", "description": "What to do or answer now."},
                    "agent_key": {
                        "anyOf": [{"type": "string"}, {"type": "null"}],
                        "description": "The full agent_key from the answer of agent_spawn. Give this or the label.",
                        "default": None,
                    },
                    "label": {
                        "anyOf": [{"type": "string"}, {"type": "null"}],
                        "description": "The label given in agent_spawn.",
                        "default": None,
                    },
                    "timeout_seconds": {
                        "anyOf": [{"type": "integer"}, {"type": "null"}],
                        "description": "How long to wait for the answer: 30 if not given, 600 at most. 0 lets it work in the background; what takes longer than you wait goes on there too.",
                        "default": None,
                    },
                },
                "required": ["message"],
                "additionalProperties": False,
            },
            {
                "description": "List the sub-agents you have spawned in this conversation and not closed.",
                "type": "object",
                "properties": {},
                "additionalProperties": False,
            },
            {
                "description": "Let a sub-agent go that you need no more. Its label is free again, and it takes no more messages.",
                "type": "object",
                "properties": {
                    "agent_key": {
                        "anyOf": [{"type": "string"}, {"type": "null"}],
                        "description": "The full agent_key from the answer of agent_spawn. Give this or the label.",
                        "default": None,
                    },
                    "label": {
                        "anyOf": [{"type": "string"}, {"type": "null"}],
                        "description": "The label given in agent_spawn.",
                        "default": None,
                    },
                },
                "additionalProperties": False,
            },
        ]
    )


class Adds(Plugin):
    """Adds a line to the system message at a priority."""

    def __init__(self, priority: int) -> None:
        self.name, self._priority = f"adds_{priority}", priority

    def register(self, r: Registrar) -> None:
        r.hook("step_start", self._add, priority=self._priority)

    def _add(self, ctx: HookContext) -> StateCommand:
        return StateCommand().schedule(AddSystemText(f"AT {self._priority}"))


async def test_the_section_comes_at_priority_80_after_what_the_workspace_says(tmp_path: Path) -> None:
    write(tmp_path, {"AGENTS.md": "RULES"})
    agent = harness(tmp_path, plugins=[Adds(81), Adds(79), Adds(69), Adds(71)], instructions="You are the boss.")
    await Runtime([agent]).run("boss", "go")
    heads = [part.partition("\n")[0] for part in system(stage(agent).requests[0]).split("\n\n")]
    shown = [head for head in heads if head.startswith(("AT", "You are", "What the workspace", "# Sub-agents"))]
    assert shown == [
        "You are the boss.",
        "AT 69",
        "What the workspace says about itself:",
        "AT 71",
        "AT 79",
        "# Sub-agents",
        "AT 81",
    ]


async def test_the_section_is_made_for_each_step_and_does_not_pile_up(tmp_path: Path) -> None:
    def change(request: Any) -> Any:
        declare(tmp_path, "late", "description: appears")
        return call("agent_list")

    agent = harness(tmp_path, spawn("general-purpose", "x", label="a"), change, send("y", label="a"))
    runtime = Runtime([agent])
    result = await runtime.run("boss", "go", thread_id="t")
    stage(agent).go_on(call("agent_list"), say("end"))
    again = await runtime.run("boss", "go", thread_id="t")
    texts = [system(request) for request in stage(agent).of_parent]
    assert [text.count("# Sub-agents") for text in texts] == [1] * 6
    assert ["- `late`: appears" in text for text in texts] == [False] * 4 + [True] * 2
    assert len(set(texts)) == 2
    assert {message.role for message in (*result.messages, *again.messages)} == {"user", "assistant", "tool"}
    for request in stage(agent).requests:
        assert [message.role == "system" for message in request.messages].count(True) == 1


async def test_without_sub_agents_there_is_no_section(tmp_path: Path) -> None:
    agent = harness(tmp_path, general_purpose=False)
    await Runtime([agent]).run("boss", "go")
    assert [message.role for message in stage(agent).requests[0].messages] == ["user"]
