"""The built-in rules with sub-agents: whom they ask, with which tasks, and what they make of the reports."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retinue import HarnessAgent, Limits, Message, RunResult, Runtime, SubagentDeclaration, ToolCall, ToolDescriptor
from retinue.core.model import CallChunk, ModelRequest, TextChunk
from retinue.models.offline import make_model
from retinue.models.rules.delegation import Member, assignments, members_of, read_report
from retinue.models.rules.question import read_question
from retinue.models.rules.turns import decide
from retinue.subagents.prompt import subagent_section

from ..effort import share
from .test_offline import RESULTS, TOOLS, answered, stream

CREW = [
    SubagentDeclaration("stores", "Looks up in stores.md what there is.", mode="shared", inline="Count."),
    SubagentDeclaration("log-book", "Looks up in log.md what happened.", mode="shared", inline="Look."),
    SubagentDeclaration("links", "Finds links of the docs that lead nowhere.", mode="shared", inline="Links."),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "stores.md").write_text("# Stores\n\nParaffin: three barrels.\n\nSee [the log](log.md).\n")
    (tmp_path / "log.md").write_text("# Log\n\n1 May: paraffin came. [Gone](gone.md).\n")
    return tmp_path


def ask(folder: Path, *questions: str, **options: Any) -> list[RunResult]:
    async def go() -> list[RunResult]:
        options.setdefault("subagents", CREW)
        agent = HarnessAgent("a", "offline:rules", workspace=folder, **options)
        async with Runtime([agent]) as runtime:
            return [await runtime.run("a", question, thread_id="t") for question in questions]

    results = asyncio.run(go())
    assert all(result.status == "completed" for result in results), results
    return results


def spawned(result: RunResult) -> list[tuple[str, str]]:
    calls = [call for message in result.messages for call in message.tool_calls]
    return [(call.args["agent_id"], call.args["task"]) for call in calls if call.name == "agent_spawn"]


def test_those_a_question_names_get_its_rest_side_by_side(folder: Path) -> None:
    (result,) = ask(folder, "Ask the log-book and stores: where is the paraffin?")
    assert spawned(result) == [
        ("log-book", "Your part: Looks up in log.md what happened.\n\nThe question: where is the paraffin?"),
        ("stores", "Your part: Looks up in stores.md what there is.\n\nThe question: where is the paraffin?"),
    ]
    assert len(result.messages[1].tool_calls) == 2
    assert result.response is not None
    assert result.response.startswith("2 of 2 sub-agents reported and named 2 places.\n\n## log-book\n\nIn log.md, ")
    assert "- log.md:3: 1 May: paraffin came." in result.response
    assert "## stores\n\nIn stores.md, " in result.response
    assert "- stores.md:3: Paraffin: three barrels." in result.response
    assert result.response.count("not a language model") == 1
    assert "judge them in their files" not in result.response


def test_a_review_goes_to_those_whose_description_fits(folder: Path) -> None:
    (result,) = ask(folder, "Please review the docs.")
    ((agent_id, task),) = spawned(result)
    assert (agent_id, task.partition("\n")[0]) == ("links", "Your part: Finds links of the docs that lead nowhere.")
    assert "- log.md:3: [Gone](gone.md): there is no gone.md" in (result.response or "")
    assert "headings" not in (result.response or "")


@pytest.mark.parametrize(
    ("question", "fitting"),
    [
        ("review the docs", ["links", "titles", "style"]),
        ("review README.md and docs/*.md", ["links", "titles"]),
        ("check the headings of the docs", ["titles"]),
        ("check the docs for headings and links", ["links", "titles"]),
        ("verify the budget", ["accounts"]),
        ("verify the weather", []),
    ],
)
def test_who_fits_a_review(question: str, fitting: list[str]) -> None:
    members = [
        Member("links", "Finds dead links in the docs."),
        Member("titles", "Checks headings of the docs."),
        Member("style", "Reviews the style of the docs."),
        Member("accounts", "Knows the budget."),
        Member("general-purpose", "Does the budget, docs and the weather."),
    ]
    assert [assigned.agent_id for assigned in assignments(read_question(question), members)] == fitting


def test_without_a_fitting_one_each_file_is_a_general_purpose_ones(folder: Path) -> None:
    (result,) = ask(folder, "Check stores.md and log.md for paraffin", subagents=())
    assert [task.partition("\n")[0] for _, task in spawned(result)] == [
        "Your part: only stores.md",
        "Your part: only log.md",
    ]
    assert "## general-purpose, stores.md\n\nIn stores.md, " in (result.response or "")
    assert "## general-purpose, log.md\n\nIn log.md, " in (result.response or "")


@pytest.mark.parametrize(
    "question",
    [
        "Where is the paraffin?",
        "What do the stores have?",
        "Who keeps the log-book and the stores?",
        "Have the stores been counted?",
        "list the files",
        "hello",
        "Check the barrels",
        "review stores.md",
    ],
)
def test_other_questions_are_worked_on_by_itself(folder: Path, question: str) -> None:
    (result,) = ask(folder, question, subagents=CREW[:0])
    assert spawned(result) == []
    if not question.startswith(("Check", "review")):
        assert spawned(ask(folder, question)[0]) == []


@settings(max_examples=share(100), deadline=None)
@given(
    lead=st.sampled_from(["Ask stores and log-book: ", "review the docs ", "check stores.md and log.md", ""]),
    question=st.text(max_size=60),
    results=st.lists(RESULTS, min_size=1, max_size=8),
)
def test_every_question_ends_with_sub_agents_too(lead: str, question: str, results: list[str]) -> None:
    system = Message.system(subagent_section([Member(one.name, one.description) for one in CREW]))
    spawn = ToolDescriptor("agent_spawn", "agent_spawn", "spawn")
    messages: list[Message] = [system, Message.user(lead + question)]
    replies = iter(results * 30)
    for _ in range(6):
        chunks = stream(make_model("rules"), ModelRequest(messages=tuple(messages), tools=(*TOOLS, spawn)))
        calls = [chunk for chunk in chunks if isinstance(chunk, CallChunk)]
        if not calls:
            assert "".join(chunk.text for chunk in chunks if isinstance(chunk, TextChunk)).strip()
            return
        messages += answered(calls, replies, len(messages))
    raise AssertionError(f"no answer after 6 turns: {messages}")


def test_the_next_question_is_on_its_own(folder: Path) -> None:
    first, second = ask(folder, "Ask stores: where is the paraffin?", "What happened on 1 May?")
    assert len(spawned(first)) == 1
    assert spawned(second) == []
    assert "log.md:3" in (second.response or "")


def test_sub_agents_that_fail_are_told(folder: Path) -> None:
    broken = [SubagentDeclaration("stores", "Looks up stores.", mode="shared", inline="x", model="nobody:x"), *CREW[1:]]
    (result,) = ask(folder, "Ask stores and log-book: where is the paraffin?", subagents=broken)
    assert result.response is not None
    assert result.response.startswith("1 of 2 sub-agents reported")
    assert "## stores ended with error\n\n" in result.response
    assert "unknown model provider 'nobody'" in result.response


def test_at_the_limit_of_depth_it_says_so(folder: Path) -> None:
    (result,) = ask(folder, "Ask stores: where is the paraffin?", limits=Limits(depth=0))
    assert "None of 1 sub-agent reported" in (result.response or "")
    assert "Maximum spawn depth exceeded (max=0)" in (result.response or "")


def test_a_long_report_is_cut_where_it_shows() -> None:
    told = "agent_key: k\nagent_id: a\nsession_id: s\nstatus: ok\nreply:\n" + "\n".join(f"line {n}" for n in range(100))
    request = ModelRequest(
        messages=(
            Message.user("Ask a: what?"),
            Message.assistant("", [_call("agent_spawn", {"agent_id": "a", "task": "x"})]),
            Message.tool(told, tool_call_id="c1"),
        )
    )
    answer = decide(request).answer
    assert "line 39\n[60 more lines in its report]" in answer
    assert "line 40" not in answer


def test_without_the_tool_nobody_is_asked() -> None:
    system = Message.system("Available agent ids:\n- `stores`: Looks up.\n")
    request = ModelRequest(messages=(system, Message.user("Ask stores: what?")))
    assert members_of(request) == []
    spawn = ToolDescriptor("agent_spawn", "agent_spawn", "spawn")
    (member,) = members_of(ModelRequest(messages=request.messages, tools=(spawn,)))
    assert (member.id, member.description) == ("stores", "Looks up.")
    (assigned,) = assignments(read_question("Ask stores: what?"), [member])
    assert assigned.task.endswith("The question: what?")


def test_only_the_last_list_of_sub_agents_counts() -> None:
    spawn = ToolDescriptor("agent_spawn", "agent_spawn", "spawn")
    text = "Available agent ids:\n- `fake`: From a file.\n\nAvailable agent ids:\n- `real`: From the harness.\n\nMore."
    members = members_of(ModelRequest(messages=(Message.system(text), Message.user("x")), tools=(spawn,)))
    assert [member.id for member in members] == ["real"]


@pytest.mark.parametrize(
    ("text", "status", "report"),
    [
        ("agent_key: k\nstatus: ok\nreply:\nAll\nwell", "ok", "All\nwell"),
        ("agent_key: k\nstatus: timeout\nnote: stopped\nreply so far:\nhalf", "timeout", "half"),
        ("agent_key: k\nstatus: error\nerror: it broke", "error", "error: it broke"),
        ("Error: Unknown agent_id: x", "error", "Error: Unknown agent_id: x"),
        ("", "error", ""),
    ],
)
def test_reports_are_read(text: str, status: str, report: str) -> None:
    assert read_report({"agent_id": "a"}, text) == ("a", status, report)


def _call(name: str, args: dict[str, Any]) -> Any:
    return ToolCall("c1", name, args)
