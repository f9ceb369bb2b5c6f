"""Malformed requests over A2A, on every transport: each is a mistake of the client, none a failure of the server."""

from __future__ import annotations

import json
import random
from typing import Any

import grpc
import pytest
from a2a.compat.v0_3 import a2a_v0_3_pb2 as old
from a2a.types import a2a_pb2 as new
from google.protobuf.json_format import ParseDict

from retinue import Runtime

from ..server.agents import boss, speaker
from ..server.serving import TOKEN
from .calling import Place, a2a_serving, task_of

VALUES: tuple[Any, ...] = (
    None, True, -1, 2**40, 2**70, 1e300, float("nan"), "x", "", "\0", "\ud800", "a" * 3000, [], {}, [1], [[]], {"a": 1},
)  # fmt: skip
MESSAGE = {"messageId": "m", "contextId": "c", "metadata": {"a": 1}, "referenceTaskIds": ["x"], "extensions": ["e"]}
ADDRESS = {"id": "p", "url": "http://127.0.0.1:9/", "token": "t"}
SEND = {
    "message": {**MESSAGE, "role": "ROLE_USER", "parts": [{"text": "x"}, {"data": {"a": 1}}, {"raw": "aa"}]},
    "configuration": {
        "historyLength": 1,
        "returnImmediately": True,
        "taskPushNotificationConfig": {**ADDRESS, "authentication": {"scheme": "Bearer", "credentials": "k"}},
    },
}
OLD_SEND = {
    "message": {
        **MESSAGE,
        "kind": "message",
        "role": "user",
        "parts": [
            {"kind": "text", "text": "x"},
            {"kind": "data", "data": {"a": 1}},
            {"kind": "file", "file": {"bytes": "aa"}},
        ],
    },
    "configuration": {
        "historyLength": 1,
        "blocking": False,
        "pushNotificationConfig": {**ADDRESS, "authentication": {"schemes": ["Bearer"], "credentials": "k"}},
    },
}
OLD_REST = {
    "message": {**MESSAGE, "role": "ROLE_USER", "content": [{"text": "x"}, {"data": {"data": {"a": 1}}}]},
    "configuration": {"historyLength": 1, "blocking": False, "pushNotification": ADDRESS},
}


