"""What every store must do, over memory, SQLite and PostgreSQL; and what a file can suffer."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from retinue import (
    Agent,
    ConfigurationError,
    HarnessAgent,
    Message,
    PersistedState,
    RunIdentity,
    RunResult,
    RunStatus,
    Runtime,
    StateKey,
    ToolCall,
    UnknownRun,
)
from retinue.core.events import TextDelta
from retinue.core.rows import LogRow
from retinue.core.stores import LogBatch
from retinue.errors import StoreError
from retinue.events import event_to_json
from retinue.storage import packs
from retinue.storage.sql import SqlStore
from retinue.storage.stores import open_store
from retinue.stores import MemoryStore, RunRecord, Store, ThreadRecord
from retinue.testing import ScriptedModel, call, say
from tests.prepared import PYTHON

from .. import inside


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    if request.param == "memory":
        yield MemoryStore()
        return
    url = f"sqlite:///{tmp_path}/app.db" if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    made = open_store(url)
    assert isinstance(made, SqlStore)
    yield made
    await made.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a runtime keeps what another goes on with."""
    return f"sqlite:///{tmp_path}/app.db" if request.param == "sqlite" else request.getfixturevalue("postgres_url")


def thread(name: str, *said: str) -> ThreadRecord:
    messages = [Message.user(text, id=f"m{n}") for n, text in enumerate(said)]
    asked = Message.assistant("…", tool_calls=[ToolCall("c1", "look", {"path": "a", "deep": [1, {"x": None}]})])
    return ThreadRecord(
        thread_id=name, user_id="u1", messages=(*messages, asked), state=PersistedState(3, {"k": {"a": [1, 2.5]}})
    )


def run_record(run_id: str, at: float, result: RunResult | None = None, thread_id: str = "t1") -> RunRecord:
    identity = RunIdentity(run_id, thread_id, "agent", user_id="u1")
    return RunRecord(identity=identity, started_at=at, result=result, log_id=run_id)


async def test_a_thread_comes_back_as_it_was_saved(store: Store) -> None:
    assert await store.load_thread("t1") is None
    await store.save_thread(thread("t1", "one"))
    await store.save_thread(thread("t2"))
    await store.save_thread(thread("t1", "one", "two \N{SNOWMAN}"))
    assert await store.load_thread("t1") == thread("t1", "one", "two \N{SNOWMAN}")
    assert await store.load_thread("t2") == thread("t2")


async def test_a_run_comes_back_as_it_was_saved(store: Store) -> None:
    result = RunResult(
        status=RunStatus.COMPLETED,
        run_id="r1",
        thread_id="t1",
        response="done",
        output={"a": 1},
        state=PersistedState(1, {"k": 1}),
        messages=(Message.user("hi"), Message.assistant("done")),
    )
    assert await store.load_run("r1") is None
    await store.save_run(run_record("r1", 1.0))
    assert await store.load_run("r1") == run_record("r1", 1.0)
    await store.save_run(run_record("r1", 1.0, result))
    assert await store.load_run("r1") == run_record("r1", 1.0, result)


async def test_runs_are_listed_newest_first_and_by_thread(store: Store) -> None:
    for number in range(5):
        await store.save_run(run_record(f"r{number}", float(number), thread_id=f"t{number % 2}"))
    assert [record.identity.run_id for record in await store.list_runs()] == ["r4", "r3", "r2", "r1", "r0"]
    assert [record.identity.run_id for record in await store.list_runs("t1")] == ["r3", "r1"]


async def test_writers_side_by_side_lose_nothing(store: Store) -> None:
    await asyncio.gather(*[store.save_thread(thread(f"t{number}", str(number))) for number in range(200)])
    for number in range(200):
        assert await store.load_thread(f"t{number}") == thread(f"t{number}", str(number))


count = StateKey("count", int, update=int, reduce=lambda a, b: a + b, scope="thread")


async def test_a_conversation_goes_on_in_another_runtime(url: str) -> None:
    model = ScriptedModel(lambda request: say(f"{len(request.messages)} messages"))
    agent = Agent("a", model)
    async with Runtime.open(url, [agent]) as runtime:
        assert (await runtime.run("a", "one", thread_id="t")).response == "1 messages"
        run = runtime.stream("a", "two", thread_id="t")
        assert (await run.result()).response == "3 messages"
    async with Runtime.open(url, [agent]) as runtime:
        assert (await runtime.run("a", "three", thread_id="t")).response == "5 messages"
        kinds = [event.kind async for event in runtime.events(run.run_id)]
        assert (kinds[0], kinds[-1]) == ("run_started", "run_finished")
        after = [event.seq async for event in runtime.events(run.run_id, after=3)]
        assert after == list(range(4, len(kinds) + 1))
        with pytest.raises(UnknownRun):
            await anext(runtime.events("run_of_nobody"))


async def test_many_rows_are_encoded_by_the_thread_that_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[int, str] = {}

    def noted(log_id: str, rows: Any) -> Any:
        threads[len(rows)] = threading.current_thread().name
        return packs.pack_rows(log_id, rows)

    inside.replace_packing(monkeypatch, noted)
    store = open_store(f"sqlite:///{tmp_path}/app.db")
    assert isinstance(store, SqlStore)
    await store.begin_run(run_record("r", 0), b"{}", "me", 60)
    rows = [LogRow(seq, 0, TextDelta(seq=seq, run_id="r", delta="x", message_id="m")) for seq in range(1, 2_002)]
    for some in (rows[:1_000], rows[1_000:], rows[1_000:]):  # the last is a retry
        await store.write(LogBatch(log_id="r", epoch=1, rows=some))
    assert threads == {1_000: threading.current_thread().name, 1_001: "retinue-store"}
    stored, _ = await store.read_events("r", limit=3_000) or ([], False)
    assert stored == [row.event for row in rows]
    await store.close()


