"""A streamed event end to end, over loopback HTTP: ours beside the openai SDK, pydantic-ai and langchain.

CPU time of this process only; the server is another. "burst" is when events arrive many at once, as from a proxy or
a fast model; "paced" when each arrives alone, and then most of the time goes into waking up, whoever reads.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

import msgspec

from benchmarks.stream_server import EVENTS
from retinue import Agent, Message, ModelRequest, Runtime, tool
from retinue.models import open_model

Ask = Callable[[], Awaitable[int]]
PROMPT: list[Any] = [{"role": "user", "content": "go"}]
GOAL = 15


@contextmanager
def serving() -> Iterator[str]:
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.stream_server"], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        try:
            yield f"http://127.0.0.1:{server.stdout.readline().strip()}"
        finally:
            server.kill()


class Lines:
    """The least there is to do with an answer: lines, and their JSON."""

    def __init__(self) -> None:
        self.count, self._rest = 0, b""

    def feed(self, piece: bytes) -> None:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                msgspec.json.decode(line[6:])
                self.count += 1


@asynccontextmanager
async def aiohttp_alone(url: str) -> AsyncIterator[Ask]:
    import aiohttp

    async with aiohttp.ClientSession() as session:

        async def ask() -> int:
            lines = Lines()
            async with session.post(f"{url}/chat/completions", json={"messages": PROMPT}) as response:
                while piece := await response.content.readany():
                    lines.feed(piece)
            return lines.count

        yield ask


@asynccontextmanager
async def httpx2_alone(url: str) -> AsyncIterator[Ask]:
    import httpx2

    async with httpx2.AsyncClient() as client:

        async def ask() -> int:
            lines = Lines()
            async with client.stream("POST", f"{url}/chat/completions", json={"messages": PROMPT}) as response:
                async for piece in response.aiter_raw():
                    lines.feed(piece)
            return lines.count

        yield ask


@asynccontextmanager
async def ours(url: str) -> AsyncIterator[Ask]:
    model: Any = open_model("openai-chat:m", base_url=url, api_key="k")
    request = ModelRequest(messages=(Message.user("go"),))

    async def ask() -> int:
        count = 0
        async for _ in model.stream(request):
            count += 1
        return count

    yield ask
    await model.aclose()


@asynccontextmanager
async def our_run(url: str) -> AsyncIterator[Ask]:
    """A whole run that is watched: every event of it, to a consumer."""
    model: Any = open_model("openai-chat:m", base_url=url, api_key="k")

    @tool
    def note(text: str) -> str:
        """Take a note."""
        return "ok"

    async def ask() -> int:
        agent = Agent("a", model, tools=[note], max_steps=1)
        return len([event async for event in Runtime([agent]).stream("a", "go")])

    yield ask
    await model.aclose()


@asynccontextmanager
async def openai_sdk(url: str) -> AsyncIterator[Ask]:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(api_key="k", base_url=url) as client:

        async def ask() -> int:
            chunks = await client.chat.completions.create(model="m", messages=PROMPT, stream=True)
            return len([chunk async for chunk in chunks])

        yield ask


@asynccontextmanager
async def pydantic_ai(url: str) -> AsyncIterator[Ask]:
    from openai import AsyncOpenAI
    from pydantic_ai.direct import model_request_stream
    from pydantic_ai.messages import ModelRequest as TheirRequest
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async with AsyncOpenAI(api_key="k", base_url=url) as client:
        model = OpenAIChatModel("m", provider=OpenAIProvider(openai_client=client))

        async def ask() -> int:
            async with model_request_stream(model, [TheirRequest.user_text_prompt("go")]) as events:
                return len([event async for event in events])

        yield ask


@asynccontextmanager
async def langchain(url: str) -> AsyncIterator[Ask]:
    from langchain_openai import ChatOpenAI

    options: dict[str, Any] = {"api_key": "k", "base_url": url, "stream_usage": True}
    model = ChatOpenAI(model="m", **options)

    async def ask() -> int:
        return len([chunk async for chunk in model.astream("go")])

    yield ask


SIDES = {
    "aiohttp and json alone": aiohttp_alone,
    "httpx2 and json alone": httpx2_alone,
    "retinue, a model": ours,
    "retinue, a whole run": our_run,
    "openai SDK": openai_sdk,
    "pydantic-ai": pydantic_ai,
    "langchain-openai": langchain,
}


async def measure(ask: Ask) -> float:
    """Microseconds of CPU an event."""
    began = time.process_time()
    count = await ask()
    spent = time.process_time() - began
    assert count >= EVENTS, count
    return spent / EVENTS * 1e6


async def take_turns(url: str, rounds: int, progress: Callable[[str], None]) -> dict[str, dict[str, list[float]]]:
    """All sides in turn within a round, so that a busy machine slows all alike; in one event loop, as some keep it."""
    taken: dict[str, dict[str, list[float]]] = {name: {"burst": [], "paced": []} for name in SIDES}
    async with AsyncExitStack() as stack:
        asks = [
            (name, mode, await stack.enter_async_context(side(f"{url}/{mode}/v1")))
            for name, side in SIDES.items()
            for mode in ("burst", "paced")
        ]
        for number in range(rounds + 1):
            progress(f"round {number} of {rounds}" if number else "warming up")
            for name, mode, ask in asks:
                spent = await measure(ask)
                if number:  # the first round fills caches
                    taken[name][mode].append(spent)
    return taken


def collect(rounds: int, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row for each side."""
    with serving() as url:
        taken = asyncio.run(take_turns(url, rounds, progress))
    return [
        {
            "what": name,
            "burst": statistics.median(modes["burst"]),
            "best": min(modes["burst"]),
            "paced": statistics.median(modes["paced"]),
        }
        for name, modes in taken.items()
    ]


def show(rows: list[dict[str, Any]]) -> None:
    base = next(row["burst"] for row in rows if row["what"] == "retinue, a model")
    print(f"{'µs of CPU a streamed event':30}{'burst':>9}{'best':>9}{'paced':>9}{'burst, of ours':>16}")
    for row in rows:
        ratio = row["burst"] / base
        print(f"{row['what']:30}{row['burst']:>9.1f}{row['best']:>9.1f}{row['paced']:>9.1f}{ratio:>15.1f}x")
    print(f"goal: at most {GOAL} µs in a burst")
