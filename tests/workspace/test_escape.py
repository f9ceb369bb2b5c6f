"""Nothing outside the root is read, shown or changed: by no path or tree, and not while links are swapped in."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retinue.core.errors import FilesystemError, PathDenied, ToolError
from retinue.workspace import LocalFilesystem, SandboxFilesystem, file_tools
from retinue.workspace.folders import ResolvedFolder
from retinue.workspace.paths import normal_path

from ..effort import share

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs an atomic exchange of two names")

SECRET = "TOP-SECRET-7261"
HIDDEN = "hidden-name-5530"

names = st.sampled_from(["a", "b", "c", "link", "out", "secret.txt", HIDDEN, "é", "A", ".", "..", "", "~", "..."])
separators = st.sampled_from(["/", "/", "/", "//", "/./", "/../", "\\", "\0", "\n", ":"])
prefixes = st.sampled_from(
    ["", "", "", "/", "../", "./", "{outside}/", "{root}/", "{root}/../outside/", "C:", "\\\\", "file://"]
)
pieces = st.lists(st.tuples(st.one_of(names, st.text(max_size=6)), separators), max_size=6)
spelled = st.builds(lambda prefix, parts: prefix + "".join(a + b for a, b in parts), prefixes, pieces)
paths = st.one_of(spelled, st.builds(lambda path, name: f"{path}{name}", spelled, names), st.text(max_size=30))

kinds = st.sampled_from(["file", "folder", "link to outside", "link to secret", "link up", "link inside", "dangling"])
trees = st.lists(
    st.tuples(st.lists(st.sampled_from(["a", "b", "c", "link"]), min_size=1, max_size=3), kinds), max_size=8
)


def plant(base: Path) -> tuple[Path, Path]:
    root, outside = base / "root", base / "outside"
    (outside / "a").mkdir(parents=True)
    root.mkdir()
    for folder in (outside, outside / "a", base):
        (folder / "secret.txt").write_text(SECRET)
        (folder / HIDDEN).write_text(SECRET)
    return root, outside


def grow(root: Path, outside: Path, tree: list[tuple[list[str], str]]) -> None:
    targets = {
        "link to outside": outside,
        "link to secret": outside / "secret.txt",
        "link up": "../" * 3 + "outside",
        "link inside": root / "a",
        "dangling": outside / "new.txt",
    }
    for parts, kind in tree:
        place = root.joinpath(*parts)
        inside = not any(
            folder.is_symlink() or folder.is_file() for folder in (place, *place.parents[: len(parts) - 1])
        )
        if not inside or place.exists():
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        if kind == "file":
            place.write_text("harmless")
        elif kind == "folder":
            place.mkdir()
        else:
            place.symlink_to(targets[kind])


def snapshot(base: Path, root: Path) -> dict[str, str]:
    """Everything below a folder that is not below the root."""
    found: dict[str, str] = {}
    for folder, below, names in os.walk(base):
        below[:] = [name for name in below if Path(folder, name) != root]
        found |= {str(Path(folder, name)): Path(folder, name).read_text() for name in names}
        found |= {str(Path(folder, name)): "folder" for name in below}
    return found


KINDS: dict[str, type[LocalFilesystem]] = {
    "anchored": LocalFilesystem,
    "resolved": type("Resolving", (LocalFilesystem,), {"_folder_type": ResolvedFolder}),
    "sandbox": SandboxFilesystem,
}


def everything_said(root: Path, kind: type[LocalFilesystem], path: str, other: str) -> Iterator[object]:
    """The answers of every operation and tool to a path."""
    files = kind(root)
    tools: dict[str, Any] = {tool.name: tool for tool in file_tools(files)}
    calls: list[Callable[[], object]] = [
        lambda: files.exists(path),
        lambda: files.read(path),
        lambda: files.list(path),
        lambda: files.walk(path),
        lambda: files.walk(),
        lambda: tools["read_file"](path),
        lambda: tools["list_files"](path),
        lambda: tools["glob_files"](path, other),
        lambda: tools["glob_files"]("**", path),
        lambda: tools["glob_files"]("**/*"),
        lambda: tools["grep_files"]("TOP", path),
        lambda: tools["grep_files"]("TOP"),
        lambda: tools["edit_file"](path, "SECRET", "CHANGED", replace_all=True),
        lambda: files.write(path, b"changed"),
        lambda: tools["write_file"](other, "changed"),
        lambda: files.delete(path),
    ]
    for call in calls:
        try:
            yield call()
        except (FilesystemError, ToolError) as error:
            yield type(error)


@pytest.mark.parametrize("name", ["anchored", "resolved", "sandbox"])
@settings(max_examples=share(300), deadline=None)
@given(tree=trees, path=paths, other=paths)
def test_no_path_shows_or_changes_what_is_outside(
    name: str, tree: list[tuple[list[str], str]], path: str, other: str
) -> None:
    kind = KINDS[name]
    with TemporaryDirectory() as base:
        root, outside = plant(Path(base))
        grow(root, outside, tree)
        path, other = (text.replace("{outside}", str(outside)).replace("{root}", str(root)) for text in (path, other))
        before = snapshot(Path(base), root)
        for answer in everything_said(root, kind, path, other):
            assert SECRET not in str(answer)
            assert HIDDEN not in str(answer) or HIDDEN in path + other
        assert snapshot(Path(base), root) == before


@settings(max_examples=share(1000), deadline=None)
@given(paths)
def test_a_path_has_one_normal_form_and_it_stays_below(path: str) -> None:
    try:
        normal, refusal = normal_path(path), None
    except FilesystemError as refused:
        normal, refusal = "", refused
    if refusal is not None:
        assert str(refusal).isprintable()
        return
    assert normal_path(normal) == normal
    assert normal == "" or ".." not in normal.split("/")
    assert os.path.normpath(os.path.join("/root", normal)) == os.path.join("/root", normal).rstrip("/")
    normal.encode()


SWAPPER = """
import ctypes, os, select, sys
names = [os.fsencode(name) for name in sys.argv[1:]]
exchange, swaps = ctypes.CDLL(None).renameat2, 0
while swaps % 64 or not select.select([sys.stdin], [], [], 0)[0]:
    assert exchange(-100, names[0], -100, names[1], 2) == 0
    swaps += 1
    if swaps == 128:
        print("often", flush=True)
