"""Hostile files, folders and patterns cost a bounded amount of work, in small pieces, and none after a cancel."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retinue import HarnessAgent, LocalFilesystem, Runtime
from retinue.core.concurrency import CancellationToken
from retinue.core.errors import PathError
from retinue.testing import ScriptedModel, say
from retinue.testing import call as called
from retinue.workspace import folders, local, paths, text, tools

from .. import inside
from ..effort import share
from .conftest import Call


class Counted(io.BytesIO):
    """Counts the bytes that are read, and the largest piece."""

    total = largest = 0

    def _note(self, data: bytes) -> bytes:
        self.total, self.largest = self.total + len(data), max(self.largest, len(data))
        return data

    def read(self, size: int | None = -1, /) -> bytes:
        return self._note(super().read(size))

    def readline(self, size: int | None = -1, /) -> bytes:
        return self._note(super().readline(size))


@pytest.mark.parametrize("data", [b"\n" * 3_000_000, b"a" * 3_000_000, b"ab\n" * 1_000_000])
@pytest.mark.parametrize("offset", [0, 999_999, 10**12])
def test_lines_are_skipped_in_pieces(data: bytes, offset: int) -> None:
    stream = Counted(data)
    text.read_window(stream, offset, 5)
    assert stream.largest <= 1 << 20
    assert stream.total <= len(data) + (2 << 20)


def test_no_more_of_a_file_is_read_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "READ_BYTES", 1_000_000)
    stream = Counted(b"ab\n" * 3_000_000)
    window = text.read_window(stream, 10**9, 5)
    assert (window.lines, window.counted) == ([], False)
    assert stream.total <= 1_000_003


@settings(max_examples=share(300), deadline=None)
@given(
    st.text("ab\r\n", max_size=40).map(str.encode),
    st.text("ab\n", min_size=1, max_size=4).map(str.encode),
    st.text("x\n", max_size=3).map(str.encode),
    st.integers(1, 8),
)
def test_an_edit_in_pieces_is_an_edit(data: bytes, old: bytes, new: bytes, piece: int) -> None:
    whole = text.replace_text(data, old, new)
    with pytest.MonkeyPatch.context() as patch:
        inside.edit_in_pieces_of(patch, piece)
        assert text.replace_text(data, old, new) == whole


async def test_an_edit_that_makes_a_file_huge_is_refused(
    call: Call, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "MOST_EDITED", 1000)
    (root / "a.txt").write_text("a" * 100)
    with pytest.raises(Exception, match="would have more than 1,000 bytes"):
        await call("edit_file", path="a.txt", old="a", new="b" * 100, replace_all=True)
    assert (root / "a.txt").read_text() == "a" * 100


def test_a_search_for_old_text_does_not_backtrack() -> None:
    data = b"a\n" * 200_000
    assert text.replace_text(data, b"a\n" * 3000 + b"b", b"").occurrences == 0


def test_entries_are_sorted_in_parts(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    inside.sort_in_parts_of(monkeypatch, 3)
    for number in range(10):
        (root / f"{number}").touch()
    assert [entry.path for entry in LocalFilesystem(root).list()] == [str(number) for number in range(10)]


def test_a_folder_with_too_many_entries_is_refused(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    for number in range(10):
        (root / f"{number}.md").touch()
    for module in (folders, local):
        monkeypatch.setattr(module, "MOST_SCANNED", 5)
    with pytest.raises(PathError, match="more than 5 entries"):
        LocalFilesystem(root).list()
    with pytest.raises(PathError, match="more than 5 entries"):
        LocalFilesystem(root).stamps("", ".none")


def test_a_file_that_is_too_large_is_not_changed(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    with open(root / "sparse", "wb") as stream:
        stream.truncate(4 << 40)
    monkeypatch.setattr(local, "LARGEST", 1000)
    with pytest.raises(PathError, match="more than 1,000 bytes"):
        LocalFilesystem(root).update("sparse", lambda data: data)


@pytest.mark.parametrize("tool", ["glob_files", "grep_files"])
async def test_a_search_has_a_deadline(call: Call, root: Path, monkeypatch: pytest.MonkeyPatch, tool: str) -> None:
    (root / "a").mkdir()
    monkeypatch.setattr(tools, "SECONDS", -1.0)
    with pytest.raises(Exception, match="the search was stopped after"):
        await call(tool, pattern="x")


@pytest.mark.parametrize(("tool", "most"), [("glob_files", 3), ("grep_files", 3)])
def test_no_entry_is_looked_at_after_a_cancel(
    root: Path, monkeypatch: pytest.MonkeyPatch, tool: str, most: int
) -> None:
    for number in range(100):
        (root / f"{number}.txt").write_text("x\n")
    token, looked = CancellationToken(), 0

    def counted(*args: Any) -> Any:
        nonlocal looked
        looked += 1
        if looked == 2:
            token.set("enough")
        return original(*args)

    place, name = (paths.GlobPattern, "step") if tool == "glob_files" else (LocalFilesystem, "open")
    original = getattr(place, name)
    monkeypatch.setattr(place, name, counted)

    class Context:
        cancellation = token

    files = inside.file_tools(LocalFilesystem(root))
    with pytest.raises(BaseException, match="enough"):
        getattr(files, tool)(pattern="none", ctx=Context())
    assert looked <= most


async def test_declarations_are_read_beside_the_event_loop_and_not_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    from retinue.subagents import markdown

    monkeypatch.setattr(markdown, "MOST_FILES", 3)
    readers: list[threading.Thread] = []
    original = LocalFilesystem.stamps

    def noted(self: LocalFilesystem, path: str = "", suffix: str = "") -> Any:
        readers.append(threading.current_thread())
        return original(self, path, suffix)

    monkeypatch.setattr(LocalFilesystem, "stamps", noted)
    agent = HarnessAgent("a", ScriptedModel(lambda request: say("done")), workspace=tmp_path)
    runtime = Runtime([agent])
    await runtime.run("a", "go")
    (tmp_path / "subagents").mkdir()
    for number in range(5):
        (tmp_path / f"subagents/helper-{number}.md").write_text("---\ndescription: d\n---\nHelp.\n")
    await runtime.run("a", "go")
    await runtime.run("a", "go")
    assert readers
    assert threading.main_thread() not in readers
    assert agent.catalog is not None
    assert sorted(agent.catalog.entries) == ["general-purpose", "helper-0", "helper-1", "helper-2"]
    assert any("5 declarations" in problem.message for problem in agent.catalog.problems)


async def test_hostile_patterns_are_answers(tmp_path: Path) -> None:
    patterns = ["{" + "," * 30_000, "{a,b}" * 800, "*" * 4097, "[" * 200, "**/" * 1300 + "x", "{" * 2000 + "," * 2000]
    turns = [called("glob_files", {"pattern": pattern}) for pattern in patterns]
    result = await Runtime([HarnessAgent("a", ScriptedModel([*turns, say("")]), workspace=tmp_path)]).run("a", "go")
    assert sum(message.role == "tool" for message in result.messages) == len(patterns)
