"""`retinue db` on files that are sound, old, new, damaged or none, as a user types it."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from retinue import RunStatus
from retinue.cli.parsers import span
from retinue.errors import StoreError
from retinue.storage.schema import DELTAS_KIND, MIGRATIONS, newest_version
from retinue.storage.sqlite import SqliteDatabase, SqliteStore
from retinue.storage.stores import sql_store, without_secrets

from .. import inside
from ..databases import LOCKED, TestServer
from ..storage.stored import counts, put_run, sql
from .conftest import Cli, finished


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "app.db"


@pytest.fixture
def url(path: Path) -> str:
    async def put() -> None:
        store = SqliteStore(str(path))
        await put_run(store, "run_a", thread_id="t1", deltas=10)
        await put_run(store, "run_b", RunStatus.SUSPENDED, thread_id="t2")
        await store.close()

    asyncio.run(put())
    return f"sqlite:///{path}"


def test_prune_says_what_it_would_do_and_does_it(cli: Cli, url: str, path: Path) -> None:
    before = counts(path)
    assert cli("db", "prune", "--db", url, "--older-than", "30d").out == "dropped 0 runs, 0 events\n"
    would = cli("db", "prune", "--db", url, "--older-than", "0s", "--threads", "--dry-run")
    assert (would.code, would.out) == (0, "would drop 1 run, 18 events, 1 thread\n")
    assert counts(path) == before
    deltas = cli("db", "prune", "--db", url, "--older-than", "0s", "--deltas")
    assert deltas.out == "dropped 10 deltas of 1 run\n"
    done = finished("db", "prune", "--db", url, "--older-than", "0s", "--threads", "--json")
    assert done.code == 0
    assert json.loads(done.out) == {
        "dry_run": False,
        "runs": 1,
        "events": 8,
        "tasks": 0,
        "threads": 1,
        "messages": 1,
    }
    assert counts(path)["runs"] == 1


def test_check_finds_nothing_or_names_it(cli: Cli, url: str, path: Path) -> None:
    assert cli("db", "check", "--db", url)[:2] == (0, "no problems\n")
    sql(path, f"DELETE FROM events WHERE log_id = 'run_a' AND kind = '{DELTAS_KIND}'")
    sql(path, "UPDATE runs SET result = '\x1b[2J' WHERE run_id = 'run_a'")
    sql(path, "UPDATE events SET private = NULL WHERE log_id = 'run_b' AND seq = 2")
    found = finished("db", "check", "--db", url)
    assert found.code == 1
    assert "error: event 3 of run 'run_a': events 3 to 12 are missing\n" in found.out
    assert "error: run 'run_a': its result: cannot be read: " in found.out
    assert "error: run 'run_b': event 1: run_started does not follow from what is before it" in found.out
    assert found.out.endswith("3 errors, 0 warnings\n")
    assert "\x1b" not in found.out
    as_json = json.loads(cli("db", "check", "--db", url, "--json").out)
    assert (as_json["ok"], {finding["code"] for finding in as_json["findings"]}) == (False, {"fold", "log", "result"})


@pytest.mark.parametrize("part", [slice(4_096, None), slice(100, 4_096), slice(20_000, 30_000)])
def test_a_damaged_file_has_errors_wherever_it_is_broken(cli: Cli, url: str, path: Path, part: slice) -> None:
    sql(path, "PRAGMA wal_checkpoint(TRUNCATE)")
    whole = path.read_bytes()
    data = bytearray(whole)
    data[part] = b"\xff" * len(data[part])
    for damaged in (bytes(data), whole[: len(whole) // 2], whole[:1_000]):
        path.write_bytes(damaged)
        code, out, err = cli("db", "check", "--db", url)
        assert (code, err) == (1, "")
        assert out == f"error: {path}: database disk image is malformed: restore a backup\n1 error, 0 warnings\n"


@pytest.mark.parametrize("first", [100, 4_096])
def test_a_damaged_file_cannot_be_used_wherever_it_is_broken(cli: Cli, url: str, path: Path, first: int) -> None:
    sql(path, "PRAGMA wal_checkpoint(TRUNCATE)")
    data = path.read_bytes()
    for command in (
        ["runs", "list"],
        ["runs", "show", "run_a"],
        ["db", "prune", "--older-than", "0s"],
        ["tasks", "list"],
    ):
        path.write_bytes(data[:first] + b"\xff" * (len(data) - first))
        code, out, err = cli(*command, "--db", url)
        assert (code, out) == (2, "")
        assert err == f"retinue: {path}: database disk image is malformed: restore a backup\n"
    if first == 100:
        planned = cli("db", "migrate", "--dry-run", "--db", url)
        assert (planned.code, "is malformed: restore a backup" in planned.err) == (2, True)


def test_who_only_looks_does_not_wait_for_who_writes(
    cli: Cli, url: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside.wait_for_lock(monkeypatch, 0.2)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        for command in (["runs", "list"], ["runs", "show", "run_a"], ["runs", "events", "run_a"], ["db", "check"]):
            assert cli(*command, "--db", url).code == 0
        refused = cli("db", "prune", "--older-than", "0s", "--db", url)
        said = f"retinue: {path}: database is locked: another process has held it for long, try again\n"
        assert refused == (2, "", said)


def test_a_file_that_cannot_be_looked_at_is_not_called_damaged(cli: Cli, url: str, path: Path) -> None:
    async def fails(*args: object) -> None:
        raise StoreError(str(path), "the server went away", transient=True)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SqliteDatabase, "find_damage", fails)
        code, out, err = cli("db", "check", "--db", url)
    assert (code, out, err) == (2, "", f"retinue: {path}: the server went away\n")


def test_check_says_what_its_exit_codes_mean(cli: Cli) -> None:
    said = " ".join(cli("db", "check", "--help").out.split())
    assert "Exit code 0: no errors" in said
    assert "1: errors, such as a damaged file" in said
    assert "2: nothing to check" in said


def test_migrate_tells_from_where_to_where(cli: Cli, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, known = f"sqlite:///{path}", newest_version()
    planned = cli("db", "migrate", "--db", url, "--dry-run")
    assert planned.out == f"{path} would be created with schema {known}\n"
    assert not path.exists()
    assert cli("db", "migrate", "--db", url).out == f"{path} was created with schema {known}\n"
    assert cli("db", "migrate", "--db", url).out == f"{path} has schema {known} already\n"
    newer = (*MIGRATIONS, ("CREATE TABLE more (a TEXT)",))
    monkeypatch.setattr("retinue.storage.schema.MIGRATIONS", newer)
    checked = cli("db", "check", "--db", url)
    assert (checked.code, "run retinue db migrate" in checked.out) == (1, True)
    dry = cli("db", "prune", "--db", url, "--older-than", "1d", "--dry-run")
    assert (dry.code, "run retinue db migrate first" in dry.err) == (2, True)
    planned = cli("db", "migrate", "--db", url, "--dry-run", "--json")
    assert json.loads(planned.out) == {"before": known, "after": len(newer), "dry_run": True}
    done = cli("db", "migrate", "--db", url)
    assert (done.code, done.out) == (0, f"{path} went from schema {known} to {len(newer)}\n")
    monkeypatch.undo()
    back = finished("db", "migrate", env={"RETINUE_DB": url})
    assert (back.code, "written by a newer version" in back.err) == (2, True)


COMMANDS = (
    ["db", "check"],
    ["db", "migrate"],
    ["db", "migrate", "--dry-run"],
    ["db", "prune", "--older-than", "1d"],
    ["runs", "list"],
    ["runs", "show", "r"],
    ["runs", "cancel", "r"],
)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_database_that_cannot_be_used_is_one_line(cli: Cli, path: Path, command: list[str], tmp_path: Path) -> None:
    url = f"sqlite:///{path}"
    problems = [("", "no database is given: use --db URL"), ("app.db", "not the URL of a store: 'app.db'")]
    problems += [("postgres:/u:secret@h/d", "not the URL of a store"), ("memory:", "needs a database, not 'memory:'")]
    if command[1] != "migrate":
        problems.append((url, f"there is no Retinue database at {path}: is it the right --db?"))
    problems.append((f"sqlite:///{tmp_path}", "it is a folder: name a file"))
    problems.append((f"sqlite:///{tmp_path}/missing/app.db", f"there is no folder {tmp_path}/missing: create it"))
    for given, says in problems:
        outcome = cli(*command, "--db", given)
        assert (outcome.code, outcome.out) == (2, "")
        assert says in outcome.err
        assert "secret" not in outcome.err
        assert outcome.err.count("\n") == 1
        assert not path.exists()
    path.write_text("a shopping list, and no database at all" * 10)
    none = cli(*command, "--db", url)
    assert (none.code, "file is not a database" in none.err) == (2, True)
    path.unlink()
    sql(path, "CREATE TABLE threads (thread_id TEXT PRIMARY KEY)")
    old = cli(*command, "--db", url)
    assert (old.code, old.out, old.err.count("\n")) == (2, "", 1)
    assert f"{path}: it was written by a development version before the first release" in old.err
    assert sql(path, "SELECT name FROM sqlite_master WHERE type = 'table'") == [("threads",)]
    path.unlink()
    sql(path, "CREATE TABLE schema_info (version INTEGER NOT NULL)")
    sql(path, f"INSERT INTO schema_info VALUES ({newest_version() + 1})")
    newer = cli(*command, "--db", url)
    assert (newer.code, "written by a newer version" in newer.err) == (2, True)
    assert "Traceback" in cli(*command, "--db", url, "--verbose").err


def test_times_are_written_as_people_do(cli: Cli) -> None:
    assert [span(text) for text in ("30d", "12h", "90m", "45s", "1.5H")] == [2_592_000, 43_200, 5_400, 45, 5_400]
    for text in ("30", "d", "-1d", "1w", "1e9d", "", "nan", "\u00b2d", f"{'9' * 400}d"):
        for given in ([f"--older-than={text}"], ["--older-than", text]):
            refused = cli("db", "prune", *given, "--db", "sqlite:///x.db")
            assert (refused.code, refused.out, refused.err.count("\n")) == (2, "", 1)
            is_option = given[-1] == "-1d"
            says = "expected one argument" if is_option else f"{text!r} is not a time: write 30d, 12h, 90m or 45s"
            assert says in refused.err
    both = cli("db", "prune", "--older-than", "1d", "--deltas", "--threads", "--db", "sqlite:///x.db")
    assert (both.code, "leave it or --threads out" in both.err) == (2, True)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://u:pw@host/db", "postgresql://u:***@host/db"),
        ("postgresql://u:p@w/x@host/db", "postgresql://u:***@host/db"),
        ("postgresql://host/db?user=u&password=pw&x=1", "postgresql://host/db?user=u&password=***&x=1"),
        ("u:pw@host", "u:***@host"),
        ("sqlite:///app.db", "sqlite:///app.db"),
    ],
)
def test_a_password_is_never_shown(url: str, shown: str) -> None:
    assert without_secrets(url) == shown


def test_postgresql_is_looked_after_alike(cli: Cli, new_postgres_url: str) -> None:
    missing = cli("runs", "list", "--db", new_postgres_url)
    assert (missing.code, "there is no Retinue database at postgresql://" in missing.err) == (2, True)
    assert "would be created" in cli("db", "migrate", "--db", new_postgres_url, "--dry-run").out
    assert "was created" in cli("db", "migrate", "--db", new_postgres_url).out

    async def put() -> None:
        store = sql_store(new_postgres_url)
        await put_run(store, "run_a", thread_id="t1")
        await put_run(store, "run_b", RunStatus.SUSPENDED, thread_id="t2")
        await store.close()

    asyncio.run(put())
    assert cli("db", "check", "--db", new_postgres_url)[:2] == (0, "no problems\n")
    assert cli("db", "prune", "--db", new_postgres_url, "--older-than", "0s").out == "dropped 1 run, 11 events\n"
    assert [run["run_id"] for run in json.loads(cli("runs", "list", "--db", new_postgres_url, "--json").out)] == [
        "run_b"
    ]
    assert "  retinue runs answer run_b VALUE\n" in finished("runs", "show", "run_b", "--db", new_postgres_url).out


def test_a_wrong_password_is_told_without_it(cli: Cli, postgres_server: TestServer) -> None:
    url = postgres_server.url(user=f"{LOCKED}:wrong-secret")
    for command in COMMANDS:
        refused = cli(*command, "--db", url, "--verbose")
        assert refused.code == 2
        assert "password authentication failed" in refused.err
        assert "wrong-secret" not in refused.err
