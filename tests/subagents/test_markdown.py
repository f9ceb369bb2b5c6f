"""Declarations in Markdown: what a file says, what is wrong with it and where, whatever was written into it."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from retinue import Limits, SubagentDeclaration
from retinue.core.agents import NAME_RULE
from retinue.subagents.markdown import Loaded, read_claude_markdown, read_markdown
from tests.prepared import PYTHON

BUILT_IN = "read_file, write_file, edit_file, list_files, glob_files, grep_files, shell"
KNOWN = (
    "builtin_tools, description, disallowed_tools, limits, maxIters, max_steps, model, steps, timeout, tools, workspace"
)


def read(text: str | bytes, name: str = "x") -> Loaded:
    data = text if isinstance(text, bytes) else text.encode()
    return read_markdown(name, data, f"subagents/{name}.md")


def read_claude(text: str) -> Loaded:
    return read_claude_markdown("file", text.encode(), ".claude/agents/file.md")


def told(loaded: Loaded) -> list[str]:
    return [str(problem) for problem in loaded.problems]


def declared(loaded: Loaded) -> SubagentDeclaration:
    assert loaded.declaration is not None, told(loaded)
    return loaded.declaration


def fields(front: str, body: str = "Do it.") -> str:
    return f"---\ndescription: What for\n{front}\n---\n{body}\n"


def test_the_file_of_the_specification() -> None:
    text = """\
---
description: 代码评审专家
workspace:
  mode: isolated               # isolated | shared
  path: ./defs/reviewer
