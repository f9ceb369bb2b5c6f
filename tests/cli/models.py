"""Models for the command line's tests, as the provider "test"."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

from retinue import CallChunk, ModelRequest, TextChunk, TurnEnd
from retinue.models import ModelChunk, ReasoningChunk

RUDE = "\x1b[2J\x1b]0;pwned\x07[bold red]not bold[/] \u202eback\x9b31m"


class Echo:
    """Says its instructions."""

    name = "test:echo"

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        yield TextChunk(request.messages[0].text)
        yield TurnEnd()


class Rude:
    """Thinks, calls and says what a terminal should never be told."""

    name = "test:rude"

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        yield ReasoningChunk(RUDE)
        if not any(message.role == "tool" for message in request.messages):
            yield CallChunk(0, None, "grep_files", '{"pattern": "."}')
            yield CallChunk(1, None, "list_files", "{}")
            yield CallChunk(2, None, "read_file", '{"path": "\\u001b[2Jx"}')
            yield CallChunk(3, None, "\x1b]0;pwned\x07", "{}")
        else:
            yield TextChunk(RUDE)
        yield TurnEnd()


class Broken:
    name = "test:broken"

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        yield TextChunk("So far ")
        raise RuntimeError("the line went \x1b[31mdead")


class Slow:
    """Lists the files, begins to speak, and then takes an hour."""

    name = "test:slow"

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        if not any(message.role == "tool" for message in request.messages):
            yield CallChunk(0, None, "list_files", "{}")
        else:
            yield TextChunk("I begin. ")
            await asyncio.sleep(3600)
        yield TurnEnd()


class Stubborn:
    """Does not let itself be cancelled."""

    name = "test:stubborn"

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        yield TextChunk("I begin. ")
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                continue


class Delegating:
    """Has a sub-agent work in the background, which fails or, where the task says so, takes an hour."""

    name = "test:delegating"

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        said = request.messages[-1]
        if "Subagent Context" in request.messages[0].text:
            if "slowly" not in said.text:
                raise RuntimeError("the sub-agent broke")
            await asyncio.sleep(3600)
        elif said.role == "tool":
            yield TextChunk("It works on it.")
        else:
            args = {"agent_id": "general-purpose", "task": said.text, "timeout_seconds": 0}
            yield CallChunk(0, None, "agent_spawn", json.dumps(args))
        yield TurnEnd()


class Shell:
    """Runs one command."""

    name = "test:shell"

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        if not any(message.role == "tool" for message in request.messages):
            yield CallChunk(0, None, "shell", '{"command": "echo hello from here"}')
        else:
            yield TextChunk("Done.")
        yield TurnEnd()


class Writing:
    """Writes two files: itself, or through a sub-agent, awaited or in the background."""

    name = "test:writing"

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        said = request.messages[-1]
        if said.role == "tool":
            yield TextChunk(f"Told: {said.text}")
        elif "delegate" in said.text:
            seconds = 0 if "background" in said.text else 60
            args = {"agent_id": "general-purpose", "task": "write", "timeout_seconds": seconds}
            yield CallChunk(0, None, "agent_spawn", json.dumps(args))
        else:
            yield CallChunk(0, None, "write_file", json.dumps({"path": "made/a.txt", "content": f"1\n{RUDE}\n3"}))
            yield CallChunk(1, None, "write_file", json.dumps({"path": "b.txt", "content": "2"}))
        yield TurnEnd()


MODELS = {
    model.name.partition(":")[2]: model for model in (Echo, Rude, Broken, Slow, Stubborn, Delegating, Shell, Writing)
}


def make_model(name: str) -> Echo | Rude | Broken | Slow | Stubborn | Delegating | Shell | Writing:
    return MODELS[name]()
