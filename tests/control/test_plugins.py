"""The plugins that come with it: stopping, permissions, long results, compaction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retinue import (
    Agent,
    Compaction,
    Decision,
    LocalFilesystem,
    Permissions,
    RunResult,
    RunStatus,
    Runtime,
    ToolCall,
    Usage,
    file_tools,
    tool,
)
from retinue.events import Compacted
from retinue.plugins import ResultFiles, StopAfterSeconds, StopAfterSteps, StopAfterTokens, StopOnRepeat, StopOnTool
from retinue.testing import RecordingSink, ScriptedModel, call, say

ran: list[str] = []


@tool
async def work(name: str = "x") -> str:
    """Work."""
    ran.append(name)
    return f"worked on {name}"


@tool
async def hand_in(text: str) -> str:
    """Hand the work in."""
    return f"handed in: {text}"


async def run(plugin: Any, *turns: Any, tools: Any = (work, hand_in)) -> RunResult:
    ran.clear()
    return await Runtime([Agent("a", ScriptedModel(turns), tools=tools, plugins=[plugin])]).run("a", "go")


@pytest.mark.parametrize(
    ("plugin", "name"),
    [
        (StopAfterSteps(2), "stop_after_steps"),
        (StopAfterTokens(150), "stop_after_tokens"),
        (StopOnRepeat(2), "stop_on_repeat"),
    ],
)
async def test_a_policy_ends_the_run_before_the_calls_are_made(plugin: Any, name: str) -> None:
    turn = [say("again", usage=Usage(requests=1, input_tokens=100)), call("work")]
    result = await run(plugin, turn, turn)
    assert (result.status, result.termination, result.steps) == (RunStatus.FAILED, f"limit:{name}", 2)
    assert ran == ["x"]
    assert [m.role for m in result.messages] == ["user", "assistant", "tool", "assistant", "tool"]
    assert result.messages[-1].text.startswith(f"[limit:{name}] ")


async def test_an_answer_is_never_thrown_away() -> None:
    for plugin in (StopAfterSteps(1), StopAfterTokens(1), StopAfterSeconds(1e-9), StopOnRepeat(1)):
        result = await run(plugin, say("answer", usage=Usage(requests=1, input_tokens=100)))
        assert (result.status, result.response) == (RunStatus.COMPLETED, "answer")


async def test_seconds() -> None:
    result = await run(StopAfterSeconds(1e-9), call("work"))
    assert (result.termination, ran) == ("limit:stop_after_seconds", [])


async def test_a_tool_may_end_the_run() -> None:
    result = await run(StopOnTool("hand_in"), call("work"), [say("Here."), call("hand_in", {"text": "essay"})])
    assert (result.status, result.termination, result.response) == (
        RunStatus.COMPLETED,
        "limit:stop_on_tool",
        "Here.",
    )
    assert result.messages[-1].text == "handed in: essay"


def test_nonsense_is_refused() -> None:
    for make in (lambda: StopAfterSteps(0), lambda: Compaction(0), lambda: Permissions(default="maybe")):  # pyright: ignore[reportArgumentType]
        with pytest.raises(ValueError, match="must be|default is"):
            make()
    with pytest.raises(ValueError, match="not a permission rule: 'a b'"):
        Permissions(deny=["a b"])


# -- permissions


@tool
async def write(path: str, text: str = "") -> str:
    """Write."""
    ran.append(path)
    return f"wrote {path}"


async def test_allow_ask_deny() -> None:
    rules = Permissions(deny=["write(path=secrets/*)", "hand_in"], ask=["write(path=*.md)"])
    model = ScriptedModel(
        [
            [call("write", {"path": p}, id=p[0]) for p in ("secrets/a.md", "b.md", "c.txt")]
            + [call("hand_in", {"text": ""})],
            say("ok"),
        ]
    )
    ran.clear()
    runtime = Runtime([Agent("a", model, tools=[write, hand_in], plugins=[rules])])
    waiting = await runtime.run("a", "go")
    assert [t.name for t in model.requests[0].tools] == ["write"]
    assert (list(waiting.suspended), ran) == (["b"], ["c.txt"])
    assert waiting.suspended["b"].message == "May a call write?"
    result = await runtime.resume(waiting.run_id, {"permission_b": Decision.resume({"approved": True})})
    assert [m.text for m in result.messages if m.role == "tool"] == [
        "blocked: write is not permitted with these arguments",
        "wrote b.md",
        "wrote c.txt",
        "not_found: there is no tool named 'hand_in'; available: write",
    ]


async def test_a_human_may_say_no() -> None:
    runtime = Runtime(
        [Agent("a", ScriptedModel([call("work", id="c1"), say("ok")]), tools=[work], plugins=[Permissions(ask=["*"])])]
    )
    ran.clear()
    waiting = await runtime.run("a", "go")
    result = await runtime.resume(waiting.run_id, {"c1": Decision.resume({"approved": False})})
    assert [m.text for m in result.messages if m.role == "tool"] == ["blocked: a human said no"]
    assert ran == []


names = st.sampled_from(["read", "write", "shell", "*", "w*"])
arguments = st.sampled_from(["", "(path=a*)", "(path=*)", "(path=secret)"])
rules = st.lists(st.builds(lambda n, a: n + a, names, arguments), max_size=3)
permissions = st.builds(
    lambda allow, ask, deny, default: Permissions(allow=allow, ask=ask, deny=deny, default=default),
    rules,
    rules,
    rules,
    st.sampled_from(["allow", "ask", "deny"]),
)


@given(permissions, st.sampled_from(["read", "write", "shell"]), st.sampled_from(["a1", "b", "secret"]))
def test_a_hidden_tool_is_always_denied(rules: Any, name: str, path: str) -> None:
    assert rules.verdict(ToolCall("c", name, {"path": path})) == "deny" or not rules.rules.hides(name)


BY_VERDICT: dict[str, dict[str, Any]] = {"allow": {}, "ask": {"ask": ["write"]}, "deny": {"deny": ["write(path=*)"]}}


@pytest.mark.parametrize("inner", BY_VERDICT)
@pytest.mark.parametrize("outer", BY_VERDICT)
async def test_rules_of_a_child_can_only_narrow_those_above(outer: str, inner: str) -> None:
    turns = [call("write", {"path": "a"}, id="c1"), say("")]
    child = Agent("child", ScriptedModel(turns), tools=[write], plugins=[Permissions(**BY_VERDICT[inner])])
    ask = call("task", {"subagent_type": "child", "description": "x"})
    boss = Agent("boss", ScriptedModel([ask, say("")]), subagents=[child], plugins=[Permissions(**BY_VERDICT[outer])])
    ran.clear()
    result = await Runtime([boss]).run("boss", "go")
    strictest = next(verdict for verdict in ("deny", "ask", "allow") if verdict in (outer, inner))
    assert (len(result.suspended), ran) == {"deny": (0, []), "ask": (1, []), "allow": (0, ["a"])}[strictest]


# -- context


async def test_long_results_go_to_the_workspace_with_a_pointer_that_can_be_read(tmp_path: Path) -> None:
    files = LocalFilesystem(tmp_path)

    @tool
    async def dump() -> str:
        """Dump."""
        return "\n".join(f"line {n}" for n in range(10_000))

    pointed = {"path": "tool_results/c1.txt", "offset": 5000, "limit": 1}
    model = ScriptedModel([call("dump", id="c1"), call("read_file", pointed), say("ok")])
    agent = Agent("a", model, tools=[dump, *file_tools(files)], plugins=[ResultFiles(files)], result_limit=500)
    result = await Runtime([agent]).run("a", "go")
    shown, found = [m.text for m in result.messages if m.role == "tool"]
    assert len(shown) < 700
    assert 'the whole is in "tool_results/c1.txt", read it with read_file(path, offset, limit)' in shown
    assert "line 5000" in found
    assert len((tmp_path / "tool_results" / "c1.txt").read_text().splitlines()) == 10_000


async def test_compaction_shortens_what_the_model_reads_and_keeps_what_is_stored() -> None:
    sink = RecordingSink()
    turns = [call("work", {"name": "w" * 100 + str(i)}, id=f"c{i}") for i in range(8)]
    model = ScriptedModel([*turns, say("done"), say("next")])
    agent = Agent("a", model, "Sys.", [work], [Compaction(max_tokens=250, keep=4)])
    runtime = Runtime([agent])
    result = await runtime.run("a", "go", thread_id="t", sinks=[sink])
    assert len(result.messages) == 18
    assert max(len(request.messages) for request in model.requests) < 12
    for request in model.requests:
        asked = [c.id for m in request.messages for c in m.tool_calls]
        assert asked == [m.tool_call_id for m in request.messages if m.role == "tool"]
    told: list[Compacted] = sink.of("compacted")
    ids = [m.id for m in result.messages]
    assert [ids.index(t.kept_from) for t in told] == sorted({ids.index(t.kept_from) for t in told})
    assert all(t.usage == Usage() and t.problem is None for t in told)
    assert model.requests[-1].messages[1].text.startswith("Earlier in this conversation (shortened):\n- user: go")
    assert (await runtime.run("a", "more", thread_id="t")).response == "next"


async def test_a_summary_may_be_made_by_anything() -> None:
    async def summarise(messages: Any) -> str:
        return f"{len(messages)} messages happened."

    model = ScriptedModel([call("work", {"name": "w" * 400}), call("work", {"name": "w" * 400}), say("done")])
    await Runtime([Agent("a", model, "", [work], [Compaction(100, keep=2, summarise=summarise)])]).run("a", "go")
    assert model.requests[-1].messages[0].text == "3 messages happened."


async def test_permissions_hold_for_every_agent_below() -> None:
    worker = Agent("worker", ScriptedModel([call("write", {"path": "secrets/a"}), say("tried")]), tools=[write])
    go = call("task", {"subagent_type": "worker", "description": "x"}, id="c1")
    rules = Permissions(deny=["write(path=secrets/*)"])
    boss = Agent("boss", ScriptedModel([go, say("ok")]), subagents=[worker], plugins=[rules])
    ran.clear()
    sink = RecordingSink()
    await Runtime([boss]).run("boss", "go", sinks=[sink])
    assert ran == []
    texts = [e.message.text for e in sink.of("tool_call_finished") if e.agent == "worker"]
    assert texts == ["blocked: write is not permitted with these arguments"]
