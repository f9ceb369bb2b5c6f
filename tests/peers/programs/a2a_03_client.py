"""A client of a2a-sdk 0.3: python old_client.py <url> <token>. Prints a line for each scenario."""

import asyncio
import sys
from contextlib import suppress
from uuid import uuid4

import httpx
from a2a.client import A2ACardResolver, ClientConfig, ClientFactory
from a2a.types import DataPart, Message, Part, Role, TaskIdParams, TaskQueryParams, TextPart, TransportProtocol

url, token = sys.argv[1:]


def message(part, **ids):
    return Message(role=Role.user, message_id=str(uuid4()), parts=[Part(root=part)], **ids)


async def connect(http, agent, transport):
    card = await A2ACardResolver(http, f"{url}/a2a/{agent}").get_agent_card()
    return ClientFactory(ClientConfig(httpx_client=http, supported_transports=[transport])).create(card)


async def follow(stream, seen=None):
    text, task = "", None
    async for task, update in stream:
        if update is not None and update.kind == "artifact-update" and update.artifact.artifact_id == "answer":
            piece = "".join(part.root.text for part in update.artifact.parts if part.root.kind == "text")
            text = text + piece if update.append else piece
        if seen is not None:
            seen(task)
    return text, task


async def stream(http, transport):
    text, task = await follow((await connect(http, "speaker", transport)).send_message(message(TextPart(text="hi"))))
    return f"{text} {task.status.state.value}"


async def question(http, transport):
    client = await connect(http, "payer", transport)
    _, task = await follow(client.send_message(message(TextPart(text="pay"))))
    ids = {"task_id": task.id, "context_id": task.context_id}
    text, _ = await follow(client.send_message(message(DataPart(data={"approved": True}), **ids)))
    return f"{task.status.state.value} then {text}"


async def login(http, transport):
    client = await connect(http, "portal", transport)
    _, task = await follow(client.send_message(message(TextPart(text="login Which one?"))))
    ids = {"task_id": task.id, "context_id": task.context_id}
    text, _ = await follow(client.send_message(message(TextPart(text="the red one"), **ids)))
    return f"{task.status.state.value} then {text}"


async def cancel(http, transport):
    client, asked = await connect(http, "waiter", transport), []

    def seen(task):
        if not asked:
            asked.append(asyncio.create_task(client.cancel_task(TaskIdParams(id=task.id))))

    _, task = await follow(client.send_message(message(TextPart(text=f"never_{uuid4()}"))), seen)
    return task.status.state.value


async def dies(http, transport):
    client, name, ids = await connect(http, "waiter", transport), f"file_{uuid4()}", []

    def seen(task):
        if not ids and task.status.state.value == "working":
            ids.append(task.id)
            print(f"waits: {name}", flush=True)

    with suppress(Exception):  # the stream breaks
        await follow(client.send_message(message(TextPart(text=name))), seen)
    while True:
        with suppress(Exception):  # nobody listens yet
            task = await client.get_task(TaskQueryParams(id=ids[0]))
            if task.status.state.value != "working":
                return task.status.state.value
        await asyncio.sleep(0.1)


async def two(http, transport):
    return ", ".join(await asyncio.gather(stream(http, transport), stream(http, transport)))


async def main():
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {token}"}, timeout=30) as http:
        for transport in (TransportProtocol.jsonrpc, TransportProtocol.http_json):
            for run in (stream, question, login, cancel, dies, two):
                try:
                    found = await run(http, transport)
                except Exception as exc:
                    found = f"FAILED {type(exc).__name__}: {exc}"
                print(f"{transport.value} {run.__name__}: {found}", flush=True)


asyncio.run(main())
