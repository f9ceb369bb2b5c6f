"""The agents of the page's pictures: scripted models that play a story, with pauses as real ones have.

`scripts/screenshots` serves them: `retinue serve tests.page.story:agents`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from zlib import crc32

from msgspec import Struct

from retinue import Agent, HarnessAgent, Limits, Permissions, ToolContext, Usage, tool
from retinue.models import CallChunk, ModelChunk, ModelRequest, TextChunk, TurnEnd

from .agents import gate

PACE = float(os.environ.get("STORY_PACE", "1"))


class Turn(Struct, frozen=True):
    """What a model says and calls, how long it thinks before, and its tokens."""

    text: str = ""
    calls: tuple[tuple[str, Mapping[str, object]], ...] = ()
    seconds: float = 0.0
    tokens: int = 4000
    words: float = 18.0
    """Words a second."""
    gate: str = ""
    """The turn ends when the gate is open."""


class Actor:
    """A model that plays turns, chosen by the task it was given. The price is a made one: $4 for a million tokens."""

    def __init__(self, name: str, script: Callable[[str], Sequence[Turn]]) -> None:
        self.name, self._script = f"testing:{name}", script

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        task = next(message.text for message in request.messages if message.role == "user")
        turns = self._script(task)
        place = sum(1 for message in request.messages if message.role == "assistant")
        turn = turns[min(place, len(turns) - 1)]
        await asyncio.sleep(turn.seconds * PACE)
        for word in turn.text.split(" ") if turn.text else ():
            yield TextChunk(f"{word} ")
            await asyncio.sleep(PACE / turn.words)
        if turn.gate:
            await gate(turn.gate)
        for index, (name, args) in enumerate(turn.calls):
            number = crc32(f"{task} {place} {index}".encode())
            yield CallChunk(index, f"{name}_{number}", name, json.dumps(args))
        out = 30 + 2 * len(turn.text.split())
        yield TurnEnd(
            "tool_calls" if turn.calls else "stop",
            Usage(
                requests=1,
                input_tokens=turn.tokens,
                output_tokens=out,
                cached_tokens=turn.tokens // 2,
                cost=4e-6 * turn.tokens,
            ),
        )


@tool
async def query_metrics(query: str, range: str = "2h") -> str:
    """Query the metrics of a service."""
    await asyncio.sleep(0.4 * PACE)
    return json.dumps({"query": query, "range": range, "peak": 61, "median": 4, "at": "09:14"})


@tool
async def read_config(name: str) -> str:
    """Read a file of the cluster."""
    await asyncio.sleep(0.3 * PACE)
    raise PermissionError("agent-ro may not read configmaps. Read the deployed file instead.")


@tool
async def edit_file(path: str, old: str, new: str) -> str:
    """Change a file."""
    return f"{path} changed"


@tool
async def web_fetch(url: str) -> str:
    """Read a page."""
    return "no incident since March"


@tool
async def replay(requests: int, ctx: ToolContext) -> str:
    """Replay recorded requests."""
    for done in itertools.count(2000, 500):
        share = min(done, requests * 38 // 100) if not _is_open("replayed") else requests
        ctx.report_activity(
            "progress", {"done": share, "total": requests, "text": f"{share // 1000}k of {requests // 1000}k requests"}
        )
        if share == requests:
            return "99 of 100 replays were fast"
        await asyncio.sleep(0.1 * PACE)
    return ""


def _is_open(name: str) -> bool:
    return (Path(os.environ["SERVED_FOLDER"]) / name).exists()


POOL = """    engine = create_engine(url,
        pool_size=20,
        pool_pre_ping=True)"""
FIXED = """    engine = create_engine(url,
        pool_size=64,
        pool_timeout=2,
        pool_pre_ping=True)"""
ANSWER = """**The tax service is asked while a database connection is held.** With 80 checkouts a second the pool of 20 runs dry, and requests \
wait for a connection, not for the database.

