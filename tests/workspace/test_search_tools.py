from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from retinue.core.context import CancellationToken
from retinue.core.errors import Denied, ExecutionFailed, InvalidArguments, NotFound, ToolCancelled
from retinue.workspace import LocalFilesystem
from retinue.workspace import grep as grep_module
from retinue.workspace import searcher as searcher_module

from .conftest import Call


async def test_glob_finds_files(call: Call, files: LocalFilesystem, root: Path) -> None:
    for path in ("a.py", "src/b.py", "src/deep/c.py", "src/deep/c.ts", "src/.hidden.py", "docs/x.md"):
        files.write(path, b"1")
    (root / "link.py").symlink_to(root / "a.py")
    assert await call("glob_files", pattern="*.py") == "a.py"
    assert await call("glob_files", pattern="**/*.py") == "a.py\nsrc/.hidden.py\nsrc/b.py\nsrc/deep/c.py"
    assert await call("glob_files", pattern="**/*.py", path="src/deep") == "src/deep/c.py"
    assert await call("glob_files", pattern="./src/**/c.{py,ts}") == "src/deep/c.py\nsrc/deep/c.ts"
    assert await call("glob_files", pattern="src/**", path="") == (
        "src/.hidden.py\nsrc/b.py\nsrc/deep/c.py\nsrc/deep/c.ts"
    )
    assert await call("glob_files", pattern="*.md") == (
        "no file in . matches '*.md'; '**/*.md' also searches the folders below"
    )


async def test_glob_refusals(call: Call, files: LocalFilesystem) -> None:
    files.write("a.txt", b"1")
    for pattern in ("../*", "/etc/*", "a\\*", "{..,a}/*"):
        with pytest.raises(Denied):
            await call("glob_files", pattern=pattern)
    with pytest.raises(InvalidArguments, match="names no file"):
        await call("glob_files", pattern="")
    with pytest.raises(ExecutionFailed, match="it is a file, not a folder"):
        await call("glob_files", pattern="*", path="a.txt")
    with pytest.raises(NotFound):
        await call("glob_files", pattern="*", path="gone")


@pytest.mark.parametrize("pattern", ["needle", "need.e", r"^.*needle$"])
async def test_grep_shows_path_line_and_text(call: Call, files: LocalFilesystem, pattern: str) -> None:
    files.write("a.txt", b"x\r\n  the needle\r\n")
    files.write("b/c.txt", b"\xef\xbb\xbfneedle\nnot\n\xff needle")
    files.write("d.bin", b"\0needle\n")
    found = "a.txt:2:   the needle\nb/c.txt:1: needle\nb/c.txt:3: \ufffd needle"
    assert await call("grep_files", pattern=pattern) == found
    assert await call("grep_files", pattern=pattern, path="b") == found.split("\n", 1)[1]
    assert await call("grep_files", pattern=pattern, path="./a.txt") == found.split("\n")[0]


async def test_grep_numbers_lines_across_blocks(call: Call, root: Path) -> None:
    lines = [b"x" * 50] * 20_000
    lines[0] = lines[9_999] = lines[19_999] = b"needle"
    lines[5_000] = b"y" * 700_000
    (root / "a.txt").write_bytes(b"\n".join(lines))
    for pattern in ("needle", "n[e]edle"):
        assert await call("grep_files", pattern=pattern) == "\n".join(
            f"a.txt:{number}: needle" for number in (1, 10_000, 20_000)
        )


async def test_grep_shows_long_lines_around_the_match(call: Call, files: LocalFilesystem) -> None:
    files.write("a.txt", b"x" * 5_000 + b"needle" + b"y" * 20_000)
    found = await call("grep_files", pattern="needle")
    assert found.startswith("a.txt:1: …x")
    assert "needle" in found
    assert len(found) < 350


async def test_grep_is_capped_where_it_shows(call: Call, files: LocalFilesystem) -> None:
    files.write("a.txt", b"needle\n" * 400)
    files.write("b.txt", b"needle\n" * 400)
    lines = (await call("grep_files", pattern="needle")).split("\n")
    assert len(lines) == 501
    assert lines[-1] == "[stopped at 500 matches, there may be more: narrow the pattern or the path]"
    files.write("a.txt", (b"needle" + b"x" * 290 + b"\n") * 400)
    assert len(await call("grep_files", pattern="needle")) < 65_000


