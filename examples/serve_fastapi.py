"""Agents in a FastAPI application that has routes, users and a lifespan of its own.

pip install ".[server]" fastapi
python examples/serve_fastapi.py        serves on http://127.0.0.1:8000
python examples/serve_fastapi.py try    serves on a free port, starts one run, shows its events and ends
"""

import asyncio
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager

import aiohttp
import uvicorn
from fastapi import FastAPI

from retinue import Agent, Runtime
from retinue.server import User, create_app
from retinue.testing import ScriptedModel, say

# A script stands in for a model, so that the example runs without a key.
greeter = Agent("greeter", ScriptedModel(lambda request: say("Good morning.", chunks=["Good ", "morning."])))
runtime = Runtime.open("memory:", [greeter])  # with "sqlite:///app.db" runs survive a restart

USERS = {"token-of-ann": "ann", "token-of-bob": "bob"}


class AppUsers:
    """The users of the application. Nobody sees the runs of another."""

    async def user_of(self, headers: Mapping[str, str]) -> User | None:
        name = USERS.get(headers.get("authorization", "").removeprefix("Bearer "))
        return None if name is None else User(name, frozenset({"read", "run", "answer"}))


agents = create_app(runtime, auth=AppUsers(), rate=50, max_streams=20)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
    # Starlette does not run the lifespan of an application that is mounted in another: enter it here.
    async with runtime, agents.router.lifespan_context(agents):
        yield


app = FastAPI(lifespan=lifespan)
app.mount("/agents", agents)


@app.get("/")
async def home() -> dict[str, str]:
    return {"agents": "/agents/api/v1", "description": "/agents/openapi.json"}


async def try_it() -> None:
    # Without this time, uvicorn waits at its end for streams that their readers keep open.
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=5))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    headers = {"authorization": "Bearer token-of-ann"}
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", headers=headers) as client:
        async with client.post("/agents/api/v1/runs", json={"agent": "greeter", "input": "Hello"}) as answer:
            run = await answer.json()
        async with client.get(f"/agents/api/v1/runs/{run['run_id']}/events?kinds=text_delta,run_finished") as events:
            print((await events.text()).replace(run["run_id"], "run_1"))
        bob = {"authorization": "Bearer token-of-bob"}
        async with client.get(f"/agents/api/v1/runs/{run['run_id']}", headers=bob) as answer:
            print("bob:", answer.status, (await answer.json())["detail"])
    server.should_exit = True
    await serving


if __name__ == "__main__":
    if "try" in sys.argv[1:]:
        asyncio.run(try_it())
    else:
        uvicorn.run(app, timeout_graceful_shutdown=5)
