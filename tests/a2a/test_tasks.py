"""Tasks beyond one transport: users, malformed requests, artifacts, messages, cards, notifications, traces."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from a2a.types import a2a_pb2 as pb
from aiohttp import ClientSession
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from google.protobuf.json_format import ParseDict

from retinue import Agent, DataPart, FilePart, PartChunk, Permissions, Runtime, StateCommand, TextChunk, tool
from retinue.models import Retrying, TurnEnd
from retinue.plugins import hook
from retinue.server import A2AOptions, StoredTokens, TokenStore
from retinue.server.auth import OneToken
from retinue.storage.sql import SqlStore
from retinue.testing import ScriptedModel, call, fail, say
from retinue.tools import ResumeMode, SuspendTicket, ToolContext, ToolResult
from retinue.wire.a2a_budget import BUDGET

from ..server.agents import Gate, boss, pay, speaker
from ..server.serving import TOKEN, serving
from .calling import ALL, NEW, A2AError, a2a_serving, answers, states, task_of, text_of


class Chunks:
    """A model that yields given chunks."""

    name = "testing:chunks"

    def __init__(self, *chunks: Any) -> None:
        self.chunks = chunks

    async def stream(self, request: object) -> AsyncIterator[Any]:
        for chunk in self.chunks:
            yield chunk


JSON = {"content-type": "application/json"}


def rpc(method: str, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 7, "method": method, "params": params}


def message(text: str = "go", **fields: Any) -> dict[str, Any]:
    return {"message": {"messageId": "m1", "role": "ROLE_USER", "parts": [{"text": text}], **fields}}


async def test_each_user_has_tasks_of_their_own(tmp_path: Path) -> None:
    runtime = Runtime.open(f"sqlite:///{tmp_path}/app.db", [boss()])
    assert isinstance(runtime.store, SqlStore)
    await runtime.store.open()
    tokens = TokenStore(runtime.store)
    ann, bob = [(await tokens.add(name))[1] for name in ("ann", "bob")]
    reader = (await tokens.add("ann", ["read"]))[1]
    auth = StoredTokens(runtime.store, OneToken(TOKEN))
    async with a2a_serving(runtime, auth=auth) as place:
        for transport in NEW:
            async with (
                place.caller(transport, "boss", ann) as mine,
                place.caller(transport, "boss", bob) as other,
                place.caller(transport, "boss", reader) as reads,
                place.caller(transport, "clerk", ann) as clerk,
            ):
                task_id = task_of(await mine.send("pay"))
                context_id = (await mine.get(task_id))["contextId"]
                for stranger in (other, clerk):
                    for attempt in (stranger.get, stranger.cancel):
                        with pytest.raises(A2AError, match="no task"):
                            await attempt(task_id)
                    with pytest.raises(A2AError, match="no task"):
                        await stranger.send({"approved": True}, taskId=task_id)
                    assert (await stranger.list()).total_size == 0
                with pytest.raises(A2AError):
                    await other.send("mine now", contextId=context_id)
                assert (await reads.get(task_id))["id"] == task_id
                for attempt in (
                    reads.send("pay"),
                    reads.send({"approved": True}, taskId=task_id),
                    reads.cancel(task_id),
                ):
                    with pytest.raises(Exception, match=r"403|PERMISSION_DENIED|scope|orbidden"):
                        await attempt
                assert (await mine.cancel(task_id))["status"]["state"] == "TASK_STATE_CANCELED"


async def test_malformed_requests_are_refused_with_their_codes() -> None:
    async with a2a_serving(Runtime([speaker("hi"), boss()])) as place:
        ask, url = place.site.ask, "/a2a/speaker"
        cases: list[tuple[Any, int]] = [
            (b"{", -32700),
            (b"[]", -32600),
            ({"jsonrpc": "1.0", "method": "GetTask", "id": 1}, -32600),
            ({"jsonrpc": "2.0", "method": "GetTask", "id": {}}, -32600),
            (rpc("Nonsense"), -32601),
            (rpc("GetTask"), -32602),
            ({**rpc("GetTask"), "params": []}, -32602),
            (rpc("GetTask", id={"x": 1}), -32602),
            (rpc("GetTask", id="nothing"), -32001),
            (rpc("tasks/get", id="nothing"), -32001),
            (rpc("message/send", message=5), -32602),
            (rpc("SendMessage", **message(" ")), -32602),
            (rpc("SendMessage", **message(role="ROLE_AGENT")), -32602),
            (rpc("SendMessage", **message(contextId="a\0b")), -32602),
            (rpc("SendMessage", **message(contextId="x" * 100_000)), -32602),
            *[(rpc("SendMessage", **message(contextId=one)), -32602) for one in ("a/b", "..", ".", "a b", "a\n")],
            (rpc("SendMessage", **message(taskId="nothing")), -32001),
            *[(rpc(name, id="nothing", historyLength=2**40), -32602) for name in ("GetTask", "tasks/get")],
            (rpc("GetTask", id="a\0b"), -32602),
            (rpc("ListTasks", contextId="a\0b"), -32602),
            (rpc("SendMessage", **message(parts=[{"raw": "AA==", "mediaType": "application/x-odd"}])), -32005),
            (rpc("SendMessage", **message(), configuration={"historyLength": -1}), -32602),
        ]
        for body, code in cases:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            answer = await ask("POST", url, data=data, headers=JSON)
            assert (answer.status, answer.body["error"]["code"]) == (200, code), body
        assert (
            await ask("POST", url, data=json.dumps(rpc("GetTask", id="x")), headers={**JSON, "a2a-version": "9.0"})
        ).body["error"]["code"] == -32009
        assert (await ask("POST", url, data=b"{}")).body["error"]["code"] == -32005
        assert (await ask("POST", "/a2a/nobody", data=b"{}")).status == 404
        assert (await ask("POST", url, data=BytesIO(b"x" * 5_000_000), headers=JSON)).status == 413
        assert (await ask("GET", f"{url}/tasks/nothing")).status == 404
        for headers, status in (({}, 415), (JSON, 400)):
            assert (await ask("POST", f"{url}/message:send", data=b"{", headers=headers)).status == status
        wrong = {**message()["message"], "metadata": {BUDGET: {"limits": {"steps": -1}}}}
        refused = await ask("POST", url, data=json.dumps(rpc("SendMessage", message=wrong)), headers=JSON)
        assert refused.body["error"]["code"] == -32602
        assert (await ask("GET", f"{url}/tasks?pageSize=0")).status == 400
        for wrong_number in ("true", str(2**40), "-1"):
            assert (await ask("GET", f"{url}/v1/tasks/nothing?historyLength={wrong_number}")).status == 400
        assert await place.service.runtime.store.list_threads() == []
        assert await place.service.runtime.store.list_runs() == []


async def test_every_route_of_a2a_but_the_cards_needs_a_token() -> None:
    async with a2a_serving(Runtime([speaker("hi")])) as place:
        async with ClientSession(place.url) as session:
            paths = {"/a2a/speaker", "/a2a/speaker/", "/a2a/speaker/message:send", "/a2a/speaker/v1/message:stream"}
            for path in paths | {"/a2a/speaker/tasks/x:cancel", "/a2a/speaker/tasks/x/pushNotificationConfigs"}:
                async with session.post(path, data=b"{}") as answer:
                    assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer"), path
            for path in ("/a2a/speaker/tasks", "/a2a/speaker/extendedAgentCard", "/a2a/speaker/v1/card"):
                async with session.get(path) as answer:
                    assert answer.status == 401, path
            for path in ("/.well-known/agent-card.json", "/a2a/speaker/.well-known/agent-card.json"):
                async with session.get(path) as answer:
                    assert answer.status == 200
                    tag = answer.headers["etag"]
                async with session.get(path, headers={"if-none-match": tag}) as answer:
                    assert answer.status == 304
            async with session.get("/a2a/nobody/.well-known/agent-card.json") as answer:
                assert answer.status == 404


async def test_the_card_names_skills_addresses_and_what_it_asks_for() -> None:
    async with a2a_serving(Runtime([boss(), speaker("hi")])) as place:
        card = (await place.site.get("/.well-known/agent-card.json")).body
        assert card["name"] == "boss"
        assert {skill["name"] for skill in card["skills"]} >= {"boss", "clerk"}
        assert ParseDict(card, pb.AgentCard()).security_requirements  # no field but those of 1.0
        kinds = [(one["protocolBinding"], one["protocolVersion"]) for one in card["supportedInterfaces"]]
        assert kinds == [
            ("JSONRPC", "1.0"), ("HTTP+JSON", "1.0"), ("GRPC", "1.0"), ("JSONRPC", "0.3"), ("HTTP+JSON", "0.3")
        ]  # fmt: skip
        assert card["supportedInterfaces"][0]["url"] == f"{place.url}/a2a/boss"
        old = (await place.site.get("/a2a/speaker/.well-known/agent-card.json")).body
        assert (old["name"], old["url"], old["protocolVersion"]) == ("speaker", f"{place.url}/a2a/speaker", "0.3")
        for transport in ALL:
            async with place.caller(transport, "speaker") as caller:
                request = pb.GetExtendedAgentCardRequest()
                extended = await caller.client.get_extended_agent_card(request, context=caller.context)
                assert extended.name == "speaker"


async def test_a_card_is_signed_with_the_key() -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    async with a2a_serving(Runtime([speaker("hi")]), a2a=A2AOptions(key=pem)) as place:
        card = (await place.site.get("/.well-known/agent-card.json")).body
        [signature] = card.pop("signatures")
        del card["securityRequirements"]  # their lists of scopes are empty, and what is empty is not signed

    def plain(data: bytes) -> str:
        return base64.urlsafe_b64encode(data).rstrip(b"=").decode()

    said = plain(json.dumps(card, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode())
    raw = base64.urlsafe_b64decode(signature["signature"] + "==")
    der = encode_dss_signature(int.from_bytes(raw[:32], "big"), int.from_bytes(raw[32:], "big"))
    checked = f"{signature['protected']}.{said}".encode()
    key.public_key().verify(der, checked, ec.ECDSA(hashes.SHA256()))


async def test_files_and_data_are_artifacts_and_void_text_is_replaced() -> None:
    model = Chunks(
        TextChunk("half an ans"),
        Retrying(code="broken", message="it broke", restarts=True),
        TextChunk("whole"),
        PartChunk(FilePart(data="AA==", media_type="image/png", name="a.png")),
        PartChunk(DataPart({"count": 42})),
        TurnEnd(),
    )
    async with a2a_serving(Runtime([Agent("maker", model)])) as place:
        for transport in NEW:
            async with place.caller(transport, "maker") as caller:
                updates = await caller.send("make")
                assert answers(updates) == "whole"
                task = await caller.get(task_of(updates))
                assert answers([{"task": task}]) == "whole"
                others = [one["parts"][0] for one in task["artifacts"] if one["artifactId"] != "answer"]
                assert others[0] == {"raw": "AA==", "mediaType": "image/png", "filename": "a.png"}
                assert others[1]["data"] == {"count": 42}


@hook("run_start")
def as_message(ctx: object) -> StateCommand:
    return StateCommand().event({"a2a": "message"})


async def test_a_run_may_be_answered_with_a_message() -> None:
    agent = Agent("short", ScriptedModel(lambda request: say("No task.")), plugins=[as_message])
    async with a2a_serving(Runtime([agent])) as place:
        for transport in ALL:
            for streaming in (True, False):
                async with place.caller(transport, "short", streaming=streaming) as caller:
                    [update] = await caller.send("hello")
                    assert text_of(update["message"]) == "No task."


async def test_failed_runs_and_several_questions() -> None:
    def pays(request: Any) -> Any:
        done = [one for one in request.messages if one.role == "tool"]
        calls = [call("pay", {"amount": n}, id=f"pay_{n}") for n in (1, 2)]
        return say(" ".join(one.text for one in done)) if done else calls

    broken = Agent("broken", ScriptedModel(lambda request: fail(RuntimeError("no luck"))))
    payer = Agent("payer", ScriptedModel(pays), tools=[pay], plugins=[Permissions(ask=["pay"])])
    async with a2a_serving(Runtime([broken, payer])) as place:
        async with place.caller("JSONRPC", "broken") as caller:
            updates = await caller.send("go")
            assert states(updates)[-1] == "failed"
            assert "no luck" in text_of(updates[-1]["statusUpdate"]["status"]["message"])
        async with place.caller("JSONRPC", "payer") as caller:
            task_id = task_of(await caller.send("pay both"))
            with pytest.raises(A2AError, match="2 questions"):
                await caller.send({"approved": True}, taskId=task_id)
            with pytest.raises(A2AError):
                await caller.send({"decisions": {"pay_1": {"action": "wish"}}}, taskId=task_id)
            decided = {
                "pay_1": {"action": "resume", "payload": {"approved": True, "args": {"amount": 5}}},
                "pay_2": {"action": "cancel", "reason": "too much"},
            }
            updates = await caller.send({"decisions": decided}, taskId=task_id, messageId="both")
            assert answers(updates).startswith("paid 5")
            history = (await caller.get(task_id))["history"]
            assert [one["messageId"] for one in history][-1] == "both"
            assert len(history[-1]["parts"]) == 2
            with pytest.raises(A2AError, match="ended"):
                await caller.send("more", taskId=task_id)


@tool
async def ask(ctx: ToolContext) -> ToolResult:
    """Ask the user."""
    ticket = SuspendTicket("t1", "ask", "Which one?", resume_mode=ResumeMode.USE_DECISION)
    return ToolResult.suspended("waits", ticket)


async def test_text_answers_a_question_without_a_schema_and_the_context_goes_on() -> None:
    def asks(request: Any) -> Any:
        last = request.messages[-1]
        return say(f"{len(request.messages)}: {last.text}") if last.role == "tool" else call("ask", {}, id=None)

    async with a2a_serving(Runtime([Agent("asker", ScriptedModel(asks), tools=[ask])])) as place:
        async with place.caller("JSONRPC", "asker") as caller:
            first = await caller.send("begin")
            task = await caller.get(task_of(first))
            with pytest.raises(A2AError, match="another context"):
                await caller.send("the red one", taskId=task["id"], contextId="elsewhere")
            assert "the red one" in answers(await caller.send("the red one", taskId=task["id"]))
            again = await caller.send("again", contextId=task["contextId"])
            assert (await caller.get(task_of(again)))["contextId"] == task["contextId"]
            # a message without a task id, in a context that waits, has to wait as well
            queued = caller.stream("third", contextId=task["contextId"])
            assert states([await anext(queued)]) == ["submitted"]
            await caller.send("blue", taskId=task_of(again))
            assert states([one async for one in queued])[-1] == "input_required"


@pytest.mark.parametrize("transport", NEW)
async def test_a_message_that_comes_again_answers_no_other_question(transport: str) -> None:
    """A client repeats a message whose reply was lost."""

    def asks_twice(request: Any) -> Any:
        said = [message.text for message in request.messages if message.role == "tool"]
        return say(" and ".join(said)) if len(said) == 2 else call("ask", {}, id=None)

    async with a2a_serving(Runtime([Agent("asker", ScriptedModel(asks_twice), tools=[ask])])) as place:
        async with place.caller(transport, "asker") as caller:
            task_id = task_of(await caller.send("begin"))
            assert states(await caller.send("yes", taskId=task_id, messageId="first"))[-1] == "input_required"
            with pytest.raises(Exception, match="message 'first' has answered a question of this task before"):
                await caller.send("yes", taskId=task_id, messageId="first")
            assert answers(await caller.send("no", taskId=task_id, messageId="second")) == "yes and no"
            with pytest.raises(Exception, match="ended"):
                await caller.send("no", taskId=task_id, messageId="second")


async def test_a_queued_task_can_be_cancelled() -> None:
    gate = Gate()
    async with a2a_serving(Runtime([gate.agent()])) as place, place.caller("JSONRPC", "gated") as caller:
        working = caller.stream("one")
        task = (await anext(working))["task"]
        queued = caller.stream("two", contextId=task["contextId"])
        waiting = (await anext(queued))["task"]["id"]
        assert (await caller.cancel(waiting))["status"]["state"] == "TASK_STATE_CANCELED"
        assert states([one async for one in queued])[-1] == "canceled"
        await caller.cancel(task["id"])


async def test_the_trace_of_the_client_reaches_the_run() -> None:
    found: list[Any] = []

    @tool
    async def look(ctx: ToolContext) -> str:
        """Look."""
        from opentelemetry.trace import get_current_span

        found.append((ctx.context.get("traceparent"), get_current_span().get_span_context().trace_id))
        return "seen"

    parent = f"00-{'ab' * 16}-{'cd' * 8}-01"
    model = ScriptedModel(lambda r: say("ok") if r.messages[-1].role == "tool" else call("look", {}))
    async with a2a_serving(Runtime([Agent("looker", model, tools=[look])])) as place:
        for transport in NEW:
            async with place.caller(transport, "looker", traceparent=parent) as caller:
                await caller.send("go")
    assert found == [(parent, int("ab" * 16, 16))] * 3


async def test_without_the_extra_there_are_no_routes_of_a2a(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retinue.server.app.find_spec", lambda name: None)
    async with serving(Runtime([speaker("hi")])) as site:
        for path in ("/.well-known/agent-card.json", "/a2a/speaker/.well-known/agent-card.json"):
            assert (await site.get(path)).status == 404
        assert (await site.post("/a2a/speaker")).status == 404
        assert await site.start("speaker")


async def test_limits_hold_on_every_transport() -> None:
    gate = Gate()
    async with a2a_serving(Runtime([gate.agent()]), max_streams=1) as place:
        for transport in ALL:
            async with place.caller(transport, "gated") as caller:
                stream = caller.stream("go")
                task_id = task_of([await anext(stream)])
                with pytest.raises(Exception, match=r"429|RESOURCE_EXHAUSTED|streams"):
                    await anext(caller.subscribe(task_id))
                await caller.cancel(task_id)
                assert states([one async for one in stream])[-1] == "canceled"


async def test_a_list_of_tasks_that_wait_has_those_that_wait() -> None:
    async with a2a_serving(Runtime([boss()])) as place, place.caller("JSONRPC", "boss") as caller:
        task_id = task_of(await caller.send("pay"))
        assert [one.id for one in (await caller.list(status="TASK_STATE_INPUT_REQUIRED")).tasks] == [task_id]
        assert (await caller.list(status="TASK_STATE_AUTH_REQUIRED")).total_size == 0