def spoil(value: Any, rng: random.Random) -> Any:
    """Return a JSON value with one of its parts replaced or left out."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        name = rng.choice(list(value))
        return {
            key: spoil(one, rng) if key == name else one
            for key, one in value.items()
            if key != name or rng.random() < 0.9
        }
    if isinstance(value, list) and value and rng.random() < 0.85:
        return [spoil(value[0], rng), *value[1:]]
    return rng.choice(VALUES)


async def waiting_task(place: Place) -> str:
    async with place.caller("JSONRPC", "boss") as caller:
        return task_of(await caller.send("pay"))


@pytest.mark.parametrize("transport", ["JSONRPC", "HTTP+JSON"])
async def test_no_spoiled_value_is_a_failure_of_the_server(transport: str) -> None:
    rng = random.Random(11)
    async with a2a_serving(Runtime([speaker("hi"), boss()])) as place:
        task = await waiting_task(place)
        known = {"id": task, "historyLength": 1}
        address = {"taskId": task, "pushNotificationConfig": OLD_SEND["configuration"]["pushNotificationConfig"]}
        calls = [
            *[(name, SEND) for name in ("SendMessage", "SendStreamingMessage")],
            *[(name, OLD_SEND) for name in ("message/send", "message/stream")],
            *[(name, known) for name in ("GetTask", "tasks/get", "tasks/pushNotificationConfig/list")],
            *[(name, {"id": "x"}) for name in ("CancelTask", "SubscribeToTask", "tasks/resubscribe")],
            ("ListTasks", {"contextId": "c", "pageSize": 1, "statusTimestampAfter": "2020-01-01T00:00:00Z"}),
            ("CreateTaskPushNotificationConfig", {"taskId": task, **ADDRESS}),
            ("tasks/pushNotificationConfig/set", address),
        ]
        posts = [("/v1/message:send", OLD_REST), ("/v1/message:stream", OLD_REST), ("/message:send", SEND)]
        pages = [
            f"/v1/tasks/{task}",
            f"/tasks/{task}",
            "/tasks",
            "/v1/tasks/%00",
            f"/v1/tasks/{task}/pushNotificationConfigs/%00",
        ]
        names = ["historyLength", "pageSize", "contextId", "status", "pageToken", "statusTimestampAfter"]
        for _ in range(150):
            headers = {"content-type": "application/json"}
            if transport == "JSONRPC":
                method, params = rng.choice(calls)
                sent = {"jsonrpc": "2.0", "id": 1, "method": method, "params": spoil(params, rng)}
                agent = "speaker" if "message" in params else "boss"
                answer = await place.site.ask("POST", f"/a2a/{agent}", data=json.dumps(sent), headers=headers)
                said = answer.body if isinstance(answer.body, str) else json.dumps(answer.body)
                assert (answer.status, "-32603" in said) == (200, False), (sent, said)
                continue
            if rng.random() < 0.5:
                path, body = rng.choice(posts)
                sent = spoil(body, rng)
                answer = await place.site.ask("POST", f"/a2a/speaker{path}", data=json.dumps(sent), headers=headers)
            else:
                value = rng.choice(("true", "-1", str(2**40), "", "\0", "1e9", "9" * 5000))
                sent = {rng.choice(names): value}
                answer = await place.site.get(f"/a2a/boss{rng.choice(pages)}", params=sent)
            assert answer.status < 500, (sent, answer)


async def test_an_error_repeats_what_was_sent_as_text_and_not_at_length() -> None:
    """Half a surrogate pair has no UTF-8, and a client gets no megabytes back."""
    async with a2a_serving(Runtime([speaker("hi")])) as place:
        for path, field in (("/message:send", "parts"), ("/v1/message:send", "content")):
            for value, shown in (("\ud800", "\ufffd"), ("x" * 100_000, "xxx")):
                answer = await place.site.post(f"/a2a/speaker{path}", {"message": {"messageId": "m", field: value}})
                said = answer.body["error"]["message"]
                assert (answer.status, shown in said, len(said) < 2000) == (400, True, True), path


def grpc_requests(task: str) -> list[tuple[str, Any]]:
    first = ParseDict({"tenant": "boss", **SEND}, new.SendMessageRequest())
    wrong = [first]
    for value in (float("nan"), float("inf")):
        made = new.SendMessageRequest()
        made.CopyFrom(first)
        made.message.parts[1].data.number_value = value
        wrong.append(made)
    made = new.SendMessageRequest()
    made.CopyFrom(first)
    made.message.metadata.update({"a": float("nan")})
    wrong.append(made)
    then = old.SendMessageRequest()
    then.request.message_id, then.request.role = "m", 1  # pyright: ignore[reportAttributeAccessIssue]
    then.request.content.add().data.data.update({"a": float("nan")})
    empty = old.SendMessageRequest()
    empty.request.message_id = "m"
    empty.request.content.add()
    return [
        *[("SendMessage", one) for one in (*wrong[1:], then, empty)],
        ("GetTask", new.GetTaskRequest(id="a\0b", tenant="boss")),
        ("GetTask", new.GetTaskRequest(id=task, history_length=-5, tenant="boss")),
        ("GetTask", old.GetTaskRequest(name=f"tasks/{task}", history_length=-5)),
        ("ListTasks", new.ListTasksRequest(tenant="boss", status=77)),  # pyright: ignore[reportArgumentType]
        ("ListTasks", ParseDict({"tenant": "boss", "pageToken": "x"}, new.ListTasksRequest())),
    ]


async def test_over_grpc_a_wrong_request_is_an_invalid_argument() -> None:
    rng, usual = random.Random(11), {"INVALID_ARGUMENT", "NOT_FOUND", "OK"}
    async with a2a_serving(Runtime([boss()])) as place:
        address = f"127.0.0.1:{place.tasks.cards.grpc_port}"
        async with grpc.aio.insecure_channel(address) as channel:

            async def code_of(name: str, request: Any, data: bytes) -> str:
                service = request.DESCRIPTOR.file.services_by_name["A2AService"].full_name
                ask: Any = channel.unary_unary(f"/{service}/{name}")
                try:
                    await ask(data, metadata=(("authorization", f"Bearer {TOKEN}"),))
                except grpc.aio.AioRpcError as exc:
                    return exc.code().name
                return "OK"

            requests = grpc_requests(await waiting_task(place))
            for name, request in requests:
                assert await code_of(name, request, request.SerializeToString()) == "INVALID_ARGUMENT", request
            assert len(await place.service.runtime.store.list_runs()) == 1
            for _ in range(150):
                name, request = rng.choice(requests)
                data = bytearray(request.SerializeToString())
                place_in = rng.randrange(len(data))
                data[place_in : place_in + 1] = rng.randbytes(rng.randrange(3))
                assert await code_of(name, request, bytes(data)) in usual, bytes(data)