"""


@contextmanager
def swapping(place: Path, target: Path) -> Iterator[Callable[[], object]]:
    """Another process exchanges what is at a place with a link, and back, as fast as it can. Gives a function that says
    whether it has done so often enough."""
    link = place.with_name("prepared")
    link.symlink_to(target)
    arguments = [sys.executable, "-c", SWAPPER, str(place), str(link)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            said: Any = process.stdout
            yield lambda: select.select([said], [], [], 0)[0]
        finally:
            process.communicate()
    assert process.returncode == 0


def attack(operations: list[Callable[[], object]], most: int, enough: Callable[[], object]) -> list[type[Exception]]:
    """Do these over and over until many were refused; nothing secret may come out. Return what was refused."""
    refused: list[type[Exception]] = []
    while len(refused) < most or PathDenied not in refused or not enough():
        for operation in operations:
            try:
                said = str(operation())
            except (FilesystemError, ToolError) as error:
                refused.append(type(error))
            else:
                assert "TOP-SECRET" not in said
                assert HIDDEN not in said
    return refused


@linux
@pytest.mark.parametrize("depth", [1, 3])
def test_a_folder_swapped_for_a_link_leads_nowhere(root: Path, outside: Path, depth: int) -> None:
    folder = root.joinpath(*["x"] * depth)
    (folder / "inner").mkdir(parents=True)
    for place in (folder, folder / "inner"):
        (place / "secret.txt").write_text("ours")
    (outside / HIDDEN).write_text("TOP-SECRET\n")
    files, path = LocalFilesystem(root), "/".join(["x"] * depth)
    tools: dict[str, Any] = {tool.name: tool for tool in file_tools(files)}
    before = snapshot(root.parent, root)
    operations: list[Callable[[], object]] = [
        lambda: files.read(f"{path}/secret.txt"),
        lambda: files.read(f"{path}/inner/secret.txt"),
        lambda: [entry.path for entry in files.list(path)],
        lambda: [entry.path for entry in files.walk()],
        lambda: tools["grep_files"]("SECRET", path).replace("'SECRET'", ""),
        lambda: tools["edit_file"](f"{path}/secret.txt", "TOP", "changed"),
        lambda: files.exists(f"{path}/{HIDDEN}") and HIDDEN,
        lambda: files.write(f"{path}/secret.txt", b"ours"),
        lambda: files.write(f"{path}/inner/new/deep.txt", b"ours"),
        lambda: files.delete(f"{path}/inner/new/deep.txt"),
        lambda: files.delete(f"{path}/{HIDDEN}"),
    ]
    with swapping(folder, outside) as enough:
        refused = attack(operations, share(5_000, 500), enough)
    assert PathDenied in refused
    assert snapshot(root.parent, root) == before


@linux
def test_a_file_swapped_for_a_link_leads_nowhere(root: Path, outside: Path) -> None:
    (root / "file.txt").write_text("ours")
    files = LocalFilesystem(root)
    before = snapshot(root.parent, root)
    with swapping(root / "file.txt", outside / "secret.txt") as enough:
        refused = attack([lambda: files.read("file.txt")], share(5_000, 500), enough)
    assert PathDenied in refused
    assert snapshot(root.parent, root) == before


def test_a_link_planted_just_before_a_write_is_replaced(
    root: Path, outside: Path, files: LocalFilesystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def plant_and_replace(name: str, target: str, **folders: int) -> None:
        (root / "file.txt").unlink(missing_ok=True)
        (root / "file.txt").symlink_to(outside / "secret.txt")
        replace(name, target, **folders)

    monkeypatch.setattr(os, "replace", plant_and_replace)
    files.write("file.txt", b"ours")
    assert not (root / "file.txt").is_symlink()
    assert files.read("file.txt") == b"ours"
    assert (outside / "secret.txt").read_text() == "TOP-SECRET\n"


def test_a_link_with_the_temporary_name_is_not_written_through(
    root: Path, outside: Path, files: LocalFilesystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retinue.workspace.local.token_hex", lambda _: "guessed")
    (root / ".retinue-tmp-guessed").symlink_to(outside / "secret.txt")
    with pytest.raises(FilesystemError):
        files.write("file.txt", b"ours")
    assert (outside / "secret.txt").read_text() == "TOP-SECRET\n"
