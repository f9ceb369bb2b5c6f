"""The conformance suite of the `Filesystem` port."""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from ..core.errors import FilesystemError
from ..core.filesystem import FileEntry, Filesystem
from .suite import Suite

OUTSIDE_PATHS = (
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
)
"""Paths that lead out of a workspace, or mean something else on another system."""


class FilesystemSuite(Suite[Filesystem]):
    """The contract of Filesystem. Its checks are not async, and the caller closes what it made."""

    def check_bytes_come_back(self, files: Filesystem) -> None:
        for data in (b"", b"text\n", bytes(range(256)), "žluť\r\n".encode(), b"x" * 1_000_000):
            files.write("a/b.bin", data)
            for reader in self._readers(files):
                assert reader.read("a/b.bin") == data
                with reader.open("a/b.bin") as stream:
                    assert stream.read() == data
                    stream.seek(0)
                    assert stream.read(2) == data[:2]
                    assert stream.seek(0, 2) == len(data)

    def check_a_large_file_is_read_in_parts(self, files: Filesystem) -> None:
        lines = [b"%07d" % number + b"x" * 992 + b"\n" for number in range(24_000)]
        files.write("large.bin", b"".join(lines))
        assert files.list() == [FileEntry("large.bin", False, 24_000_000)]
        with files.open("large.bin") as stream:
            for number in (0, 12_345, 23_999):
                stream.seek(1000 * number)
                assert stream.readline() == lines[number]

    def check_a_stream_shows_the_file_as_it_was_opened(self, files: Filesystem) -> None:
        files.write("a.txt", b"before" * 10_000)
        with files.open("a.txt") as stream:
            assert stream.read(6) == b"before"
            files.write("a.txt", b"after" * 10_000)
            assert stream.read() == b"before" * 9_999
        assert files.read("a.txt") == b"after" * 10_000

    def check_paths_are_normalised(self, files: Filesystem) -> None:
        files.write("./a//b/./c.txt", b"1")
        assert files.read("a/b/c.txt") == files.read("a/x/../b/c.txt") == files.read("./a/b//c.txt") == b"1"
        for folder in ("a/b", "./a/b/", "a//b", "x/../a/b"):
            assert files.list(folder) == [FileEntry("a/b/c.txt", False, 1)]
        for root in ("", ".", "./", "a/.."):
            assert files.list(root) == [FileEntry("a", True)]
            assert files.walk(root) == [FileEntry("a/b/c.txt", False, 1)]
            assert files.exists(root)

    def check_a_listing_is_sorted_and_flat(self, files: Filesystem) -> None:
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

    def check_a_walk_is_sorted_by_path(self, files: Filesystem) -> None:
        paths = ["a/b.txt", "a-b.txt", "a.txt", "ab/c/d.txt", "a/b/c.txt", "a_b", "a%b/c", "z"]
        for path in paths:
            files.write(path, b"1")
        assert [entry.path for entry in files.walk()] == sorted(paths)
        assert [entry.path for entry in files.walk("a")] == ["a/b.txt", "a/b/c.txt"]
        assert not any(entry.is_dir for entry in files.walk())

    def check_what_is_missing_is_refused_by_name(self, files: Filesystem) -> None:
        files.write("here.txt", b"1")
        for operation in (files.read, files.open, files.list, files.walk, files.delete):
            for path in ("gone.txt", "gone/deeper.txt"):
                with _refused("gone"):
                    operation(path)
        assert not files.exists("gone.txt")
        assert not files.exists("gone/deeper.txt")
        assert not files.exists("here.txt/deeper.txt")

    def check_files_and_folders_are_told_apart(self, files: Filesystem) -> None:
        files.write("folder/file.txt", b"1")
        for operation in (files.read, files.open, _writing(files), _updating(files)):
            for path in ("folder", "", "folder/file.txt/x"):
                with _refused():
                    operation(path)
        for operation in (files.list, files.walk, files.make_folder):
            with _refused("file.txt"):
                operation("folder/file.txt")
        with _refused():
            files.write("new/", b"2")
        assert files.walk() == [FileEntry("folder/file.txt", False, 1)]

    def check_files_and_empty_folders_are_deleted(self, files: Filesystem) -> None:
        files.write("a/b.txt", b"1")
        for path in ("a", ""):
            with _refused():
                files.delete(path)
        files.delete("a/b.txt")
        for reader in self._readers(files):
            assert not reader.exists("a/b.txt")
            assert reader.list("a") == []
        with _refused("b.txt"):
            files.delete("a/b.txt")
        files.delete("a")
        for reader in self._readers(files):
            assert not reader.exists("a")
            assert reader.list() == []

    def check_no_path_leads_out(self, files: Filesystem) -> None:
        files.write("a/kept.txt", b"1")
        operations = (files.read, files.open, files.list, files.walk, files.exists, files.delete, files.make_folder)
        asking = (files.stamp, files.stamps, files.folder_stamp)
        for path in OUTSIDE_PATHS:
            for operation in (*operations, *asking, _writing(files), _updating(files)):
                with _refused() as said:
                    operation(path)
                assert said[0].isprintable()
                assert len(said[0]) < 400
        assert files.walk() == [FileEntry("a/kept.txt", False, 1)]

    def check_a_reader_never_sees_half_a_write(self, files: Filesystem) -> None:
        versions = [letter * 300_000 for letter in (b"a", b"b")]
        files.write("file.txt", versions[0])
        readers = self._readers(files)

        def write() -> None:
            for turn in range(40):
                files.write("file.txt", versions[turn % 2])

        def read(reader: Filesystem) -> None:
            while not writing.done():
                assert reader.read("file.txt") in versions
                assert [entry.path for entry in reader.list()] == ["file.txt"]

        with ThreadPoolExecutor() as pool:
            writing = pool.submit(write)
            for reading in [pool.submit(read, reader) for reader in readers for _ in range(2)]:
                reading.result()
            writing.result()
        assert [entry.path for entry in files.walk()] == ["file.txt"]

    def check_writers_side_by_side_make_their_folders(self, files: Filesystem) -> None:
        writers = self._readers(files)
        paths = [f"a/b/c/{number % 5}/{number}.txt" for number in range(100)]

        def write(number: int) -> None:
            writers[number % len(writers)].write(paths[number], paths[number].encode())

        with ThreadPoolExecutor() as pool:
            list(pool.map(write, range(len(paths))))
        for reader in writers:
            assert sorted([entry.path for entry in reader.walk()]) == sorted(paths)
            assert all(reader.read(path) == path.encode() for path in paths)

    def check_an_update_is_what_was_made_of_the_file(self, files: Filesystem) -> None:
        assert files.update("a/x.txt", lambda before: None if before is None else b"") is None
        assert not files.exists("a/x.txt")
        first = files.update("a/x.txt", lambda before: b"1" if before is None else b"?")
        assert first == files.stamp("a/x.txt")
        second = files.update("a/x.txt", lambda before: (before or b"") + b"2")
        assert second == files.stamp("a/x.txt") != first
        assert files.update("a/x.txt", lambda before: None) == second
        for reader in self._readers(files):
            assert reader.read("a/x.txt") == b"12"

    def check_an_update_that_fails_changes_nothing(self, files: Filesystem) -> None:
        files.write("x.txt", b"1")

        def spoil(before: bytes | None) -> bytes:
            raise ValueError("no")

        for path in ("x.txt", "new.txt"):
            try:
                files.update(path, spoil)
            except ValueError:
                continue
            raise AssertionError("the error was swallowed")
        assert files.read("x.txt") == b"1"
        assert [entry.path for entry in files.walk()] == ["x.txt"]

    def check_updates_at_once_are_all_kept(self, files: Filesystem) -> None:
        writers = self._readers(files)
        count = 25

        def append(number: int) -> None:
            for _ in range(count):
                writers[number % len(writers)].update("a/log.txt", lambda before: (before or b"") + b"%d\n" % number)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(append, range(4)))
        lines = files.read("a/log.txt").split()
        assert sorted(lines) == sorted([b"%d" % number for number in range(4) for _ in range(count)]), "one was lost"

    def check_a_folder_is_a_filesystem(self, files: Filesystem) -> None:
        inner = files.below("a/b")
        assert inner.stamps() == {}
        assert not inner.exists("")
        inner.make_folder("")
        assert inner.exists("")
        inner.make_folder("deep/er")
        inner.make_folder("deep/er")
        inner.write("x.txt", b"1")
        assert files.read("a/b/x.txt") == inner.read("x.txt") == inner.below(".").read("x.txt") == b"1"
        assert inner.below("deep").list() == [FileEntry("er", True)]
        files.write("secret.txt", b"2")
        for path in (*OUTSIDE_PATHS, "../../secret.txt"):
            with _refused():
                inner.read(path)
            with _refused():
                inner.below(path).write("x", b"")
        assert sorted([entry.path for entry in files.walk()]) == ["a/b/x.txt", "secret.txt"]
        assert inner.changing is files.changing

    def check_stamps_tell_changes(self, files: Filesystem) -> None:
        assert files.stamp("x.txt") is None
        assert files.stamps("none") == {}
        files.write("x.txt", b"1")
        files.write("inner/y.txt", b"1")
        before = files.stamp("x.txt")
        assert before
        for reader in self._readers(files):
            assert reader.stamps() == {"x.txt": before}
            assert reader.stamps("", ".md") == {}
            assert reader.stamp("inner") is None
        files.write("x.txt", b"2")
        assert files.stamp("x.txt") not in (None, before)

    def check_a_file_made_again_has_another_stamp(self, files: Filesystem) -> None:
        files.write("x.txt", b"1")
        seen = {files.stamp("x.txt")}
        for number in range(1, 4):
            files.delete("x.txt")
            files.write("x.txt", b"other"[:number])
            seen.add(files.stamp("x.txt"))
        assert len(seen) == 4

    def check_folder_stamps_tell_changes(self, files: Filesystem) -> None:
        files.write("x.txt", b"1")
        files.write("inner/y.txt", b"1")
        assert files.folder_stamp("none") is None
        with _refused():
            files.folder_stamp("x.txt")
        before = files.folder_stamp("inner")
        assert before is not None
        assert files.folder_stamp() is not None
        assert files.folder_stamp("inner") == before
        files.write("inner/z.txt", b"1")
        assert files.folder_stamp("inner") != before


@contextmanager
def _refused(words: str = "") -> Generator[list[str]]:
    """Expect a FilesystemError whose message contains these words."""
    said: list[str] = []
    try:
        yield said
    except FilesystemError as error:
        said.append(str(error))
        assert words in said[0], f"{words!r} is not in: {error}"
    else:
        raise AssertionError("it was not refused")


def _writing(files: Filesystem) -> Callable[[str], Any]:
    return lambda path: files.write(path, b"2")


def _updating(files: Filesystem) -> Callable[[str], Any]:
    return lambda path: files.update(path, lambda before: b"2")