- Now: `pool_size` is 64. The 95th percentile is back at 233 ms.
- Next: move the call out of the transaction, then set the pool back to 20."""
REPORT = """Release 4.2 asks the tax service **inside** the transaction. Every checkout now keeps its connection for 38 ms longer, and at \
80 checkouts a second a pool of 20 runs dry.

## What was measured

| Setting | p50 | p95 | waiters |
|---|--:|--:|--:|
| 4.1, pool of 20 | 84 ms | 210 ms | 0 |
| 4.2, pool of 20 | 391 ms | 940 ms | 61 |
| 4.2, pool of 64 | 121 ms | 233 ms | 0 |

## Where it comes from

```python
async def quote(cart: Cart) -> Quote:
    async with db.transaction():        # takes a connection ...
        items = await db.load(cart.items)
        tax = await taxhub.rate(items)  # ... and holds it for 38 ms
        return Quote(items, tax, note="4.2")
```

- The call moved into the transaction in `a41f09c`.
- A bigger pool hides it; moving the call out removes it. See the [trace of one checkout](https://traces.example/checkout/81)."""


def _spawn(agent: str, task: str, seconds: int = 600) -> tuple[str, Mapping[str, object]]:
    return "agent_spawn", {"agent_id": agent, "task": task, "timeout_seconds": seconds}


def _lead(task: str) -> Sequence[Turn]:
    if "Checkout" not in task:
        return [
            Turn(
                "The notes are in `NOTES.md`: two new commands, one removed option, and how to move.",
                seconds=0.5,
                tokens=31_000,
            )
        ]
    return [
        Turn(
            "The 95th percentile went from 210 ms to 940 ms at 09:14, two minutes after the deploy. Three suspects, checked side by "
            "side: the query plans, the connection pool, and the new tax service.",
            (
                _spawn("researcher", "Compare the query plans of 4.1 and 4.2"),
                _spawn("researcher", "Check the connection pool"),
                _spawn("researcher", "Trace the new tax service"),
                _spawn("replayer", "Replay yesterday's peak against staging", 0),
            ),
            1.0,
            18_400,
        ),
        Turn(ANSWER, (), 0.5, 26_000, 60),
    ]


def _researcher(task: str) -> Sequence[Turn]:
    if task.startswith("Compare"):
        return [
            Turn("I look at the plans.", (("query_metrics", {"query": "pg.plans"}),), 0.5, 8_000),
            Turn("The ten slowest statements have the same plans in both releases.", (), 1.5, 10_000),
        ]
    if task.startswith("Check"):
        return [
            Turn(
                "",
                (("query_metrics", {"query": "pool.waiters"}), ("read_config", {"name": "configmap/checkout"})),
                0.8,
                21_000,
            ),
            Turn(
                "61 requests wait for 20 connections at the peak. I let a tester prove it before anything changes.",
                (("task", {"subagent_type": "tester", "description": "Reproduce it with 80 parallel checkouts"}),),
                0.3,
                24_000,
            ),
            Turn(REPORT, (), 0.3, 28_000, 200),
        ]
    return [
        Turn("", (("query_metrics", {"query": "taxhub.latency"}),), 0.6, 19_000),
        Turn(
            "Calls to the tax service take 38 ms at the median, so they cannot explain 700 ms on their own. But each holds a database "
            "connection while it waits, which would",
            (("web_fetch", {"url": "https://status.taxhub.example/history"}),),
            0.2,
            22_000,
            5.5,
            "traced",
        ),
        Turn("38 ms a call, inside the transaction. This is the cause.", (), 0.2, 16_000, 60),
    ]


def _tester(task: str) -> Sequence[Turn]:
    return [
        Turn(
            "Reproduced in 3 of 3 tries. Handing the fix to a patcher.",
            (("task", {"subagent_type": "patcher", "description": "Raise the pool size, nothing else"}),),
            1.5,
            29_000,
        ),
        Turn("The 95th percentile is 233 ms with 64 connections.", (), 0.3, 9_000, 60),
    ]


def _patcher(task: str) -> Sequence[Turn]:
    edit = {"path": "services/checkout/pool.py", "old": POOL, "new": FIXED}
    return [Turn("", (("edit_file", edit),), 0.6, 8_900), Turn("The pool has 64 connections now.", (), 0.2, 2_000, 60)]


def _replayer(task: str) -> Sequence[Turn]:
    return [Turn("", (("replay", {"requests": 32_000}),), 0.3, 12_000), Turn("The peak is fast again.", (), 0.1, 9_000)]


VENDORS = [
    f"{first} {second}"
    for second in (
        "Freight",
        "Cloud",
        "Print",
        "Couriers",
        "Media",
        "Legal",
        "Foods",
        "Power",
        "Labs",
        "Stone",
        "Travel",
        "Optics",
    )
    for first in (
        "Acme Borealis Cobalt Delta Elm Foxglove Granite Harbour Iris Juniper Kestrel Lumen Mistral Northwind Orchid Pinewood "
        "Quarry Redwood Saffron Tundra Umber Vale Willow Yarrow Zephyr"
    ).split()
]
FINDINGS = (
    "No change of price clause",
    "Renews 1 March, notice 90 days",
    "Ends this year, no renewal",
    "Two clauses differ from the template",
    "Nothing to report",
    "Liability is capped",
)


def _auditor(task: str) -> Sequence[Turn]:
    checks = tuple(("task", {"subagent_type": "checker", "description": name}) for name in VENDORS)
    text = "300 contracts, one checker each. I will list those whose price or notice clause differs from the template."
    return [Turn(text, checks, 0.3, 16_000, 60), Turn("All 300 are checked.", (), 0, 9_000)]


def _checker(task: str) -> Sequence[Turn]:
    chance = Random(task)
    place = VENDORS.index(task)
    if place in (8, 70):
        mail = {"to": f"legal@{task.split()[0].lower()}.example", "subject": "Notice period in clause 7"}
        return [
            Turn(
                "",
                (("send_mail", {**mail, "body": "Clause 7 names 60 days, appendix B names 90. Which one is valid?"}),),
                0.5,
                11_000,
            )
        ]
    if place > 190:
        text = "Comparing clause 7 with the template. The notice period is the one of the first version."
        return [Turn(text, (), 1 + 3 * chance.random(), 9_000, 1 + 3 * chance.random(), "audited")]
    if place % 47 == 7:
        return [Turn("", (("open_contract", {"vendor": task}),), chance.random(), 7_000)] * 30
    return [Turn(chance.choice(FINDINGS), (), 1.5 * chance.random(), chance.randint(5_000, 24_000), 60)]


@tool
async def send_mail(to: str, subject: str, body: str) -> str:
    """Send a mail."""
    return "sent"


@tool
async def open_contract(vendor: str) -> str:
    """Open a contract."""
    raise FileNotFoundError("the scan of this contract is empty")


ask = [Permissions(ask=["edit_file", "web_fetch", "send_mail"])]
patcher = Agent("patcher", Actor("haiku", _patcher), tools=[edit_file], plugins=ask, description="Changes code.")
tester = Agent("tester", Actor("sonnet", _tester), subagents=[patcher], description="Proves things.")
researcher = Agent(
    "researcher",
    Actor("opus", _researcher),
    description="Reads and searches.",
    tools=[query_metrics, read_config, web_fetch],
    plugins=ask,
    subagents=[tester],
)
replayer = Agent("replayer", Actor("haiku", _replayer), description="Replays traffic.", tools=[replay])
checker = Agent(
    "checker",
    Actor("haiku", _checker),
    tools=[send_mail, open_contract],
    plugins=ask,
    max_steps=3,
    description="Checks one contract.",
)
lead = HarnessAgent(
    "lead",
    Actor("opus", _lead),
    description="Plans and delegates: researchers look at different causes side by side, and nothing changes without you.",
    workspace=os.environ.get("SERVED_FOLDER", "."),
    subagents=[researcher, replayer],
)
auditor = Agent(
    "auditor",
    Actor("opus", _auditor),
    description="Checks every contract against the template, one agent each.",
    subagents=[checker],
    limits=Limits(children=1000, parallel=400),
)
agents = [lead, auditor]
