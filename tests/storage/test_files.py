"""The filesystem in a database: the contract of all filesystems, and what only this one is asked."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from retinue import ConfigurationError, StoreFilesystem
from retinue.errors import FileMissing, FilesystemError, PathDenied, PathError
from retinue.storage import files as module
from retinue.storage.sqlite import SqliteStore
from retinue.stores import MemoryStore
from retinue.testing import FilesystemSuite
from retinue.workspace import Filesystem

from .. import inside
from ..effort import share
from ..prepared import PYTHON

ROOT = Path(__file__).parents[2]
UPDATES = share(500, 100)

Open = Callable[..., StoreFilesystem]


@pytest.fixture
def open_files(database_url: str) -> Iterator[Open]:
    """Opens spaces of one database, each time as another process does."""
    with ExitStack() as opened:
        yield lambda space="default", **options: opened.enter_context(StoreFilesystem(database_url, space, **options))


@pytest.fixture
def files(open_files: Open) -> StoreFilesystem:
    return open_files()


@pytest.fixture
def suite(open_files: Open) -> FilesystemSuite:
    numbers = count()

    def reopen(made: Filesystem) -> Filesystem:
        assert isinstance(made, StoreFilesystem)
        return open_files(made.space)

    return FilesystemSuite(lambda: open_files(f"space {next(numbers)}"), reopen)


@pytest.mark.parametrize("check", FilesystemSuite.names())
def test_contract(check: str, suite: FilesystemSuite) -> None:
    getattr(suite, check)()


def test_the_suite_runs_all_of_its_checks(suite: FilesystemSuite) -> None:
    assert [check.__name__ for check in suite.checks()] == FilesystemSuite.names()
    assert len(FilesystemSuite.names()) == 19


def test_a_large_file_comes_back(files: StoreFilesystem, open_files: Open) -> None:
    data = bytes(range(256)) * 100_000
    files.write("large.bin", data)
    with open_files().open("large.bin") as file:
        assert file.read() == data


class Forgetful(StoreFilesystem):
    def update(self, path: str, change: Callable[[bytes | None], bytes | None]) -> object:
        after = change(self.read(path) if self.exists(path) else None)
        return None if after is None else self.write(path, after)


class Leaky(StoreFilesystem):
    def exists(self, path: str) -> bool:
        return ".." not in path and super().exists(path)


@pytest.mark.parametrize(
    ("kind", "check"),
    [(Forgetful, "check_an_update_is_what_was_made_of_the_file"), (Leaky, "check_no_path_leads_out")],
)
def test_the_suite_finds_a_fault(kind: type[StoreFilesystem], check: str, tmp_path: Path) -> None:
    with kind(f"sqlite:///{tmp_path}/app.db") as made, pytest.raises(AssertionError):
        getattr(FilesystemSuite(lambda: made), check)()


def test_making_one_does_nothing(tmp_path: Path) -> None:
    files = StoreFilesystem(f"sqlite:///{tmp_path}/app.db", "team-a")
    files.below("a/b").without(lambda names: False).close()
    files.close()
    assert not list(tmp_path.iterdir())
    assert repr(files.below("a")) == f"StoreFilesystem('{tmp_path}/app.db', 'team-a').below('a')"


@pytest.mark.parametrize("store", ["memory:", "files", "sqlite://", MemoryStore()])
def test_it_needs_a_database(store: str | MemoryStore) -> None:
    with pytest.raises(ConfigurationError, match=r"sqlite:///"):
        StoreFilesystem(store)


@pytest.mark.parametrize("space", ["", "a\0b", "a\nb", "\ud800", "x" * 201])
def test_names_of_spaces(space: str) -> None:
    with pytest.raises(ConfigurationError, match="not the name of a space"):
        StoreFilesystem("sqlite:///app.db", space)


def test_spaces_do_not_see_each_other(open_files: Open) -> None:
    one, other = open_files("team-a"), open_files("team-b")
    one.write("notes/a.txt", b"1")
    assert other.list() == []
    other.write("notes/a.txt", b"2")
    other.delete("notes/a.txt")
    assert one.read("notes/a.txt") == b"1"


def test_the_same_place_is_equal(open_files: Open) -> None:
    files = open_files()
    assert files.below("a") == files.below("b/../a") != files.below("b")
    assert len({files.below("a"), files.below("a"), files}) == 2
    assert files != "default"


def test_an_empty_one_has_a_root(files: StoreFilesystem) -> None:
    assert files.list() == files.walk() == []
    assert files.exists("")
    assert files.folder_stamp() is not None
    files.make_folder("")
    for path in ("", "."):
        with pytest.raises(PathError, match="root folder"):
            files.delete(path)


def test_what_is_too_large_to_read_whole_is_opened(open_files: Open) -> None:
    files = open_files(read_limit=10)
    files.write("a.txt", b"0123456789")
    assert files.read("a.txt") == b"0123456789"
    files.write("a.txt", b"0123456789!")
    with pytest.raises(PathError, match=r"a\.txt: it has 11 bytes, over the limit of 10"):
        files.read("a.txt")
    with files.open("a.txt") as stream:
        assert stream.read() == b"0123456789!"
    assert files.update("a.txt", lambda before: (before or b"") + b"?") == files.stamp("a.txt")


def test_what_is_too_large_to_keep_is_refused(files: StoreFilesystem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGEST", 10)
    for write in (lambda data: files.write("a.txt", data), lambda data: files.update("a.txt", lambda _: data)):
        with pytest.raises(PathError, match=r"a\.txt: 11 bytes are over the limit of 10"):
            write(b"x" * 11)
    assert files.list() == []


def test_folders_that_are_kept_back(files: StoreFilesystem) -> None:
    files.write("open/a.txt", b"1")
    files.write("kept/b.txt", b"2")
    files.write("kept/deep/c.txt", b"3")
    shown = files.without(lambda names: "kept" in names)
    for operation in (shown.read, shown.open, shown.stamp, shown.delete, lambda path: shown.write(path, b"")):
        with pytest.raises(PathDenied, match="kept back"):
            operation("kept/b.txt")
    for operation in (shown.list, shown.stamps, shown.folder_stamp, shown.make_folder):
        with pytest.raises(PathDenied, match="kept back"):
            operation("kept")
    assert not shown.exists("kept/b.txt")
    assert [entry.path for entry in shown.walk()] == ["open/a.txt"]
    with pytest.raises(PathDenied, match="kept back"):
        shown.below("kept").read("b.txt")
    assert [entry.path for entry in files.walk()] == ["kept/b.txt", "kept/deep/c.txt", "open/a.txt"]


def test_a_folder_is_named_as_whoever_asks_knows_it(files: StoreFilesystem) -> None:
    files.write("secret/place/file", b"1")
    inner = files.below("secret/place")
    with pytest.raises(PathError) as refused:
        inner.write("file/deeper.txt", b"2")
    assert str(refused.value) == "file: it is a file, not a folder"
    with pytest.raises(FileMissing) as missing:
        inner.read("gone.txt")
    assert str(missing.value) == "gone.txt: there is no such file or folder"
    with pytest.raises(PathError) as refused:
        files.below("secret/place/file").write("x", b"")
    assert "secret" not in str(refused.value)


def test_an_update_is_made_again_of_what_others_wrote(open_files: Open) -> None:
    files, other = open_files(), open_files()
    seen: list[bytes | None] = []

    def change(before: bytes | None) -> bytes:
        seen.append(before)
        if len(seen) == 1:
            other.write("a/x.txt", b"theirs ")
        if len(seen) == 2:
            other.delete("a/x.txt")
        return (before or b"") + b"mine"

    files.update("a/x.txt", change)
    assert seen == [None, b"theirs ", None]
    assert files.read("a/x.txt") == b"mine"


def test_an_update_gives_way_for_so_long(open_files: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_WAIT", 0.05)
    files, other = open_files(), open_files()
    numbers = count()

    def change(before: bytes | None) -> bytes:
        other.write("x.txt", b"%d" % next(numbers))
        return b"mine"

    with pytest.raises(PathError, match=r"x\.txt: others have changed it all the time"):
        files.update("x.txt", change)
    assert files.read("x.txt") != b"mine"


def test_files_beside_a_folder_that_is_removed(open_files: Open) -> None:
    """Nothing is left in a folder that is gone, whoever comes first."""
    one, other = open_files(), open_files()

    def remove(number: int) -> None:
        try:
            other.delete(f"a/{number}")
        except PathError:
            return

    for number in range(30):
        one.make_folder(f"a/{number}")
    with ThreadPoolExecutor(4) as pool:
        done = [pool.submit(one.write, f"a/{number}/x.txt", b"1") for number in range(30)]
        done += [pool.submit(remove, number) for number in range(30)]
        for each in done:
            each.result()
    assert len(one.walk("a")) == 30


def test_a_store_that_is_open_is_shared(tmp_path: Path) -> None:
    store = SqliteStore(str(tmp_path / "app.db"))
    with StoreFilesystem(store) as files:
        files.write("a.txt", b"1")
    assert StoreFilesystem(store).read("a.txt") == b"1"
    store.database.close_blocking()
    with pytest.raises(PathError, match=r"a\.txt: the store of this workspace cannot be used: .*it was closed"):
        files.read("a.txt")


def test_a_database_that_cannot_be_used_is_a_refusal(tmp_path: Path) -> None:
    (tmp_path / "app.db").write_bytes(b"not a database" * 100)
    with StoreFilesystem(f"sqlite:///{tmp_path}/app.db") as files:
        for operation in (files.read, files.list, files.stamp, files.exists, lambda path: files.write(path, b"")):
            with pytest.raises(FilesystemError, match=r"a\.txt: the store of this workspace cannot be used"):
                operation("a.txt")
    with StoreFilesystem(f"sqlite:///{tmp_path}/none/app.db") as files, pytest.raises(FilesystemError, match="create"):
        files.list()


APPEND = """
import sys
from retinue import StoreFilesystem

