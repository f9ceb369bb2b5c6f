"""What every store outside the process must do: checks to be run on each implementation."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from ..core.errors import OwnershipLost, StoreError
from ..core.events import Event, TextDelta
from ..core.lifecycle import RunStatus
from ..core.stores import REQUESTS, Asked, AskStatus, DurableStore, JournalEntry, LogBatch, OwnedLog, RunRecord
from .stores import ODD, StoreSuite, stored_run, stored_thread

ROUNDS = 50
"""How often two race for the same thing."""
LONG = 60.0


def text_events(first: int, last: int, text: str = ODD) -> list[Event]:
    """Events with these numbers."""
    return [
        TextDelta(seq=seq, at=seq / 4, run_id="r1", agent="a", ns=("tools:c1",), delta=text)
        for seq in range(first, last + 1)
    ]


def journal_entries(*keys: str, run_id: str = "r1") -> list[JournalEntry]:
    """Entries with these keys, of which the bodies are any bytes."""
    return [JournalEntry(run_id, key, "model", bytes(range(256)) + key.encode()) for key in keys]


async def begin(store: DurableStore, record: RunRecord, owner: str = "p1", lease: float = LONG) -> str | None:
    """Begin a run of which its id was asked."""
    run_id = record.identity.run_id
    return await store.begin_run(record, JournalEntry(run_id, "request", "request", run_id.encode()), owner, lease)


async def refused(write: Any, error: type[StoreError] = StoreError) -> None:
    """Await what must be refused for good."""
    try:
        await write
    except error as exc:
        assert not exc.passes, f"said to pass: {exc}"
    else:
        raise AssertionError("it was not refused")


class DurableStoreSuite(StoreSuite[DurableStore]):
    """The contract of DurableStore, and that of Store. `reopen` is needed: two at once are what this is about."""

    async def check_a_run_begins_whole(self) -> None:
        async with self._two() as (store, other):
            assert await store.read_events("r1") is None
            assert await begin(store, stored_run("r1")) is None
            assert await other.load_run("r1") == stored_run("r1")
            assert await other.read_journal("r1") == [JournalEntry("r1", "request", "request", b"r1")]
            assert await other.owner_of("r1") == "p1"
            assert await other.read_events("r1") == ([], False)

    async def check_a_run_begins_once(self) -> None:
        async with self._two() as (store, other):
            for _ in range(2):  # again by the same: it was not heard that the first try went well
                assert await begin(store, stored_run("r1")) is None
            assert len(await store.read_journal("r1")) == 1
            await refused(begin(other, stored_run("r1"), "p2"))
            another = JournalEntry("r1", "request", "request", b"something else")
            await refused(store.begin_run(stored_run("r1"), another, "p1", LONG))
            assert await other.owner_of("r1") == "p1"

    async def check_a_busy_thread_refuses(self) -> None:
        async with self._two() as (store, other):
            assert await begin(store, stored_run("r1")) is None
            assert await begin(other, stored_run("r2", 2.0), "p2") == "r1"
            assert await other.load_run("r2") is None
            assert await other.read_events("r2") is None
            assert await begin(other, stored_run("r3", 3.0, thread_id="t2"), "p2") is None

    async def check_a_thread_is_free_when_its_run_has_ended(self) -> None:
        async with self._two() as (store, other):
            await begin(store, stored_run("r1"))
            await store.write(LogBatch(log_id="r1", epoch=1, run=stored_run("r1", 1.0, RunStatus.SUSPENDED)))
            assert await begin(other, stored_run("r2", 2.0), "p2") == "r1"
            await store.write(LogBatch(log_id="r1", epoch=1, run=stored_run("r1", 1.0, RunStatus.COMPLETED)))
            assert await begin(other, stored_run("r2", 2.0), "p2") is None

    async def check_a_queue_keeps_its_order(self) -> None:
        async with self._two() as (store, other):
            await begin(store, stored_run("r1"))
            third, second = stored_run("r3", 3.0, queued=True), stored_run("r2", 2.0, queued=True)
            assert await begin(other, third, "p2") == "r1"
            assert await begin(store, second) == "r1"
            assert await other.load_run("r3") == third
            assert await begin(store, stored_run("r4", 4.0)) is not None
            assert await other.take_thread(third) == "r2"
            assert await store.take_thread(second) == "r1"
            await store.write(LogBatch(log_id="r1", epoch=1, run=stored_run("r1", 1.0, RunStatus.FAILED)))
            assert await other.take_thread(third) == "r2"
            for _ in range(2):
                assert await store.take_thread(second) is None
            assert (await store.list_runs(status="queued"), await store.load_run("r2")) == (
                [third],
                stored_run("r2", 2.0),
            )
            assert await other.take_thread(third) == "r2"
            await store.write(LogBatch(log_id="r2", epoch=1, run=stored_run("r2", 2.0, RunStatus.CANCELLED)))
            assert await other.take_thread(third) is None

    async def check_a_queued_run_does_not_wait_for_a_free_thread(self) -> None:
        async with self._one() as store:
            assert await begin(store, stored_run("r1", queued=True)) is None
            assert await store.load_run("r1") == stored_run("r1")

    async def check_events_are_read_in_order(self) -> None:
        async with self._two() as (store, other):
            await begin(store, stored_run("r1"))
            for first in range(1, 2001, 500):
                await store.write(LogBatch(log_id="r1", epoch=1, events=text_events(first, first + 499)))
            for reader in (store, other):
                assert await reader.read_events("r1", 0, 5000) == (text_events(1, 2000), False)
                assert await reader.read_events("r1", 998, 3) == (text_events(999, 1001), False)
                assert await reader.read_events("r1", 2000) == ([], False)
            await store.write(LogBatch(log_id="r1", epoch=1, ended=True))
            assert await other.read_events("r1", 1990, 11) == (text_events(1991, 2000), True)
            found = await other.read_events("r1", 1990, 10)
            assert found is not None
            assert found[0] == text_events(1991, 2000), "the last are left out"
            assert await other.read_events("r1", 2000) == ([], True)

    async def check_a_log_that_ended_may_go_on(self) -> None:
        async with self._one() as store:
            await begin(store, stored_run("r1"))
            await store.write(LogBatch(log_id="r1", epoch=1, ended=True, released=True))
            epoch = await store.claim("r1", "p2", LONG)
            assert epoch == 2
            await store.write(LogBatch(log_id="r1", epoch=epoch, events=text_events(1, 1)))
            assert await store.read_events("r1") == (text_events(1, 1), False)

    async def check_a_journal_keeps_its_order(self) -> None:
        async with self._two() as (store, other):
            await begin(store, stored_run("r1"))
            await begin(store, stored_run("r2", thread_id="t2"))
            entries = journal_entries(*[f"k{number}" for number in range(30)])
            for first in range(0, 30, 3):
                some = entries[first : first + 3]
                await store.write(LogBatch(log_id="r1", epoch=1, entries=some, first_entry=1 + first))
            assert (await other.read_journal("r1"))[1:] == entries
            await store.write(LogBatch(log_id="r1", epoch=1, ended=True, released=True, done=True))
            assert await other.read_journal("r1") == []
            assert len(await other.read_journal("r2")) == 1

    async def check_an_owner_that_was_followed_writes_nothing(self) -> None:
        async with self._two() as (store, other):
            await begin(store, stored_run("r1"))
            assert await other.claim("r1", "p2", LONG, after="p1") == 2
            await refused(store.write(_everything(1)), OwnershipLost)
            await refused(store.write(LogBatch(log_id="unknown", epoch=1)), OwnershipLost)
            await self._nothing_was_written(other)
            await other.write(_everything(2))
            assert await store.load_run("r1") == stored_run("r1", 1.0, RunStatus.COMPLETED)
            assert await store.load_thread("t1") == stored_thread("t1", "one")

    async def check_a_batch_is_written_whole_or_not_at_all(self) -> None:
        async with self._two() as (store, other):
            await begin(store, stored_run("r1"))
            await store.write(LogBatch(log_id="r1", epoch=1, events=text_events(1, 2, "before")))
            await refused(store.write(_everything(1)))
            found = await other.read_events("r1")
            assert found == (text_events(1, 2, "before"), False)
            assert len(await other.read_journal("r1")) == 1
            assert await other.load_run("r1") == stored_run("r1")
            assert await other.load_thread("t1") is None

    async def check_the_same_batch_is_written_once(self) -> None:
        async with self._two() as (store, other):
            await begin(store, stored_run("r1"))
            for _ in range(3):
                await store.write(_everything(1))
            assert await other.read_events("r1") == (text_events(1, 3), False)
            assert (await other.read_journal("r1"))[1:] == journal_entries("a", "b")
            assert await other.load_thread("t1") == stored_thread("t1", "one")
            last = LogBatch(log_id="r1", epoch=1, events=text_events(4, 4), ended=True, released=True, done=True)
            for _ in range(2):
                await store.write(last)
            assert await other.read_events("r1") == (text_events(1, 4), True)
            assert await other.owner_of("r1") is None

    async def check_a_thread_keeps_the_messages_it_has(self) -> None:
        async with self._two() as (store, other):
            await begin(store, stored_run("r1"))
            before, after = stored_thread("t1", "one"), stored_thread("t1", "one", "two", "three")
            await store.write(LogBatch(log_id="r1", epoch=1, thread=before))
            await store.write(LogBatch(log_id="r1", epoch=1, thread=after, thread_from=1))
            assert await other.load_thread("t1") == after

    async def check_a_log_is_claimed_only_when_it_may_be(self) -> None:
        async with self._two() as (store, other):
            assert await store.claim("unknown", "p1", LONG) is None
            assert await store.epoch_of("unknown") is None
            await begin(store, stored_run("r1"))
            assert await other.claim("r1", "p2", LONG) is None
            assert await other.claim("r1", "p2", LONG, after="p3") is None
            for epoch in (2, 3):  # again by the same: it was not heard that the first try went well
                assert await other.claim("r1", "p2", LONG, after="p1") == epoch
                assert await store.epoch_of("r1") == epoch
            assert await store.owner_of("r1") == "p2"
            await other.write(LogBatch(log_id="r1", epoch=3, released=True))
            assert await store.owner_of("r1") is None
            assert await store.claim("r1", "p1", -1.0) == 4
            assert await other.claim("r1", "p2", LONG) == 5

    async def check_leases_are_prolonged(self) -> None:
        async with self._two() as (store, other):
            await begin(store, stored_run("r1"), "p1", -1.0)
            await begin(store, stored_run("r2", thread_id="t2"), "p1", -1.0)
            await begin(other, stored_run("r3", thread_id="t3"), "p2", -1.0)
            assert await store.renew("p1", LONG) == {"r1", "r2"}
            expected = [OwnedLog("r1", "p1", False), OwnedLog("r2", "p1", False), OwnedLog("r3", "p2", True)]
            for reader in (store, other):
                assert sorted(await reader.owned_logs(), key=lambda log: log.log_id) == expected
            assert await store.renew("p3", LONG) == set()

    async def check_an_owner_learns_who_is_to_be_cancelled(self) -> None:
        async with self._two() as (store, other):
            await begin(store, stored_run("r1"))
            await begin(store, stored_run("r2", thread_id="t2"))
            await other.ask_cancel("r1", ODD)
            await other.ask_cancel("unknown", "why")
            assert await store.cancels("p1") == {"r1": ODD}
            assert await store.cancels("p2") == {}
            await store.write(LogBatch(log_id="r1", epoch=1, ended=True, released=True))
            await other.ask_cancel("r1", "too late")
            assert await other.claim("r1", "p1", LONG) == 2
            assert await store.cancels("p1") == {}

    async def check_one_of_two_claims_wins(self) -> None:
        async with self._two() as (store, other):
            await begin(store, stored_run("r1"))
            epoch = 1
            for _ in range(ROUNDS):
                await store.write(LogBatch(log_id="r1", epoch=epoch, released=True))
                claims = await asyncio.gather(store.claim("r1", "p1", LONG), other.claim("r1", "p2", LONG))
                assert sorted(claims, key=str) == [epoch + 1, None], claims
                epoch += 1
                assert await other.owner_of("r1") == ("p1" if claims[0] else "p2")

    async def check_one_of_two_runs_gets_the_thread(self) -> None:
        async with self._two() as (store, other):
            for number in range(ROUNDS):
                records = [stored_run(f"{name}{number}", thread_id=f"t{number}") for name in "ab"]
                holders = await asyncio.gather(begin(store, records[0], "p1"), begin(other, records[1], "p2"))
                winner = holders.index(None)
                assert holders[1 - winner] == records[winner].identity.run_id
                assert await store.load_run(records[1 - winner].identity.run_id) is None

    async def check_one_of_two_that_wait_is_next(self) -> None:
        async with self._two() as (store, other):
            await begin(store, stored_run("r0", 0.0))
            waiting = [stored_run(f"r{number}", float(number), queued=True) for number in range(1, ROUNDS)]
            for record in waiting:
                assert await begin(store, record) is not None
            for number, record in enumerate(waiting):
                ended = stored_run(f"r{number}", float(number), RunStatus.COMPLETED)
                tries = [(store, other)[n % 2].take_thread(record) for n in range(4)]
                later = [(store, other)[n % 2].take_thread(after) for n, after in enumerate(waiting[number + 1 :][:4])]
                await asyncio.gather(store.write(LogBatch(log_id=f"r{number}", epoch=1, run=ended)), *tries, *later)
                assert await other.take_thread(record) is None
                assert None not in await asyncio.gather(
                    *[other.take_thread(after) for after in waiting[number + 1 :][:3]]
                )

    async def check_many_logs_grow_at_once(self) -> None:
        async with self._two() as (store, other):

            async def grow(at: DurableStore, run_id: str) -> None:
                await begin(at, stored_run(run_id, thread_id=run_id), "p1")
                for seq in range(1, 21):
                    await at.write(LogBatch(log_id=run_id, epoch=1, events=text_events(seq, seq)))

            await asyncio.gather(
                *[grow((store, other)[n % 2], f"r{n}") for n in range(20)], *[store.renew("p1", LONG) for _ in range(5)]
            )
            for number in range(20):
                assert await other.read_events(f"r{number}") == (text_events(1, 20), False)

    async def check_much_is_written_at_once(self) -> None:
        async with self._two() as (store, other):
            await begin(store, stored_run("r1"))
            entries = [JournalEntry("r1", f"k{number}", "note", bytes([number]) * 3_000_000) for number in range(5)]
            events = text_events(1, 40_000)
            await asyncio.wait_for(
                store.write(LogBatch(log_id="r1", epoch=1, events=events, entries=entries, first_entry=1)), 60
            )
            assert (await other.read_journal("r1"))[1:] == entries
            assert await other.read_events("r1", 0, 50_000) == (events, False)

    async def check_who_watches_a_log_sees_it_grow(self) -> None:
        async with self._two() as (store, other):
            await begin(store, stored_run("r1"))
            with other.watch("r1") as watch:
                for seq in range(1, 6):
                    assert await other.read_events("r1", seq - 1) == ([], False)
                    await store.write(LogBatch(log_id="r1", epoch=1, events=text_events(seq, seq)))  # before the wait
                    await _within(watch, lambda at=seq - 1: _has_events(other, at))

    async def check_who_watches_for_cancels_is_told(self) -> None:
        async with self._two() as (store, other):
            await begin(store, stored_run("r1"))
            with store.watch(REQUESTS) as watch:
                await other.ask_cancel("r1", "enough")

                async def is_asked() -> bool:
                    return await store.cancels("p1") == {"r1": "enough"}

                await _within(watch, is_asked)

    async def check_what_is_asked_is_done_by_one(self) -> None:
        async with self._two() as (store, other):
            asks = [Asked(f"a{number}", f"r{number % 3} {ODD}", f"body {number}".encode()) for number in range(ROUNDS)]
            for asked in asks:
                await store.ask(asked)
            await store.ask(asks[0])  # again: it was not heard that the first try went well
            assert await other.asked() == asks
            for asked in asks:
                taken = await asyncio.gather(store.take_ask(asked.ask_id, "p1"), other.take_ask(asked.ask_id, "p2"))
                assert sorted(taken) == [False, True], taken
                taker = "p1" if taken[0] else "p2"
                assert await store.take_ask(asked.ask_id, taker)
                assert await other.ask_status(asked.ask_id) == AskStatus(taker, None)
            assert await other.asked() == []
            assert not await store.take_ask("unknown", "p1")

    async def check_who_asked_is_told(self) -> None:
        async with self._two() as (store, other):
            asked = Asked("a1", "r1", b"body")
            with other.watch(REQUESTS) as watch:
                await store.ask(asked)

                async def is_asked() -> bool:
                    return await other.asked() == [asked]

                await _within(watch, is_asked)
            assert await other.take_ask("a1", "p2")
            with store.watch("a1") as watch:
                await other.reply("a1", b"\x00 reply")

                async def is_told() -> bool:
                    return await store.ask_status("a1") == AskStatus("p2", b"\x00 reply")

                await _within(watch, is_told)
            assert not await store.withdraw("a1")
            await store.forget_ask("a1")
            assert await store.ask_status("a1") is None
            await other.reply("a1", b"too late")
            assert await store.ask_status("a1") is None
            await store.ask(asked)
            assert await store.withdraw("a1")
            assert await other.asked() == []

    async def _nothing_was_written(self, store: DurableStore) -> None:
        assert await store.read_events("r1") == ([], False)
        assert len(await store.read_journal("r1")) == 1
        assert await store.load_run("r1") == stored_run("r1")
        assert await store.load_thread("t1") is None


def _everything(epoch: int) -> LogBatch:
    return LogBatch(
        log_id="r1",
        epoch=epoch,
        events=text_events(1, 3),
        entries=journal_entries("a", "b"),
        first_entry=1,
        thread=stored_thread("t1", "one"),
        run=stored_run("r1", 1.0, RunStatus.COMPLETED),
    )


async def _has_events(store: DurableStore, after: int) -> bool:
    found = await store.read_events("r1", after)
    return bool(found and found[0])


async def _within(watch: Any, is_so: Any, seconds: float = 10.0) -> None:
    """Look until something is so, and wait between: it must not take half as long as the watch may."""
    began = time.monotonic()
    while not await is_so() and time.monotonic() - began < seconds:
        await watch.wait(seconds)
    assert time.monotonic() - began < seconds / 2, "nobody was told of a change"
