"""The agents of a server, called by the official client on every transport and in both versions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from retinue import Agent, Runtime
from retinue.errors import ModelRefused
from retinue.models import TextChunk, TurnEnd
from retinue.server.auth import User
from retinue.testing import ScriptedModel, call

from .. import inside
from ..server.agents import Gate, boss, speaker
from ..waiting import until
from .calling import ALL, NEW, A2AError, a2a_serving, answers, states, task_of


@pytest.mark.parametrize("transport", ALL)
async def test_an_answer_is_streamed_as_one_artifact(transport: str) -> None:
    async with a2a_serving(Runtime([speaker("Good ", "day")])) as place, place.caller(transport, "speaker") as caller:
        updates = await caller.send("hello", messageId="mine")
        assert states(updates) == ["submitted", "working", "completed"]
        assert answers(updates) == "Good day"
        assert [one["artifactUpdate"].get("append", False) for one in updates if "artifactUpdate" in one] == [
            False, True, False
        ]  # fmt: skip
        task = await caller.get(task_of(updates))
        assert answers([{"task": task}]) == "Good day"
        assert [message["messageId"] for message in task["history"]] == ["mine"]


@pytest.mark.parametrize("transport", ALL)
async def test_a_client_without_streams_gets_the_settled_task(transport: str) -> None:
    async with a2a_serving(Runtime([speaker("Good ", "day")])) as place:
        async with place.caller(transport, "speaker", streaming=False) as caller:
            [update] = await caller.send("hello")
            assert states([update]) == ["completed"]
            assert answers([update]) == "Good day"


@pytest.mark.parametrize("transport", ALL)
async def test_an_approval_of_a_child_is_a_form_that_a_data_part_answers(transport: str) -> None:
    async with a2a_serving(Runtime([boss()])) as place, place.caller(transport, "boss") as caller:
        updates = await caller.send("pay")
        assert states(updates) == ["submitted", "working", "input_required"]
        task_id = task_of(updates)
        question = updates[-1]["statusUpdate"]["status"]["message"]
        form = next(part["data"] for part in question["parts"] if "data" in part)
        assert (form["call"], form["tool"], form["agent"]) == ("task_1/pay_1", "pay", "clerk")
        assert form["schema"]["required"] == ["approved"]
        with pytest.raises(A2AError):  # text cannot answer a ticket with a schema
            await caller.send("yes", taskId=task_id)
        answered = await caller.send({"approved": True}, taskId=task_id, messageId="reply")
        assert states(answered) == ["working", "completed"]
        assert answers(answered) == "boss: clerk: paid 3"
        assert answers(answered, "answer:tools:task_1") == "clerk: paid 3"
        history = (await caller.get(task_id))["history"]
        assert [(one["role"], one["messageId"]) for one in history] == [
            ("ROLE_USER", "m1"), ("ROLE_AGENT", question["messageId"]), ("ROLE_USER", "reply")
        ]  # fmt: skip


@pytest.mark.parametrize("transport", ALL)
async def test_a_task_at_work_is_subscribed_to_and_cancelled(transport: str) -> None:
    gate = Gate()
    async with a2a_serving(Runtime([gate.agent()])) as place, place.caller(transport, "gated") as caller:
        stream = caller.stream("go")
        task_id = task_of([await anext(stream)])
        gate.say("one ", "two ")
        await until(lambda: place.service.runtime.log(task_id).has_event(4))
        again = caller.subscribe(task_id)
        first = await anext(again)
        assert answers([first]) == "one two "
        gate.say("three")
        assert answers([first, await anext(again)]) == "one two three"
        cancelled = await caller.cancel(task_id)
        assert cancelled["status"]["state"] == "TASK_STATE_CANCELED"
        assert states([one async for one in again])[-1] == "canceled"
        assert states([one async for one in stream])[-1] == "canceled"
        with pytest.raises(A2AError):
            await caller.cancel(task_id)
        with pytest.raises(A2AError):
            [one async for one in caller.subscribe(task_id)]


@pytest.mark.parametrize("transport", ALL)
async def test_streamed_text_stays_in_a_cancelled_task(transport: str, tmp_path: Path) -> None:
    gate = Gate()
    runtime = Runtime.open(f"sqlite:///{tmp_path}/app.db", [gate.agent()])
    async with a2a_serving(runtime) as place, place.caller(transport, "gated") as caller:
        stream = caller.stream("go")
        updates = [await anext(stream)]
        gate.say("one ", "two")
        while answers(updates) != "one two":
            updates.append(await anext(stream))
        cancelled = await caller.cancel(task_of(updates))
        assert cancelled["status"]["state"] == "TASK_STATE_CANCELED"
        assert answers([{"task": cancelled}]) == "one two"
        updates += [one async for one in stream]
        assert answers(updates) == "one two"
        assert answers([{"task": await caller.get(task_of(updates))}]) == "one two"


@pytest.mark.parametrize("end", ["fails", "limit"])
async def test_streamed_text_stays_in_a_task_whatever_ends_it(end: str, tmp_path: Path) -> None:
    """The text of a child stays, too."""

    class Breaks:
        name = "testing:breaks"

        async def stream(self, request: object) -> AsyncIterator[Any]:
            yield TextChunk("half an ")
            yield TextChunk("answer")
            if end == "fails":
                raise ModelRefused("no more", self.name)
            yield TurnEnd("length")

    gate = Gate()
    kid = gate.agent("kid")
    turns = ScriptedModel([call("task", {"subagent_type": "kid", "description": "work"}, id="kid_1")])
    agents = [Agent("breaks", Breaks()), Agent("boss", turns, subagents=[kid])]  # pyright: ignore[reportArgumentType]
    runtime = Runtime.open(f"sqlite:///{tmp_path}/app.db", agents)
    async with a2a_serving(runtime) as place:
        async with place.caller("JSONRPC", "breaks") as caller:
            updates = await caller.send("go")
            assert states(updates)[-1] == "failed"
            assert answers(updates) == "half an answer"
            assert answers([{"task": await caller.get(task_of(updates))}]) == "half an answer"
        async with place.caller("JSONRPC", "boss") as caller:
            stream, name = caller.stream("go"), "answer:tools:kid_1"
            updates = [await anext(stream)]
            gate.say("kid ", "says")
            while answers(updates, name) != "kid says":
                updates.append(await anext(stream))
            cancelled = await caller.cancel(task_of(updates))
            assert answers([{"task": cancelled}], name) == "kid says"


@pytest.mark.parametrize("transport", NEW)
async def test_tasks_are_listed_by_pages_and_states(transport: str) -> None:
    async with a2a_serving(Runtime([speaker("hi"), boss()])) as place:
        async with place.caller(transport, "boss") as other:
            await other.send("pay")
        async with place.caller(transport, "speaker", streaming=False) as caller:
            ids = [task_of(await caller.send("hello", messageId=f"m{n}")) for n in range(3)]
            first = await caller.list(pageSize=2)
            assert (len(first.tasks), first.total_size, first.page_size) == (2, 3, 2)
            rest = await caller.list(pageSize=2, pageToken=first.next_page_token)
            assert {one.id for one in (*first.tasks, *rest.tasks)} == set(ids)
            assert not rest.next_page_token
            assert not any(one.artifacts for one in first.tasks)
            assert all(one.artifacts for one in (await caller.list(includeArtifacts=True)).tasks)
            assert (await caller.list(status="TASK_STATE_WORKING")).total_size == 0
            known = (await caller.get(ids[0]))["contextId"]
            assert [one.id for one in (await caller.list(contextId=known)).tasks] == [ids[0]]
            with pytest.raises(A2AError):
                await caller.list(pageToken="nonsense")


@pytest.mark.parametrize("transport", ALL)
async def test_without_a_valid_token_nothing_is_answered(transport: str) -> None:
    async with a2a_serving(Runtime([speaker("hi")])) as place:
        for token in (None, "a-wrong-token"):
            async with place.caller(transport, "speaker", token) as caller:
                with pytest.raises(Exception, match=r"401|UNAUTHENTICATED|token|nauthor"):
                    await caller.send("hello")
        assert await place.service.runtime.store.list_runs() == []


class Revocable:
    """Lets a user in, who may only start runs, until it is revoked."""

    user: User | None = User("ann", frozenset({"run"}))

    async def user_of(self, headers: Mapping[str, str]) -> User | None:
        return self.user


@pytest.mark.parametrize("transport", ALL)
async def test_a_revoked_token_ends_a_stream(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inside.beat_every(monkeypatch, 0.0)
    gate, auth = Gate(), Revocable()
    async with a2a_serving(Runtime([gate.agent()]), auth=auth) as place, place.caller(transport, "gated") as caller:
        stream, seen = caller.stream("go"), list[Any]()
        gate.say("one ")
        while not answers(seen):
            seen.append(await anext(stream))
        auth.user = None
        gate.say("two ", None)
        assert answers(seen + [one async for one in stream]) == "one "
