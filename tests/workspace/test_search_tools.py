from __future__ import annotations

import re
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retinue.core.concurrency import CancellationToken
from retinue.core.errors import Denied, ExecutionFailed, InvalidArguments, NotFound, ToolCancelled
from retinue.workspace import LocalFilesystem
from retinue.workspace import grep as grep_module
from retinue.workspace import text as text_module
from retinue.workspace import tools as tools_module
from retinue.workspace.grep import LinePattern

from ..effort import share
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


RE2_SYNTAX = (
    ". The syntax is RE2's: there is no look-around such as (?=…), no back-reference such as \\1, "
    "and a repeat goes up to 1000"
)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("", "pattern must not be empty"),
        ("foo[", f"invalid regular expression: missing ]: [{RE2_SYNTAX}"),
        ("a**", f"invalid regular expression: bad repetition operator: **{RE2_SYNTAX}"),
        ("(?=a)b", f"invalid regular expression: invalid perl operator: (?={RE2_SYNTAX}"),
        ("(a)\\1", f"invalid regular expression: invalid escape sequence: \\1{RE2_SYNTAX}"),
        ("x\ud800", "pattern has a character that is not text, at position 1"),
        ("x" * 1001, "invalid regular expression: it has 1,001 characters, the limit is 1,000"),
        ("(?:a|b){999}" * 80, f"invalid regular expression: pattern too large - compile failed{RE2_SYNTAX}"),
    ],
)
async def test_grep_says_what_is_wrong(call: Call, pattern: str, message: str) -> None:
    with pytest.raises(InvalidArguments) as refused:
        await call("grep_files", pattern=pattern)
    assert refused.value.message == message


async def test_grep_patterns_that_are_too_large(call: Call) -> None:
    for pattern in ("(" * 500 + ")" * 499, "a{1001}"):
        with pytest.raises(InvalidArguments, match="invalid regular expression"):
            await call("grep_files", pattern=pattern)


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("^b", [2, 4]),
        ("a$", [1, 3]),
        (r"\Ab", [2, 4]),
        (r"a\z", [1, 3]),
        (r"a\sb", []),
        ("[^x]b", [4]),
        ("^$", [5]),
        ("(?i)B{2}", [4]),
        ("é", [6]),
        (r"\pL{2}", [4, 6]),
        ("a|", [1, 2, 3, 4, 5, 6]),
    ],
)
async def test_a_pattern_never_leaves_its_line(
    call: Call, files: LocalFilesystem, pattern: str, found: list[int]
) -> None:
    files.write("a.txt", "a\nb\na\nbb\n\né\u00fc".encode())
    lines = (await call("grep_files", pattern=pattern)).split("\n")
    assert [int(line.split(":")[1]) for line in lines if line.startswith("a.txt:")] == found


@settings(max_examples=share(100), deadline=None)
@given(st.text("ab.*+?|()[]^$\\n", max_size=8), st.lists(st.text("ab", max_size=5), max_size=8))
def test_lines_are_found_as_by_searching_each_alone(pattern: str, lines: list[str]) -> None:
    try:
        compiled, expected = LinePattern(pattern), re.compile(pattern)
    except (InvalidArguments, re.error, FutureWarning):
        return
    found = compiled.find("\n".join(lines).encode(), 1, 100)
    assert found == [(number, line) for number, line in enumerate(lines or [""], 1) if expected.search(line)]


async def test_grep_refusals(call: Call, files: LocalFilesystem, root: Path) -> None:
    files.write("src/a.txt", b"1")
    (root / "link").symlink_to(root / "src")
    with pytest.raises(NotFound, match="did you mean src"):
        await call("grep_files", pattern="x", path="scr")
    for path in ("link", "link/a.txt", "../x"):
        with pytest.raises(Denied):
            await call("grep_files", pattern="1", path=path)


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*b", "(.*)(.*)(.*)(.*)(.*)x", "(a?){30}a{30}b"])
async def test_a_pattern_that_would_backtrack_for_ever_is_answered(
    call: Call, files: LocalFilesystem, pattern: str
) -> None:
    files.write("a.txt", b"a" * 5000 + b"!\n")
    assert await call("grep_files", pattern=pattern) == f"no line in . matches {pattern!r}"


async def test_a_search_that_takes_too_long_is_stopped(
    call: Call, files: LocalFilesystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grep_module, "SECONDS", -1.0)
    files.write("a.txt", b"a\n")
    with pytest.raises(ExecutionFailed, match="stopped after -1 s: make the pattern simpler"):
        await call("grep_files", pattern="b")


class Cancelling(BytesIO):
    """A file of one endless line, whose reader is cancelled after the first megabytes."""

    def __init__(self, cancellation: CancellationToken) -> None:
        super().__init__(b"x" * 8_000_000)
        self.cancellation, self.reads = cancellation, 0

    def close(self) -> None:
        """Stay open."""

    def readline(self, size: int | None = -1) -> bytes:
        self.reads += 1
        if self.reads == 3:
            self.cancellation.set("enough")
        return super().readline(size)


@pytest.mark.parametrize(("name", "args"), [("grep_files", {"pattern": "y"}), ("read_file", {})])
async def test_a_cancelled_call_stops_within_a_line(
    call: Call, files: LocalFilesystem, monkeypatch: pytest.MonkeyPatch, name: str, args: dict[str, str]
) -> None:
    files.write("a.txt", b"")
    cancellation = CancellationToken()
    stream = Cancelling(cancellation)
    monkeypatch.setattr(type(files), "open", lambda self, path: stream)
    with pytest.raises(ToolCancelled, match="enough"):
        await call(name, cancellation, path="a.txt", **args)
    assert stream.reads == 3


async def test_a_sparse_file_is_read_up_to_a_limit(call: Call, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module, "READ_BYTES", 2_000_000)
    monkeypatch.setattr(tools_module, "READ_BYTES", 2_000_000)
    with (root / "a.txt").open("wb") as file:
        file.write(b"first\n" * 2000)
        file.truncate(1 << 42)
    assert (await call("read_file", path="a.txt", limit=1)).startswith("     1\tfirst\n[lines 1-1 of more than")
    with pytest.raises(InvalidArguments, match="offset 5000 is more than 2,000,000 bytes into a.txt"):
        await call("read_file", path="a.txt", offset=5000)


async def test_a_cancelled_call_looks_at_nothing(call: Call, files: LocalFilesystem) -> None:
    files.write("a.txt", b"needle")
    cancellation = CancellationToken()
    cancellation.set("enough")
    for name in ("grep_files", "glob_files"):
        with pytest.raises(ToolCancelled, match="enough"):
            await call(name, cancellation, pattern="needle")


async def test_folders_of_tools_are_searched_only_when_named(files: LocalFilesystem, call: Call) -> None:
    for path in ("src/a.py", ".git/config", "src/node_modules/x/a.py"):
        files.write(path, b"needle\n")
    assert await call("glob_files", pattern="**/*") == "src/a.py"
    assert await call("grep_files", pattern="needle") == "src/a.py:1: needle"
    assert await call("grep_files", pattern="needle", path=".git") == ".git/config:1: needle"
    assert await call("glob_files", pattern="*", path=".git") == ".git/config"
