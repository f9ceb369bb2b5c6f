"""agent_spawn, agent_send, agent_list and agent_close: every answer, every error line, in the order of the checks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from inline_snapshot import snapshot

from retinue import Agent, HarnessAgent, Limits, RunStatus, Runtime, SubagentDeclaration, ToolContext, tool
from retinue.subagents.tools import seconds_of
from retinue.testing import RecordingSink, ScriptedModel, call, fail, say
from tests.story import story
from tests.subagents.stage import Stage, declare, harness, key_in, plain, send, spawn, stage, told

GP = "general-purpose"
INVALID = (
    "Invalid label: a label is up to 64 letters, digits, spaces, '_', '-' or '.', and begins with a letter or digit"
)


async def answers(workspace: Path, *turns: Any, limits: Limits | None = None, **options: Any) -> list[str]:
    """What the model is told when it makes these calls."""
    agent = harness(workspace, *turns, **options)
    result = await Runtime([agent]).run("boss", "go", limits=limits)
    assert (result.status, result.response, result.error) == (RunStatus.COMPLETED, "end", None)
    return told(result)


async def test_the_answers_when_all_goes_well(tmp_path: Path) -> None:
    found = await answers(
        tmp_path,
        spawn(GP, "  count the files \n", label="Counter"),
        spawn(GP),
        lambda request: send("and now?", agent_key=key_in(request, 0)),
        send("again", label=" counter "),
        call("agent_list"),
        call("agent_close", {"label": "COUNTER"}),
        lambda request: call("agent_close", {"agent_key": f" {key_in(request, 1)} "}),
        call("agent_list"),
    )
    assert found == snapshot(
        [
            """\
agent_key: agent:general-purpose:<1>
agent_id: general-purpose
session_id: sub-<1>
status: ok
reply:
did   count the files \n\
""",
            """\
agent_key: agent:general-purpose:<2>
agent_id: general-purpose
session_id: sub-<2>
status: accepted\
""",
            """\
agent_key: agent:general-purpose:<1>
status: ok
reply:
did and now?\
""",
            """\
agent_key: agent:general-purpose:<1>
status: ok
reply:
did again\
""",
            """\
Active subagents (2):
- agent_key: agent:general-purpose:<1>
  agent_id: general-purpose
  label: Counter
  spawn_depth: 1
- agent_key: agent:general-purpose:<2>
  agent_id: general-purpose
  spawn_depth: 1\
""",
            """\
agent_key: agent:general-purpose:<1>
status: closed\
""",
            """\
