"""Hostile patterns and declarations: examples, and checks that raise where a promise is broken."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from hypothesis import strategies as st

from retinue import Agent, HarnessAgent, LocalFilesystem, ToolContext, ToolError, file_tools
from retinue.core.concurrency import CancellationToken
from retinue.core.runs import RunIdentity
from retinue.core.state import Snapshot
from retinue.subagents.markdown import read_claude_markdown, read_markdown

SECRET = "TOP-SECRET-7261"


class HasFolder(Protocol):
    folder: Path


_glob_pieces = st.sampled_from(
    ["*", "**", "**/", "?", "[", "]", "[!", "[a-", "{", "}", ",", "{a,b}", "{,}", "/", "..", "../", "\\", "a", "é", "\0", "!(a)", "\ud800"]
)  # fmt: skip
_regex_pieces = st.sampled_from(
    [
        "(", ")", "(a+)+", "(a|aa)*", ".*", "[", "]", "[^", "{1000}", "{0,30}", "\\", "\\1", "(?=", "(?P<a>", "(?i)", "$", "^", "|", "\\pL",
        "\\x{10FFFF}", "\\C", "\\Q", "a", "é", "\0", "\ud800", "\\A", "\\z", "TOP", "\n",
    ]
)  # fmt: skip
_many = st.integers(0, 300)


def _text(pieces: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    repeated = st.builds(lambda piece, times: piece * times, pieces, _many)
    return st.lists(pieces | repeated, max_size=12).map("".join) | st.text(max_size=40)


patterns = st.tuples(
    st.sampled_from(["glob_files", "grep_files"]),
    _text(_glob_pieces) | _text(_regex_pieces),
    st.sampled_from(["", ".", "a", "..", "link", "a/../..", "missing", "a.txt"]),
)


def _workspace(folder: Path) -> Path:
    root = folder / "root"
    if not root.exists():
        (folder / "outside").mkdir()
        (folder / "outside" / "secret.txt").write_text(SECRET)
        (root / "a" / "b").mkdir(parents=True)
        for path in ("a.txt", "a/é.txt", "a/b/c.py"):
            (root / path).write_text("a" * 2000 + "\nTOP of the page\n\xff\n")
        (root / "link").symlink_to(folder / "outside")
    return root


def _context() -> ToolContext:
    return ToolContext(
        call_id="c",
        tool_name="t",
        run=RunIdentity(run_id="r", thread_id="t", agent="a"),
        agent=Agent("a"),
        snapshot=Snapshot({}, {}, 0),
        emit=lambda event: None,
        cancellation=CancellationToken(),
    )


async def check_pattern(world: HasFolder, example: tuple[str, str, str]) -> None:
    """A pattern is answered or refused in words; it shows nothing outside."""
    name, pattern, path = example
    (tool,) = [one for one in file_tools(LocalFilesystem(_workspace(world.folder))) if one.name == name]
    try:
        answer: Any = await tool.execute({"pattern": pattern, "path": path}, _context())
    except ToolError as error:
        answer = error.message
        assert answer
    assert isinstance(answer, str)
    assert SECRET not in answer
    assert "secret.txt" not in answer.replace(pattern, "")
    assert len(answer) < 200_000


_field_names = st.sampled_from(
    ["name", "description", "tools", "disallowed_tools", "builtin_tools", "model", "max_steps", "timeout", "limits", "workspace", "url", "headers", "x"]
)  # fmt: skip
_scalars = st.sampled_from(
    [
        "a", "'", '"', "*", "&a b", "*a", "!!python/object/apply:os.system [x]", "!!binary x", "[", "{", "[a, b]", "{mode: shared}", "|", ">", "#", "- a",
        "~", "1e400", "-1", "0x10", "9" * 400, "yes", "a: b: c", "../..", "/etc", "%", "@", "`", "\t", "\ufeff", "\x00", "é", "? x",
        "<<: *a", "shell", "write_file, shell", "sonnet", "inherit",
    ]
)  # fmt: skip
_values = _scalars | st.text(max_size=20) | st.builds(lambda piece, times: piece * times, _scalars, _many)
_lines = st.builds(lambda name, value: f"{name}: {value}", _field_names, _values) | _values
_documents = st.builds(
    lambda head, lines, tail, body: f"{head}\n" + "\n".join(lines) + f"\n{tail}\n{body}",
    st.sampled_from(["---", "---", "---", "", "--- ", "----", "\ufeff---"]),
    st.lists(_lines, max_size=8),
    st.sampled_from(["---", "---", "---", "...", "", "-- -"]),
    st.text(max_size=40),
)
front_matter = st.tuples(
    st.sampled_from(["evil", "é", "..", "a b", "x" * 80, "\ud800"]),
    _documents.map(lambda text: text.encode(errors="surrogatepass")) | st.binary(max_size=200),
    st.booleans(),
)


async def check_front_matter(world: HasFolder, example: tuple[str, bytes, bool]) -> None:
    """A file is a declaration or has a problem that says what and where; a declaration has no more than its parent."""
    name, data, is_claude = example
    loaded = (read_claude_markdown if is_claude else read_markdown)(name, data, "subagents/x.md")
    for problem in loaded.problems:
        assert problem.message
        str(problem).encode(errors="backslashreplace")
    declared = loaded.declaration
    if declared is None:
        # A document without a name in `.claude/agents` is no agent, and no mistake.
        assert loaded.problems or is_claude
        return
    assert declared.url is None
    parent = HarnessAgent("boss", "test:model", workspace=world.folder, builtin_tools=["read_file"])
    child = parent.child(declared, "", parent.files, tells_agents_file=False)
    assert {*child.toolbox} <= {"read_file"}
