from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from retinue.core.errors import Denied, ExecutionFailed, InvalidArguments, NotFound, ToolError
from retinue.workspace import LocalFilesystem, file_tools
from retinue.workspace.tools import READ_ONLY_TOOLS

from ..effort import share
from .conftest import Call, context


def numbered(*lines: str, first: int = 1) -> str:
    return "\n".join(f"{number:>6}\t{line}" for number, line in enumerate(lines, first))


def test_the_six_tools_and_their_parameters(tmp_path: Path) -> None:
    tools = file_tools(LocalFilesystem(tmp_path / "not-there"))
    assert {tool.name: list(tool.descriptor.parameters["properties"]) for tool in tools} == {
        "read_file": ["path", "offset", "limit"],
        "write_file": ["path", "content"],
        "edit_file": ["path", "old", "new", "replace_all"],
        "list_files": ["path"],
        "glob_files": ["pattern", "path"],
        "grep_files": ["pattern", "path"],
    }
    assert {tool.name: tool.descriptor.parameters.get("required") for tool in tools} == {
        "read_file": ["path"],
        "write_file": ["path", "content"],
        "edit_file": ["path", "old", "new"],
        "list_files": None,
        "glob_files": ["pattern"],
        "grep_files": ["pattern"],
    }
    for tool in tools:
        assert tool.descriptor.options.idempotent == (tool.name in READ_ONLY_TOOLS)
        assert tool.descriptor.description
        assert "Args" not in tool.descriptor.description
        assert all(parameter["description"] for parameter in tool.descriptor.parameters["properties"].values())


async def test_read_numbers_the_lines(call: Call, files: LocalFilesystem) -> None:
    files.write("notes/a.md", b"one\n\n  three\n")
    assert await call("read_file", path="notes/a.md") == numbered("one", "", "  three")
    assert await call("read_file", path="./notes//a.md", offset=2) == numbered("  three", first=3)


async def test_read_says_how_to_go_on(call: Call, files: LocalFilesystem) -> None:
    files.write("a.txt", b"".join(b"line %d\n" % number for number in range(1, 2502)))
    first = (await call("read_file", path="a.txt")).split("\n")
    assert first[-2:] == ["  2000\tline 2000", "[lines 1-2000 of 2501; read on with offset=2000]"]
    rest = (await call("read_file", path="a.txt", offset=2000)).split("\n")
    assert (rest[0], rest[-1]) == ("  2001\tline 2001", "  2501\tline 2501")
    middle = await call("read_file", path="a.txt", offset=9, limit=2)
    assert middle == numbered("line 10", "line 11", first=10) + "\n[lines 10-11 of 2501; read on with offset=11]"


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"no newline at the end", ["no newline at the end"]),
        (b"a\nb", ["a", "b"]),
        (b"dos\r\nlines\r\n", ["dos", "lines"]),
        (b"\xef\xbb\xbfmarked\n", ["marked"]),
        ("ž 漢 🎉\n".encode(), ["ž 漢 🎉"]),
        ("not\u2028an end\x0cnor this\n".encode(), ["not\u2028an end\x0cnor this"]),
        (b"\n", [""]),
    ],
)
async def test_read_kinds_of_text(call: Call, files: LocalFilesystem, data: bytes, lines: list[str]) -> None:
    files.write("a.txt", data)
    assert await call("read_file", path="a.txt") == numbered(*lines)


async def test_read_shows_what_is_not_utf8(call: Call, files: LocalFilesystem) -> None:
    files.write("a.txt", "naïve\nplain\n".encode("latin-1"))
    note = "[the file is not all UTF-8: what could not be decoded shows as \ufffd]"
    assert await call("read_file", path="a.txt") == numbered("na\ufffdve", "plain") + "\n" + note


async def test_read_an_empty_file(call: Call, files: LocalFilesystem) -> None:
    files.write("a.txt", b"")
    assert await call("read_file", path="a.txt") == "a.txt is empty"


