"""The checks of documents that the built-in rules know."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from retinue import Agent, RunResult, Runtime
from retinue.models.rules.checks import (
    Document,
    check_commands,
    check_headings,
    check_links,
    known_paths,
    make_document,
)
from retinue.models.rules.question import read_question
from retinue.workspace import LocalFilesystem, file_tools

FILES = {"a.md", "docs/b.md", "docs/pic (1).png", "scripts/run"}
exists: Callable[[str], bool] = known_paths(FILES).__contains__


def document(text: str, path: str = "a.md") -> Document:
    return make_document(path, enumerate(text.splitlines(), 1))


@pytest.mark.parametrize(
    "link",
    [
        "docs/b.md",
        "./docs/b.md",
        "docs",
        "docs/",
        "<docs/pic%20(1).png>",
        'docs/b.md "with a title"',
        "#the-title",
        "a.md#the-title",
        "#twice-1",
    ],
)
def test_links_that_lead_somewhere(link: str) -> None:
    result = check_links([document(f"# The Title!\n\n## Twice\n\n## Twice\n\n[x]({link})")], exists)
    assert result == (1, "link", [])


@pytest.mark.parametrize(
    "link",
    [
        "https://example.org/x.md",
        "mailto:a@example.org",
        "//example.org",
        "/absolute.md",
        "../outside.md",
        "docs/b.md#a-heading-nobody-has-read",
    ],
)
def test_links_out_of_sight_are_not_counted(link: str) -> None:
    assert check_links([document(f"# The Title\n\n[x]({link})")], exists) == (0, "link", [])


@pytest.mark.parametrize(
    ("link", "says"),
    [
        ("gone.md", "[x](gone.md): there is no gone.md"),
        ("docs/gone.md#part", "[x](docs/gone.md#part): there is no docs/gone.md"),
        ("b.md", "[x](b.md): there is no b.md"),
        ("#nowhere", "[x](#nowhere): a.md has no heading #nowhere"),
    ],
)
def test_links_that_lead_nowhere(link: str, says: str) -> None:
    (place,) = check_links([document(f"# The Title\n\n![y](docs/b.md) and [x]({link})")], exists).places
    assert (place.path, place.number, place.text) == ("a.md", 3, says)


def test_links_are_relative_to_their_document_and_not_looked_for_in_code() -> None:
    text = "[x](b.md) [y](../a.md) `[z](gone.md)`\n```\n[code](gone.md)\n```\n[w](a.md)"
    result = check_links([document(text, "docs/b.md")], exists)
    assert result.number == 3
    assert [place.number for place in result.places] == [5]


def test_commands_of_the_project_that_are_not_there() -> None:
    text = (
        "Run `scripts/run` or `scripts/fly --now`, not `docs/gone`.\n```sh\nscripts/run\n$ scripts/walk x\n"
        "A=1 scripts/crawl\n.venv/bin/x\npip install x/y\n```\n```python\nscripts/code\n```\n"
    )
    result = check_commands([document(text)], exists)
    assert [(place.number, place.text.partition(":")[0]) for place in result.places] == [
        (1, "scripts/fly"),
        (4, "scripts/walk"),
        (5, "scripts/crawl"),
    ]
    assert (result.number, result.noun) == (5, "local command")


def test_commands_beside_their_document_are_there() -> None:
    assert check_commands([document("```sh\n./run\n```", "scripts/README.md")], exists).places == []


def test_headings() -> None:
    text = "## First\n\n# Title\n\n### Deep\n\n## Ends.\n\n## Ends.\n\n## Log\n\n### Added\n\n## Older\n\n### Added\n"
    places = check_headings([document(text)], exists).places
    assert [(place.number, place.text) for place in places] == [
        (1, "'First' is the first heading, and not a title (#)"),
        (3, "'Title' is a second title (#)"),
        (5, "'Deep' leaves out a level: #, then ###"),
        (7, "'Ends.' ends with '.'"),
        (9, "'Ends.' ends with '.'"),
        (9, "'Ends.' is there twice"),
    ]


def test_comments_in_code_and_front_matter_are_no_headings() -> None:
    text = "---\n# a comment\nkey: 1\n---\n# Title\n\n~~~sh\n# not a heading\n```\n# nor this\n~~~\n\n---\n\n## Part\n"
    assert [text for _, _, text in document(text).headings] == ["Title", "Part"]


@pytest.mark.parametrize(
    ("question", "checks"),
    [
        ("review the docs", ["links", "commands", "headings"]),
        ("Please check the links in README.md", ["links"]),
        ("Could you verify commands and headings?", ["commands", "headings"]),
        ("请检查文档", ["links", "commands", "headings"]),
        ("Your part: Finds dead links.\n\nThe question: review the docs", ["links"]),
        ("Your part: only a.md\n\nThe question: check the headings of a.md and README.md", ["headings"]),
        ("Your part: Finds dead links.\n\nThe question: where is the lamp?", []),
        ("Where are links explained?", []),
        ("Check the lamp", []),
        ("the docs: review them", []),
    ],
)
def test_what_is_to_be_checked(question: str, checks: list[str]) -> None:
    read = read_question(question)
    assert list(read.checks) == checks
    assert (read.kind == "check") == bool(checks)


def ask(folder: Path, question: str, *tools: str) -> RunResult:
    given = [tool for tool in file_tools(LocalFilesystem(folder)) if not tools or tool.name in tools]
    return asyncio.run(Runtime().run(Agent("a", "offline:rules", tools=given), question))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for path, text in {
        "README.md": "# Read me\n\n[b](docs/b.md) [gone](docs/gone.md)\n",
        "docs/b.md": "# B\n\n### Deep\n",
        ".hidden/c.md": "[x](y.md)\n",
        "notes.txt": "[x](y.md)\n",
    }.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def test_a_review_reads_the_documents_and_makes_sure(folder: Path) -> None:
    result = ask(folder, "review the docs")
    calls = [(call.name, call.args) for message in result.messages for call in message.tool_calls]
    assert calls[1:] == [
        ("read_file", {"path": "README.md"}),
        ("read_file", {"path": "docs/b.md"}),
        ("read_file", {"path": "docs/gone.md", "limit": 1}),
    ]
    assert result.response == (
        "I checked 2 links in 2 documents. Worth a look:\n\n"
        "- README.md:3: [gone](docs/gone.md): there is no docs/gone.md\n\n"
        "There are no local commands to check in 2 documents.\n\n"
        "I checked 3 headings in 2 documents. Worth a look:\n\n"
        "- docs/b.md:3: 'Deep' leaves out a level: #, then ###\n\n"
        "These places were found by rules, not by a language model: judge them yourself."
    )


def test_what_listings_do_not_show_but_can_be_read_is_there(folder: Path) -> None:
    (folder / "README.md").write_text("# Read me\n\n[venv](node_modules/x.md)\n")
    (folder / "node_modules").mkdir()
    (folder / "node_modules/x.md").write_text("here\n")
    assert "nothing wrong" in (ask(folder, "check the links").response or "")


def test_only_what_is_named_is_checked(folder: Path) -> None:
    assert "1 heading in 1 document and" in (ask(folder, "check the headings of README").response or "")
    assert "2 headings in 1 document. Worth" in (ask(folder, "check the headings in docs/*.md").response or "")
    assert "I see no Markdown files like that" in (ask(folder, "check the links in *.rst").response or "")


def test_without_the_tools_it_says_which_it_needs(folder: Path) -> None:
    assert "I need the tools glob_files and read_file" in (ask(folder, "review the docs", "read_file").response or "")