model: openai:gpt-4o-mini
maxIters: 8
tools: [read_file, grep_files]
---
"""
    loaded = read(text, "reviewer")
    expected = SubagentDeclaration(
        "reviewer",
        "代码评审专家",
        workspace="./defs/reviewer",
        mode="isolated",
        model="openai:gpt-4o-mini",
        max_steps=8,
        tools=["read_file", "grep_files"],
        source="subagents/reviewer.md",
    )
    assert (loaded.declaration, told(loaded)) == (expected, [])
    assert loaded.declaration is not None
    assert loaded.declaration.lines == {
        "description": 2,
        "workspace": 3,
        "workspace.mode": 4,
        "workspace.path": 5,
        "model": 6,
        "maxIters": 7,
        "tools": 8,
    }


def test_all_that_is_left_out_has_its_default() -> None:
    loaded = read("---\ndescription: What for\n---\n\nYou review.\n\nTwice.\n")
    expected = SubagentDeclaration("x", "What for", inline="You review.\n\nTwice.", source="subagents/x.md")
    assert (loaded.declaration, told(loaded)) == (expected, [])
    assert (expected.mode, expected.max_steps, expected.tools, expected.model) == ("isolated", 10, None, None)


def test_every_field_that_can_be_given() -> None:
    text = fields(
        "workspace: {mode: Shared}\nmax_steps: 3\ntools: a, b\nbuiltin_tools: [read_file]\ndisallowed_tools: [b]\n"
        "timeout: 1.5\nlimits: {tokens: 20000, cost: 0.5}"
    )
    loaded = read(text)
    expected = SubagentDeclaration(
        "x",
        "What for",
        inline="Do it.",
        mode="shared",
        max_steps=3,
        tools=["a", "b"],
        builtin_tools=["read_file"],
        disallowed_tools=["b"],
        timeout=1.5,
        limits=Limits(tokens=20_000, cost=0.5),
        source="subagents/x.md",
    )
    assert (loaded.declaration, told(loaded)) == (expected, [])


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        pytest.param(
            b"", "subagents/x.md: it is empty: begin with a line ---, then fields, then a line ---", id="empty"
        ),
        pytest.param(
            b" \n\n", "subagents/x.md: it is empty: begin with a line ---, then fields, then a line ---", id="blank"
        ),
        pytest.param(
            b"You review.\n",
            "subagents/x.md:1: it has no front matter: begin with a line ---, then fields, then a line ---",
            id="missing",
        ),
        pytest.param(
            b"\n---\ndescription: a\n---\n",
            "subagents/x.md:1: it has no front matter: begin with a line ---, then fields, then a line ---",
            id="late",
        ),
        pytest.param(
            b"---\ndescription: a\nbody\n",
            "subagents/x.md:1: its front matter is not closed: end it with a line ---",
            id="unclosed",
        ),
        pytest.param(
            b"---\n---\nbody",
            "subagents/x.md:1: its front matter is empty: it needs at least a description",
            id="nothing in it",
        ),
        pytest.param(
            b"---\n# only this\n---\nbody",
            "subagents/x.md:1: its front matter is empty: it needs at least a description",
            id="only a comment",
        ),
        pytest.param(
            b"---\n- a\n- b\n---\nbody",
            "subagents/x.md:2: its front matter must hold fields such as `description: \xe2\x80\xa6`, not a list".encode(
                "latin-1"
            ).decode(),
            id="a list",
        ),
        pytest.param(
            b"---\njust words\n---\nbody",
            "subagents/x.md:2: its front matter must hold fields such as `description: \u2026`, not the text 'just words'",
            id="a text",
        ),
        pytest.param(
            b"---\ndescription: a\n\tmodel: b\n---\n",
            "subagents/x.md:3: not YAML: found a tab character that violates indentation",
            id="tab",
        ),
        pytest.param(
            b"---\ndescription: a\nmodel: [b\n---\n",
            "subagents/x.md:4: not YAML: did not find expected ',' or ']'",
            id="open bracket",
        ),
        pytest.param(
            b"---\ndescription: a\nmodel: b\ndescription: c\n---\n",
            "subagents/x.md:4: description is given twice, first in line 2",
            id="twice",
        ),
        pytest.param(
            b"---\ndescription: a\nworkspace:\n  mode: shared\n  mode: isolated\n---\n",
            "subagents/x.md:5: workspace.mode is given twice, first in line 4",
            id="twice inside",
        ),
        pytest.param(
            b"---\ndescription: a\n? [b]\n: c\n---\n",
            "subagents/x.md:3: the name of a field must be plain text",
            id="a list as name",
        ),
        pytest.param(
            b"---\ndescription: &a b\nmodel: *a\n---\n",
            "subagents/x.md:3: *a stands for a value given elsewhere: write the value itself",
            id="alias",
        ),
        pytest.param(
            b"---\ndescription: a\0b\n---\n",
            "subagents/x.md:1: not YAML: unacceptable character #x0000: control characters are not allowed in "
            '"<unicode string>", position 14',
            id="NUL",
        ),
        pytest.param(
            b"---\ndescription: a\nmodel: \xff\n---\n",
            "subagents/x.md:3: it is not UTF-8 text: save it as UTF-8",
            id="Latin-1",
        ),
        pytest.param(
            "---\ndescription: a\n---\n".encode("utf-16"),
            "subagents/x.md:1: it is not UTF-8 text: save it as UTF-8",
            id="UTF-16",
        ),
        pytest.param(
            b"---\ndescription: a\n---\n" + b"x" * 1_000_000,
            "subagents/x.md: it has 1,000,023 bytes, over the limit of 256,000: shorten it",
            id="1 MB",
        ),
        pytest.param(
            b"---\ndescription: " + b"x" * 20_000 + b"\n---\n",
            "subagents/x.md:1: its front matter has 20,013 characters, over the limit of 16,000",
            id="much YAML",
        ),
    ],
)
def test_a_file_that_cannot_be_read_says_why_and_where(data: bytes, problem: str) -> None:
    loaded = read(data)
    assert (loaded.declaration, told(loaded)) == (None, [problem])
    assert not loaded.problems[0].is_warning


@pytest.mark.parametrize(
    ("front", "problem"),
    [
        ("description:", ":2: description: is missing: say when to use this sub-agent and what it gives back"),
        ("description: '  '", ":2: description: is missing: say when to use this sub-agent and what it gives back"),
        ("description: null", ":2: description: is missing: say when to use this sub-agent and what it gives back"),
        ("model: a:b", ": description: is missing: say when to use this sub-agent and what it gives back"),
        ("description: [a, b]", ":2: description: must be text, not a list"),
        ("description: {a: b}", ":2: description: must be text, not fields"),
        (
            "description: a\nbuiltin_tools: [read_file, raed_file]",
            f":3: builtin_tools: there is no built-in tool 'raed_file'; there are {BUILT_IN}",
        ),
        ("description: a\ntools: {a: b}", ":3: tools: must be a list of names, such as [first, second]"),
        ("description: a\ntools: [[b]]", ":3: tools: must be a list of names, such as [first, second]"),
        ("description: a\ntools: [b, null]", ":3: tools: must be a list of names, such as [first, second]"),
        ("description: a\ntimeout: soon", ":3: timeout: must be a number above 0, not 'soon'"),
        ("description: a\ntimeout: -1", ":3: timeout: must be a number above 0, not '-1'"),
        ("description: a\ntimeout: nan", ":3: timeout: must be a number above 0, not 'nan'"),
        ("description: a\ntimeout: [1]", ":3: timeout: must be a number above 0, not a list"),
        (
            "description: a\nlimits: 20000",
            ":3: limits: must be written as limits: {steps: 20} (any of depth, children, parallel, steps, tokens, cost, seconds), not as the text '20000'",
        ),
        ("description: a\nlimits:\n  tokens: inf", ":4: limits.tokens: must be a number of 0 or more, not 'inf'"),
        ("description: a\nlimits:\n  tokens: 1.5", ":4: limits.tokens: must be a number of 0 or more, not '1.5'"),
        (
            "description: a\nlimits:\n  token: 5",
            ":4: limits.token: there is no such limit; there are depth, children, parallel, steps, tokens, cost, seconds",
        ),
        (
            "description: a\nlimits: {parallel: 0}",
            ":3: limits: Limits.parallel must be at least 1, got 0: give a whole number",
        ),
        ("description: a\nworkspace:\n  path: [b]", ":4: workspace.path: must be text"),
    ],
)
def test_a_fault_in_a_field_names_file_line_and_field(front: str, problem: str) -> None:
    loaded = read(f"---\n{front}\n---\n")
    assert (loaded.declaration, told(loaded)) == (None, [f"subagents/x.md{problem}"])


@pytest.mark.parametrize(
    ("front", "problem", "expected"),
    [
        ("colour: red", f":3: colour: is not known and has no effect; known: {KNOWN}", {}),
        ("name: other", ":3: name: is not read: the file name makes this 'x'", {"name": "x"}),
        ("url: http://a", ":3: url: is not read from files; declare remote sub-agents in code", {"url": None}),
        (
            "headers: {a: b}",
            ":3: headers: is not read from files; declare remote sub-agents in code",
            {"headers": None},
        ),
        (
            "maxIters: '8x'",
            ":3: maxIters: must be a whole number above 0, not '8x'; the default is used",
            {"max_steps": 10},
        ),
        (
            "maxIters: 0",
            ":3: maxIters: must be a whole number above 0, not '0'; the default is used",
            {"max_steps": 10},
        ),
        (
            "maxIters: " + "9" * 5000,
            f":3: maxIters: must be a whole number above 0, not '{'9' * 60}'; the default is used",
            {"max_steps": 10},
        ),
        ("steps: 4\nmaxIters: 5", ":4: maxIters: says the same as steps, which counts", {"max_steps": 4}),
        (
            "workspace: shared",
            ":3: workspace: must be written as workspace: {mode: shared} (mode is isolated or shared; path is a folder), not as the text 'shared'",
            {"mode": "isolated"},
        ),
        (
            "workspace:\n  mode: open",
            ":4: workspace.mode: must be isolated or shared, not 'open'; isolated is used",
            {"mode": "isolated"},
        ),
        (
            "workspace:\n  mode: [shared]",
            ":4: workspace.mode: must be isolated or shared, not a list; isolated is used",
            {"mode": "isolated"},
        ),
        (
            "workspace:\n  mode: shared\n  root: /",
            ":5: workspace.root: is not known and has no effect; known: mode, path",
            {"mode": "shared"},
        ),
        (
            "workspace:\n  path: defs",
            ":4: workspace.path: is given, and its AGENTS.md counts: the text below the front matter is ignored",
            {"workspace": "defs", "inline": None},
        ),
        ("model: [a]", ":3: model: must be text, not a list", {"model": None}),
    ],
)
def test_what_has_no_effect_is_a_warning_and_the_rest_loads(front: str, problem: str, expected: dict[str, Any]) -> None:
    loaded = read(fields(front))
    assert told(loaded) == [f"subagents/x.md{problem}"]
    assert loaded.problems[0].is_warning
    found = declared(loaded)
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("front", "name", "value"),
    [
        ("model: yes", "model", "yes"),
        ("model: 123", "model", "123"),
        ("model: null", "model", None),
        ("model: ~", "model", None),
        ("model:", "model", None),
        ("model: 'null'", "model", "null"),
        ("maxIters: '8'", "max_steps", 8),
        ("tools:", "tools", None),
        ("tools: ''", "tools", None),
        ("tools: []", "tools", ()),
        ("tools: [ ' a ', '' ]", "tools", ("a",)),
        ("tools:\n- a\n- b", "tools", ("a", "b")),
        ("builtin_tools: []", "builtin_tools", ()),
        ("workspace:", "mode", "isolated"),
        ("workspace: {path: ' '}", "workspace", None),
        ("limits:", "limits", None),
    ],
)
def test_scalars_are_the_text_as_written(front: str, name: str, value: Any) -> None:
    loaded = read(fields(front))
    assert told(loaded) == []
    assert getattr(declared(loaded), name) == value


@pytest.mark.parametrize("written", ["yes", "123", "2026-01-01", "1e3", "a --- b", "'---'", "on: off"])
def test_a_description_is_text_whatever_it_looks_like(written: str) -> None:
    loaded = read(
        f"---\ndescription: {written!r}\n---\nbody" if ":" in written else f"---\ndescription: {written}\n---\nb"
    )
    assert (declared(loaded).description, told(loaded)) == (written.strip("'"), [])


def test_only_a_line_of_its_own_ends_the_front_matter() -> None:
    text = "---\ndescription: |\n  first\n  ---\n  last --- words\n---\nbody\n\n---\n\nmore ---\n"
    found = declared(read(text))
    assert found.description == "first\n---\nlast --- words"
    assert found.inline == "body\n\n---\n\nmore ---"


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "BOM"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"], ids=["LF", "CRLF", "CR"])
def test_line_endings_and_byte_order_marks_do_not_matter(mark: bytes, end: bytes) -> None:
    data = mark + end.join([b"--- ", b"description: a", b"colour: red", b"---\t", b"one", b"two", b""])
    loaded = read(data)
    assert (declared(loaded).description, declared(loaded).inline) == ("a", "one\ntwo")
    assert [problem.line for problem in loaded.problems] == [3]


@pytest.mark.parametrize(
    "name", ["../x", "..", "", "a/b", "a.b", "x" * 65, "研" * 65, "a b", "-x", "_x", "½", "a\u200db", "\u0301a"]
)
def test_a_file_name_that_is_no_id_is_refused(name: str) -> None:
    loaded = read("---\ndescription: a\n---\nb", name)
    problem = f"its file name is no agent_id: use {NAME_RULE}"
    assert (loaded.declaration, told(loaded)) == (None, [f"subagents/{name}.md: {problem}"])


@pytest.mark.parametrize(
    ("file_name", "agent_id"),
    [
        ("评审", "评审"),
        ("revue\u0301", "revué"),
        ("समीक्षक", "समीक्षक"),
        ("2fa-check", "2fa-check"),
        ("обзор_2", "обзор_2"),
        ("٣", "٣"),
    ],
)
def test_a_file_name_of_any_script_is_the_id(file_name: str, agent_id: str) -> None:
    loaded = read("---\nname: other\ndescription: a\n---\nb", file_name)
    assert declared(loaded).name == agent_id
    assert told(loaded) == [f"subagents/{file_name}.md:2: name: is not read: the file name makes this {agent_id!r}"]


DEEP = """
import sys, threading
from retinue.subagents.markdown import read_markdown
def work():
    for inner in ("[" * 7_900 + "]" * 7_900, "[" * 15_900, "{a: " * 3_900, "\\n " + "- " * 7_900, "\\n " + "? " * 7_900):
        data = ("---\\ndescription: a\\nfoo: " + inner + "\\n---\\nb").encode()
        loaded = read_markdown("x", data, "x.md")
        print(loaded.declaration is not None, loaded.problems[0].line)
