from __future__ import annotations

import re
from fnmatch import fnmatchcase

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from retinue.core.errors import InvalidArguments
from retinue.core.filesystem import FileEntry
from retinue.workspace.paths import GlobPattern, walk_files

from ..effort import share


def found(pattern: str, *paths: str) -> list[str]:
    """Which of these files a walk finds, and it must open no folder for nothing."""
    tree: dict[str, dict[str, FileEntry]] = {"": {}}
    for path in paths:
        parts = path.split("/")
        for depth in range(1, len(parts) + 1):
            here = "/".join(parts[:depth])
            is_dir = depth < len(parts)
            tree.setdefault("/".join(parts[: depth - 1]), {})[here] = FileEntry(here, is_dir)
    glob = GlobPattern(pattern)
    walked = walk_files(lambda folder: list(tree[folder].values()), "", glob.start, glob.step)
    return [entry.path for entry in walked]


def matches(segments: list[str], names: list[str]) -> bool:
    """The meaning of a pattern, said as simply as possible."""
    if not segments:
        return not names
    if segments[0] == "**":
        return matches(segments[1:], names) or (bool(names) and matches(segments, names[1:]))
    return bool(names) and fnmatchcase(names[0], segments[0]) and matches(segments[1:], names[1:])


segments = st.lists(st.sampled_from(["a", "b", "ab", "*", "**", "?", "a*", "[!a]", "*b"]), min_size=1, max_size=5)
files = st.lists(st.sampled_from(["a", "b", "ab", "ba"]), min_size=1, max_size=4)


@settings(max_examples=share(500), deadline=None)
@given(segments, files)
@example(["**", "a", "**"], ["a"])
@example(["a", "**"], ["a"])
def test_a_pattern_means_what_it_says(pattern: list[str], names: list[str]) -> None:
    # At the end, `**` stands for every file below.
    wanted = matches([*pattern, "*"] if pattern[-1] == "**" else pattern, names)
    assert found("/".join(pattern), "/".join(names)) == (["/".join(names)] if wanted else [])


@pytest.mark.parametrize(
    ("pattern", "paths"),
    [
        ("*.{py,ts}", ["a.py", "a.ts"]),
        ("{a,b/c}.{py,ts}", ["a.py", "a.ts", "b/c.ts"]),
        ("{src}/x", ["{src}/x"]),
        ("[[]x]", ["[x]"]),
        ("a.py/..//*.ts", ["a.ts"]),
    ],
)
def test_braces_brackets_and_dots(pattern: str, paths: list[str]) -> None:
    assert found(pattern, "a.py", "a.ts", "b/c.ts", "b/c.md", "{src}/x", "[x]") == paths


def test_only_folders_that_can_hold_a_match_are_opened() -> None:
    opened: list[str] = []

    def listing(folder: str) -> list[FileEntry]:
        opened.append(folder)
        below = {"": ["src", "node_modules"], "src": ["src/deep"]}.get(folder, [])
        return [FileEntry(path, True) for path in below]

    glob = GlobPattern("src/*.py")
    assert list(walk_files(listing, "", glob.start, glob.step)) == []
    assert opened == ["", "src"]


@pytest.mark.timeout(20)
def test_many_stars_do_not_take_for_ever() -> None:
    name = "a" * 250
    assert found("*a" * 30 + "*b", name) == []
    assert found("**/" * 30 + "b", "/".join(["a"] * 60)) == []


def test_patterns_that_are_refused() -> None:
    for pattern in ("", ".", "a/..", "{,}"):
        with pytest.raises(InvalidArguments, match="names no file"):
            GlobPattern(pattern)
    with pytest.raises(InvalidArguments, match=re.escape("more than 64 alternatives")):
        GlobPattern("{a,b}" * 7)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("{" + "," * 100_000, "the pattern has 100,001 characters; the limit is 4,096"),
        ("{" + "," * 4_000 + "}", "has more than 64 alternatives"),
        ("{a,b}" * 800, "has more than 64 alternatives"),
    ],
)
def test_braces_are_bounded(pattern: str, message: str) -> None:
    with pytest.raises(InvalidArguments, match=message) as refused:
        GlobPattern(pattern)
    assert len(str(refused.value)) < 300


def test_braces_that_never_close_are_characters() -> None:
    assert found("{" * 100 + "," * 100, "a") == []
    assert found("{a,b", "{a,b") == ["{a,b"]
