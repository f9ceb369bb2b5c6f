"""A server process: python -m tests.client.node <folder> <port>

Its database is in the folder. It prints `ready` once it listens. Its agent says some words, waits until the folder has a
file `go`, and says more.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import uvicorn

from retinue import Agent, Runtime, tool
from retinue.server import create_app
from retinue.testing import ScriptedModel, call, say
from tests.waiting import until

TOKEN = "token-of-the-node"
WORDS = [f"w{number} " for number in range(200)]
LEASE = 1.0


def digger(folder: Path) -> Agent:
    @tool(idempotent=True)
    async def dig() -> str:
        """Dig."""
        await until((folder / "go").exists)
        return "dug"

    def turn(request: Any) -> Any:
        words = say("".join(WORDS), chunks=WORDS)
        return words if request.messages[-1].role == "tool" else [words, call("dig", {}, id="dig_1")]

    return Agent("digger", ScriptedModel(turn), tools=[dig])


async def serve(folder: Path, port: int) -> None:
    async with Runtime.open(f"sqlite:///{folder}/node.db", [digger(folder)], lease=LEASE) as runtime:
        config = uvicorn.Config(create_app(runtime, auth=TOKEN), port=port, log_level="warning", lifespan="off")
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        await until(lambda: server.started or serving.done())
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await serving


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2])))
