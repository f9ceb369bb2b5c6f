"""A tool that knows how many of its calls ran at once."""

from __future__ import annotations

import asyncio

from retinue.tools import FunctionTool


class Busy:
    """`most` is the largest number of calls of `tool` that were at work together."""

    def __init__(self, pause: float = 0.001) -> None:
        self._running, self._pause, self.most = 0, pause, 0
        self.tool = FunctionTool(self.work)

    async def work(self) -> str:
        """Work."""
        self._running += 1
        self.most = max(self.most, self._running)
        await asyncio.sleep(self._pause)
        self._running -= 1
        return "ok"