@pytest.mark.parametrize(
    ("args", "kind", "message"),
    [
        ({"path": "a.txt", "offset": 5}, InvalidArguments, "offset 5 is past the end: a.txt has 2 lines"),
        ({"path": "a.txt", "offset": 2}, InvalidArguments, "offset 2 is past the end: a.txt has 2 lines"),
        ({"path": "a.txt", "offset": -1}, InvalidArguments, "offset must be 0 or more, got -1"),
        ({"path": "a.txt", "limit": 0}, InvalidArguments, "limit must be 1 or more, got 0"),
        ({"path": "b.bin"}, ExecutionFailed, "b.bin: it is a binary file; only text can be read"),
        ({"path": "folder"}, ExecutionFailed, "folder: it is a folder, not a file"),
        ({"path": ""}, ExecutionFailed, ".: it is the root folder of this workspace, not a file"),
        ({"path": "link"}, Denied, "link: it is a symbolic link, and links are not followed"),
        ({"path": "../x"}, Denied, "../x: it leads out of the workspace"),
        ({"path": "zzz"}, NotFound, "zzz: there is no such file or folder"),
        ({"path": "A.TXT"}, NotFound, "A.TXT: there is no such file or folder; did you mean a.txt?"),
        ({"path": "foldr/reprot.md"}, NotFound, "foldr: there is no such file or folder; did you mean folder?"),
        (
            {"path": "folder/reprot.md"},
            NotFound,
            "folder/reprot.md: there is no such file or folder; did you mean folder/report.md or folder/report2.md?",
        ),
    ],
)
async def test_read_refusals(
    call: Call, files: LocalFilesystem, root: Path, args: dict[str, Any], kind: type[ToolError], message: str
) -> None:
    files.write("a.txt", b"1\n2\n")
    files.write("b.bin", b"\x7fELF\0\0")
    files.write("folder/report.md", b"1")
    files.write("folder/report2.md", b"1")
    (root / "link").symlink_to(root / "a.txt")
    with pytest.raises(kind) as refused:
        await call("read_file", **args)
    assert (type(refused.value), refused.value.message) == (kind, message)


async def test_a_missing_root_says_what_to_do(tmp_path: Path) -> None:
    read, write, *_ = file_tools(LocalFilesystem(tmp_path / "ws"))
    with pytest.raises(NotFound, match=r"ws: the root folder of this workspace does not exist; create it, or write"):
        await read.execute({"path": "a.txt"}, context())
    await write.execute({"path": "a.txt", "content": "x"}, context())
    assert (tmp_path / "ws" / "a.txt").read_text() == "x"


async def test_a_root_that_is_a_file_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "ws").write_text("x")
    for tool in file_tools(LocalFilesystem(tmp_path / "ws")):
        given = {"path": "a.txt", "pattern": "x", "content": "x", "old": "x", "new": "y"}
        args = {name: given[name] for name in tool.descriptor.parameters["properties"] if name in given}
        with pytest.raises(ExecutionFailed, match="give it a folder"):
            await tool.execute(args, context())


async def test_long_lines_are_cut_where_it_shows(call: Call, files: LocalFilesystem) -> None:
    files.write("a.txt", b"x" * 25_000 + b"\nshort\n" + "é".encode() * 9_999)
    cut, short, wide = (await call("read_file", path="a.txt")).split("\n")
    assert cut == "     1\t" + "x" * 10_000 + " … [15,000 more bytes in this line]"
    assert short == "     2\tshort"
    assert wide == "     3\t" + "é" * 5_000 + " … [9,998 more bytes in this line]"


async def test_one_reading_fits_what_a_model_may_read(call: Call, files: LocalFilesystem) -> None:
    files.write("a.txt", b"".join(b"%d %b\n" % (number, b"x" * 1_000) for number in range(1, 101)))
    seen: list[str] = []
    while True:
        text = await call("read_file", path="a.txt", offset=len(seen))
        assert len(text) < 70_000
        lines = text.split("\n")
        more = lines.pop() if lines[-1].startswith("[lines") else None
        seen += lines
        if more is None:
            break
        assert more.endswith(f"of 100; read on with offset={len(seen)}]")
    assert [line.split("\t")[1].split()[0] for line in seen] == [str(number) for number in range(1, 101)]


