"""An agent that follows the contract of the A2A test kit: the id of a message says what becomes of it.

retinue serve tests.a2a.tck_agent:agent --no-auth --port 9999 --push-private
"""

from __future__ import annotations

import asyncio
import base64

from retinue import Agent, Block, DataPart, FilePart, HookContext, ModelRequest, PartChunk, StateCommand, tool
from retinue.models import CallChunk, TextChunk, TurnEnd
from retinue.plugins import BeforeToolContext, hook
from retinue.tools import ResumeMode, SuspendTicket, ToolContext, ToolResult

HELLO = "Hello from TCK"
TEXTS = {
    "tck-artifact-text": "Generated text content",
    "tck-stream-001": "Stream hello from TCK",
    "tck-stream-003": "Stream task lifecycle",
    "tck-stream-ordering-001": "Ordered output",
    "tck-stream-artifact-text": "Streamed text content",
    "tck-message-response": "Direct message response",
}
FILE = FilePart(data=base64.b64encode(b"content").decode(), media_type="text/plain", name="output.txt")
LINK = FilePart(url="https://example.com/output.txt", media_type="text/plain", name="output.txt")
PARTS = {
    "tck-artifact-file-url": LINK,
    "tck-artifact-file": FILE,
    "tck-stream-artifact-file": FILE,
    "tck-artifact-data": DataPart({"key": "value", "count": 42}),
}
LONG = 5.0
"""Seconds for which the kit wants a task to be at work."""


def asked(messages) -> str:
    """Return the id of the last message of the user."""
    return next((message.id or "" for message in reversed(messages) if message.role == "user"), "")


def chosen(table, name: str):
    return next((table[prefix] for prefix in sorted(table, key=len, reverse=True) if name.startswith(prefix)), None)


class Kit:
    """A model that does what the id of the message says."""

    name = "tck:rules"

    async def stream(self, request: ModelRequest):
        name = asked(request.messages)
        last = request.messages[-1]
        if last.role == "tool" and "history message" not in last.text:
            yield TextChunk(HELLO)
        elif name.startswith("tck-input-required"):
            yield CallChunk(index=0, id=f"ask{len(request.messages)}", name="ask", arguments="{}")
        elif name.startswith("tck-reject-task"):
            yield CallChunk(index=0, id="reject", name="reject", arguments="{}")
        elif (part := chosen(PARTS, name)) is not None:
            yield PartChunk(part)
        elif name.startswith("tck-stream-artifact-chunked"):
            yield TextChunk("chunk-1 ")
            yield TextChunk("chunk-2")
        elif name.startswith("tck-stream-002"):
            pass
        else:
            if name.startswith("test-resubscribe-message-id"):
                await asyncio.sleep(LONG)
            yield TextChunk(chosen(TEXTS, name) or HELLO)
        yield TurnEnd()


@tool
async def ask(ctx: ToolContext) -> ToolResult:
    """Ask the user."""
    ticket = SuspendTicket(f"ticket_{ctx.call_id}", "ask", "Go on?", resume_mode=ResumeMode.USE_DECISION)
    return ToolResult.suspended("waits for the user", ticket)


@tool
async def reject() -> str:
    """Refuse the task."""
    return "never"


@hook("before_tool")
def refuse(ctx: BeforeToolContext) -> Block | None:
    return Block("rejected", end_run=True) if ctx.call.name == "reject" else None


@hook("run_start")
def answer_at_once(ctx: HookContext) -> StateCommand | None:
    is_message = asked(ctx.messages).startswith("tck-message-response")
    return StateCommand().event({"a2a": "message"}) if is_message else None


agent = Agent(
    "tck", Kit(), tools=[ask, reject], plugins=[refuse, answer_at_once], description="Follows the A2A test kit."
)
