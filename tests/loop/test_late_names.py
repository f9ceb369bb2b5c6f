"""A tool call whose name comes later than its id."""

from __future__ import annotations

from collections.abc import AsyncIterator

from retinue import Agent, CallChunk, ModelRequest, Runtime, TextChunk, TurnEnd, tool
from retinue.models import ModelChunk


class Late:
    name = "test:late"

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        if request.messages[-1].role == "tool":
            yield TextChunk("done")
        else:
            yield CallChunk(0, "call_1", None, "")
            yield CallChunk(0, None, "look", '{"q":')
            yield CallChunk(0, None, None, '"x"}')
        yield TurnEnd()


@tool
async def look(q: str) -> str:
    """Look."""
    return f"saw {q}"


async def test_a_name_that_comes_after_the_id_counts() -> None:
    result = await Runtime([Agent("a", Late(), tools=[look])]).run("a", "go")
    assert [message.text for message in result.messages if message.role == "tool"] == ["saw x"]
    assert result.messages[1].tool_calls[0].name == "look"
