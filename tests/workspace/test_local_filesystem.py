from __future__ import annotations

import os
import pickle
import shutil
import socket
import stat
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retinue.core.errors import ConfigurationError, FileMissing, FilesystemError, PathDenied, PathError
from retinue.core.filesystem import Filesystem
from retinue.testing import FilesystemSuite
from retinue.workspace import LocalFilesystem

from .. import inside
from ..effort import share


@pytest.fixture
def suite(tmp_path: Path, kind: type[LocalFilesystem]) -> FilesystemSuite:
    numbers = count()

    def reopen(made: Filesystem) -> Filesystem:
        assert isinstance(made, LocalFilesystem)
        return kind(made.root)

    return FilesystemSuite(lambda: kind(tmp_path / f"root{next(numbers)}"), reopen)


@pytest.mark.parametrize("check", FilesystemSuite.names())
def test_contract(check: str, suite: FilesystemSuite) -> None:
    getattr(suite, check)()


def test_making_one_looks_at_nothing(tmp_path: Path, kind: type[LocalFilesystem]) -> None:
    files: Filesystem = kind(tmp_path / "not" / "there")
    assert not list(tmp_path.iterdir())
    for operation in (files.read, files.list, files.walk, files.delete):
        with pytest.raises(FileMissing, match=r"not/there: .*create it, or write a file"):
            operation("a.txt")
    assert not files.exists("a.txt")
    assert not files.exists("")
    assert not list(tmp_path.iterdir())
    files.write("a.txt", b"1")
    assert files.read("a.txt") == b"1"


def test_a_relative_root_does_not_move_with_the_process(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root.parent)
    files = LocalFilesystem("root")
    monkeypatch.chdir(root)
    files.write("a.txt", b"1")
    assert (root / "a.txt").read_bytes() == b"1"
    assert str(root) in repr(files)


def test_a_root_that_is_a_file(tmp_path: Path, kind: type[LocalFilesystem]) -> None:
    (tmp_path / "file").write_text("x")
    for folder in ("file", "file/below"):
        files = kind(tmp_path / folder)
        for operation in (files.read, files.list, files.walk, files.exists):
            with pytest.raises(FilesystemError, match=r"file.*give it a folder"):
                operation("a.txt")
        with pytest.raises(FilesystemError, match=r"file.*give it a folder"):
            files.write("a.txt", b"")
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize("root", ["", "a\0b"])
def test_a_root_that_is_no_path(root: str) -> None:
    with pytest.raises(ConfigurationError):
        LocalFilesystem(root)


def test_the_root_itself_may_be_a_link(root: Path, kind: type[LocalFilesystem]) -> None:
    (root.parent / "link").symlink_to(root)
    files = kind(root.parent / "link")
    files.write("a/b.txt", b"1")
    assert (root / "a" / "b.txt").read_bytes() == b"1"
    assert [entry.path for entry in files.walk()] == ["a/b.txt"]


@pytest.mark.parametrize("target", ["outside", "inside", "nowhere"])
def test_links_are_not_followed(root: Path, outside: Path, kind: type[LocalFilesystem], target: str) -> None:
    (root / "real").mkdir()
    (root / "real" / "secret.txt").write_text("TOP-SECRET\n")
    folder = {"outside": outside, "inside": root / "real", "nowhere": root / "nowhere"}[target]
    (root / "folder").symlink_to(folder)
    (root / "file").symlink_to(folder / "secret.txt")
    (root / "real" / "deep").symlink_to(folder)
    files = kind(root)
    for path in ("file", "folder", "folder/secret.txt", "folder/inner/secret.txt", "real/deep/secret.txt"):
        assert not files.exists(path)
        operations = (files.read, files.open, files.list, files.walk, files.delete)
        for operation in (*operations, lambda path: files.write(path, b"changed")):
            with pytest.raises(PathDenied, match="symbolic link"):
                operation(path)
    assert [entry.path for entry in files.list()] == ["real"]
    assert [entry.path for entry in files.walk()] == ["real/secret.txt"]
    assert (outside / "secret.txt").read_text() == (root / "real" / "secret.txt").read_text() == "TOP-SECRET\n"


