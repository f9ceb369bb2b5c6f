"""Checks of the DurableStore contract, to be run on every implementation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from msgspec.structs import replace

from ..core.errors import OwnershipLost
from ..core.events import Event, RunStarted, StepStarted, TextDelta
from ..core.rows import LogRow, Private
from ..core.runs import RunStatus, Usage
from ..core.stores import (
    PAGE_BYTES,
    WISHES,
    Conversation,
    DurableStore,
    LogBatch,
    LogSummary,
    Losses,
    Reply,
    RunFacts,
    StoredLog,
    SummaryUpdate,
    ThreadUpdate,
    Watch,
    Wish,
)
from .stores import ODD, stored_run, stored_thread
from .threads import LONG, ThreadSuite, begin, ended_run, full_batch, public, refused, step_rows, text_rows

ROUNDS = 50
"""The number of rounds of each race."""
EVERYTHING = 2**40
"""Bytes that are more than any log here has."""


class DurableStoreSuite(ThreadSuite):
    """The contract of DurableStore and of Store. `reopen` is required: the checks use two stores at once."""

    async def check_a_run_begins_whole(self, store: DurableStore, other: DurableStore) -> None:
        assert await store.read_events("r1") is None
        assert await store.read_log("r1") is None
        assert await begin(store, stored_run("r1")) is None
        assert await other.load_run("r1") == stored_run("r1")
        assert await other.read_request("r1") == b"r1"
        assert await other.owner_of("r1") == "p1"
        assert await other.read_events("r1") == ([], False)
        assert await other.read_log("r1") == StoredLog(rows=[])

    async def check_a_run_begins_once(self, store: DurableStore, other: DurableStore) -> None:
        for _ in range(2):  # the second is a retry, by an owner who did not hear of the first
            assert await begin(store, stored_run("r1")) is None
        await refused(begin(other, stored_run("r1"), "p2"))
        await refused(store.begin_run(stored_run("r1"), b"something else", "p1", LONG))
        for _ in range(2):
            assert await begin(store, stored_run("r2", 2.0), when_busy="enqueue") == "r1"
        await store.write(ended_run("r1"))
        assert await begin(store, stored_run("r2", 2.0), when_busy="enqueue") is None
        assert await other.load_run("r2") == stored_run("r2", 2.0)
        assert await other.owner_of("r2") == "p1"

    async def check_events_are_read_in_order(self, store: DurableStore, other: DurableStore) -> None:
        await begin(store, stored_run("r1"))
        for first in range(1, 2001, 500):
            await store.write(LogBatch(log_id="r1", epoch=1, rows=text_rows(first, first + 499)))
        for reader in (store, other):
            assert await reader.read_events("r1", 0, 5000, EVERYTHING) == (public(text_rows(1, 2000)), False)
            assert await reader.read_events("r1", 998, 3) == (public(text_rows(999, 1001)), False)
            assert await reader.read_events("r1", 2000) == ([], False)
        await store.write(LogBatch(log_id="r1", epoch=1, ended=True))
        assert await other.read_events("r1", 1990, 11) == (public(text_rows(1991, 2000)), True)
        found = await other.read_events("r1", 1990, 10)
        assert found and found[0] == public(text_rows(1991, 2000)), "the last are left out"
        assert await other.read_events("r1", 2000) == ([], True)

    async def check_events_are_read_in_pages_of_few_bytes(self, store: DurableStore, other: DurableStore) -> None:
        rows = [*text_rows(1, 40, "x" * 50_000), *text_rows(41, 45, "x" * 1_000_000), *text_rows(46, 3000)]
        await begin(store, stored_run("r1"))
        await store.write(LogBatch(log_id="r1", epoch=1, rows=rows, ended=True))
        found, ended = list[Event](), False
        while not ended:
            page = await other.read_events("r1", found[-1].seq if found else 0)
            assert page is not None and page[0]
            ended = page[1]
            *_, last = found = [*found, *page[0]]
            # The last event may be larger than a page, and what is before it in its pack is no more than a page.
            assert (
                sum([len(event.delta) for event in page[0] if isinstance(event, TextDelta) and event is not last])
                < 2 * PAGE_BYTES
            )
        assert found == public(rows)

    async def check_a_log_comes_back_as_it_was_written(self, store: DurableStore, other: DurableStore) -> None:
        started = RunStarted(seq=1, thread_id="t1", run_id="r1")
        batches = [
            [LogRow(0, 1, None, Private(kind="resumed", at=2.5)), LogRow(1, 0, started, Private(done=3))],
            [*step_rows(2), *text_rows(5, 300), *step_rows(301)],
            [LogRow(303, 1, None, Private(kind="done", done=1))],
            [LogRow(303, 2, None, Private(kind="done", done=2)), *text_rows(304, 305)],
            [LogRow(305, 1, None, Private(kind="commit"))],
            [LogRow(306 + n, 0, StepStarted(seq=306 + n, step=n), Private(done=n)) for n in range(700)],
        ]
        await begin(store, stored_run("r1"))
        for rows in batches:
            await store.write(LogBatch(log_id="r1", epoch=1, rows=rows))
            written = [row for batch in batches[: batches.index(rows) + 1] for row in batch]
            kept = [row for row in written if not isinstance(row.event, TextDelta)]
            for reader in (store, other):
                last = written[-1]
                assert await reader.read_log("r1") == StoredLog(rows=kept, seq=last.seq, sub=last.sub)
                assert await reader.read_events("r1", 0, 5000, EVERYTHING) == (public(written), False)

    async def check_a_conversation_has_the_runs_that_have_not_ended(
        self, store: DurableStore, other: DurableStore
    ) -> None:
        assert await other.load_conversation("t1") == Conversation(requests=[])
        for number, run_id in enumerate(["r1", "r3", "r2"]):
            await begin(store, stored_run(run_id, float(number)), when_busy="enqueue")
        await begin(store, stored_run("elsewhere", thread_id="t2"))
        waiting = [("r1", b"r1"), ("r3", b"r3"), ("r2", b"r2")]
        assert await other.load_conversation("t1") == Conversation(requests=waiting)
        asks = stored_run("r1", 1.0, RunStatus.SUSPENDED)
        await store.write(LogBatch(log_id="r1", epoch=1, runs=[asks], released=True, rests=True))
        assert await other.load_conversation("t1") == Conversation(requests=waiting)
        thread = stored_thread("t1", "one", "two")
        assert await store.claim("r1", "p1", LONG) == 2
        done = stored_run("r1", 1.0, RunStatus.COMPLETED)
        await store.write(LogBatch(log_id="r1", epoch=2, runs=[done], threads=[ThreadUpdate(thread)], ended=True))
        assert await other.load_conversation("t1") == Conversation(thread=thread, requests=waiting[1:])
        assert await store.take_thread("r3") is None
        assert await other.load_conversation("t1") == Conversation(thread=thread, requests=waiting[1:])

    async def check_a_thread_stands_as_its_logs_do(self, store: DurableStore, other: DurableStore) -> None:
        async def stands() -> tuple[str, str, int, int, Usage]:
            (one,) = await other.list_threads("u1")
            assert await other.list_threads("u1", status=one.status) == [one]
            assert await other.list_threads(changed_after=one.changed_at) == []
            return one.title, one.status, one.questions, one.children, one.usage

        def batch(run_id: str, epoch: int = 1, *, rows: int = 0, ended: bool = False, **counts: Any) -> LogBatch:
            update = SummaryUpdate("t1", "u1", LogSummary(**counts))
            return LogBatch(log_id=run_id, epoch=epoch, rows=step_rows(rows), summary=update, ended=ended)

        nothing, some = Usage(), Usage(requests=2, input_tokens=10, cost=0.5)
        await begin(store, stored_run("r1", 1.0, title="first"))
        assert await stands() == ("first", "running", 0, 0, nothing)
        asks = batch("r1", rows=1, status="waiting", questions=2, children=3, usage=some)
        for _ in range(2):  # the second is a retry
            await store.write(asks)
            assert await stands() == ("first", "waiting", 2, 3, some)
        await begin(store, stored_run("r2", 2.0, title="second"), when_busy="enqueue")
        assert await stands() == ("first", "waiting", 2, 3, some)
        await refused(store.write(batch("r1", 7, rows=4, status="failed")), OwnershipLost)
        assert await stands() == ("first", "waiting", 2, 3, some)
        done = batch("r1", rows=4, status="completed", usage=some + some, ended=True)
        done.runs = [stored_run("r1", 1.0, RunStatus.COMPLETED)]
        await store.write(done)
        assert await stands() == ("first", "queued", 0, 0, some + some)
        assert await store.take_thread("r2") is None
        assert await stands() == ("first", "running", 0, 0, some + some)
        broken = LogBatch(log_id="r2", epoch=1, runs=[stored_run("r2", 2.0, RunStatus.FAILED)], released=True)
        await store.write(broken)
        assert await stands() == ("first", "failed", 0, 0, some + some)

    async def check_deltas_are_read_alone(self, store: DurableStore, other: DurableStore) -> None:
        first, last = text_rows(1, 300), text_rows(304, 400)
        await begin(store, stored_run("r1"))
        await store.write(LogBatch(log_id="r1", epoch=1, rows=[*first, *step_rows(301), *last]))
        deltas = public([*first, *last])
        for reader in (store, other):
            assert await reader.read_deltas("unknown", 0, 400) == []
            for after, upto in (
                (0, 400),
                (0, 1),
                (100, 200),
                (256, 257),
                (299, 305),
                (300, 303),
                (350, 350),
                (399, 500),
            ):
                expected = [event for event in deltas if after < event.seq <= upto]
                assert await reader.read_deltas("r1", after, upto) == expected, (after, upto)

    async def check_nobody_but_the_owner_reads_private_parts(self, store: DurableStore, other: DurableStore) -> None:
        await begin(store, stored_run("r1"))
        await store.write(LogBatch(log_id="r1", epoch=1, rows=step_rows(1)))
        await store.write(LogBatch(log_id="r1", epoch=1, rows=[LogRow(3, 1, None, Private(kind="commit"))]))
        await store.write(LogBatch(log_id="r1", epoch=1, rows=step_rows(4)))
        for after, limit in ((0, 100), (0, 2), (1, 1), (3, 100), (5, 1), (6, 5)):
            found = await other.read_events("r1", after, limit)
            expected = public([*step_rows(1), *step_rows(4)])[after : after + limit]
            assert found == (expected, False), (after, limit)

    async def check_a_stale_owner_writes_nothing(self, store: DurableStore, other: DurableStore) -> None:
        await begin(store, stored_run("r1"))
        await store.put_wish(Wish(log_id="r1", wish_id="w1", run_id="r1", kind="cancel"))
        assert await other.claim("r1", "p2", LONG, gone="p1") == 2
        for batch in (full_batch(), full_batch(ended=True), LogBatch(log_id="r1", epoch=1)):
            await refused(store.write(batch), OwnershipLost)
        await refused(store.write(LogBatch(log_id="r1", epoch=1, released=True)), OwnershipLost)
        await refused(store.write(LogBatch(log_id="unknown", epoch=1)), OwnershipLost)
        await self._nothing_was_written(other, lost=1)
        assert await other.owner_of("r1") == "p2"
        await other.write(full_batch(2))
        assert await store.load_run("r1") == replace(stored_run("r1", 1.0, RunStatus.COMPLETED), lost=1)
        assert await store.load_thread("t1") == stored_thread("t1", "one")

    async def check_a_log_without_owner_is_not_written(self, store: DurableStore, other: DurableStore) -> None:
        await begin(store, stored_run("r1"))
        await store.put_wish(Wish(log_id="r1", wish_id="w1", run_id="r1", kind="cancel"))
        await store.write(LogBatch(log_id="r1", epoch=1, released=True))
        await refused(store.write(full_batch()), OwnershipLost)
        await self._nothing_was_written(other)
        assert await store.claim("r1", "p1", LONG) == 2
        await store.write(LogBatch(log_id="r1", epoch=2, ended=True))
        await refused(store.write(full_batch(2)), OwnershipLost)
        await self._nothing_was_written(other)

    async def check_a_batch_is_written_whole_or_not_at_all(self, store: DurableStore, other: DurableStore) -> None:
        await begin(store, stored_run("r1"))
        await store.put_wish(Wish(log_id="r1", wish_id="w1", run_id="r1", kind="cancel"))
        before = step_rows(1, "before")[:3]
        await store.write(LogBatch(log_id="r1", epoch=1, rows=before))
        for ended in (False, True):
            await refused(store.write(full_batch(ended=ended)))
            assert await other.read_events("r1") == (public(before), False)
            assert await other.load_run("r1") == stored_run("r1")
            assert await other.load_thread("t1") is None
            assert await other.reply_to("r1", "w1") is None
            assert await other.owner_of("r1") == "p1"

    async def check_a_batch_that_is_tried_again_is_written_once(self, store: DurableStore, other: DurableStore) -> None:
        batches = [
            full_batch(),
            LogBatch(log_id="r1", epoch=1, rows=text_rows(21, 21)),
            LogBatch(log_id="r1", epoch=1, threads=[ThreadUpdate(stored_thread("t1", "one", "two"), 1)]),
            LogBatch(log_id="r1", epoch=1, rows=[LogRow(21, 1, None, Private(kind="commit"))], released=True),
        ]
        await begin(store, stored_run("r1"))
        await store.put_wish(Wish(log_id="r1", wish_id="w1", run_id="r1", kind="cancel"))
        for batch in batches:
            for _ in range(3):
                await store.write(batch)
        found = await other.read_log("r1")
        assert found == StoredLog(rows=[*step_rows(1), LogRow(21, 1, None, Private(kind="commit"))], seq=21, sub=1)
        assert await other.load_thread("t1") == stored_thread("t1", "one", "two")
        assert await other.reply_to("r1", "w1") == b"reply"
        assert await other.claim("r1", "p2", LONG) == 2
        await store.write(batches[-1])  # its rows are there, whoever has the log now
        assert await other.owner_of("r1") == "p2"

    async def check_an_end_that_is_tried_again_is_recognised(self, store: DurableStore, other: DurableStore) -> None:
        for run_id, rows in (("r1", text_rows(1, 1)), ("r2", [])):
            await begin(store, stored_run(run_id, thread_id=run_id))
            done = stored_run(run_id, 1.0, RunStatus.COMPLETED, thread_id=run_id)
            last = LogBatch(log_id=run_id, epoch=1, rows=rows, runs=[done], ended=True)
            for _ in range(3):
                await store.write(last)
            assert await other.read_events(run_id) == (public(rows), True)
            assert await other.owner_of(run_id) is None
        await begin(store, stored_run("r3", thread_id="r3"))
        for _ in range(2):
            await store.write(LogBatch(log_id="r3", epoch=1, released=True))
        await refused(store.write(LogBatch(log_id="r3", epoch=1, ended=True)), OwnershipLost)

    async def check_a_run_that_has_ended_is_not_changed(self, store: DurableStore, other: DurableStore) -> None:
        await begin(store, stored_run("r1"))
        for status in (RunStatus.COMPLETED, RunStatus.FAILED, RunStatus.SUSPENDED, None):
            await store.write(LogBatch(log_id="r1", epoch=1, runs=[stored_run("r1", 1.0, status)]))
        await other.save_run(stored_run("r1", 1.0, RunStatus.CANCELLED))
        assert await other.load_run("r1") == stored_run("r1", 1.0, RunStatus.COMPLETED)

    async def check_a_background_child_is_found_by_its_own_id(self, store: DurableStore, other: DurableStore) -> None:
        await begin(store, stored_run("r1"))
        child = stored_run("child", 2.0, thread_id="t2", log_id="r1", parent_run_id="r1")
        done = stored_run("child", 2.0, RunStatus.COMPLETED, thread_id="t2", log_id="r1", parent_run_id="r1")
        for record in (child, done):
            await store.write(LogBatch(log_id="r1", epoch=1, runs=[record]))
            assert await other.load_run("child") == record
            assert await other.facts_of("child") == RunFacts(record, "p1")
        assert await other.facts_of("unknown") is await other.load_run("unknown") is None
        assert await other.read_request("child") is None
        assert [log.log_id for log in await other.open_logs()] == ["r1"]

    async def check_a_thread_keeps_the_messages_it_has(self, store: DurableStore, other: DurableStore) -> None:
        await begin(store, stored_run("r1"))
        before, after = stored_thread("t1", "one"), stored_thread("t1", "one", "two", "three")
        await store.write(LogBatch(log_id="r1", epoch=1, threads=[ThreadUpdate(before)]))
        await store.write(LogBatch(log_id="r1", epoch=1, threads=[ThreadUpdate(after, keep=1)]))
        assert await other.load_thread("t1") == after
        fewer, second = stored_thread("t1"), stored_thread("t2", "more")
        await store.write(LogBatch(log_id="r1", epoch=1, threads=[ThreadUpdate(fewer), ThreadUpdate(second)]))
        assert (await other.load_thread("t1"), await other.load_thread("t2")) == (fewer, second)

    async def check_a_log_is_claimed_only_when_it_may_be(self, store: DurableStore, other: DurableStore) -> None:
        assert await store.claim("unknown", "p1", LONG) is None
        await begin(store, stored_run("r1"))
        (seen,) = await other.open_logs()
        assert await other.claim("r1", "p2", LONG) is None
        assert await store.claim("r1", "p1", LONG) is None
        assert await other.claim("r1", "p2", LONG, gone="p3") is None
        assert await other.claim("r1", "p2", LONG, gone="p1", seen=seen.lease_until + 1) is None
        assert await other.claim("r1", "p2", LONG, gone="p1", seen=seen.lease_until) == 2
        assert await store.owner_of("r1") == "p2"
        await other.write(LogBatch(log_id="r1", epoch=2, released=True))
        assert await store.owner_of("r1") is None
        assert await store.claim("r1", "p1", -1.0) == 3
        assert await other.claim("r1", "p2", LONG) == 4
        assert await store.claim("r1", "p1", LONG) is None
        await other.write(LogBatch(log_id="r1", epoch=4, ended=True))
        assert await store.claim("r1", "p1", LONG) is None
        assert await store.claim("r1", "p1", LONG, gone="p2") is None

    async def check_deaths_of_owners_are_counted(self, store: DurableStore, other: DurableStore) -> None:
        async def losses(log_id: str) -> Losses:
            found = await other.read_log(log_id)
            assert found is not None
            return found.losses

        await begin(store, stored_run("r1"))
        assert await losses("r1") == Losses()
        await store.write(LogBatch(log_id="r1", epoch=1, released=True))
        assert await store.claim("r1", "p1", LONG) == 2
        assert (await losses("r1"), await store.deaths(LONG)) == (Losses(), {}), "it was handed over"
        assert await other.claim("r1", "p2", LONG, gone="p1") == 3
        assert await losses("r1") == Losses(count=1, epoch=2)
        assert await store.claim("r1", "p3", -1.0, gone="p2") == 4
        assert await other.claim("r1", "p4", LONG) == 5
        assert await losses("r1") == Losses(count=3, epoch=4)
        assert sorted(await store.deaths(LONG)) == ["p1", "p2", "p3"]
        await other.write(LogBatch(log_id="r1", epoch=5, losses=Losses(count=1, steps=7, is_alone=True)))
        assert await losses("r1") == Losses(count=1, steps=7, epoch=4, is_alone=True)
        assert [run.lost for run in await store.list_runs()] == [1]
        assert [log.lost for log in await store.open_logs()] == [1]

    async def check_leases_are_renewed(self, store: DurableStore, other: DurableStore) -> None:
        await begin(store, stored_run("r1"), "p1", -1.0)
        await begin(store, stored_run("r2", thread_id="t2"), "p1", -1.0)
        await begin(other, stored_run("r3", thread_id="t3"), "p2", -1.0)
        assert await store.renew("p1", LONG) == {"r1", "r2"}
        for reader in (store, other):
            found = sorted(await reader.open_logs(), key=lambda log: log.log_id)
            assert [(log.log_id, log.owner, log.epoch, log.expired) for log in found] == [
                ("r1", "p1", 1, False),
                ("r2", "p1", 1, False),
                ("r3", "p2", 1, True),
            ]
            assert await reader.open_logs("r3") == found[2:]
        assert await store.renew("p3", LONG) == set()

    async def check_logs_that_need_an_owner_are_listed(self, store: DurableStore, other: DurableStore) -> None:
        for run_id in ("left", "waits", "done", "tasks"):
            await begin(store, stored_run(run_id, thread_id=run_id))
        await begin(store, stored_run("queued", 2.0, thread_id="left"), when_busy="enqueue")
        waits = stored_run("waits", 1.0, RunStatus.SUSPENDED, thread_id="waits")
        await store.write(LogBatch(log_id="waits", epoch=1, runs=[waits], released=True, rests=True))
        await store.write(ended_run("done", thread_id="done"))
        has_tasks = stored_run("tasks", 1.0, RunStatus.COMPLETED, thread_id="tasks")
        await store.write(LogBatch(log_id="tasks", epoch=1, runs=[has_tasks]))
        assert await other.left_logs() == []
        await store.write(LogBatch(log_id="tasks", epoch=1, released=True))
        for run_id in ("left", "queued"):
            await store.write(LogBatch(log_id=run_id, epoch=1, released=True))
        found = sorted(await other.open_logs(), key=lambda log: log.log_id)
        names = ["left", "queued", "tasks"]
        assert [(log.log_id, log.owner) for log in found] == [(name, None) for name in names]
        assert sorted(await other.left_logs(), key=lambda log: log.log_id) == found
        assert await other.open_logs("left") + await other.open_logs("waits") == found[:1]
        assert await other.open_logs("tasks") == found[2:]
        for name in names:
            assert await other.claim(name, "p2", LONG) == 2
        assert await store.left_logs() == []

    async def check_wishes_wait_for_a_reply(self, store: DurableStore, other: DurableStore) -> None:
        await begin(store, stored_run("r1"))
        await begin(store, stored_run("r2", thread_id="t2"))
        asked = [
            Wish(log_id="r1", wish_id="w1", run_id="child", kind="decide", body=bytes(range(256))),
            Wish(log_id="r2", wish_id="w1", run_id="r2", kind="cancel"),
            Wish(log_id="r1", wish_id="a0", run_id="r1", kind="cancel", body=ODD.encode()),
        ]
        for wish in [*asked, asked[0]]:
            await other.put_wish(wish)
        assert await store.wishes("p1") == asked
        assert await store.wishes_for("r1") == [asked[0], asked[2]]
        assert await store.wishes("p2") == []
        await store.write(LogBatch(log_id="r1", epoch=1, replies=[Reply("w1", b"\x00 yes"), Reply("none", b"x")]))
        await store.write(LogBatch(log_id="r1", epoch=1, replies=[Reply("w1", b"too late")]))
        assert await other.reply_to("r1", "w1") == b"\x00 yes"
        assert await other.reply_to("r2", "w1") is await other.reply_to("r1", "unknown") is None
        await other.put_wish(asked[0])
        assert await store.wishes("p1") == asked[1:]
        await store.write(LogBatch(log_id="r1", epoch=1, released=True))
        assert await store.wishes("p1") == [asked[1]]
        assert await other.claim("r1", "p2", LONG) == 2
        assert await other.wishes("p2") == [asked[2]], "the next owner does not get what is left"

    async def check_one_of_two_claims_wins(self, store: DurableStore, other: DurableStore) -> None:
        await begin(store, stored_run("r1"))
        epoch = 1
        for _ in range(ROUNDS):
            await store.write(LogBatch(log_id="r1", epoch=epoch, released=True))
            claims = await asyncio.gather(store.claim("r1", "p1", LONG), other.claim("r1", "p2", LONG))
            assert sorted(claims, key=str) == [epoch + 1, None], claims
            epoch += 1
            assert await other.owner_of("r1") == ("p1" if claims[0] else "p2")

    async def check_one_of_two_runs_gets_the_thread(self, store: DurableStore, other: DurableStore) -> None:
        for number in range(ROUNDS):
            records = [stored_run(f"{name}{number}", thread_id=f"t{number}") for name in "ab"]
            holders = await asyncio.gather(begin(store, records[0], "p1"), begin(other, records[1], "p2"))
            winner = holders.index(None)
            assert holders[1 - winner] == records[winner].identity.run_id
            assert await store.load_run(records[1 - winner].identity.run_id) is None

    async def check_of_many_interrupts_the_newest_runs(self, store: DurableStore, other: DurableStore) -> None:
        runs = [stored_run(f"r{number:02}", float(number)) for number in range(ROUNDS)]
        begins = [begin((store, other)[n % 2], run, f"p{n % 2}", LONG, "interrupt") for n, run in enumerate(runs)]
        before = await asyncio.gather(*begins)
        asked = {wish.log_id for wish in [*await store.wishes("p0"), *await store.wishes("p1")]}
        (left,) = {run.identity.run_id for run in runs} - asked
        assert left not in before, "an older run stops a newer one"
        for run_id in sorted(asked):
            await store.write(ended_run(run_id, status=RunStatus.CANCELLED))
        assert await other.take_thread(left) is None

    async def check_one_of_two_that_wait_is_next(self, store: DurableStore, other: DurableStore) -> None:
        await begin(store, stored_run("r0", 0.0))
        waiting = [f"r{number}" for number in range(1, ROUNDS)]
        for number, run_id in enumerate(waiting, 1):
            assert await begin(store, stored_run(run_id, float(number)), when_busy="enqueue") is not None
        for number, run_id in enumerate(waiting):
            tries = [(store, other)[n % 2].take_thread(run_id) for n in range(4)]
            later = [(store, other)[n % 2].take_thread(after) for n, after in enumerate(waiting[number + 1 :][:4])]
            await asyncio.gather(store.write(ended_run(f"r{number}", float(number))), *tries, *later)
            assert await other.take_thread(run_id) is None
            assert None not in [await other.take_thread(after) for after in waiting[number + 1 :][:3]]

    async def check_many_logs_grow_at_once(self, store: DurableStore, other: DurableStore) -> None:

        async def grow(at: DurableStore, run_id: str) -> None:
            await begin(at, stored_run(run_id, thread_id=run_id), "p1")
            for seq in range(1, 21):
                await at.write(LogBatch(log_id=run_id, epoch=1, rows=text_rows(seq, seq)))

        await asyncio.gather(
            *[grow((store, other)[n % 2], f"r{n}") for n in range(20)], *[store.renew("p1", LONG) for _ in range(5)]
        )
        for number in range(20):
            assert await other.read_events(f"r{number}") == (public(text_rows(1, 20)), False)

    async def check_batches_are_written_in_the_order_of_the_calls(
        self, store: DurableStore, other: DurableStore
    ) -> None:
        await begin(store, stored_run("r1"))
        large = text_rows(41, 60, "x" * 100_000)
        batches = [text_rows(seq, seq) for seq in range(1, 41)] + [large] + [text_rows(n, n) for n in range(61, 81)]
        await asyncio.gather(*[store.write(LogBatch(log_id="r1", epoch=1, rows=rows)) for rows in batches])
        found = await other.read_events("r1", 0, 1000, EVERYTHING)
        assert found == (public([row for rows in batches for row in rows]), False)

    async def check_much_is_written_at_once(self, store: DurableStore, other: DurableStore) -> None:
        await begin(store, stored_run("r1"))
        large = [
            LogRow(number, 0, StepStarted(seq=number, step=1), Private(writes={"x": str(number) * 3_000_000}))
            for number in range(1, 6)
        ]
        rows = [*large, *text_rows(6, 40_000)]
        await asyncio.wait_for(store.write(LogBatch(log_id="r1", epoch=1, rows=rows)), 60)
        assert await other.read_log("r1") == StoredLog(rows=large, seq=40_000)
        assert await other.read_events("r1", 0, 50_000, EVERYTHING) == (public(rows), False)

    async def check_who_watches_a_log_sees_it_grow(self, store: DurableStore, other: DurableStore) -> None:
        await begin(store, stored_run("r1"))
        with other.watch("r1") as watch:
            for seq in range(1, 6):
                assert await other.read_events("r1", seq - 1) == ([], False)
                await store.write(LogBatch(log_id="r1", epoch=1, rows=text_rows(seq, seq)))  # before the wait

                async def has_grown(after: int = seq - 1) -> bool:
                    found = await other.read_events("r1", after)
                    return bool(found and found[0])

                await _within(watch, has_grown)

    async def check_who_watches_for_wishes_and_replies_is_woken(self, store: DurableStore, other: DurableStore) -> None:
        await begin(store, stored_run("r1"))
        with store.watch(WISHES) as watch:
            await other.put_wish(Wish(log_id="r1", wish_id="w1", run_id="r1", kind="cancel"))

            async def is_asked() -> bool:
                return bool(await store.wishes("p1"))

            await _within(watch, is_asked)
        with other.watch("r1") as watch:
            await store.write(LogBatch(log_id="r1", epoch=1, replies=[Reply("w1", b"yes")]))

            async def has_reply() -> bool:
                return await other.reply_to("r1", "w1") == b"yes"

            await _within(watch, has_reply)
        with store.watch(WISHES) as watch:
            await begin(other, stored_run("r2", 2.0), "p2", when_busy="interrupt")
            await _within(watch, is_asked)

    async def _nothing_was_written(self, store: DurableStore, lost: int = 0) -> None:
        found = await store.read_events("r1")
        assert found is not None
        assert found[0] == []
        assert await store.load_run("r1") == replace(stored_run("r1"), lost=lost)
        assert await store.load_thread("t1") is None
        assert await store.reply_to("r1", "w1") is None


async def _within(watch: Watch, is_so: Callable[[], Awaitable[bool]], seconds: float = 10.0) -> None:
    """Wait until a condition holds; fail if that takes half as long as the watch may wait."""
    began = time.monotonic()
    while not await is_so() and time.monotonic() - began < seconds:
        await watch.wait(seconds)
    assert time.monotonic() - began < seconds / 2, "nobody was told of a change"