agent_key: agent:general-purpose:<2>
status: closed\
""",
            "No active subagents.",
        ]
    )


@pytest.mark.parametrize(
    ("args", "answer"),
    [
        ({"agent_id": "ghost", "label": "taken"}, "Unknown agent_id: ghost\nAvailable agent ids: general-purpose, r"),
        ({"agent_id": "../x"}, "Unknown agent_id: ../x\nAvailable agent ids: general-purpose, r"),
        ({"agent_id": "General-Purpose"}, "Unknown agent_id: General-Purpose\nAvailable agent ids: general-purpose, r"),
        ({"agent_id": " "}, "Unknown agent_id:  \nAvailable agent ids: general-purpose, r"),
        ({"agent_id": "r", "label": "taken", "task": "x"}, "Label already in use: taken"),
        ({"agent_id": "r", "label": " TAKEN "}, "Label already in use: TAKEN"),
        *[
            (
                {"agent_id": "r", "label": label},
                INVALID,
            )
            for label in ("../x", "a/b", "a\nb", ".hidden", "-x", "x" * 65, "a\0", "a:b", "a\\b")
        ],
    ],
)
async def test_the_error_lines_of_agent_spawn(tmp_path: Path, args: dict[str, Any], answer: str) -> None:
    turns = [spawn(GP, label="taken"), call("agent_spawn", args), call("agent_list")]
    found = await answers(tmp_path, *turns, subagents=[SubagentDeclaration("r", "d")])
    assert found[1] == f"Error: {answer}"
    assert found[2].startswith("Active subagents (1):")
    assert sorted(path.name for path in tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "answer"),
    [
        ({"agent_key": "k", "label": "l", "message": " "}, "Provide either agent_key or label, not both."),
        ({"message": ""}, "Either agent_key or label is required."),
        ({"agent_key": " ", "label": "", "message": "m"}, "Either agent_key or label is required."),
        ({"label": "ghost", "message": " \n"}, "message is required"),
        ({"label": "ghost", "message": "m"}, "Unknown label: ghost\nUse agent_list() to see your sub-agents."),
        ({"label": "../x", "message": "m"}, "Unknown label: ../x\nUse agent_list() to see your sub-agents."),
        ({"agent_key": "ghost", "message": "m"}, "Unknown agent_key: ghost\nUse agent_list() to see your sub-agents."),
        (
            {"agent_key": GP, "message": "m"},
            "Unknown agent_key: general-purpose\nUse agent_list() to see your sub-agents.",
        ),
        (
            {"agent_key": "SESSION", "message": "m"},
            "Unknown agent_key: sub-<1>\nUse agent_list() to see your sub-agents.",
        ),
        (
            {"agent_key": "UPPER", "message": "m"},
            "Unknown agent_key: AGENT:GENERAL-PURPOSE:<1>\nUse agent_list() to see your sub-agents.",
        ),
    ],
)
@pytest.mark.parametrize("name", ["agent_send", "agent_close"])
async def test_the_error_lines_of_agent_send_and_agent_close(
    tmp_path: Path, args: dict[str, Any], answer: str, name: str
) -> None:
    def ask(request: Any) -> Any:
        given, key = dict(args), key_in(request)
        given["agent_key"] = {
            "SESSION": f"sub-{key.rpartition(':')[2]}",
            "UPPER": f"AGENT:GENERAL-PURPOSE:{key[22:]}",
        }.get(given.get("agent_key", ""), given.get("agent_key"))
        if name == "agent_close":
            del given["message"]
        return call(name, {key: value for key, value in given.items() if value is not None})

    if answer == "message is required" and name == "agent_close":
        answer = "Unknown label: ghost\nUse agent_list() to see your sub-agents."
    found = await answers(tmp_path, spawn(GP, "x"), ask)
    assert found[1] == f"Error: {answer}"


async def test_a_call_that_breaks_the_schema_is_refused_before_it_runs(tmp_path: Path) -> None:
    found = await answers(
        tmp_path,
        [
            call("agent_spawn", {}),
            call("agent_spawn", {"agent_id": 3}),
            call("agent_spawn", {"agent_id": GP, "timeout_seconds": "30"}),
            call("agent_spawn", {"agent_id": GP, "timeout_seconds": 1.5}),
            call("agent_spawn", {"agent_id": GP, "model": "x:y"}),
            call("agent_send", {"label": "x"}),
        ],
    )
    assert [text.partition(":")[0] for text in found] == ["invalid_arguments"] * 6


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(None, 30), (1, 1), (30, 30), (600, 600), (601, 600), (10**9, 600), (0, 0), (-1, 0), (-(10**9), 0)],
)
def test_how_long_a_call_waits(given: int | None, seconds: int) -> None:
    assert seconds_of(given) == seconds


async def test_a_label_is_free_again_after_close_and_belongs_to_one_sub_agent(tmp_path: Path) -> None:
    found = await answers(
        tmp_path,
        [spawn(GP, "one", label="a"), spawn(GP, "two", label="A"), spawn(GP, "three", label="b")],
        call("agent_close", {"label": "A"}),
        send("x", label="a"),
        spawn(GP, "four", label="a"),
        send("x", label="a"),
    )
    assert [text.splitlines()[-1] for text in found] == [
        "did one",
        "Error: Label already in use: A",
        "did three",
        "status: closed",
        "Use agent_list() to see your sub-agents.",
        "did four",
        "did x",
    ]


async def test_a_label_stays_free_when_its_sub_agent_could_not_be_made(tmp_path: Path) -> None:
    made: list[int] = []

    def make(ctx: ToolContext) -> Agent:
        made.append(1)
        if len(made) == 1:
            raise RuntimeError("no luck")
        return Agent("made", ScriptedModel([say("at last")]))

    found = await answers(
        tmp_path, spawn("f", "x", label="a"), spawn("f", "x", label="a"), subagent_factories={"f": make}
    )
    assert found == [
        "Error: agent 'f' could not be run: RuntimeError: no luck",
        "agent_key: agent:f:<1>\nagent_id: f\nsession_id: sub-<1>\nstatus: ok\nreply:\nat last",
    ]


@pytest.mark.parametrize(
    ("made", "answer"),
    [
        (None, "agent 'f' could not be run: its factory gave None, which is not an agent"),
        ("boss", "agent 'f' could not be run: its factory gave 'boss', which is not an agent"),
        (
            Agent("m", "ghost:model"),
            (
                "agent 'm' could not be run: agent 'm': unknown model provider 'ghost' in 'ghost:model'; known: "
                "anthropic, llamacpp, offline, ollama, openai, openai-chat, openai-responses, openrouter, vllm, "
                "and those of pydantic-ai"
            ),
        ),
    ],
)
async def test_a_factory_that_gives_nothing_to_run_is_an_answer(tmp_path: Path, made: Any, answer: str) -> None:
    assert await answers(tmp_path, spawn("f", "x"), subagent_factories={"f": lambda ctx: made}) == [f"Error: {answer}"]


async def test_a_sub_agent_whose_file_is_gone_says_so(tmp_path: Path) -> None:
    path = declare(tmp_path, "r")
    agent = harness(
        tmp_path, spawn("r", "x", label="a"), say("end"), send("y", label="a"), call("agent_close", {"label": "a"})
    )
    runtime = Runtime([agent])
    await runtime.run("boss", "go", thread_id="t")
    path.unlink()
    result = await runtime.run("boss", "go", thread_id="t")
    assert told(result) == [
        "Error: The sub-agent r of this key is not declared any more",
        "agent_key: agent:r:<1>\nstatus: closed",
    ]


async def test_how_a_child_fails_is_told(tmp_path: Path) -> None:
    @tool
    async def look() -> str:
        """Look."""
        return "seen"

    def child(request: Any) -> Any:
        task = request.messages[1].text
        if task == "break":
            return [say("half a "), fail(OSError("line is down"))]
        return [say("still going"), call("look")]

    declared = [
        SubagentDeclaration("short", "d", max_steps=2),
        SubagentDeclaration("cheap", "d", limits=Limits(steps=1)),
    ]
    found = await answers(
        tmp_path,
        [spawn(GP, "break"), spawn("short", "go on"), spawn("cheap", "go on")],
        child=child,
        tools=[look],
        subagents=declared,
    )
    assert found == snapshot(
        [
            """\
