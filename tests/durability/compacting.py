"""A scene of an agent whose conversation outgrows the window of its model."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from hashlib import blake2b
from typing import Any

from retinue import Agent, Compaction, Usage, tool
from retinue.models import ModelChunk, ModelRequest
from retinue.testing import ScriptedModel, call, say

from .scene import Scene, Spot

STEPS = 24


class Windowed:
    """A model that dies at `m:<step>`, or at `summary:<number>`, and counts twice the tokens that are estimated."""

    name, context_window = "m", 3000

    def __init__(self, spot: Spot) -> None:
        self._spot, self._inner = spot, ScriptedModel(self._answer)

    def _answer(self, request: ModelRequest) -> Any:
        usage = Usage(requests=1, input_tokens=request.estimate_tokens() * 2, output_tokens=5)
        if not request.tools:
            return say(f"## Done so far\nUp to {last_fact(request)}.", usage=usage)
        step = last_fact(request) + 1
        return say("It is done.") if step > STEPS else [say("", usage=usage), call("work", {"n": step}, id=f"c{step}")]

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        said = [(message.role.value, message.text, str(message.tool_calls)) for message in request.messages]
        digest = blake2b(str(said).encode(), digest_size=8).hexdigest()
        point = (
            f"m:{last_fact(request) + 1}" if request.tools else f"summary:{1 + ('# The summary so far' in said[1][1])}"
        )
        self._spot.did(f"{point} {digest}")
        await self._spot.point(point)
        async for chunk in self._inner.stream(request):
            yield chunk


def last_fact(request: ModelRequest) -> int:
    """Return the number of the last fact that a request has."""
    facts = re.findall(r"fact (\d+):", " ".join([message.text for message in request.messages]))
    return int(facts[-1]) if facts else 0


def lasting(spot: Spot) -> Scene:
    """Steps whose results fill the window more than once."""

    @tool(idempotent=True)
    async def work(n: int) -> str:
        """Work."""
        return f"fact {n}: " + "all went well. " * 30

    agent = Agent("solo", Windowed(spot), "You work.", [work], [Compaction()], max_steps=50)
    return Scene([agent], options={"thread_id": "t"})