async def test_grep_is_bounded_by_bytes(call: Call, files: LocalFilesystem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grep_module, "MOST_BYTES", 1_000_000)
    files.write("a.txt", b"x\n" * 400_000)
    files.write("b.txt", b"x\n" * 400_000 + b"needle\n")
    files.write("c.txt", b"needle\n")
    found = await call("grep_files", pattern="needle")
    assert found == (
        "no line in . matches 'needle'\n[stopped in b.txt after 1,000,000 bytes, not all was searched: narrow the path]"
    )


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("", "pattern must not be empty"),
        (
            "foo[",
            "invalid regular expression: unterminated character set at position 3\nfoo[\n   ^",
        ),
        ("a**", "invalid regular expression: multiple repeat at position 2\na**\n  ^"),
    ],
)
async def test_grep_points_at_what_is_wrong(call: Call, pattern: str, message: str) -> None:
    with pytest.raises(InvalidArguments) as refused:
        await call("grep_files", pattern=pattern)
    assert refused.value.message == message


async def test_grep_patterns_that_are_too_large(call: Call) -> None:
    for pattern in ("(" * 5_000 + ")" * 5_000, "a{99999999999999999999}"):
        with pytest.raises(InvalidArguments, match="invalid regular expression"):
            await call("grep_files", pattern=pattern)


async def test_grep_refusals(call: Call, files: LocalFilesystem, root: Path) -> None:
    files.write("src/a.txt", b"1")
    (root / "link").symlink_to(root / "src")
    with pytest.raises(NotFound, match="did you mean src"):
        await call("grep_files", pattern="x", path="scr")
    for path in ("link", "link/a.txt", "../x"):
        with pytest.raises(Denied):
            await call("grep_files", pattern="1", path=path)


@pytest.mark.timeout(30)
async def test_a_catastrophic_pattern_stops_nothing_else(
    call: Call, files: LocalFilesystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searcher_module, "SECONDS", 1.0)
    files.write("a.txt", b"a" * 60 + b"!\n")
    started = time.monotonic()
    searching = asyncio.create_task(call("grep_files", pattern="(a+)+$"))
    longest = 0.0
    while not searching.done():
        before = time.monotonic()
        await asyncio.sleep(0.01)
        longest = max(longest, time.monotonic() - before)
    with pytest.raises(ExecutionFailed, match="stopped after 1 s: make the pattern simpler"):
        await searching
    assert time.monotonic() - started < 10
    assert longest < 0.9


@pytest.mark.timeout(30)
async def test_a_cancelled_search_stops(call: Call, files: LocalFilesystem) -> None:
    files.write("a.txt", b"a" * 60 + b"!\n")
    cancellation = CancellationToken()
    searching = asyncio.create_task(call("grep_files", cancellation, pattern="(a+)+$"))
    await asyncio.sleep(0.5)
    cancellation.set("enough")
    with pytest.raises(ToolCancelled, match="enough"):
        await searching


async def test_a_cancelled_call_looks_at_nothing(call: Call, files: LocalFilesystem) -> None:
    files.write("a.txt", b"needle")
    cancellation = CancellationToken()
    cancellation.set("enough")
    for name in ("grep_files", "glob_files"):
        with pytest.raises(ToolCancelled, match="enough"):
            await call(name, cancellation, pattern="needle")


async def test_where_no_process_can_be_started_grep_still_works(
    call: Call, files: LocalFilesystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.frozen", True, raising=False)
    files.write("a.txt", b"needle\n")
    assert await call("grep_files", pattern="n.edle") == "a.txt:1: needle"
    with pytest.raises(InvalidArguments, match="unterminated character set at position 0"):
        await call("grep_files", pattern="[")


async def test_folders_of_tools_are_searched_only_when_named(files: LocalFilesystem, call: Call) -> None:
    for path in ("src/a.py", ".git/config", "src/node_modules/x/a.py"):
        files.write(path, b"needle\n")
    assert await call("glob_files", pattern="**/*") == "src/a.py"
    assert await call("grep_files", pattern="needle") == "src/a.py:1: needle"
    assert await call("grep_files", pattern="needle", path=".git") == ".git/config:1: needle"
    assert await call("glob_files", pattern="*", path=".git") == ".git/config"
