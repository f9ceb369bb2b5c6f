"""The file tools on files in a database: the tests of the tools on a folder, where they need no disk."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from retinue import StoreFilesystem, file_tools
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


def test_edits_of_several_nodes_lose_nothing(files: StoreFilesystem, database_url: str) -> None:
    files.write("list.txt", b"".join([b"<%d>\n" % number for number in range(60)]))
    with StoreFilesystem(database_url) as other, ThreadPoolExecutor(8) as pool:
        edits: list[Any] = [{tool.name: tool for tool in file_tools(node)}["edit_file"] for node in (files, other)]
        list(pool.map(lambda number: edits[number % 2]("list.txt", f"<{number}>", f"done {number}"), range(60)))
    assert files.read("list.txt") == b"".join([b"done %d\n" % number for number in range(60)])