agent_key: agent:general-purpose:<1>
agent_id: general-purpose
session_id: sub-<1>
status: error
error: OSError: line is down
reply so far:
half a \
""",
            """\
agent_key: agent:short:<2>
agent_id: short
session_id: sub-<2>
status: error
error: no answer after max_steps=2 steps: raise max_steps or give a smaller task
reply so far:
still going
Calls that it had finished:
- look: seen
- look: seen\
""",
            """\
agent_key: agent:cheap:<3>
agent_id: cheap
session_id: sub-<3>
status: error
error: the limit on steps is reached: 1 of 1 used, too little is left for another step
reply so far:
still going\
""",
        ]
    )


async def test_a_declared_timeout_stops_a_child_and_is_told(tmp_path: Path) -> None:
    stopped: list[str] = []

    async def child(request: Any) -> Any:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            stopped.append("stopped")
            raise

    declared = SubagentDeclaration("slow", "d", timeout=0.05)
    (text,) = await answers(tmp_path, spawn("slow", "x"), child=child, subagents=[declared])
    assert stopped == ["stopped"]
    assert text.startswith("agent_key: agent:slow:<1>\nagent_id: slow\nsession_id: sub-<1>\nstatus: timeout")
    assert "0.05 s" in text


async def test_a_child_may_have_a_model_of_its_own(tmp_path: Path) -> None:
    own = ScriptedModel([say("on my own")])
    (text,) = await answers(tmp_path, spawn("r", "x"), subagents=[SubagentDeclaration("r", "d", model=own)])
    assert text.endswith("reply:\non my own")
    (text,) = await answers(tmp_path, spawn("r", "x"), subagents=[SubagentDeclaration("r", "d", model="ghost:m")])
    assert text.startswith("Error: agent 'r' could not be run: ")
    assert "ghost" in text


async def test_a_child_spends_its_parents_budget_whatever_its_declaration_says(tmp_path: Path) -> None:
    @tool
    async def look() -> str:
        """Look."""
        return "seen"

    wide = Limits(depth=99, children=10_000, parallel=1_000, steps=1_000, tokens=10**9)
    declared = SubagentDeclaration("r", "d", limits=wide, max_steps=1_000)
    agent = harness(tmp_path, spawn("r", "x"), child=lambda _: call("look"), tools=[look], subagents=[declared])
    result = await Runtime([agent]).run("boss", "go", limits=Limits(steps=5))
    error = "error: the limit on steps is reached: 4 of 5 used, and the model asked for more calls"
    done = "Calls that it had finished:\n- look: seen\n- look: seen"
    assert told(result) == [f"agent_key: agent:r:<1>\nagent_id: r\nsession_id: sub-<1>\nstatus: error\n{error}\n{done}"]
    # One of the five is left to the parent, which answers with it.
    assert (len(stage(agent).of_parent), len(stage(agent).of_children)) == (2, 3)


async def test_the_number_of_children_is_limited(tmp_path: Path) -> None:
    found = await answers(tmp_path, spawn(GP, "a"), spawn(GP, "b"), send("c", label="x"), limits=Limits(children=1))
    assert found[1:] == [
        "Error: This conversation may start 1 sub-agents, and has: go on with what you have",
        "Error: Unknown label: x\nUse agent_list() to see your sub-agents.",
    ]


async def test_a_fourth_level_is_refused_also_through_factories(tmp_path: Path) -> None:
    def nested(ctx: ToolContext | None = None) -> HarnessAgent:
        def act(request: Any) -> Any:
            last = request.messages[-1]
            return spawn("nested", "deeper") if last.role == "user" else say(last.text.splitlines()[-1])

        return HarnessAgent(
            "nested",
            ScriptedModel(act),
            workspace=tmp_path,
            subagent_factories={"nested": nested},
            limits=Limits(depth=50),
        )

    sink = RecordingSink()
    result = await Runtime([nested()]).run("nested", "go", sinks=[sink], limits=Limits(depth=3))
    assert result.response == "Error: Maximum spawn depth exceeded (max=3)"
    assert [len(event.ns) for event in sink.of("run_started")] == [0, 1, 2, 3]
    narrower = await Runtime([nested()]).run("nested", "go", limits=Limits(depth=1))
    assert narrower.response == "Error: Maximum spawn depth exceeded (max=1)"


async def test_depth_is_checked_before_anything_else(tmp_path: Path) -> None:
    found = await answers(tmp_path, [spawn("ghost", label="../x"), spawn(GP)], limits=Limits(depth=0))
    assert found == ["Error: Maximum spawn depth exceeded (max=0)"] * 2


async def test_children_of_declarations_and_general_purpose_are_leaves(tmp_path: Path) -> None:
    names = ("agent_spawn", "agent_send", "task")

    def child(request: Any) -> Any:
        if len(request.messages) == 2:
            return [call(name, {"agent_id": GP, "message": "x"}) for name in names]
        return say("; ".join([message.text for message in request.messages[-3:]]))

    found = await answers(
        tmp_path, [spawn(GP, "x"), spawn("r", "x")], child=child, subagents=[SubagentDeclaration("r", "d")]
    )
    known = "read_file, write_file, edit_file, list_files, glob_files, grep_files"
    refused = [f"not_found: there is no tool named '{name}'; available: {known}" for name in names]
    assert [text.partition("reply:\n")[2] for text in found] == ["; ".join(refused)] * 2


async def test_user_context_and_lineage_flow_down(tmp_path: Path) -> None:
    seen: dict[str, tuple[Any, ...]] = {}

    @tool
    async def look(ctx: ToolContext) -> str:
        """Look."""
        run = ctx.run
        seen[run.agent] = (run.user_id, dict(ctx.context), run.depth, run.parent_thread_id, run.parent_tool_call_id)
        return plain([run.thread_id])[0]

    def child(request: Any) -> Any:
        return call("look") if len(request.messages) == 2 else say(request.messages[-1].text)

    def made(ctx: ToolContext) -> Agent:
        return Agent("made", Stage(call("look"), lambda request: say(request.messages[-1].text)), "I.", [look])

    agent = harness(
        tmp_path,
        [spawn(GP, "x", id="c1"), spawn("r", "x", id="c2"), spawn("made", "x", id="c3")],
        child=child,
        tools=[look],
        subagents=[SubagentDeclaration("r", "d")],
        subagent_factories={"made": made},
    )
    result = await Runtime([agent]).run("boss", "go", user_id="ann", context={"tenant": 7}, thread_id="t-1")
    assert seen == {
        GP: ("ann", {"tenant": 7}, 1, "t-1", "c1"),
        "r": ("ann", {"tenant": 7}, 1, "t-1", "c2"),
        "made": ("ann", {"tenant": 7}, 1, "t-1", "c3"),
    }
    assert [text.splitlines()[-1] for text in told(result)] == ["sub-<1>"] * 3
    assert [text.splitlines()[2] for text in told(result)] == [
        "session_id: sub-<1>",
        "session_id: sub-<2>",
        "session_id: sub-<3>",
    ]


async def test_a_spawn_as_a_whole(tmp_path: Path) -> None:
    agent = harness(tmp_path, spawn(GP, "dig", id="c1"))
    sink = RecordingSink()
    await Runtime([agent]).run("boss", "go", sinks=[sink])
    lines = plain(
        [f"{'/'.join(event.ns) or '.'} {line}" for event, line in zip(sink.events, story(sink.events), strict=True)]
    )
    assert lines == snapshot(
        [
            ". run_started",
            ". step_started 1",
            ". tool_call_started c1 agent_spawn",
            '. tool_call_args_delta c1 \'{"agent_id":"general-purpose","task":"dig"}\'',
            ". inference_finished tool_calls",
            ". tool_call_ready c1 {'agent_id': 'general-purpose', 'task': 'dig'}",
            ". child_started c1 'general-purpose'",
            "tools:c1 run_started",
            "tools:c1 step_started 1",
            "tools:c1 text_delta 'did dig'",
            "tools:c1 inference_finished stop",
            "tools:c1 step_finished 1",
            "tools:c1 run_finished completed natural 'did dig' None",
            ". child_finished c1 completed",
            ". tool_call_finished c1 succeeded 'agent_key: agent:general-purpose:<1>\\nagent_id: general-purpose\\nsession_id: sub-<1>\\nstatus: ok\\nreply:\\ndid dig'",
            ". step_finished 1",
            ". step_started 2",
            ". text_delta end",
            ". inference_finished stop",
            ". step_finished 2",
            ". run_finished completed natural end None",
        ]
    )
    assert stage(agent).of_children[0].messages[1].text == "dig"