def test_a_write_leaves_the_other_name_of_a_hard_link_alone(root: Path, outside: Path, files: LocalFilesystem) -> None:
    os.link(outside / "secret.txt", root / "shared.txt")
    files.write("shared.txt", b"changed")
    assert files.read("shared.txt") == b"changed"
    assert (outside / "secret.txt").read_text() == "TOP-SECRET\n"


@pytest.fixture
def special(root: Path) -> Iterator[list[str]]:
    os.mkfifo(root / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.getcwd()
        os.chdir(root)  # the path of a socket must be short
        try:
            listener.bind("socket")
        finally:
            os.chdir(here)
        yield ["pipe", "socket"]


@pytest.mark.timeout(20)
def test_special_files_are_refused_at_once(root: Path, kind: type[LocalFilesystem], special: list[str]) -> None:
    files = kind(root)
    assert files.list() == files.walk() == []
    for path in special:
        assert not files.exists(path)
        for operation in (files.read, files.open, lambda path: files.write(path, b"")):
            with pytest.raises(PathDenied, match="pipe, a device or a socket"):
                operation(path)
        assert not stat.S_ISREG((root / path).stat().st_mode)


def test_modes_are_kept_and_new_files_follow_the_umask(root: Path, files: LocalFilesystem) -> None:
    files.write("script.sh", b"1")
    plain = (root / "plain").open("w")
    plain.close()
    assert (root / "script.sh").stat().st_mode == (root / "plain").stat().st_mode
    (root / "script.sh").chmod(0o4751)
    files.write("script.sh", b"2")
    assert stat.S_IMODE((root / "script.sh").stat().st_mode) == 0o751


@pytest.mark.usefixtures("permissions")
def test_permissions_count(root: Path, files: LocalFilesystem) -> None:
    files.write("a/b.txt", b"1")
    (root / "a" / "b.txt").chmod(0o444)
    with pytest.raises(PathDenied, match="permission denied"):
        files.write("a/b.txt", b"2")
    (root / "a").chmod(0)
    try:
        with pytest.raises(PathDenied, match="permission denied"):
            files.read("a/b.txt")
        assert files.walk() == []
    finally:
        (root / "a").chmod(0o755)
    assert files.read("a/b.txt") == b"1"


def test_a_write_that_fails_leaves_nothing(root: Path, files: LocalFilesystem, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write("a.txt", b"1")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(PathError, match=r"a\.txt: no space left on device"):
        files.write("a.txt", b"2")
    assert [path.name for path in root.iterdir()] == ["a.txt"]
    assert files.read("a.txt") == b"1"


def test_fsync_writes_too(root: Path) -> None:
    files = LocalFilesystem(root, fsync=True)
    files.write("a/b.txt", b"1")
    files.write("a/b.txt", b"2")
    assert files.read("a/b.txt") == b"2"


def test_a_file_over_the_limit_is_refused_whole_and_read_in_parts(root: Path) -> None:
    files = LocalFilesystem(root, read_limit=10)
    files.write("exact.txt", b"0123456789")
    files.write("large.txt", b"0123456789x")
    assert files.read("exact.txt") == b"0123456789"
    with pytest.raises(PathError, match=r"large\.txt: it has 11 bytes, over the limit of 10 .*offset and a limit"):
        files.read("large.txt")
    with files.open("large.txt") as stream:
        assert stream.read(3) == b"012"


@pytest.mark.skipif(not os.path.exists("/proc/self/environ"), reason="needs a file that does not tell its size")
def test_a_file_that_hides_its_size_is_still_limited() -> None:
    files = LocalFilesystem("/proc/self", read_limit=5)
    with pytest.raises(PathError, match="over the limit of 5"):
        files.read("status")
    with pytest.raises(PathDenied, match="symbolic link"):
        LocalFilesystem("/proc/self").read("root/etc/passwd")


def test_names_that_cannot_be_asked_for_are_not_listed(root: Path, files: LocalFilesystem) -> None:
    for name in (b"not-utf8-\xff", b"new\nline", b"back\\slash", b"C:drive", b".retinue-tmp-1"):
        (Path(os.fsdecode(bytes(root) + b"/" + name))).write_text("x")
    files.write("plain: name?.txt", b"1")
    assert [entry.path for entry in files.list()] == [entry.path for entry in files.walk()] == ["plain: name?.txt"]


def test_folders_deeper_than_one_path_can_say(root: Path, files: LocalFilesystem) -> None:
    here = os.open(root, os.O_RDONLY)
    for _ in range(60):
        os.mkdir("d" * 100, dir_fd=here)
        deeper = os.open("d" * 100, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = deeper
    os.close(here)
    files.write("a.txt", b"1")
    assert [entry.path for entry in files.walk()] == ["a.txt"]
    files.write("/".join(["d" * 100] * 39) + "/f", b"1")
    assert len(files.walk()) == 2
    shutil.rmtree(root / ("d" * 100), ignore_errors=True)


def test_no_descriptor_is_left_open(root: Path, outside: Path, files: LocalFilesystem) -> None:
    (root / "link").symlink_to(outside)
    (root / "file").write_text("x")
    before = len(os.listdir("/dev/fd"))
    for path in ("a/b/c.txt", "a", "link/x", "link", "file", "file/x", "gone/x", "..", ""):
        for operation in (files.read, files.list, files.walk, files.exists, lambda path: files.write(path, b"")):
            try:
                operation(path)
            except FilesystemError:
                continue
    assert len(os.listdir("/dev/fd")) == before


def test_errors_keep_their_fields_through_pickling() -> None:
    error = pickle.loads(pickle.dumps(FileMissing("a.txt", "there is no such file")))
    assert (error.path, error.problem, str(error)) == ("a.txt", "there is no such file", "a.txt: there is no such file")
    assert isinstance(error, FilesystemError)


names = st.sampled_from(["a", "b", "c.txt"])
paths = st.lists(names, min_size=1, max_size=3).map("/".join)
operations = st.tuples(st.sampled_from(["write", "delete"]), paths, st.binary(max_size=5))


@settings(max_examples=share(150), deadline=None)
@given(st.lists(operations, max_size=15))
def test_it_behaves_like_a_dictionary_of_paths(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, str, bytes]]
) -> None:
    files = LocalFilesystem(tmp_path_factory.mktemp("root"))
    model: dict[str, bytes] = {}
    folders: set[str] = set()
    for operation, path, data in steps:
        above = {path[:index] for index, letter in enumerate(path) if letter == "/"}
        if operation == "write":
            allowed = path not in folders and not above & model.keys()
            act = lambda: files.write(path, data)  # noqa: E731, B023
        else:
            allowed = path in model or path in folders - {p.rpartition("/")[0] for p in [*model, *folders]}
            act = lambda: files.delete(path)  # noqa: E731, B023
        if not allowed:
            with pytest.raises(FilesystemError):
                act()
        else:
            act()
            if operation == "write":
                model[path] = data
                folders |= above
            else:
                model.pop(path, None)
                folders.discard(path)
        assert {entry.path: files.read(entry.path) for entry in files.walk()} == model
        assert all(files.exists(known) for known in [*model, *folders])


def test_a_large_folder_is_sorted_in_parts(files: LocalFilesystem, monkeypatch: pytest.MonkeyPatch) -> None:
    inside.sort_in_parts_of(monkeypatch, 3)
    names = [f"{number * 7 % 20:02}" for number in range(20)]
    for name in names:
        files.write(f"{name}/x", b"")
    assert [entry.path for entry in files.list()] == sorted(names)
    assert [entry.path for entry in files.walk()] == [f"{name}/x" for name in sorted(names)]