async def test_a_large_file(call: Call, root: Path) -> None:
    lines, line = share(1_000_000, 200_000), b"0123456789" * 5 + b"\n"
    (root / "large.txt").write_bytes(line * lines)
    text = await call("read_file", path="large.txt", offset=lines - 10, limit=1)
    at = lines - 9
    assert (
        text == numbered(line.decode().strip(), first=at) + f"\n[lines {at}-{at} of {lines}; read on with offset={at}]"
    )
    size = f"{51 * lines:,}"
    with pytest.raises(ExecutionFailed, match=rf"large\.txt: it has {size} bytes, over the limit of 10,000,000"):
        await call("edit_file", path="large.txt", old="0", new="1")
    assert "no line" in await call("grep_files", pattern="absent")
    (root / "one-line.txt").write_bytes(b"x" * 50 * lines)
    text = await call("read_file", path="one-line.txt")
    assert text.endswith(f"[{50 * lines - 10_000:,} more bytes in this line]")


async def test_write_says_what_it_did(call: Call, files: LocalFilesystem) -> None:
    wrote = await call("write_file", path="./notes//a.md", content="one\ntwo\n")
    assert wrote == "wrote 2 lines (8 bytes) to notes/a.md"
    assert files.read("notes/a.md") == b"one\ntwo\n"
    assert await call("write_file", path="b", content="é") == "wrote 1 line (2 bytes) to b"
    assert await call("write_file", path="b", content="") == "wrote 0 lines (0 bytes) to b"
    assert files.read("b") == b""


@pytest.mark.parametrize(
    ("path", "kind", "message"),
    [
        ("folder", ExecutionFailed, "folder: it is a folder, not a file"),
        ("new/", ExecutionFailed, "new/: it names a folder, not a file"),
        ("a.txt/b.txt", ExecutionFailed, "a.txt: it is a file, not a folder"),
        ("/etc/x", Denied, "/etc/x: it is absolute; give a path relative to the workspace, such as 'notes/plan.md'"),
        ("a\\b", Denied, "a\\b: it has a backslash; put '/' between folders"),
        ("x" * 256, Denied, "x" * 200 + "…: a name in it is longer than 255 bytes"),
    ],
)
async def test_write_refusals(
    call: Call, files: LocalFilesystem, path: str, kind: type[ToolError], message: str
) -> None:
    files.write("folder/a.txt", b"1")
    files.write("a.txt", b"1")
    before = files.walk()
    with pytest.raises(kind) as refused:
        await call("write_file", path=path, content="2")
    assert (type(refused.value), refused.value.message) == (kind, message)
    assert files.walk() == before


async def test_what_is_not_text_is_refused(call: Call, files: LocalFilesystem) -> None:
    files.write("a.txt", b"1")
    with pytest.raises(InvalidArguments, match="content has a character that is not text, at position 1"):
        await call("write_file", path="a.txt", content="x\ud800")
    with pytest.raises(InvalidArguments, match="new has a character that is not text"):
        await call("edit_file", path="a.txt", old="1", new="\ud800")
    assert files.read("a.txt") == b"1"


async def test_edit_replaces_one_piece(call: Call, files: LocalFilesystem) -> None:
    files.write("a.txt", b"one\ntwo\nthree\n")
    said = await call("edit_file", path="a.txt", old="two\nthr", new="2\n3")
    assert said == "replaced 1 occurrence in a.txt, at line 2"
    assert files.read("a.txt") == b"one\n2\n3ee\n"
    await call("edit_file", path="a.txt", old="one\n", new="")
    assert files.read("a.txt") == b"2\n3ee\n"


async def test_edit_replaces_all_when_asked(call: Call, files: LocalFilesystem) -> None:
    files.write("a.txt", b"x\ny\nx x\n")
    said = await call("edit_file", path="a.txt", old="x", new="\\1z", replace_all=True)
    assert said == "replaced 3 occurrences in a.txt, at lines 1, 3, 3"
    assert files.read("a.txt") == b"\\1z\ny\n\\1z \\1z\n"


