from __future__ import annotations

import pytest

from retinue.core.errors import PathDenied
from retinue.workspace.paths import name_problem, normal_path, split_path


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("", ()),
        (".", ()),
        ("./", ()),
        ("a/..", ()),
        ("./a//b", ("a", "b")),
        ("a/b/", ("a", "b")),
        ("a/./b/../c", ("a", "c")),
        ("...", ("...",)),
        (" a ", (" a ",)),
        ("~/a", ("~", "a")),
        ("ab:c", ("ab:c",)),
        ("é/漢", ("é", "漢")),
    ],
)
def test_what_a_path_means(path: str, names: tuple[str, ...]) -> None:
    assert split_path(path) == names
    assert normal_path(path) == "/".join(names)


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("..", "leads out of the workspace"),
        ("a/../../a", "leads out of the workspace"),
        ("/a", "is absolute; give a path relative"),
        ("\\a", "has a backslash"),
        ("a/C:/b", "has a drive letter"),
        ("a\x7f", "has a control character"),
        ("a\0/../b", "has a control character"),
        ("\udcff", "no file name can have"),
        ("é" * 128, "longer than 255 bytes"),
        ("a/" * 2049, "longer than 4096 characters"),
        (".retinue-tmp-x", "kept for files being written"),
    ],
)
def test_what_is_refused(path: str, problem: str) -> None:
    with pytest.raises(PathDenied, match=problem):
        split_path(path)


@pytest.mark.parametrize("name", ["a:stream", "con", "NUL.txt", "Com1", "lpt9.log", "dot.", "space ", "CONIN$"])
def test_names_that_mean_something_else_on_windows(name: str) -> None:
    assert name_problem(name, windows=True)
    assert name_problem(name, windows=False) is None or name == "a:stream"


@pytest.mark.parametrize("name", ["console", "null", "com", "a.con", ".git"])
def test_names_that_are_fine_on_windows(name: str) -> None:
    assert name_problem(name, windows=True) is None
