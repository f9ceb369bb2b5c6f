"""The built-in rules: what they look for, what they answer, and that they always end."""

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
    ExecutionFailed,
    Limits,
    Message,
    RunResult,
    Runtime,
    ToolCall,
    ToolDescriptor,
    tool,
)
from retinue.core.model import CallChunk, Model, ModelRequest, ReasoningChunk, TextChunk, TurnEnd
from retinue.models.offline import make_model
from retinue.models.rules.question import make_term, read_question
from retinue.workspace import LocalFilesystem, file_tools

from ..effort import share

FILES = {
    "notes/lamp.md": "# The lamp\n\nThe lamp burns paraffin.\nThe wick is part LW-7 and is changed in May.\n",
    "notes/stores.md": "# Stores\n\nParaffin: three barrels.\nLW-7: on shelf B, next to the matches.\n",
    "log.md": "1 May: fog all day.\n2 May: fog, then rain.\n3 May: clear. Wick changed by Ada.\n",
    "灯塔.md": "灯塔在岛的北边。\n燃料放在地下室。\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


def ask(folder: Path, *questions: str, **options: Any) -> list[RunResult]:
    """The answers to questions on one thread."""

    async def go() -> list[RunResult]:
        agent = Agent("a", "offline:rules", tools=file_tools(LocalFilesystem(folder)), **options)
        async with Runtime([agent]) as runtime:
            return [await runtime.run("a", question, thread_id="t") for question in questions]

    results = asyncio.run(go())
    assert all(result.status == "completed" and result.steps <= 6 for result in results), results
    return results


def answer(folder: Path, *questions: str) -> str:
    return ask(folder, *questions)[-1].response or ""


def rounds(result: RunResult) -> list[list[str]]:
    """The names of the calls of each step."""
    return [[call.name for call in message.tool_calls] for message in result.messages if message.role == "assistant"]


def test_it_looks_around_searches_in_parallel_reads_and_quotes(folder: Path) -> None:
    (result,) = ask(folder, "Which wick does the lamp need, and who changed it?")
    assert rounds(result) == [
        ["list_files", "glob_files"],
        ["grep_files"] * 4,
        ["read_file"] * 2,
        ["grep_files"],
        [],
    ]
    assert result.response is not None
    assert "In 4 files, " in result.response
    assert "notes/lamp.md:4: The wick is part LW-7" in result.response
    assert "log.md:3: 3 May: clear. Wick changed by Ada." in result.response
    assert "Nothing matches need." in result.response
    assert "not by a language model" in result.response


def test_it_follows_a_part_number_into_another_file(folder: Path) -> None:
    assert "LW-7 is also in:\n\n- notes/stores.md:4: LW-7: on shelf B" in answer(folder, "Which part is the wick?")


def test_the_plan_comes_first(folder: Path) -> None:
    (result,) = ask(folder, "Where is the paraffin?")
    first = result.messages[1]
    assert str(first.parts[0]).startswith(
        "ReasoningPart(text='Plan: see which files there are, then search for paraffin"
    )


def test_it_is_honest_about_finding_nothing(folder: Path) -> None:
    text = answer(folder, "Where is the zebra?")
    assert text.startswith("I found nothing: no line in 4 files has zebra.")
    assert "not a language model" in text
    assert "try other words" in text


def test_a_file_that_is_not_there_is_reported_and_the_nearest_taken(folder: Path) -> None:
    (result,) = ask(folder, "What does lamps.txt say about the wick?")
    assert rounds(result)[:2] == [["list_files", "glob_files", "read_file"], ["grep_files", "read_file"]]
    text = result.response or ""
    assert text.startswith("There is no lamps.txt; the nearest name is notes/lamp.md, so I took that.")
    assert "notes/lamp.md:4: The wick" in text


def test_a_file_like_no_other_is_reported(folder: Path) -> None:
    assert answer(folder, "read qqq.zip") == "There is no file like qqq.zip."


def test_a_file_that_cannot_be_read_is_reported(folder: Path) -> None:
    (folder / "picture.png").write_bytes(b"\0\1\2")
    assert "picture.png: it is a binary file" in answer(folder, "read picture.png")


@pytest.mark.parametrize(
    "question", ["hello", "Hi there!", "what can you do?", "help", "thanks", "你好", "你能做什么？"]
)
def test_greetings_need_no_tools(folder: Path, question: str) -> None:
    (result,) = ask(folder, question)
    assert rounds(result) == [[]]
    assert (result.response or "").startswith("I am offline:rules, a built-in set of rules and not a language model.")


@pytest.mark.parametrize(
    "question", ["list the files", "What files are here?", "How many files are there?", "列出文件"]
)
def test_listing(folder: Path, question: str) -> None:
    text = answer(folder, question)
    assert text.startswith("4 files here")
    assert "- notes/lamp.md" in text


def test_listing_a_folder_and_a_pattern(folder: Path) -> None:
    assert "- notes/stores.md" in answer(folder, "list the files in notes")
    assert answer(folder, "list all *.rst files") == "There are no files like *.rst, unless hidden ones."
    assert "not_found: cellar" in answer(folder, "list the files in cellar")


def test_a_pattern_narrows_the_search(folder: Path) -> None:
    text = answer(folder, "Where in lo*.md is the wick?")
    assert "log.md:3" in text
    assert "lamp.md" not in text


def test_reading_a_file(folder: Path) -> None:
    assert "1 May: fog all day.\n2 May: fog, then rain." in answer(folder, "read log.md")
    (folder / "long.txt").write_text("\n".join(f"line {number}" for number in range(150)))
    text = answer(folder, "show long.txt")
    assert "line 59\n[90 more lines read; ask for words in this file" in text


def test_counting(folder: Path) -> None:
    text = answer(folder, "How many lines mention fog?")
    assert "- fog: 2 lines in 1 file" in text
    assert "log.md:1: 1 May: fog all day." in text
    assert "- all of these in one line: 1 line in 1 file" in answer(folder, "how many lines with fog and rain")


def test_an_empty_folder(tmp_path: Path) -> None:
    assert answer(tmp_path, "Where is the lamp?") == "There is nothing to search: I see no files here."
    assert answer(tmp_path, "list the files") == "There are no files here, unless hidden ones."


def test_a_question_that_points_back_takes_over_the_words_before(folder: Path) -> None:
    first, second = ask(folder, "When was the wick changed?", "And who did it?")
    assert "log.md:3" in (first.response or "")
    assert "log.md:3: 3 May: clear. Wick changed by Ada." in (second.response or "")


def test_a_new_question_on_the_thread_is_on_its_own(folder: Path) -> None:
    assert "wick" not in answer(folder, "When was the wick changed?", "Where is the paraffin?")


def test_chinese_is_searched_for_in_pairs_of_characters(folder: Path) -> None:
    text = answer(folder, "灯塔的燃料在哪里？")
    assert "灯塔.md:1: 灯塔在岛的北边。" in text
    assert "灯塔.md:2: 燃料放在地下室。" in text


def test_hidden_and_installed_files_are_left_out(folder: Path) -> None:
    for name in (".git/config", "node_modules/x/index.js", "venv/lib.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("paraffin\n" * 600)
    text = answer(folder, "Where is the paraffin?")
    assert text.startswith("In 4 files, 2 lines in 2 files match paraffin.")


def test_without_words_it_says_so(folder: Path) -> None:
    assert answer(folder, "?!").startswith("I find no word in this question")


def test_without_tools_it_says_what_it_needs() -> None:
    result = asyncio.run(Runtime().run(Agent("a", "offline:rules"), "Where is the lamp?"))
    assert "not a language model" in (result.response or "")
    assert "I need the file tools glob_files, grep_files, list_files and read_file" in (result.response or "")


def test_with_some_tools_it_does_what_it_can(folder: Path) -> None:
    async def go(*names: str) -> str:
        tools = [one for one in file_tools(LocalFilesystem(folder)) if one.name in names]
        return (
            await Runtime().run(Agent("a", "offline:rules", tools=tools), "What is in log.md on fog?")
        ).response or ""

    assert "1 May: fog" in asyncio.run(go("read_file"))
    assert "I need the tool grep_files" in asyncio.run(go("list_files"))
    assert "log.md:1: 1 May: fog all day." in asyncio.run(go("grep_files"))


def test_calls_that_fail_are_told() -> None:
    @tool
    def list_files(path: str = "") -> str:
        """List."""
        raise ExecutionFailed("the disk is gone")

    @tool
    def grep_files(pattern: str, path: str = "") -> str:
        """Search."""
        raise ExecutionFailed("the disk is gone")

    result = asyncio.run(
        Runtime().run(Agent("a", "offline:rules", tools=[list_files, grep_files]), "Where is the lamp?")
    )
    assert result.status == "completed"
    assert "These calls failed:\n\n- list_files: execution_failed: the disk is gone" in (result.response or "")


def test_at_a_limit_it_answers_with_what_it_has(folder: Path) -> None:
    (result,) = ask(folder, "Where is the lamp?", limits=Limits(tokens=1))
    assert "the limit on tokens is reached" in (result.response or "")


def test_it_counts_four_characters_as_a_token() -> None:
    request = ModelRequest(messages=(Message.user("a" * 7 + "?"),))
    chunks = stream(make_model("rules"), request)
    end = chunks[-1]
    assert isinstance(end, TurnEnd)
    text = "".join(chunk.text for chunk in chunks if isinstance(chunk, TextChunk))
    assert (end.usage.requests, end.usage.input_tokens, end.usage.output_tokens) == (1, 2, -(-len(text) // 4))


def test_other_names_say_which_exist() -> None:
    with pytest.raises(ConfigurationError, match="offline:rules"):
        make_model("gpt")
    assert isinstance(make_model("rules"), Model)


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("signed", "who signs here"),
        ("delivery", "the deliveries of May"),
        ("running", "it runs"),
        ("boxes", "a box"),
        ("lens", "the lens"),
        ("Runa's", "of Runa Estby"),
        ("C++", "in C++ and"),
    ],
)
def test_words_match_their_other_forms(word: str, text: str) -> None:
    assert make_term(word).matches(text)


@pytest.mark.parametrize(("word", "text"), [("signed", "a signal"), ("fog", "foggy"), ("cat", "category")])
def test_words_do_not_match_other_words(word: str, text: str) -> None:
    assert not make_term(word).matches(text)


def test_a_long_question_is_cut_and_its_most_telling_words_kept() -> None:
    question = read_question(
        '"blue lamp" ' + " ".join(f"word{letter}" for letter in "abcdefghij") + " LW-7 " + "x" * 100_000
    )
    assert len(question.terms) == 6
    assert {"blue lamp", "LW-7"} <= {term.shown for term in question.terms}


def stream(model: Model, request: ModelRequest) -> list[Any]:
    async def go() -> list[Any]:
        return [chunk async for chunk in model.stream(request)]

    return asyncio.run(go())


TOOLS = tuple(ToolDescriptor(name, name, name) for name in ("list_files", "glob_files", "grep_files", "read_file"))
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
        ]
    ),
)


@settings(max_examples=share(150), deadline=None)
@given(question=st.text(max_size=120), results=st.lists(RESULTS, min_size=1, max_size=12))
def test_every_question_ends_whatever_the_tools_say(question: str, results: list[str]) -> None:
    model = make_model("rules")
    messages: list[Message] = [Message.user(question)]
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
        messages += answered(calls, replies, len(messages))
    raise AssertionError(f"no answer after 6 turns: {messages}")


def answered(calls: list[CallChunk], replies: Iterable[str], turn: int) -> list[Message]:
    made = [ToolCall(f"c{turn}_{call.index}", call.name or "", json.loads(call.arguments)) for call in calls]
    results = [Message.tool(text, tool_call_id=call.id) for call, text in zip(made, replies, strict=False)]
    return [Message.assistant("", made), *results]
