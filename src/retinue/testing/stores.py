"""The conformance suite of the `Store` port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from ..core.messages import Message, ToolCall
from ..core.runs import RunIdentity, RunResult, RunStatus
from ..core.state import PersistedState
from ..core.stores import RunRecord, Store, ThreadRecord
from .suite import Suite

ODD = "\u017elu\u0165\r\n\u2028 \U0001f600 \\u0000 'quoted' \"twice\" ?%s%"
S = TypeVar("S", bound=Store)


def stored_thread(thread_id: str = "t1", *said: str, user_id: str | None = "u1") -> ThreadRecord:
    """Return a thread with messages and state."""
    messages = [Message.user(text, id=f"m{number}") for number, text in enumerate(said)]
    asked = Message.assistant(ODD, tool_calls=[ToolCall("c1", "look", {"path": ODD, "deep": [1, {"x": None}]})])
    state = PersistedState(3, {"k": {"a": [1, 2.5, ODD]}})
    return ThreadRecord(thread_id=thread_id, user_id=user_id, messages=(*messages, asked), state=state)


def stored_run(run_id: str, started_at: float = 1.0, status: RunStatus | None = None, **fields: Any) -> RunRecord:
    """Return the record of a running run or, with a status, of one that ended or waits."""
    thread_id, user_id = fields.pop("thread_id", "t1"), fields.pop("user_id", "u1")
    parent_run_id = fields.pop("parent_run_id", None)
    result = None
    if status is not None:
        result = RunResult(
            status=status,
            run_id=run_id,
            thread_id=thread_id,
            response=ODD,
            output={"a": [1, ODD]},
            state=PersistedState(1, {"k": 1}),
            messages=(Message.user("hi", id="m1"), Message.assistant(ODD, id="m2")),
        )
    identity = RunIdentity(run_id, thread_id, "agent", user_id=user_id, parent_run_id=parent_run_id)
    log_id = fields.pop("log_id", run_id)
    return RunRecord(identity=identity, started_at=started_at, result=result, log_id=log_id, **fields)


class StoreSuite(Suite[S]):
    """The contract of Store. Each check opens and closes its stores. `DurableStoreSuite` has more, for stores on disk."""

    async def _run(self, check: Callable[..., Any]) -> None:
        """Check with two stores on the same records; without `reopen`, with the same store twice."""
        async with _opened(self._make()) as store:
            if self._reopen is None:
                await check(self, store, store)
                return
            async with _opened(self._reopen(store)) as other:
                await check(self, store, other)

    async def check_nothing_is_there_at_first(self, store: S, other: S) -> None:
        assert await other.load_thread("t1") is None
        assert await other.load_run("r1") is None
        assert await other.list_runs() == []

    async def check_a_thread_is_read_as_it_was_saved(self, store: S, other: S) -> None:
        for record in (
            stored_thread("t1", "one"),
            stored_thread("t2", user_id=None),
            stored_thread("t1", "one", ODD, "x" * 200_000),
            stored_thread("t1", "fewer"),
            ThreadRecord(thread_id=ODD),
        ):
            await store.save_thread(record)
            for reader in (store, other):
                assert await reader.load_thread(record.thread_id) == record

    async def check_a_run_is_read_as_it_was_saved(self, store: S, other: S) -> None:
        for record in (
            stored_run("r1", 1.25),
            stored_run("r1", 1.25, RunStatus.SUSPENDED),
            stored_run("r1", 1.25, RunStatus.COMPLETED),
            stored_run("child", 1.5, log_id="r1", parent_run_id="r1"),
            stored_run("r2", 2.0, queued=True, user_id=None),
        ):
            await store.save_run(record)
            for reader in (store, other):
                assert await reader.load_run(record.identity.run_id) == record

    async def check_runs_are_listed_newest_first(self, store: S, other: S) -> None:
        for number in range(12):
            await store.save_run(stored_run(f"r{number}", float(number)))
        await store.save_run(stored_run("r3", 3.0, RunStatus.COMPLETED))
        await store.save_run(stored_run("child", 20.0, log_id="r3", parent_run_id="r3"))  # not a root: not listed
        for reader in (store, other):
            assert _ids(await reader.list_runs()) == [f"r{number}" for number in range(11, -1, -1)]
            assert _ids(await reader.list_runs(limit=2)) == ["r11", "r10"]
            assert await reader.list_runs(limit=0) == []

    async def check_runs_are_found_by_thread_user_and_status(self, store: S, other: S) -> None:
        await store.save_run(stored_run("r1", 1.0, RunStatus.COMPLETED))
        await store.save_run(stored_run("r2", 2.0, RunStatus.FAILED, user_id="u2"))
        await store.save_run(stored_run("r3", 3.0, thread_id="t2"))
        await store.save_run(stored_run("r4", 4.0, queued=True, thread_id="t2", user_id="u2"))
        assert _ids(await other.list_runs("t1")) == ["r2", "r1"]
        assert _ids(await other.list_runs(user_id="u2")) == ["r4", "r2"]
        assert _ids(await other.list_runs(status="running")) == ["r3"]
        assert _ids(await other.list_runs(status="queued")) == ["r4"]
        assert _ids(await other.list_runs("t1", user_id="u1", status="completed", limit=5)) == ["r1"]
        assert await other.list_runs("t1", user_id="u1", status="failed") == []

    async def check_runs_are_listed_in_pages(self, store: S, other: S) -> None:
        for number in range(5):
            await store.save_run(stored_run(f"r{number}", float(number), user_id=None if number == 2 else "u1"))
        assert _ids(await other.list_runs(before=(3.0, "r3"), limit=2)) == ["r2", "r1"]
        assert _ids(await other.list_runs(user_id="u1", before=(3.0, "r3"))) == ["r1", "r0"]
        assert _ids(await other.list_runs(user_id="u1", unowned=True, before=(3.0, "r3"))) == ["r2", "r1", "r0"]

    async def check_threads_are_created_listed_and_deleted(self, store: S, other: S) -> None:
        assert await store.create_thread(stored_thread("made", "one"))
        assert not await store.create_thread(stored_thread("made", "two", user_id="u2"))
        assert await other.load_thread("made") == stored_thread("made", "one")
        await store.save_thread(stored_thread("of a child", "x"))  # it carries no root run: it is not listed
        listed = await other.list_threads("u1")
        assert [(thread.thread_id, thread.user_id) for thread in listed] == [("made", "u1")]
        assert await other.list_threads("u2") == []
        assert await other.list_threads("u1", thread_id="made") == listed
        assert await other.list_threads("u1", thread_id="of a child") == []
        place = (listed[0].used_at, "made")
        assert await other.list_threads("u1", before=place) == []
        assert await other.user_of_thread("made") == ("u1",)
        assert await other.user_of_thread("nope") is None
        assert await store.create_thread(stored_thread("for a run", ""), is_listed=False)
        assert await other.user_of_thread("for a run") == ("u1",)
        assert await other.list_threads("u1") == await other.list_threads("u1", changed_after=0.0) == listed
        await store.save_run(stored_run("r1", thread_id="for a run"))
        assert {thread.thread_id for thread in await other.list_threads("u1")} == {"made", "for a run"}
        assert await store.delete_thread("made")
        assert not await store.delete_thread("made")
        assert await other.load_thread("made") is None

    async def check_threads_have_titles_and_are_searched(self, store: S, other: S) -> None:
        for thread_id, text in (("t1", " The  first\n"), ("t2", "100% Ärger"), ("t3", "")):
            assert await store.create_thread(stored_thread(thread_id, text))
        listed = {thread.thread_id: thread for thread in await other.list_threads()}
        assert {name: (one.title, one.status) for name, one in listed.items()} == {
            "t1": ("The first", "idle"),
            "t2": ("100% Ärger", "idle"),
            "t3": ("", "idle"),
        }
        assert await store.name_thread("t3", "The third")
        assert not await store.name_thread("nope", "x")
        for search, found in (("THE", {"t1", "t3"}), ("0% ä", {"t2"}), ("_", set[str]()), ("%", {"t2"})):
            assert {thread.thread_id for thread in await other.list_threads(search=search)} == found, search
        assert len(await other.list_threads("u1", status="idle")) == 3
        assert await other.list_threads(status="running") == []

    async def check_writers_side_by_side_lose_nothing(self, store: S, other: S) -> None:
        records = [stored_thread(f"t{number}", str(number)) for number in range(100)]
        await asyncio.gather(*[(store, other)[n % 2].save_thread(record) for n, record in enumerate(records)])
        for record in records:
            assert await store.load_thread(record.thread_id) == record

    async def check_what_is_saved_last_stays(self, store: S, other: S) -> None:
        async with asyncio.TaskGroup() as saving:
            for number in range(50):
                saving.create_task(store.save_thread(stored_thread("t1", str(number))))
                await asyncio.sleep(0)
        assert await other.load_thread("t1") == stored_thread("t1", "49")


@asynccontextmanager
async def _opened(store: S) -> AsyncGenerator[S]:
    anyhow: Any = store
    if hasattr(store, "open"):
        await anyhow.open()
    try:
        yield store
    finally:
        if hasattr(store, "close"):
            await anyhow.close()


def _ids(records: list[RunRecord]) -> list[str]:
    return [record.identity.run_id for record in records]
