"""A server process for tests with several: python -m tests.remote.node <folder> <port> <role> [<url of the next server>]

Its database and its workspace are in the folder. It prints `ready` once it listens. A tool `dig` notes in the folder that
it runs, and waits there for a file `go`.
"""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import uvicorn

from retinue import Agent, HarnessAgent, Permissions, Runtime, SubagentDeclaration, tool
from retinue.backends import http_client, remote
from retinue.server import create_app
from retinue.testing import ScriptedModel, call, say
from tests.waiting import until

TOKEN = "token-of-the-nodes"
LEASE = 2.0


def words(text: str) -> Any:
    return say(text, chunks=re.findall(r"\S+\s*", text))


def since_user(request: Any) -> list[Any]:
    """The results of tools since the last message of the user."""
    last = max(place for place, message in enumerate(request.messages) if message.role == "user")
    return [message for message in request.messages[last:] if message.role == "tool"]


def researcher(folder: Path) -> Agent:
    """Digs three times, has a helper look, which may need an approval, and reports."""

    @tool(idempotent=True)
    async def dig(n: int) -> str:
        """Dig."""
        (folder / f"digging_{n}").touch()
        await until((folder / "go").exists)
        return f"dug {n}"

    @tool(idempotent=True)
    async def look(where: str) -> str:
        """Look."""
        return f"nothing in {where}"

    def help_out(request: Any) -> Any:
        done = since_user(request)
        return words("I have looked everywhere.") if done else call("look", {"where": "the attic"}, id="look_1")

    def turn(request: Any) -> Any:
        done, said = since_user(request), [m.text for m in request.messages if m.role == "user"]
        if len(done) < 3:
            return [words(f"I will dig for the {len(done)}. time now."), call("dig", {"n": len(done)})]
        if len(done) == 3:
            asked = "asker" if "ask" in said[-1] else "helper"
            return call("task", {"subagent_type": asked, "description": "Look."})
        return words(f"Report number {len(said)}: there is nothing at all in the ground.")

    helper = Agent("helper", ScriptedModel(help_out), tools=[look], description="Looks.")
    plugins = [Permissions(ask=["look"])]
    asker = Agent("asker", ScriptedModel(help_out), tools=[look], plugins=plugins, description="Asks, then looks.")
    return Agent("researcher", ScriptedModel(turn), tools=[dig], subagents=[helper, asker], description="Researches.")


def boss(name: str, folder: Path, url: str, below: str) -> HarnessAgent:
    """Has the agent below it, on the next server, do what the user wants, twice if that is wanted."""

    def turn(request: Any) -> Any:
        done = since_user(request)
        wish = next(message.text for message in reversed(request.messages) if message.role == "user")
        if not done:
            return call("agent_spawn", {"agent_id": below, "task": wish, "label": "r", "timeout_seconds": 600})
        if len(done) == 1 and "twice" in wish:
            return call("agent_send", {"label": "r", "message": wish, "timeout_seconds": 600})
        return say(f"{name}: {done[-1].text}")

    declared = SubagentDeclaration(below, "Works elsewhere", url=url, headers={"authorization": f"Bearer {TOKEN}"})
    return HarnessAgent(name, ScriptedModel(turn), workspace=folder, subagents=[declared], general_purpose=False)


def agents_of(role: str, folder: Path, url: str) -> list[Agent]:
    if role == "researcher":
        return [researcher(folder)]
    below = {"boss": "researcher", "chief": "boss"}[role]
    return [boss(role, folder / "files", url, below)]


async def serve(folder: Path, port: int, role: str, url: str = "") -> None:
    remote.SUBMIT_PATIENCE = remote.CONNECT_PATIENCE = 100.0  # a server that is restarted may take long
    http_client.SILENCE_SECONDS = 1.0
    agents = agents_of(role, folder, url)
    async with Runtime.open(f"sqlite:///{folder}/node.db", agents, lease=LEASE, on_close="leave") as runtime:
        config = uvicorn.Config(create_app(runtime, auth=TOKEN), port=port, log_level="warning", lifespan="off")
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        await until(lambda: server.started or serving.done())
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await serving


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))
