"""Logs that have ended and were packed: nothing that is read has changed, each text is stored once, and nothing gets lost."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from retinue import (
    Agent,
    ConfigurationError,
    Message,
    RunStatus,
    Runtime,
    ToolCall,
    ToolCallStatus,
    ToolResult,
    tool,
)
from retinue.core.events import (
    DELTAS,
    ActivityDelta,
    Event,
    InferenceFinished,
    ReasoningDelta,
    RunFinished,
    RunStarted,
    TextDelta,
    ToolCallArgsDelta,
    ToolCallFinished,
    ToolCallReady,
    ToolCallStreamDelta,
)
from retinue.core.rows import LogRow, Private
from retinue.core.stores import LogBatch, ThreadRecord, ThreadUpdate
from retinue.errors import StoreError
from retinue.storage.check import check
from retinue.storage.packer import Packer
from retinue.storage.prune import Pruned, prune
from retinue.storage.references import expand
from retinue.storage.sql import SqlStore
from retinue.storage.stores import sql_store
from retinue.testing import ScriptedModel, call, say, think
from retinue.testing.stores import stored_run

from .. import inside
from ..effort import IS_LONG, share
from ..packing import check_packing, compare, everything
from ..prepared import PYTHON
from .stored import tamper

REQUEST = b'{"messages":["what a program asks at first"],"digest":"of a request"}'
ALPHABETS = ("abcdefgh ", 'ab"\\\n\t', "e\u0301\u0308\u200d", "\U0001f469\u200d\U0001f680ß\x00", '{"[,:]}')


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[SqlStore]:
    made = sql_store(database_url)
    await made.open()
    yield made
    await made.close()


class Program:
    """A log at random: streams that alternate, texts that come again whole or in part, messages of a thread or of none."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.rows: list[LogRow] = []
        self.seq = 0
        self.said = [Message.user(self.text(), id="m0")]
        self.texts = [self.said[0].text]

    def text(self, most: int = 200) -> str:
        alphabet = self.random.choice(ALPHABETS)
        return "".join(self.random.choices(alphabet, k=self.random.choice((0, 1, 19, 20, 30, most))))

    def add(self, event: Event, private: Private | None = None, run: int = 0) -> None:
        self.seq += 1
        ns = () if run == 0 else (f"tools:c{run}",)
        stamped = replace(event, seq=self.seq, at=1.7e9 + self.seq / 7, run_id="r1" if run == 0 else f"k{run}", ns=ns)
        self.rows.append(LogRow(self.seq, 0, stamped, private))
        if self.random.random() < 0.1:
            again = Private(kind="commit", run_id="r1", writes={"k": self.random.choice(self.texts)})
            self.rows.append(LogRow(self.seq, 1, None, again))

    def pieces(self, text: str) -> list[str]:
        found: list[str] = []
        while text:
            size = self.random.choice((0, 1, 1, 4, 1_000))
            found.append(text[:size])
            text = text[size:]
        return found

    def step(self, number: int) -> None:
        """Some runs answer at the same time, in pieces; one of them drops a draft."""
        kinds: tuple[Any, ...] = (TextDelta, ReasoningDelta)
        streams: list[tuple[int, Any, dict[str, Any], list[str]]] = []
        for run in range(self.random.choice((1, 1, 3))):
            text = self.random.choice((self.text(), self.text(3_000), *self.texts[-2:]))
            self.texts.append(text)
            message = Message.assistant(text, [ToolCall(f"c{number}", "look", {"q": text})], id=f"m{number}.{run}")
            streams.append((run, self.random.choice(kinds), {"message_id": message.id}, self.pieces(text)))
            args = f'{{"q": {self.quoted(text)} }}'
            streams.append((run, ToolCallArgsDelta, {"call_id": f"c{number}"}, self.pieces(args)))
            streams.append((run, ToolCallStreamDelta, {"call_id": f"c{number}"}, self.pieces(text[: len(text) // 2])))
            if run == 0:
                self.said.append(message)
        left = [stream for stream in streams if stream[3]]
        while left:
            stream = self.random.choice(left)
            run, kind, fields, pieces = stream
            self.add(kind(delta=pieces.pop(0), **fields), run=run)
            if not pieces:
                left.remove(stream)
        self.add(ActivityDelta(activity_type="plan", delta=[{"op": "add", "value": self.text()}]))
        answer = self.said[-1]
        self.add(InferenceFinished(step=number, message=answer))
        self.add(ToolCallReady(call_id=f"c{number}", tool_name="look", args={"q": answer.text}))
        result = ToolResult(data=self.random.choice((self.text(), {"found": [answer.text]}, answer.text)))
        found = Message.tool(result.text, tool_call_id=f"c{number}")
        self.said.append(found)
        status = ToolCallStatus.SUCCEEDED
        self.add(
            ToolCallFinished(call_id=f"c{number}", tool_name="look", status=status, result=result, message=found),
            Private(message=found) if self.random.random() < 0.3 else None,
        )

    def quoted(self, text: str) -> str:
        return json.dumps(text, ensure_ascii=self.random.random() < 0.5)

    def whole(self) -> list[LogRow]:
        self.rows.append(LogRow(0, 1, None, Private(kind="resumed", at=1.5)))
        self.add(RunStarted(thread_id="t1", messages=tuple(self.said)))
        for number in range(1, self.random.choice((2, 5, 12))):
            self.step(number)
        self.add(RunFinished(status=RunStatus.COMPLETED, termination="natural", response=self.said[-1].text))
        return self.rows


async def put(store: SqlStore, program: Program, *, has_thread: bool = True) -> None:
    rows = program.whole()
    record = stored_run("r1", 1.0, RunStatus.COMPLETED)
    assert record.result is not None
    record.result = replace(record.result, messages=tuple(program.said), response=program.said[-1].text)
    await store.begin_run(stored_run("r1"), REQUEST, "p1", 60.0)
    for first in range(0, len(rows), 300):
        await store.write(LogBatch(log_id="r1", epoch=1, rows=rows[first : first + 300]))
    thread = ThreadRecord(thread_id="t1", messages=tuple(program.said))
    threads = [ThreadUpdate(thread)] if has_thread else []
    await store.write(LogBatch(log_id="r1", epoch=1, runs=[record], threads=threads, ended=True))


@pytest.mark.parametrize("seed", range(share(150, 12)))
async def test_a_packed_log_says_what_it_said(tmp_path: Path, seed: int) -> None:
    store = sql_store(f"sqlite:///{tmp_path}/app.db")
    await put(store, Program(seed), has_thread=seed % 3 > 0)
    conversation = await store.load_thread("t1")
    last = await store.last_event("r1")
    deltas = await store.read_deltas("r1", 3, last - 2)
    assert await check_packing(store) == 1
    assert await store.load_thread("t1") == conversation
    assert await store.read_request("r1") == REQUEST
    assert await store.last_event("r1") == last
    again = await store.read_deltas("r1", 3, last - 2)
    assert [(one.seq, one.kind) for one in again] == [(one.seq, one.kind) for one in deltas]
    assert await check(store) == []
    assert (await tamper(store, "SELECT COUNT(*) FROM events")) == [(0,)]
    await store.close()


async def test_a_log_is_packed_the_same_on_postgresql(store: SqlStore) -> None:
    await put(store, Program(5))
    assert await check_packing(store) == 1
    assert await check(store) == []


# --- each text in one row


async def rows_with(store: SqlStore, marker: str) -> list[str]:
    """Return the tables whose rows say something, once for each row; the title of a thread is not counted."""
    found: list[str] = []
    for table in ("runs", "threads", "messages", "events", "packs", "said", "inbox", "tasks", "task_results"):
        for row in await store.database.rows(f"SELECT * FROM {table}"):
            texts = [expand(bytes(value)) for value in row if isinstance(value, bytes | memoryview)]
            if any(marker.encode() in text for text in texts):
                found.append(table)
    return found


async def test_each_text_is_stored_in_one_row(store: SqlStore) -> None:
    letters = random.Random(1)

    def text(name: str) -> str:
        return f"marker-{name}-" + "".join(letters.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=300))

    names = ("input", "think", "task", "childthink", "answer", "args", "result", "last", "second", "secondlast", "ctx")
    said = {name: text(name) for name in names}

    @tool
    def look(q: str) -> str:
        """Look."""
        return said["result"]

    child = Agent("child", ScriptedModel([[think(said["childthink"]), say(said["answer"], chunks=[*said["answer"]])]]))
    script = [
        [think(said["think"]), call("agent_run_child", {"prompt": said["task"]})],
        call("look", f'{{"q" : "{said["args"]}"}}'),
        say(said["last"], chunks=[*said["last"]]),
        say(said["secondlast"]),
    ]
    agent = Agent("a", ScriptedModel(script), tools=[look, child.as_tool()])
    async with Runtime([agent], store=store) as runtime:
        await runtime.run("a", said["input"], thread_id="t", context={"note": said["ctx"]})
        await runtime.run("a", said["second"], thread_id="t")
        packer = Packer(store)
        await packer.sweep()
        assert {name: await rows_with(store, said[name]) for name in names} == {
            **{name: ["messages"] for name in names},
            "childthink": ["said"],
            "ctx": ["packs"],
        }
        conversation = [message.text for message in await runtime.messages("t")]
        assert [said["input"], said["second"]] == [
            one for one in conversation if one in (said["input"], said["second"])
        ]


# --- nothing gets lost

PACK_AND_DIE = """
import asyncio, os, signal, sys
from retinue.storage import sqlite
from retinue.storage.packer import Packer
from retinue.storage.stores import sql_store
left = int(sys.argv[2])
def counted(call):
    def count(link, *given):
        global left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(link, *given)
    return count
async def main():
    store = sql_store(sys.argv[1])
    await store.open()
    for name in ("run", "insert", "commit"):
        setattr(sqlite.SqliteLink, name, counted(getattr(sqlite.SqliteLink, name)))
    await Packer(store).pack("r1")
    print(left, flush=True)
asyncio.run(main())
"""


async def test_a_packer_that_is_killed_loses_nothing(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/app.db"
    store = sql_store(url)
    await put(store, Program(3))
    before = await everything(store, "r1")
    step, ended = -1, False
    while not ended:
        step += 1 if IS_LONG else 3
        process = await asyncio.create_subprocess_exec(
            PYTHON, "-c", PACK_AND_DIE, url, str(step), stdout=asyncio.subprocess.PIPE
        )
        await process.communicate()
        assert process.returncode in (0, -signal.SIGKILL)
        ended = process.returncode == 0
        compare(before, await everything(store, "r1"))
    assert step > 15
    assert await tamper(store, "SELECT packed FROM logs") == [(2,)]
    assert await check(store) == []
    await store.close()


async def test_of_two_packers_one_packs(store: SqlStore, database_url: str) -> None:
    other = sql_store(database_url)
    await put(store, Program(4))
    before = await everything(store, "r1")
    await asyncio.gather(*[Packer(one).pack("r1") for one in (store, other, store, other)])
    compare(before, await everything(other, "r1"))
    assert await check(store) == []
    await other.close()


async def test_a_log_that_cannot_be_read_stays_as_it_is(store: SqlStore, caplog: pytest.LogCaptureFixture) -> None:
    await put(store, Program(4))
    await tamper(store, "UPDATE events SET body = '[{' WHERE kind = 'rows'")
    await Packer(store).sweep()
    assert "the log of run r1 cannot be packed, and stays as it is" in caplog.text
    assert await tamper(store, "SELECT packed FROM logs") == [(0,)]


async def test_a_large_log_stays_as_it_is(store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    await put(store, Program(4))
    before = await everything(store, "r1")
    inside.pack_logs_up_to(monkeypatch, 10)
    packer = Packer(store)
    for _ in range(2):
        await packer.sweep()
    assert await tamper(store, "SELECT packed FROM logs") == [(0,)]
    compare(before, await everything(store, "r1"))
    monkeypatch.undo()
    await Packer(store).sweep()
    assert await tamper(store, "SELECT packed FROM logs") != [(0,)]


# --- what becomes of packed logs


async def test_packed_logs_are_pruned(store: SqlStore) -> None:
    await put(store, Program(6))
    count = len([row for row in Program(6).whole() if isinstance(row.event, DELTAS)])
    before = await store.read_log("r1")
    await Packer(store).sweep()
    assert await prune(store, 0, deltas=True, dry_run=True) == Pruned(runs=1, events=count)
    assert await prune(store, 0, deltas=True) == Pruned(runs=1, events=count)
    thinned = await store.read_log("r1")
    assert before is not None
    assert thinned is not None
    assert thinned.thinned
    assert [row.event for row in thinned.rows] == [row.event for row in before.rows if row.event is not None]
    assert await check(store) == []
    assert (await prune(store, 0)).runs == 1
    for table in ("packs", "said", "logs", "runs"):
        assert await tamper(store, f"SELECT COUNT(*) FROM {table}") == [(0,)], table
    assert await store.load_thread("t1") is not None


async def test_messages_that_a_stored_run_refers_to_cannot_be_changed(store: SqlStore) -> None:
    program = Program(7)
    await put(store, program)
    longer = (*program.said, Message.user("more"))
    await store.save_thread(ThreadRecord(thread_id="t1", messages=longer))
    for others in ((), (Message.user("other"), *program.said[1:])):
        with pytest.raises(StoreError, match="of thread 't1' cannot be changed: runs that are stored refer to them"):
            await store.save_thread(ThreadRecord(thread_id="t1", messages=others))
    assert (await store.load_run("r1") or stored_run("r1")).result is not None


async def test_the_thread_of_a_sub_agent_goes_with_the_thread_of_its_run(store: SqlStore) -> None:
    await store.begin_run(stored_run("r1"), b"{}", "p1", 60.0)
    assert await store.hold_thread("r1", 1, "sub", "u1") is None
    sub = ThreadRecord(thread_id="sub", user_id="u1", messages=(Message.user("hello"),))
    record = stored_run("r1", 1.0, RunStatus.COMPLETED)
    await store.write(
        LogBatch(log_id="r1", epoch=1, runs=[record], threads=[ThreadUpdate(sub)], left=["sub"], ended=True)
    )
    with pytest.raises(ConfigurationError, match="'sub' is of a sub-agent: delete thread 't1', which has it"):
        await store.delete_thread("sub")
    assert await store.delete_thread("t1")
    assert await store.load_thread("sub") is None


async def test_small_packs_of_a_thread_are_merged(store: SqlStore) -> None:
    agent = Agent("a", ScriptedModel(lambda request: say(f"answer {len(request.messages)}")))
    async with Runtime([agent], store=store) as runtime:
        ids = [(await runtime.run("a", f"question {number}", thread_id="t")).run_id for number in range(20)]
        results = [await runtime.result(run_id) for run_id in ids]
        before = await runtime.messages("t")
        await Packer(store).sweep()
        ((packs,),) = await tamper(store, "SELECT COUNT(*) FROM messages")
        assert packs < 20
        assert await runtime.messages("t") == before
        assert [await runtime.result(run_id) for run_id in ids] == results
        assert await check(store) == []


async def test_a_packed_run_is_forked(store: SqlStore) -> None:
    agent = Agent("a", ScriptedModel(lambda request: say(f"answer {len(request.messages)}, which is long enough")))
    async with Runtime([agent], store=store) as runtime:
        await runtime.run("a", "the first question of many", thread_id="t")
        second = await runtime.run("a", "the second question of many", thread_id="t")
        await Packer(store).sweep()
        last = await store.last_event(second.run_id)
        fork = await runtime.fork(second.run_id, at=last, input="and the third question")
        assert (await fork.result()).response == "answer 5, which is long enough"
        assert await runtime.state_at(second.run_id, last)
        await Packer(store).sweep()
        assert [message.text for message in await runtime.messages(fork.thread_id)][-2:] == [
            "and the third question",
            "answer 5, which is long enough",
        ]
        assert await store.delete_thread("t")
        assert (await fork.result()).response == "answer 5, which is long enough"
        assert await check(store) == []
