"""Tasks beyond one transport: users, malformed requests, artifacts, messages, cards, notifications, traces."""

from __future__ import annotations

import base64
import json
import signal
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from a2a.types import a2a_pb2 as pb
from aiohttp import ClientSession, web
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from google.protobuf.json_format import ParseDict

from retinue import Agent, DataPart, FilePart, PartChunk, Permissions, Runtime, StateCommand, TextChunk, tool
from retinue.models import Retrying, TurnEnd
from retinue.plugins import hook
from retinue.server import A2AOptions, StoredTokens, TokenStore, a2a_push
from retinue.server.a2a_push import StoredPush
from retinue.server.auth import OneToken
from retinue.storage.sql import SqlStore
from retinue.testing import ScriptedModel, call, fail, say
from retinue.tools import ResumeMode, SuspendTicket, ToolContext, ToolResult
from retinue.wire.a2a_budget import BUDGET

from ..runners import AppRunner
from ..server.agents import Gate, boss, pay, speaker
from ..server.processes import TOKEN as SERVED
from ..server.processes import served
from ..server.serving import TOKEN, serving
from ..waiting import until
from .calling import ALL, NEW, A2AError, a2a_serving, answers, calling, states, task_of, text_of


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
            (rpc("SendMessage", **message(taskId="nothing")), -32001),
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


# --- push notifications


@asynccontextmanager
async def webhook(*statuses: int) -> AsyncIterator[tuple[str, list[tuple[Any, Any]]]]:
    """A server that notes what is posted to it, and answers with these statuses first."""
    left, got = list(statuses), list[tuple[Any, Any]]()

    async def take(request: web.Request) -> web.Response:
        got.append((await request.json(), request.headers))
        return web.Response(status=left.pop(0) if left else 200)

    app = web.Application()
    app.router.add_post("/hook", take)
    runner = AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/hook", got  # type: ignore[union-attr]
    finally:
        await runner.cleanup()


def ended(got: list[tuple[Any, Any]]) -> bool:
    return any(body.get("statusUpdate", {}).get("status", {}).get("state") == "TASK_STATE_COMPLETED" for body, _ in got)


@pytest.mark.parametrize("transport", NEW)
@pytest.mark.parametrize("database", [True, False])
async def test_notifications_are_sent_again_until_they_are_taken(
    transport: str, database: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(a2a_push, "PAUSES", (0.0,) * 5)
    agents = [speaker("Good ", "day")]
    runtime = Runtime.open(f"sqlite:///{tmp_path}/a.db", agents) if database else Runtime(agents)
    async with webhook(503, 500, 429) as (url, got), a2a_serving(runtime) as place:
        async with place.caller(transport, "speaker", streaming=False) as caller:
            config = {
                "id": "c1",
                "url": url,
                "token": "known",
                "authentication": {"scheme": "Bearer", "credentials": "k"},
            }
            updates = await caller.send("hello", configuration={"taskPushNotificationConfig": config})
            await until(lambda: ended(got))
            task_id = task_of(updates)
            bodies = [body for body, _ in got[3:]]
            kinds = [next(iter(body)) for body in bodies]
            assert kinds == ["statusUpdate", "artifactUpdate", "statusUpdate"]
            assert text_of(bodies[1]["artifactUpdate"]["artifact"]) == "Good day"
            assert [body for body, _ in got[:3]] == [bodies[0]] * 3
            headers = got[-1][1]
            assert (headers["authorization"], headers["x-a2a-notification-token"]) == ("Bearer k", "known")

            requests = {"task_id": task_id, "id": "c1"}
            known = await caller.client.get_task_push_notification_config(
                pb.GetTaskPushNotificationConfigRequest(**requests), context=caller.context
            )
            assert known.url == url
            listing = pb.ListTaskPushNotificationConfigsRequest(task_id=task_id)
            listed = await caller.client.list_task_push_notification_configs(listing, context=caller.context)
            assert [one.id for one in listed.configs] == ["c1"]
            if database:  # the address goes with the run
                assert await runtime.store.delete_thread((await caller.get(task_id))["contextId"])
                assert isinstance(runtime.store, SqlStore)
                assert await StoredPush(runtime.store).of(task_id) == []
                return
            for _ in range(2):
                await caller.client.delete_task_push_notification_config(
                    pb.DeleteTaskPushNotificationConfigRequest(**requests), context=caller.context
                )
            with pytest.raises(A2AError):
                await caller.client.get_task_push_notification_config(
                    pb.GetTaskPushNotificationConfigRequest(**requests), context=caller.context
                )


async def test_nothing_is_sent_to_private_addresses_unless_allowed() -> None:
    async with webhook() as (url, got), a2a_serving(Runtime([speaker("hi")]), a2a=A2AOptions()) as place:
        async with place.caller("JSONRPC", "speaker", streaming=False) as caller:
            for bad in (
                url, url.replace("127.0.0.1", "localhost"), "http://[::1]/x", "http://10.0.0.1/x", "file:///etc/passwd",
                "http://169.254.169.254/", "http://[::ffff:127.0.0.1]/", "ftp://example.com", "http://user@example.com", "x",
            ):  # fmt: skip
                with pytest.raises(A2AError):
                    await caller.send("hello", configuration={"taskPushNotificationConfig": {"url": bad}})
            assert await place.service.runtime.store.list_runs() == []
        assert got == []


async def test_a_name_that_leads_to_this_machine_is_refused_when_it_is_resolved() -> None:
    from retinue.server.a2a_push import _Resolver

    with pytest.raises(OSError, match="no address"):
        await _Resolver(private=False).resolve("localhost", 80)
    assert await _Resolver(private=True).resolve("localhost", 80)


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


async def test_a_task_of_another_process_is_pushed_on_after_its_death(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/app.db"
    async with webhook() as (address, got):
        options = ("--db", url, "--push-private")
        async with served("tests.server.served:runtime", *options, folder=tmp_path) as first:
            async with calling(first.site.url, "JSONRPC", "waiter", SERVED, streaming=False) as caller:
                config = {"taskPushNotificationConfig": {"url": address}, "returnImmediately": True}
                await caller.send("it", configuration=config)
            await until(lambda: (tmp_path / "it.pids").exists() and got)
            await first.end(signal.SIGKILL)
        with closing(sqlite3.connect(tmp_path / "app.db")) as database:  # as if the hold of the dead were over
            database.execute("UPDATE push_targets SET held_until = 0")
            database.commit()
        async with served("tests.server.served:runtime", *options, folder=tmp_path):
            (tmp_path / "it").touch()
            await until(lambda: ended(got))
        kept = [body["statusUpdate"]["status"]["state"] for body, _ in got if "statusUpdate" in body]
        assert list(dict.fromkeys(kept)) == ["TASK_STATE_WORKING", "TASK_STATE_COMPLETED"]  # the first may come twice


async def test_a_list_of_tasks_that_wait_has_those_that_wait() -> None:
    async with a2a_serving(Runtime([boss()])) as place, place.caller("JSONRPC", "boss") as caller:
        task_id = task_of(await caller.send("pay"))
        assert [one.id for one in (await caller.list(status="TASK_STATE_INPUT_REQUIRED")).tasks] == [task_id]
        assert (await caller.list(status="TASK_STATE_AUTH_REQUIRED")).total_size == 0
