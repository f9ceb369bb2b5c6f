"""offline:rules: what it looks for, whom it asks, what it answers, and that it always ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retinue import (
    Agent,
    ConfigurationError,
    HarnessAgent,
    Limits,
    Message,
    RunResult,
    Runtime,
    SubagentDeclaration,
    ToolCall,
    ToolDescriptor,
)
from retinue.cli.offline import make_model
from retinue.core.model import CallChunk, Model, ModelRequest, ReasoningChunk, TextChunk, TurnEnd
from tests.effort import share

FILES = {
    "notes/lamp.md": "# The lamp\n\nThe lamp burns paraffin.\nThe wick is part LW-7 and is changed in May.\n",
    "notes/stores.md": "# Stores\n\nParaffin: three barrels.\nLW-7: on shelf B, see [the list](gone.md).\n",
    "log.md": "1 May: fog all day.\n2 May: fog, then rain.\n3 May: clear. Wick changed by Ada.\n",
    ".hidden/old.md": "The lamp burned paraffin.\n",
}
CREW = [
    SubagentDeclaration("stores", "Looks up in notes/stores.md what there is.", mode="shared", inline="Count."),
    SubagentDeclaration("log-book", "Looks up in log.md what happened.", mode="shared", inline="Look."),
    SubagentDeclaration("links", "Finds links of the docs that lead nowhere.", mode="shared", inline="Links."),
    SubagentDeclaration("style", "Judges the style of the docs.", mode="shared", inline="Judge."),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


def ask(folder: Path, *questions: str, **options: Any) -> list[RunResult]:
    """The answers to questions on one thread."""

    async def ask_each() -> list[RunResult]:
        agent = HarnessAgent("a", "offline:rules", workspace=folder, **options)
        async with Runtime([agent]) as runtime:
            return [await runtime.run("a", question, thread_id="t") for question in questions]

    results = asyncio.run(ask_each())
    assert all(result.status == "completed" and result.steps <= 6 for result in results), results
    return results


def answer(folder: Path, *questions: str) -> str:
    return ask(folder, *questions)[-1].response or ""


def rounds(result: RunResult) -> list[list[str]]:
    """The names of the calls of each step."""
    return [[call.name for call in message.tool_calls] for message in result.messages if message.role == "assistant"]


def spawned(result: RunResult) -> list[tuple[str, str]]:
    calls = [call for message in result.messages for call in message.tool_calls]
    return [(call.args["agent_id"], call.args["task"]) for call in calls if call.name == "agent_spawn"]


def test_it_looks_around_searches_in_parallel_and_quotes(folder: Path) -> None:
    (result,) = ask(folder, "Which wick does the lamp need, and when is it changed?")
    assert rounds(result) == [["list_files", "glob_files"], ["grep_files"] * 4, ["grep_files"], []]
    text = result.response or ""
    assert text.startswith("In 3 files, ")
    assert "- notes/lamp.md:4: The wick is part LW-7" in text
    assert "- log.md:3: 3 May: clear. Wick changed by Ada." in text
    assert "LW-7: also in\n\n- notes/stores.md:4: LW-7: on shelf B" in text
    assert "not by a language model" in text
    assert ".hidden" not in text


def test_it_is_honest_about_finding_nothing(folder: Path) -> None:
    text = answer(folder, "Where is the zebra?")
    assert text.startswith("I found no line with zebra. I am rules")
    assert "try other words" in text


def test_a_misnamed_file_is_reported_and_the_nearest_taken(folder: Path) -> None:
    text = answer(folder, "What does lamps.txt say about the wick?")
    assert text.startswith("There is no lamps.txt; the nearest name is notes/lamp.md.")
    assert "notes/lamp.md:4: The wick" in text
    assert answer(folder, "read qqq.zip").startswith("There is no qqq.zip; the nearest name is none.")


def test_reading_and_listing(folder: Path) -> None:
    assert "1 May: fog all day." in answer(folder, "read log.md")
    text = answer(folder, "list the files")
    assert text.startswith("3 files here")
    assert "- notes/lamp.md" in text


@pytest.mark.parametrize("question", ["hello", "Hi there!", "what can you do?", "help", "?!"])
def test_other_questions_get_an_introduction(folder: Path, question: str) -> None:
    (result,) = ask(folder, question)
    assert rounds(result) == [[]]
    assert (result.response or "").startswith("I am offline:rules, built-in rules and not a language model.")


def test_a_question_that_points_back_takes_over_the_words_before(folder: Path) -> None:
    _, second, third = ask(folder, "When was the wick changed?", "And who did it?", "Where is the paraffin?")
    assert "log.md:3: 3 May: clear. Wick changed by Ada." in (second.response or "")
    assert "wick" not in (third.response or "")


def test_links_to_files_are_checked(folder: Path) -> None:
    assert "- notes/stores.md:4: [the list](gone.md): there is no notes/gone.md" in answer(folder, "check the links")
    (folder / "notes/gone.md").touch()
    assert answer(folder, "check the links").endswith("found nothing wrong.")


def test_without_tools_it_says_what_it_needs() -> None:
    result = asyncio.run(Runtime().run(Agent("a", "offline:rules"), "Where is the lamp?"))
    assert "I need the file tools glob_files, grep_files, list_files and read_file" in (result.response or "")


def test_at_a_limit_it_answers_with_what_it_has(folder: Path) -> None:
    (result,) = ask(folder, "Where is the lamp?", limits=Limits(tokens=1400))
    assert result.usage.tokens <= 1400
    assert (result.response or "").startswith("I could not look further: the limit on tokens is reached: ")


def test_the_sub_agents_a_question_names_get_its_rest(folder: Path) -> None:
    (result,) = ask(folder, "Ask the log-book and stores: where is the paraffin?", subagents=CREW)
    assert spawned(result) == [
        ("log-book", "Your part: Looks up in log.md what happened.\n\nThe question: where is the paraffin?"),
        ("stores", "Your part: Looks up in notes/stores.md what there is.\n\nThe question: where is the paraffin?"),
    ]
    text = result.response or ""
    assert text.startswith("2 of 2 sub-agents reported.\n\n## log-book\n\n")
    assert "- notes/stores.md:3: Paraffin: three barrels." in text
    assert text.endswith("I put these reports together and conclude nothing from them.")
    assert spawned(ask(folder, "What is in the stores?", subagents=CREW)[0]) == []


def test_a_review_goes_to_those_who_review_and_says_what_rules_cannot(folder: Path) -> None:
    (result,) = ask(folder, "Please review the docs.", subagents=CREW)
    assert [agent_id for agent_id, _ in spawned(result)] == ["links", "style"]
    assert "[the list](gone.md): there is no notes/gone.md" in (result.response or "")
    assert "## style\n\nThis part needs a language model" in (result.response or "")


def test_sub_agents_that_fail_are_reported(folder: Path) -> None:
    broken = [SubagentDeclaration("stores", "Looks up stores.", mode="shared", inline="x", model="nobody:x"), *CREW[1:]]
    (result,) = ask(folder, "Ask stores and log-book: where is the paraffin?", subagents=broken)
    assert (result.response or "").startswith("1 of 2 sub-agents reported.")
    assert "unknown model provider 'nobody'" in (result.response or "")


def test_it_counts_four_characters_as_a_token() -> None:
    chunks = stream(make_model("rules"), ModelRequest(messages=(Message.user("a" * 7 + "?"),)))
    end = chunks[-1]
    assert isinstance(end, TurnEnd)
    text = "".join(chunk.text for chunk in chunks if isinstance(chunk, TextChunk))
    assert (end.usage.requests, end.usage.input_tokens, end.usage.output_tokens) == (1, 2, -(-len(text) // 4))


def test_other_names_say_which_exist() -> None:
    with pytest.raises(ConfigurationError, match="offline:rules"):
        make_model("gpt")
    assert isinstance(make_model("rules"), Model)


def stream(model: Model, request: ModelRequest) -> list[Any]:
    async def collect() -> list[Any]:
        return [chunk async for chunk in model.stream(request)]

    return asyncio.run(collect())


NAMES = ("list_files", "glob_files", "grep_files", "read_file", "agent_spawn")
TOOLS = tuple(ToolDescriptor(name, name, name) for name in NAMES)
SYSTEM = Message.system("Available agent ids:\n- `stores`: Looks.\n- `log-book`: Reviews docs.\n")
RESULTS = st.one_of(
    st.text(max_size=80),
    st.sampled_from(
        [
            "a.md (3 bytes)\nsub/",
            "a.md\nsub/b.md",
            "a.md:1: lamp HN-12",
            "     1\tlamp\n     2\tAB-123",
            "not_found: gone",
            "[limit:tokens] no",
            "cancelled",
            "agent_id: a\nstatus: ok\nreply:\nx",
        ]
    ),
)


@settings(max_examples=share(150), deadline=None)
@given(
    lead=st.sampled_from(["Ask stores and log-book: ", "review the docs ", "check the links in a.md ", "", "", ""]),
    question=st.text(max_size=120),
    results=st.lists(RESULTS, min_size=1, max_size=12),
)
def test_every_question_ends_whatever_the_tools_say(lead: str, question: str, results: list[str]) -> None:
    model = make_model("rules")
    messages: list[Message] = [SYSTEM, Message.user(lead + question)]
    replies: Iterable[str] = iter(results * 20)
    for _ in range(6):
        request = ModelRequest(messages=tuple(messages), tools=TOOLS)
        chunks = stream(model, request)
        assert chunks == stream(model, request)
        calls = [chunk for chunk in chunks if isinstance(chunk, CallChunk)]
        if not calls:
            assert "".join(chunk.text for chunk in chunks if isinstance(chunk, TextChunk)).strip()
            return
        assert isinstance(chunks[0], ReasoningChunk)
        made = [
            ToolCall(f"c{len(messages)}_{call.index}", call.name or "", json.loads(call.arguments)) for call in calls
        ]
        messages.append(Message.assistant("", made))
        messages += [Message.tool(text, tool_call_id=call.id) for call, text in zip(made, replies, strict=False)]
    raise AssertionError(f"no answer after 6 turns: {messages}")
