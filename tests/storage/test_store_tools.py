"""The file tools on files in a database: the tests of the tools on a folder, where they need no disk."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from retinue import ExecutionFailed, HarnessAgent, RunStatus, Runtime, StoreFilesystem, file_tools
from retinue.errors import FilesystemDown
from retinue.testing import ScriptedModel, say
from retinue.testing import call as call_tool
from tests.workspace.conftest import call
from tests.workspace.test_file_tools import (
    test_edit_a_file_that_is_not_there,
    test_edit_replaces_all_when_asked,
    test_edit_replaces_one_piece,
    test_list_refusals,
    test_long_lines_are_cut_where_it_shows,
    test_one_reading_fits_what_a_model_may_read,
    test_parallel_edits_lose_nothing,
    test_read_an_empty_file,
    test_read_kinds_of_text,
    test_read_numbers_the_lines,
    test_read_says_how_to_go_on,
    test_read_shows_what_is_not_utf8,
    test_what_is_not_text_is_refused,
    test_write_says_what_it_did,
)
from tests.workspace.test_search_tools import (
    test_a_cancelled_call_looks_at_nothing,
    test_folders_of_tools_are_searched_only_when_named,
    test_glob_refusals,
    test_grep_is_capped_where_it_shows,
    test_grep_shows_long_lines_around_the_match,
    test_grep_shows_path_line_and_text,
)

__all__ = [
    "call",
    "test_a_cancelled_call_looks_at_nothing",
    "test_edit_a_file_that_is_not_there",
    "test_edit_replaces_all_when_asked",
    "test_edit_replaces_one_piece",
    "test_folders_of_tools_are_searched_only_when_named",
    "test_glob_refusals",
    "test_grep_is_capped_where_it_shows",
    "test_grep_shows_long_lines_around_the_match",
    "test_grep_shows_path_line_and_text",
    "test_list_refusals",
    "test_long_lines_are_cut_where_it_shows",
    "test_one_reading_fits_what_a_model_may_read",
    "test_parallel_edits_lose_nothing",
    "test_read_an_empty_file",
    "test_read_kinds_of_text",
    "test_read_numbers_the_lines",
    "test_read_says_how_to_go_on",
    "test_read_shows_what_is_not_utf8",
    "test_what_is_not_text_is_refused",
    "test_write_says_what_it_did",
]


@pytest.fixture
def files(database_url: str) -> Iterator[StoreFilesystem]:
    with StoreFilesystem(database_url) as made:
        yield made


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("read_file", {"path": "a.md"}),
        ("list_files", {}),
        ("glob_files", {"pattern": "**"}),
        ("grep_files", {"pattern": "x"}),
        ("grep_files", {"pattern": "x", "path": "folder"}),
    ],
)
def test_a_store_that_cannot_be_used_is_said_to_be_that(tmp_path: Path, name: str, args: dict[str, str]) -> None:
    path = tmp_path / "app.db"
    path.write_bytes(b"this is not a database" * 100)
    with StoreFilesystem(f"sqlite:///{path}") as files:
        tool: Any = {tool.name: tool for tool in file_tools(files)}[name]
        with pytest.raises(ExecutionFailed, match="the store of this workspace cannot be used: .* not a database"):
            tool(**args)


async def test_a_run_goes_on_without_its_workspace(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "app.db"
    path.write_bytes(b"this is not a database" * 100)
    model = ScriptedModel([call_tool("list_files"), say("I could not look.")])
    with StoreFilesystem(f"sqlite:///{path}") as files:
        async with Runtime([HarnessAgent("boss", model, filesystem=files)]) as runtime:
            result = await runtime.run("boss", "What is there?")
    assert (result.status, result.response) == (RunStatus.COMPLETED, "I could not look.")
    assert any("cannot be used" in message.text for message in result.messages if message.role == "tool")
    assert [record for record in caplog.records if record.exc_info] == []


@pytest.mark.parametrize("breaks", ["open", "list"])
def test_a_search_during_which_the_store_breaks_finds_not_nothing(
    files: StoreFilesystem, breaks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write("folder/a.md", b"x")
    works = getattr(files, breaks)

    def fails(path: str = "") -> Any:
        if not path:
            return works(path)
        raise FilesystemDown(path, "the store of this workspace cannot be used")

    monkeypatch.setattr(files, breaks, fails)
    grep: Any = {tool.name: tool for tool in file_tools(files)}["grep_files"]
    with pytest.raises(ExecutionFailed, match="the store of this workspace cannot be used"):
        grep("x")


def test_edits_of_several_nodes_lose_nothing(files: StoreFilesystem, database_url: str) -> None:
    files.write("list.txt", b"".join([b"<%d>\n" % number for number in range(60)]))
    with StoreFilesystem(database_url) as other, ThreadPoolExecutor(8) as pool:
        edits: list[Any] = [{tool.name: tool for tool in file_tools(node)}["edit_file"] for node in (files, other)]
        list(pool.map(lambda number: edits[number % 2]("list.txt", f"<{number}>", f"done {number}"), range(60)))
    assert files.read("list.txt") == b"".join([b"done %d\n" % number for number in range(60)])
