"""What every filesystem must do: checks over a factory, to be run on each implementation.

A check takes a function that gives a new, empty filesystem. `CONTRACT` names them all.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from retinue.core.errors import FilesystemError
from retinue.core.filesystem import FileEntry, Filesystem

Factory = Callable[[], Filesystem]

OUTSIDE_PATHS = [
    "..",
    "../x",
    "a/../../x",
    "./../x",
    "a/b/../../../x",
    "/",
    "/etc/passwd",
    "//server/share",
    "\\\\server\\share",
    "..\\x",
    "a\\..\\..\\x",
    "C:\\x",
    "C:/x",
    "c:x",
    "a/\0b",
    "\0",
    "a\nb",
    "\ud800",
    "x" * 300,
    "a/" * 5000 + "a",
]


def check_bytes_come_back(make: Factory) -> None:
    files = make()
    for data in (b"", b"text\n", bytes(range(256)), "žluť\r\n".encode(), b"x" * 1_000_000):
        files.write("a/b.bin", data)
        assert files.read("a/b.bin") == data
        with files.open("a/b.bin") as stream:
            assert stream.read() == data
            stream.seek(0)
            assert stream.read(2) == data[:2]


def check_paths_are_normalised(make: Factory) -> None:
    files = make()
    files.write("./a//b/./c.txt", b"1")
    assert files.read("a/b/c.txt") == files.read("a/x/../b/c.txt") == files.read("./a/b//c.txt") == b"1"
    for folder in ("a/b", "./a/b/", "a//b", "x/../a/b"):
        assert files.list(folder) == [FileEntry("a/b/c.txt", False, 1)]
    for root in ("", ".", "./", "a/.."):
        assert files.list(root) == [FileEntry("a", True)]
        assert files.walk(root) == [FileEntry("a/b/c.txt", False, 1)]
        assert files.exists(root)


def check_listing_is_sorted_and_flat(make: Factory) -> None:
    files = make()
    for path in ("b.txt", "a/z.txt", "a/y/x.txt", "C.txt", ".hidden", "é.txt"):
        files.write(path, b"12")
    assert [(entry.path, entry.is_dir, entry.size) for entry in files.list()] == [
        (".hidden", False, 2),
        ("C.txt", False, 2),
        ("a", True, 0),
        ("b.txt", False, 2),
        ("é.txt", False, 2),
    ]
    assert [entry.path for entry in files.list("a")] == ["a/y", "a/z.txt"]


def check_walk_is_sorted_by_path(make: Factory) -> None:
    files = make()
    paths = ["a/b.txt", "a-b.txt", "a.txt", "ab/c/d.txt", "a/b/c.txt", "z"]
    for path in paths:
        files.write(path, b"1")
    assert [entry.path for entry in files.walk()] == sorted(paths)
    assert [entry.path for entry in files.walk("a")] == ["a/b.txt", "a/b/c.txt"]
    assert not any(entry.is_dir for entry in files.walk())


def check_missing_is_refused_by_name(make: Factory) -> None:
    files = make()
    files.write("here.txt", b"1")
    for operation in (files.read, files.open, files.list, files.walk, files.delete):
        for path in ("gone.txt", "gone/deeper.txt"):
            with pytest.raises(FilesystemError, match="gone"):
                operation(path)
    assert not files.exists("gone.txt")
    assert not files.exists("gone/deeper.txt")
    assert not files.exists("here.txt/deeper.txt")


def check_files_and_folders_are_told_apart(make: Factory) -> None:
    files = make()
    files.write("folder/file.txt", b"1")
    for operation in (files.read, files.open, lambda path: files.write(path, b"2")):
        for path in ("folder", "", "folder/file.txt/x"):
            with pytest.raises(FilesystemError):
                operation(path)
    for operation in (files.list, files.walk):
        with pytest.raises(FilesystemError, match=r"file\.txt"):
            operation("folder/file.txt")
    with pytest.raises(FilesystemError):
        files.write("new/", b"2")
    assert files.walk() == [FileEntry("folder/file.txt", False, 1)]


def check_delete(make: Factory) -> None:
    files = make()
    files.write("a/b.txt", b"1")
    with pytest.raises(FilesystemError):
        files.delete("a")
    with pytest.raises(FilesystemError):
        files.delete("")
    files.delete("a/b.txt")
    assert not files.exists("a/b.txt")
    with pytest.raises(FilesystemError, match=r"b\.txt"):
        files.delete("a/b.txt")


def check_no_path_leads_out(make: Factory) -> None:
    files = make()
    files.write("a/kept.txt", b"1")
    operations = (files.read, files.open, files.list, files.walk, files.exists, files.delete)
    for path in OUTSIDE_PATHS:
        for operation in (*operations, lambda path: files.write(path, b"2")):
            with pytest.raises(FilesystemError) as refused:
                operation(path)
            assert str(refused.value).isprintable()
            assert len(str(refused.value)) < 400
    assert files.walk() == [FileEntry("a/kept.txt", False, 1)]


def check_a_reader_never_sees_half_a_write(make: Factory) -> None:
    files = make()
    versions = [letter * 300_000 for letter in (b"a", b"b")]
    files.write("file.txt", versions[0])

    def write() -> None:
        for turn in range(150):
            files.write("file.txt", versions[turn % 2])

    def read() -> None:
        while not writing.done():
            assert files.read("file.txt") in versions
            assert [entry.path for entry in files.list()] == ["file.txt"]

    with ThreadPoolExecutor() as pool:
        writing = pool.submit(write)
        for reading in [pool.submit(read) for _ in range(3)]:
            reading.result()
        writing.result()
    assert [entry.path for entry in files.walk()] == ["file.txt"]


def check_parallel_writers_make_their_folders(make: Factory) -> None:
    files = make()
    paths = [f"a/b/c/{number % 5}/{number}.txt" for number in range(100)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda path: files.write(path, path.encode()), paths))
    assert sorted(entry.path for entry in files.walk()) == sorted(paths)
    assert all(files.read(path) == path.encode() for path in paths)


def check_a_folder_is_a_filesystem(make: Factory) -> None:
    files = make()
    inner = files.below("a/b")
    assert inner.stamps() == {}
    inner.make_folder("")
    inner.make_folder("deep/er")
    inner.make_folder("deep/er")
    inner.write("x.txt", b"1")
    assert files.read("a/b/x.txt") == inner.read("x.txt") == inner.below(".").read("x.txt") == b"1"
    assert inner.below("deep").list() == [FileEntry("er", True)]
    files.write("secret.txt", b"2")
    for path in (*OUTSIDE_PATHS, "../../secret.txt"):
        with pytest.raises(FilesystemError):
            inner.read(path)
        with pytest.raises(FilesystemError):
            inner.below(path).write("x", b"")
    assert sorted(entry.path for entry in files.walk()) == ["a/b/x.txt", "secret.txt"]
    assert inner.changing is files.changing


def check_stamps_tell_changes(make: Factory) -> None:
    files = make()
    assert files.stamp("x.txt") is None
    assert files.stamps("none") == {}
    files.write("x.txt", b"1")
    files.write("inner/y.txt", b"1")
    before = files.stamp("x.txt")
    assert before
    assert files.stamps() == {"x.txt": before}
    files.write("x.txt", b"2")
    assert files.stamp("x.txt") not in (None, before)
    assert files.stamp("inner") is None
    assert files.folder_stamp("none") is None
    with pytest.raises(FilesystemError):
        files.folder_stamp("x.txt")
    before = files.folder_stamp("inner")
    assert before is not None
    assert files.folder_stamp() is not None
    assert files.folder_stamp("inner") == before
    files.write("inner/z.txt", b"1")
    assert files.folder_stamp("inner") != before


CONTRACT = (
    check_a_folder_is_a_filesystem,
    check_stamps_tell_changes,
    check_bytes_come_back,
    check_paths_are_normalised,
    check_listing_is_sorted_and_flat,
    check_walk_is_sorted_by_path,
    check_missing_is_refused_by_name,
    check_files_and_folders_are_told_apart,
    check_delete,
    check_no_path_leads_out,
    check_a_reader_never_sees_half_a_write,
    check_parallel_writers_make_their_folders,
)