with StoreFilesystem(sys.argv[1]) as files:
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(int(sys.argv[3])):
        line = f"{sys.argv[2]} {number}\\n".encode()
        files.update("notes/log.txt", lambda before: (before or b"") + line)
"""


@pytest.mark.timeout(120)
def test_two_processes_lose_nothing(database_url: str, files: StoreFilesystem) -> None:
    processes = [
        subprocess.Popen(
            [PYTHON, "-c", APPEND, database_url, name, str(UPDATES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        for name in ("one", "two")
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
    for process in processes:
        process.stdin.write(b"go\n")  # pyright: ignore[reportOptionalMemberAccess]
        process.stdin.flush()  # pyright: ignore[reportOptionalMemberAccess]
    assert [process.communicate() and process.returncode for process in processes] == [0, 0]
    lines = files.read("notes/log.txt").decode().splitlines()
    for name in ("one", "two"):
        assert [line for line in lines if line.startswith(name)] == [f"{name} {number}" for number in range(UPDATES)]
    assert len(lines) == 2 * UPDATES


def test_work_that_is_done_twice_is_done_once(files: StoreFilesystem, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a connection that broke when all was written: it is tried again."""
    database: Any = inside.database_of(files)
    write_blocking = database.write_blocking

    def twice(work: Callable[[Any], Any], about: str = "") -> Any:
        write_blocking(work, about)
        return write_blocking(work, about)

    monkeypatch.setattr(database, "write_blocking", twice)
    for _ in range(3):
        files.update("a/log.txt", lambda before: (before or b"") + b"x")
    assert files.read("a/log.txt") == b"xxx"
    files.write("a/other.txt", b"1")
    files.make_folder("a/b")
    for path in ("a/log.txt", "a/other.txt", "a/b", "a"):
        files.delete(path)
    assert files.list() == []
    with pytest.raises(FileMissing):
        files.delete("a")