threading.stack_size(256 * 1024)  # what a thread has on some systems
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def test_nesting_without_end_does_not_bring_the_process_down() -> None:
    done = subprocess.run([PYTHON, "-c", DEEP], capture_output=True, text=True, timeout=90, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["True 3", "False 4", "False 4", "True 3", "False 4"]


def test_what_is_deeper_than_any_field_is_passed_over() -> None:
    hooks = (
        "hooks:\n  PreToolUse:\n    - matcher: Bash\n      hooks:\n        - type: command\n          command: [a, [b]]"
    )
    loaded = read(f"---\nname: x\ndescription: a\n{hooks}\nmodel: m:n\n---\nb")
    assert (declared(loaded).model, [problem.field for problem in loaded.problems]) == ("m:n", ["name", "hooks"])


def test_aliases_cannot_grow_without_bound() -> None:
    wide = ",".join(["*a"] * 1500), ",".join(["*b"] * 1500), ",".join(["*c"] * 1500)
    text = fields(f"p: &a [x]\nq: &b [{wide[0]}]\nr: &c [{wide[1]}]\ntools: [{wide[2]}]")
    loaded = read(text)
    assert told(loaded) == ["subagents/x.md:4: *a stands for a value given elsewhere: write the value itself"]


def test_an_agent_of_another_tool() -> None:
    loaded = read_claude(
        "---\nname: reviewer\ndescription: Reviews\ntools: Read, Grep, MultiEdit, Edit, lookup\n"
        "disallowedTools: Write\nmodel: anthropic:some-model\nmaxTurns: 5\n---\nYou review."
    )
    expected = SubagentDeclaration(
        "reviewer",
        "Reviews",
        inline="You review.",
        mode="shared",
        model="anthropic:some-model",
        max_steps=5,
        tools=["lookup"],
        builtin_tools=["read_file", "grep_files", "edit_file"],
        disallowed_tools=["write_file"],
        source=".claude/agents/file.md",
    )
    assert (loaded.declaration, told(loaded)) == (expected, [])


@pytest.mark.parametrize(
    ("front", "problem", "expected"),
    [
        (
            "tools: Read, Bash(git:*)",
            "tools: 'Bash(git:*)' allows some calls only, which has no counterpart here: it gets none",
            {"builtin_tools": ("read_file",), "tools": ()},
        ),
        (
            "tools: Agent, Read",
            "tools: Agent has no effect: a declared sub-agent starts none itself",
            {"builtin_tools": ("read_file",)},
        ),
        (
            "model: sonnet",
            "model: 'sonnet' names a family, not a model: the parent's is used; write provider:model",
            {"model": None},
        ),
        (
            "tools: Read, WebFetch, mcp__x__y",
            (
                "tools: WebFetch has no counterpart here and has no effect\n"
                ".claude/agents/file.md:4: tools: mcp__x__y has no counterpart here and has no effect"
            ),
            {"builtin_tools": ("read_file",), "tools": ()},
        ),
        ("color: red", "color: has no counterpart here and has no effect", {}),
        ("mcpServers: {a: {b: c}}", "mcpServers: has no counterpart here and has no effect", {}),
    ],
)
def test_what_does_not_map_is_named(front: str, problem: str, expected: dict[str, Any]) -> None:
    loaded = read_claude(f"---\nname: a\ndescription: b\n{front}\n---\nc")
    assert "\n".join(told(loaded)) == f".claude/agents/file.md:4: {problem}"
    assert {name: getattr(declared(loaded), name) for name in expected} == expected


@pytest.mark.parametrize(
    ("front", "expected"),
    [
        ("disallowedTools: Bash(rm:*)", {"disallowed_tools": ("shell",), "builtin_tools": None, "tools": None}),
        ("model: inherit", {"model": None}),
        ("model: some-model-1", {"model": "anthropic:some-model-1"}),
        ("tools: []", {"tools": (), "builtin_tools": ()}),
    ],
)
def test_what_maps_only_nearly_never_gives_more(front: str, expected: dict[str, Any]) -> None:
    loaded = read_claude(f"---\nname: a\ndescription: b\n{front}\n---\nc")
    assert told(loaded) == []
    assert {name: getattr(declared(loaded), name) for name in expected} == expected


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("---\ndescription: notes\n---\n", []),
        (
            "---\nname: ../x\ndescription: a\n---\n",
            [f".claude/agents/file.md:2: name: must be {NAME_RULE}"],
        ),
        (
            "---\nname: x\n---\n",
            [".claude/agents/file.md: description: is missing: say when to use this sub-agent and what it gives back"],
        ),
    ],
    ids=["a document", "a bad name", "no description"],
)
def test_what_is_no_agent_of_another_tool(text: str, problems: list[str]) -> None:
    loaded = read_claude(text)
    assert (loaded.declaration, told(loaded)) == (None, problems)


def test_a_description_as_claude_code_writes_it() -> None:
    text = (
        "---\nname: reviewer\n"
        'description: Use this agent when code is ready. Examples:\\n\\nContext: it\'s done.\\nuser: "Review: all"\n'
        "tools: Read, Grep\nmodel: inherit\n---\n\nYou review: carefully.\n"
    )
    loaded = read_claude(text)
    assert told(loaded) == []
    found = declared(loaded)
    assert found.description == (
        'Use this agent when code is ready. Examples:\n\nContext: it\'s done.\nuser: "Review: all"'
    )
    assert (found.builtin_tools, found.lines["tools"]) == (("read_file", "grep_files"), 4)
    assert found.inline == "You review: carefully."


@pytest.mark.parametrize("front", ["a: [b", "a: 'b", "- : -\n ? :"])
def test_front_matter_that_no_quotes_mend_is_reported(front: str) -> None:
    loaded = read_claude(f"---\nname: a\n{front}\n---\n")
    assert loaded.declaration is None
    assert len(loaded.problems) == 1
