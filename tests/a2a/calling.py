"""A server with A2A on all transports, and the clients of the official SDK."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from a2a.client import ClientCallContext, ClientConfig
from a2a.client.card_resolver import A2ACardResolver
from a2a.client.client_factory import ClientFactory
from a2a.types import a2a_pb2 as pb
from a2a.utils.errors import A2AError
from google.protobuf.json_format import MessageToDict, ParseDict
from grpc.aio import insecure_channel

from retinue import Runtime
from retinue.server import A2AOptions, create_app
from retinue.server.a2a_grpc import start_grpc

from ..server.serving import TOKEN, Site, asking, listening

NEW = ("JSONRPC", "HTTP+JSON", "GRPC")
ALL = (*NEW, "JSONRPC 0.3", "HTTP+JSON 0.3")


class Caller:
    """A client of one agent on one transport. Whatever it returns is JSON in the shape of version 1.0."""

    def __init__(self, client: Any, token: str | None, **headers: str) -> None:
        self.client = client
        known = {"authorization": f"Bearer {token}"} if token else {}
        self.context = ClientCallContext(service_parameters={**known, **headers})

    async def stream(self, *parts: Any, **fields: Any) -> AsyncIterator[dict[str, Any]]:
        configuration = ParseDict(fields.pop("configuration", {}), pb.SendMessageConfiguration())
        body = {"messageId": "m1", "role": "ROLE_USER", "parts": [part_of(part) for part in parts], **fields}
        request = pb.SendMessageRequest(message=ParseDict(body, pb.Message()), configuration=configuration)
        async for update in self.client.send_message(request, context=self.context):
            yield MessageToDict(update)

    async def send(self, *parts: Any, **fields: Any) -> list[dict[str, Any]]:
        return [update async for update in self.stream(*parts, **fields)]

    async def get(self, task_id: str) -> dict[str, Any]:
        return MessageToDict(await self.client.get_task(pb.GetTaskRequest(id=task_id), context=self.context))

    async def cancel(self, task_id: str) -> dict[str, Any]:
        return MessageToDict(await self.client.cancel_task(pb.CancelTaskRequest(id=task_id), context=self.context))

    async def list(self, **fields: Any) -> pb.ListTasksResponse:
        return await self.client.list_tasks(ParseDict(fields, pb.ListTasksRequest()), context=self.context)

    async def subscribe(self, task_id: str) -> AsyncIterator[dict[str, Any]]:
        async for update in self.client.subscribe(pb.SubscribeToTaskRequest(id=task_id), context=self.context):
            yield MessageToDict(update)


def part_of(given: Any) -> dict[str, Any]:
    return {"text": given} if isinstance(given, str) else {"data": given}


def states(updates: list[dict[str, Any]]) -> list[str]:
    """The states that a stream went through, each once in a row."""
    found: list[str] = []
    for update in updates:
        status = update.get("task", update.get("statusUpdate", {})).get("status")
        if status is not None and status["state"] not in found[-1:]:
            found.append(status["state"])
    return [state.removeprefix("TASK_STATE_").lower() for state in found]


def answers(updates: list[dict[str, Any]], name: str = "answer") -> str:
    """The text of an artifact, put together as the protocol says."""
    text = ""
    for update in updates:
        if "task" in update:
            text = "".join(text_of(one) for one in update["task"].get("artifacts", ()) if one["artifactId"] == name)
        elif "artifactUpdate" in update and update["artifactUpdate"]["artifact"]["artifactId"] == name:
            body = update["artifactUpdate"]
            text = (text if body.get("append") else "") + text_of(body["artifact"])
    return text


def text_of(one: dict[str, Any]) -> str:
    return "".join(part.get("text", "") for part in one["parts"])


def task_of(updates: list[dict[str, Any]]) -> str:
    return next(one["task"]["id"] if "task" in one else one["statusUpdate"]["taskId"] for one in updates)


class Place:
    """A server, by its addresses."""

    def __init__(self, url: str, site: Site, app: Any) -> None:
        self.url, self.site, self.service, self.tasks = url, site, app.state.service, app.state.a2a

    @asynccontextmanager
    async def caller(
        self, transport: str, agent: str, token: str | None = TOKEN, *, streaming: bool = True, **headers: str
    ) -> AsyncIterator[Caller]:
        async with calling(self.url, transport, agent, token, streaming=streaming, **headers) as caller:
            yield caller


@asynccontextmanager
async def calling(
    url: str, transport: str, agent: str, token: str | None, *, streaming: bool = True, **headers: str
) -> AsyncIterator[Caller]:
    binding, _, version = transport.partition(" ")
    async with httpx.AsyncClient(timeout=60) as http:
        card = await A2ACardResolver(http, f"{url}/a2a/{agent}").get_agent_card()
        wanted = [
            one
            for one in card.supported_interfaces
            if one.protocol_binding == binding and one.protocol_version == (version or "1.0")
        ]
        del card.supported_interfaces[:]
        card.supported_interfaces.extend(wanted)
        config = ClientConfig(
            streaming=streaming,
            httpx_client=http,
            grpc_channel_factory=insecure_channel,
            supported_protocol_bindings=[binding],
        )
        client = ClientFactory(config).create(card)
        try:
            yield Caller(client, token, **headers)
        finally:
            await client.close()


@asynccontextmanager
async def a2a_serving(runtime: Runtime, **options: Any) -> AsyncIterator[Place]:
    """Serve a runtime over HTTP and gRPC; it is entered and closed here."""
    async with runtime:
        app = create_app(runtime, **{"auth": TOKEN, "a2a": A2AOptions(push_private=True), **options})
        async with listening(app) as url, asking(url, TOKEN) as site:
            server = await start_grpc(app, "127.0.0.1", 0)
            try:
                yield Place(url, site, app)
            finally:
                app.state.service.close()
                await server.stop(None)


__all__ = ["ALL", "NEW", "A2AError", "Caller", "Place", "a2a_serving", "answers", "calling", "states", "task_of"]