@pytest.mark.parametrize(
    ("old", "new", "kind", "message"),
    [
        ("", "x", InvalidArguments, "old must not be empty; use write_file to make a file or to replace all of it"),
        ("one", "one", InvalidArguments, "old and new are the same; nothing was changed"),
        (
            "two",
            "x",
            ExecutionFailed,
            (
                "a.txt: the old text occurs 2 times, at lines 2, 3; "
                "add lines around it to say which one, or set replace_all"
            ),
        ),
        (
            "four",
            "x",
            ExecutionFailed,
            "a.txt: the old text does not occur; it must match exactly, with its white space: read the file again",
        ),
        (
            "  one",
            "x",
            ExecutionFailed,
            (
                "a.txt: the old text does not occur; it must match exactly, with its white space: "
                "line 1 differs in white space or in what follows it"
            ),
        ),
    ],
)
async def test_edit_refusals(
    call: Call, files: LocalFilesystem, old: str, new: str, kind: type[ToolError], message: str
) -> None:
    files.write("a.txt", b"one\ntwo\n two\n")
    with pytest.raises(kind) as refused:
        await call("edit_file", path="a.txt", old=old, new=new)
    assert (type(refused.value), refused.value.message) == (kind, message)
    assert files.read("a.txt") == b"one\ntwo\n two\n"


async def test_edit_a_file_that_is_not_there(call: Call, files: LocalFilesystem) -> None:
    files.write("settings.toml", b"x")
    with pytest.raises(NotFound, match=r"setings\.toml: .*did you mean settings\.toml\?"):
        await call("edit_file", path="setings.toml", old="x", new="y")


def test_parallel_edits_lose_nothing(files: LocalFilesystem) -> None:
    edit = {tool.name: tool for tool in file_tools(files)}["edit_file"]
    files.write("a.txt", b"".join(b"<%d>\n" % number for number in range(60)))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: edit("a.txt", f"<{number}>", f"done {number}"), range(60)))  # type: ignore[operator]
    assert files.read("a.txt") == b"".join(b"done %d\n" % number for number in range(60))


async def test_list_shows_folders_and_sizes(call: Call, files: LocalFilesystem, root: Path) -> None:
    files.write("b.txt", b"1")
    files.write("a/c.txt", b"12")
    (root / "empty").mkdir()
    (root / "link").symlink_to(root / "b.txt")
    assert await call("list_files") == "a/\nb.txt (1 byte)\nempty/"
    assert await call("list_files", path="a/") == "a/c.txt (2 bytes)"
    assert await call("list_files", path="empty") == "empty is empty"


async def test_list_refusals(call: Call, files: LocalFilesystem) -> None:
    files.write("src/a.txt", b"1")
    with pytest.raises(ExecutionFailed, match=r"^execution_failed: src/a\.txt: it is a file, not a folder$"):
        await call("list_files", path="src/a.txt")
    with pytest.raises(NotFound, match=r"scr: .*did you mean src\?"):
        await call("list_files", path="scr")
    with pytest.raises(Denied):
        await call("list_files", path="..")


async def test_an_empty_workspace(call: Call) -> None:
    assert await call("list_files") == ". is empty"
    assert await call("glob_files", pattern="**") == "no file in . matches '**'"
    assert await call("grep_files", pattern="x") == "no line in . matches 'x'"


async def test_listings_are_capped_where_it_shows(call: Call, root: Path) -> None:
    for number in range(1_001):
        (root / f"{number:04}.txt").touch()
    for name, args in {"list_files": {}, "glob_files": {"pattern": "*"}}.items():
        lines = (await call(name, **args)).split("\n")
        assert len(lines) == 1_001
        assert lines[-1].startswith("[only the first 1000 ")


@pytest.mark.timeout(30)
async def test_a_pipe_does_not_hang(call: Call, files: LocalFilesystem, root: Path) -> None:
    os.mkfifo(root / "pipe")
    files.write("a.txt", b"needle\n")
    for name, args in {
        "read_file": {},
        "write_file": {"content": "x"},
        "edit_file": {"old": "x", "new": "y"},
        "list_files": {},
        "grep_files": {"pattern": "x"},
    }.items():
        with pytest.raises(ToolError, match="pipe"):
            await call(name, path="pipe", **args)
    assert await call("grep_files", pattern="needle") == "a.txt:1: needle"
    assert await call("glob_files", pattern="*") == "a.txt"


@pytest.mark.usefixtures("permissions")
async def test_files_that_cannot_be_read_are_counted(call: Call, files: LocalFilesystem, root: Path) -> None:
    files.write("a.txt", b"needle")
    files.write("b.txt", b"needle")
    (root / "b.txt").chmod(0)
    assert await call("grep_files", pattern="needle") == "a.txt:1: needle\n[files that could not be read: 1]"
    with pytest.raises(Denied, match=r"b\.txt: permission denied"):
        await call("read_file", path="b.txt")
