"""The six file tools of an agent. The docstrings of their methods are what the model reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from copy import copy
from difflib import get_close_matches
from typing import Any

from ..core.concurrency import CancellationToken
from ..core.context import ToolContext
from ..core.errors import (
    ConfigurationError,
    Denied,
    ExecutionFailed,
    FileMissing,
    FilesystemDown,
    FilesystemError,
    InvalidArguments,
    NotFound,
    PathDenied,
    shown_path,
)
from ..core.filesystem import FileEntry, Filesystem, files_of, is_divided
from ..core.functions import FunctionTool
from ..core.tools import Tool
from .grep import SECONDS, LinePattern, grep
from .history import Files, WithHistory
from .paths import GlobPattern, Places, first_entries, join_path, normal_path, shown, split_path, walk_files
from .text import READ_BYTES, Edit, Window, is_binary, nearly_at, read_window, replace_text

READ_ONLY_TOOLS = frozenset({"read_file", "list_files", "glob_files", "grep_files"})
"""The tools that change nothing."""
NOT_SEARCHED = frozenset({".git", ".hg", ".svn", ".venv", "node_modules", "__pycache__"})
"""Folders that searches skip: they are large, and seldom what is meant."""

MOST_ENTRIES = 1000
"""The number of files that a listing shows."""


def file_tools(filesystem: Filesystem) -> tuple[Tool, ...]:
    """Return the tools with which a model reads and changes the files of a filesystem."""
    files = _FileTools(filesystem)
    reading = (files.list_files, files.glob_files, files.grep_files)
    functions = (files.read_file, files.write_file, files.edit_file, *reading)
    return tuple([_FileTool(one, category="files", idempotent=one.__name__ in READ_ONLY_TOOLS) for one in functions])


class _FileTool(FunctionTool):
    """A file tool: when it is called, it works on the part of the files that its run has, with what was cut from its
    conversation."""

    async def execute(self, args: dict[str, Any], ctx: ToolContext) -> Any:
        tool = copy(self)
        files: _FileTools = self.function.__self__  # pyright: ignore[reportFunctionMemberAccess]
        tool.function = getattr(files.for_run(ctx), self.__name__)
        return await FunctionTool.execute(tool, args, ctx)


class _FileTools:
    def __init__(self, filesystem: Files) -> None:
        self._filesystem = filesystem

    def for_run(self, ctx: ToolContext) -> _FileTools:
        filesystem = self._filesystem
        assert not isinstance(filesystem, WithHistory)
        try:
            files = files_of(filesystem, ctx.run) if is_divided(filesystem) else filesystem
            return _FileTools(files if ctx.history is None else WithHistory(files, ctx.history))
        except (ConfigurationError, FilesystemError) as exc:
            raise ExecutionFailed(str(exc)) from exc

    def read_file(self, path: str, offset: int = 0, limit: int = 2000, ctx: ToolContext | None = None) -> str:
        """Read a text file.

        Each line comes as its number, a tab and its text. Numbers begin at 1 and are not part of the file.
        If there is more than fits, the last line says so and with which offset to read on.
        Use grep_files to find a place in a large file first.

        Args:
            path: The file, relative to the workspace, such as "notes/plan.md".
            offset: How many lines to skip. 0 begins at line 1, 2000 at line 2001.
            limit: How many lines to read at most.
        """
        if offset < 0:
            raise InvalidArguments(f"offset must be 0 or more, got {offset}")
        if limit < 1:
            raise InvalidArguments(f"limit must be 1 or more, got {limit}")
        with self._refusing(path), self._filesystem.open(path) as stream:
            if is_binary(stream):
                raise ExecutionFailed(f"{normal_path(path)}: it is a binary file; only text can be read")
            window = read_window(stream, offset, limit, _cancellation(ctx).raise_if_set)
            return _render(window, normal_path(path), offset)

    def write_file(self, path: str, content: str) -> str:
        """Write a text file: make it, or replace all that is in it. Folders that are missing are made.

        To change part of a file that exists, use edit_file.

        Args:
            path: The file, relative to the workspace, such as "notes/plan.md".
            content: The whole text of the file.
        """
        data = _encoded("content", content)
        with self._refusing(path), self._filesystem.changing:
            self._filesystem.write(path, data)
        lines = content.count("\n") + (content != "" and not content.endswith("\n"))
        return f"wrote {_count(lines, 'line')} ({_count(len(data), 'byte')}) to {normal_path(path)}"

    def edit_file(self, path: str, old: str, new: str, replace_all: bool = False) -> str:
        """Replace a piece of text in a file; everything else stays as it is.

        The old text must be exactly as in the file, with its white space but without the line numbers that
        read_file shows, and must occur once: add lines around it until it does, or set replace_all.

        Args:
            path: The file, relative to the workspace.
            old: The text to replace. It may go over several lines.
            new: The text to put there. Empty deletes the old text.
            replace_all: Replace the text wherever it occurs, instead of failing if it occurs more than once.
        """
        if not old:
            raise InvalidArguments("old must not be empty; use write_file to make a file or to replace all of it")
        old_data, new_data = _encoded("old", old), _encoded("new", new)
        edit = Edit(0, [], b"")

        def change(data: bytes) -> bytes:
            nonlocal edit
            try:
                edit = replace_text(data, old_data, new_data)
            except ValueError as error:
                raise InvalidArguments(f"{normal_path(path)}: {error}") from None
            _check_edit(edit, normal_path(path), data, old_data, replace_all)
            return edit.data

        with self._refusing(path):
            self._change(path, change)
        return f"replaced {_count(edit.occurrences, 'occurrence')} in {normal_path(path)}, at {_lines(edit)}"

    def _change(self, path: str, change: Callable[[bytes], bytes]) -> None:
        """Change a file. A local one needs the lock of this process, a shared one the atomic update of its store."""
        if self._filesystem.is_local:
            with self._filesystem.changing:
                return self._filesystem.write(path, change(self._filesystem.read(path)))

        def change_if_there(data: bytes | None) -> bytes:
            if data is None:
                raise FileMissing(path, "there is no such file or folder")
            return change(data)

        self._filesystem.update(path, change_if_there)

    def list_files(self, path: str = "") -> str:
        """List what is in a folder, one entry a line: folders with "/" at the end, files with their size.

        Only the folder itself is listed; use glob_files to look below it. Paths are relative to the workspace and
        can be given to the other tools as they are. Links are not shown.

        Args:
            path: The folder, relative to the workspace. Empty is the workspace itself.
        """
        with self._refusing(path):
            entries = first_entries(self._filesystem.list(path), MOST_ENTRIES + 1)
        if not entries:
            return f"{shown_path(normal_path(path))} is empty"
        lines = [f"{one.path}/" if one.is_dir else f"{one.path} ({_count(one.size, 'byte')})" for one in entries]
        return _capped(lines, "entries", "use glob_files with a narrower pattern")

    def glob_files(self, pattern: str, path: str = "", ctx: ToolContext | None = None) -> str:
        """Find files by name, one path a line.

        In a pattern, "*" stands for any part of a name, "?" for one character, "[ab]" for one of these, "{a,b}" for
        either and "**" for any number of folders: "*.md" finds files in the folder itself, "**/*.md" also in those
        below. Case matters. Folders and links are not found, nor what is in .git, .venv, node_modules and the like,
        unless the path names it.

        Args:
            pattern: What the path must look like, relative to the folder searched, such as "src/**/*.py".
            path: The folder to search, relative to the workspace. Empty is the workspace itself.
        """
        cancellation = _cancellation(ctx)
        with self._refusing(path):
            glob = GlobPattern(pattern)
            found: list[str] = []
            listing, check = self._listing(cancellation), cancellation.raise_if_set

            def step(places: Places, entry: FileEntry) -> Places | None:
                check()
                return glob.step(places, entry)

            for entry in walk_files(listing, normal_path(path), glob.start, step):
                found.append(entry.path)
                if len(found) > MOST_ENTRIES:
                    break
        if not found:
            deeper = "" if "/" in pattern or "**" in pattern else f"; '**/{pattern}' also searches the folders below"
            return f"no file in {shown_path(normal_path(path))} matches {shown(pattern)}{deeper}"
        return _capped(found, "files", "narrow the pattern or the path")

    def grep_files(self, pattern: str, path: str = "", ctx: ToolContext | None = None) -> str:
        """Search the text of files, line by line, for a regular expression.

        Each match comes as "path:line: text". If there are too many, the last line says so. Binary files and links are
        left out, and so is .git, .venv, node_modules and the like, unless the path names it. To read around a match,
        give read_file an offset a little below its line number.

        Args:
            pattern: A regular expression in RE2's syntax, which is Python's without look-around and back-references;
                \\w, \\d and \\b mean ASCII, \\pL is any letter. Put "(?i)" first to ignore case, and a backslash
                before . * + ? ( ) [ ] { } ^ $ | to search for the character itself.
            path: The folder or file to search, relative to the workspace. Empty is the whole workspace.
        """
        cancellation, compiled = _cancellation(ctx), LinePattern(pattern)
        with self._refusing(path):
            found = grep(self._filesystem, self._files(path, cancellation), compiled, cancellation.raise_if_set)
        lines = found.lines or [f"no line in {shown_path(normal_path(path))} matches {pattern!r}"]
        return "\n".join([*lines, *found.notes()])

    def _files(self, path: str, cancellation: CancellationToken) -> Iterator[FileEntry]:
        """Return the file itself, or the files below the folder."""
        try:
            return walk_files(self._listing(cancellation), normal_path(path), True, lambda above, _: above)
        except FilesystemDown:
            raise
        except FilesystemError:
            self._filesystem.open(path).close()
            return iter([FileEntry(normal_path(path), False)])

    def _listing(self, cancellation: CancellationToken) -> Callable[[str], list[FileEntry]]:
        """Return a function that lists folders until the call is cancelled or too long, without `NOT_SEARCHED`."""
        end = time.monotonic() + SECONDS

        def listing(path: str) -> list[FileEntry]:
            cancellation.raise_if_set()
            if time.monotonic() > end:
                raise ExecutionFailed(f"the search was stopped after {SECONDS:g} s: search in a smaller folder")
            entries = self._filesystem.list(path)
            return [entry for entry in entries if not entry.is_dir or entry.path.rpartition("/")[2] not in NOT_SEARCHED]

        return listing

    @contextmanager
    def _refusing(self, path: str) -> Generator[None, None, None]:
        """Turn the errors of a filesystem into those of a tool call."""
        try:
            yield
        except FileMissing as error:
            similar = _similar(self._filesystem, path)
            raise NotFound(f"{error}; did you mean {' or '.join(similar)}?" if similar else str(error)) from error
        except PathDenied as error:
            raise Denied(str(error)) from error
        except FilesystemError as error:
            raise ExecutionFailed(str(error)) from error
        except OSError as error:
            raise ExecutionFailed(f"{shown_path(path)}: {error.strerror or error}") from error


def _cancellation(ctx: ToolContext | None) -> CancellationToken:
    return CancellationToken() if ctx is None else ctx.cancellation


def _similar(filesystem: Files, path: str) -> list[str]:
    """Return paths like the first part of this one that does not exist."""
    parents: tuple[str, ...] = ()
    try:
        for name in split_path(path):
            entries, wanted = filesystem.list(join_path(parents)), join_path((*parents, name))
            is_there = any(entry.path == wanted for entry in entries)
            names = [entry.path.rpartition("/")[2] for entry in first_entries(entries, MOST_ENTRIES)]
            if not is_there:
                lowered = {known.lower(): known for known in names}
                return [join_path((*parents, lowered[near])) for near in get_close_matches(name.lower(), lowered)]
            parents = (*parents, name)
    except FilesystemError:
        pass
    return []


def _render(window: Window, path: str, offset: int) -> str:
    if not window.lines:
        if offset == 0:
            return f"{path} is empty"
        if not window.counted:
            place = f"offset {offset} is more than {READ_BYTES:,} bytes into {path}, which is the limit"
            raise InvalidArguments(f"{place}: use grep_files, or cut a part out with a command")
        raise InvalidArguments(f"offset {offset} is past the end: {path} has {_count(window.total, 'line')}")
    notes: list[str] = []
    if window.lossy:
        notes.append("[the file is not all UTF-8: what could not be decoded shows as \ufffd]")
    if window.next < window.total or not window.counted:
        total = f"{window.total}" if window.counted else f"more than {window.total}"
        notes.append(f"[lines {offset + 1}-{window.next} of {total}; read on with offset={window.next}]")
    return "\n".join([*window.lines, *notes])


def _check_edit(edit: Edit, path: str, data: bytes, old: bytes, replace_all: bool) -> None:
    """Refuse an edit that matches nothing, matches too much or changes nothing."""
    if not edit.occurrences:
        near = nearly_at(data, old)
        hint = "read the file again" if near is None else f"line {near} differs in white space or in what follows it"
        raise ExecutionFailed(
            f"{path}: the old text does not occur; it must match exactly, with its white space: {hint}"
        )
    if edit.occurrences > 1 and not replace_all:
        raise ExecutionFailed(
            f"{path}: the old text occurs {edit.occurrences} times, at {_lines(edit)}; "
            "add lines around it to say which one, or set replace_all"
        )
    if edit.data == data:
        raise InvalidArguments("old and new are the same; nothing was changed")


def _capped(lines: list[str], what: str, advice: str) -> str:
    if len(lines) <= MOST_ENTRIES:
        return "\n".join(lines)
    return "\n".join([*lines[:MOST_ENTRIES], f"[only the first {MOST_ENTRIES} {what} are shown: {advice}]"])


def _encoded(name: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArguments(f"{name} has a character that is not text, at position {error.start}") from error


def _lines(edit: Edit) -> str:
    listed = ", ".join(map(str, edit.lines))
    return f"line{'s' * (edit.occurrences > 1)} {listed}{', …' * (edit.occurrences > len(edit.lines))}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