async def test_rows_that_cannot_be_encoded_name_their_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(log_id: str, rows: Any) -> Any:
        raise TypeError("no such type")

    store = open_store(f"sqlite:///{tmp_path}/app.db")
    assert isinstance(store, SqlStore)
    await store.begin_run(run_record("r", 0), b"{}", "me", 60)
    inside.replace_packing(monkeypatch, refuse)
    rows = [LogRow(seq, 0, TextDelta(seq=seq, run_id="r", delta="x", message_id="m")) for seq in range(1, 1_002)]
    for count in (1, 1_001):
        with pytest.raises(StoreError, match="run 'r' cannot be stored: no such type"):
            await store.write(LogBatch(log_id="r", epoch=1, rows=rows[:count]))
    await store.close()


async def test_what_is_stored_of_a_log_is_the_log(url: str) -> None:
    agent = Agent("a", ScriptedModel([call("nothing", {"x": 1}), say("done", chunks=["do", "ne"])]))
    async with Runtime.open(url, [agent]) as runtime:
        run = runtime.stream("a", "go")
        live = [event_to_json(event) async for event in run]
        await run.result()
    async with Runtime.open(url) as runtime:
        stored = [event_to_json(event) async for event in runtime.events(run.run_id)]
    assert stored == live


FOLLOWER = """
import asyncio, sys
from retinue import Runtime
async def main():
    async with Runtime.open(sys.argv[1]) as runtime:
        async for event in runtime.events(sys.argv[2]):
            print(event.seq, event.kind, event.run_id, flush=True)
asyncio.run(main())
"""


async def test_another_process_follows_a_background_task_to_its_end(tmp_path: Path, url: str) -> None:
    told = 0
    may_end = asyncio.Event()

    async def model(request: Any) -> Any:
        nonlocal told
        if "Subagent Context" in request.messages[0].text:
            await may_end.wait()
            return say("found it")
        told += 1
        spawn = call("agent_spawn", {"agent_id": "general-purpose", "task": "look", "timeout_seconds": 0})
        return spawn if told == 1 else say("it works on it")

    agent = HarnessAgent("orch", ScriptedModel(model), workspace=tmp_path)
    async with Runtime.open(url, [agent]) as runtime:
        run = runtime.stream("orch", "go", thread_id="t1")
        await run.result()
        follower = await asyncio.create_subprocess_exec(
            PYTHON, "-c", FOLLOWER, url, run.run_id, stdout=asyncio.subprocess.PIPE
        )
        assert follower.stdout is not None
        first = await asyncio.wait_for(follower.stdout.readline(), 90)
        may_end.set()
        live = [f"{event.seq} {event.kind} {event.run_id}" async for event in runtime.events(run.run_id)]
        rest, _ = await asyncio.wait_for(follower.communicate(), 90)
    assert (first + rest).decode().split("\n")[:-1] == live
    assert live[-1].split()[1] == "task_updated"
    assert f"run_finished {run.run_id}" in "\n".join(live[:-3])


async def test_a_stream_of_tokens_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    """Everything is written by the time the result is there, in far fewer writes than there are tokens."""
    agent = Agent("a", ScriptedModel([say("x" * 2000, chunks=["x"] * 2000)]))
    async with Runtime.open(f"sqlite:///{tmp_path}/app.db", [agent]) as runtime:
        store: Any = runtime.store
        writes: list[int] = []
        write = store.write

        def counted(batch: Any) -> Any:
            writes.append(len(batch.rows))
            return write(batch)

        store.write = counted
        result = await runtime.run("a", "go")
        found = await store.read_events(result.run_id, 0, 10_000)
    assert len(found[0]) > 2000
    assert len(writes) < 200


def newer(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE schema_info (version INTEGER)")
    connection.execute("INSERT INTO schema_info VALUES (999)")
    connection.commit()
    connection.close()


def garbage(path: Path) -> None:
    path.write_bytes(b"this is not a database" * 100)


def folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (newer, "written by a newer version (schema 999"),
        (garbage, "file is not a database"),
        (folder, "it is a folder: name a file"),
    ],
)
async def test_a_file_that_cannot_be_used_is_named_and_left_alone(
    tmp_path: Path, spoil: Callable[[Path], None], said: str
) -> None:
    path = tmp_path / "app.db"
    spoil(path)
    before = path.read_bytes() if path.is_file() else b""
    with pytest.raises(StoreError) as refused:
        await open_and_close(f"sqlite:///{path}")
    assert said in str(refused.value)
    assert str(path) in str(refused.value)
    assert (path.read_bytes() if path.is_file() else b"") == before


async def open_and_close(url: str) -> None:
    store = open_store(url)
    assert isinstance(store, SqlStore)
    try:
        await store.open()
    finally:
        await store.close()


async def test_who_opens_a_new_file_while_another_does_waits(tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / "app.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")  # SQLite changes no mode beside it, and does not wait for its end
    opening = asyncio.create_task(open_and_close(f"sqlite:///{tmp_path / 'app.db'}"))
    await asyncio.sleep(0.05)
    assert not opening.done()
    other.execute("ROLLBACK")
    await opening
    other.close()


async def test_a_missing_folder_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="create it"):
        await open_and_close(f"sqlite:///{tmp_path}/none/app.db")


@pytest.mark.parametrize("url", ["", "sqlite:", "sqlite://app.db", "sqlite:///", "mysql://u:secret@x", "app.db"])
def test_a_url_that_names_no_store_lists_those_there_are(url: str) -> None:
    with pytest.raises(ConfigurationError, match="sqlite:///app.db") as refused:
        open_store(url)
    assert "secret" not in str(refused.value)
