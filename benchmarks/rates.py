"""Providers that refuse: a real server process enforces its limits on 200 children, through our OpenAI and Anthropic wires.

scripts/bench --rates [NAME...]    all of it takes about five minutes
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from retinue import Agent, Limits, Message, Model, ModelRequest, Rate, RunStatus, Runtime
from retinue.models import ModelChunk, open_model
from retinue.models.resilience import ResilientModel
from retinue.testing import ScriptedModel, call, say

CHILDREN = 200
BIG = Limits(children=100_000, parallel=100_000)


class Provider:
    """A server process."""

    def __init__(self, url: str) -> None:
        self.url = url

    def stats(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/stats") as answer:
            return json.load(answer)

    def model(self, wire: str = "openai") -> Model:
        url = f"{self.url}/v1" if wire == "openai" else self.url
        return open_model(f"{wire}:m", base_url=url, api_key="a-key-of-the-benchmark")


@contextmanager
def provider(**limits: Any) -> Iterator[Provider]:
    command = [sys.executable, "-m", "benchmarks.rate_server", json.dumps(limits)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield Provider(f"http://127.0.0.1:{int(process.stdout.readline())}")
    finally:
        process.kill()
        process.wait()


def lead_of(count: int, model: Model) -> Agent:
    asked = {"subagent_type": "finder", "description": "look"}
    calls = [call("task", asked, id=f"call_{place}") for place in range(count)]
    return Agent("lead", ScriptedModel([calls, say("done")]), subagents=[Agent("finder", model)], limits=BIG)


async def fan_out(runtime: Runtime, count: int, user_id: str | None = None) -> tuple[float, int]:
    """Run a lead with so many children; return the seconds, and the number of children that were lost."""
    began, done = time.perf_counter(), 0
    async for event in runtime.stream("lead", "go", user_id=user_id):
        done += event.kind == "child_finished" and event.status is RunStatus.COMPLETED
    return time.perf_counter() - began, count - done


def row(name: str, took: float, ideal: float, lost: int, stats: dict[str, Any], most: float, refused: float) -> bool:
    arrivals = stats["arrivals"]
    count = sum(not accepted for _, _, accepted in arrivals)
    part = count / max(len(arrivals), 1)
    is_good = lost == 0 and took <= most * ideal and part <= refused
    print(
        f"{name:<46} {took:6.1f} s {took / ideal:5.2f}x of ideal (at most {most})   lost {lost}   "
        f"refused {count} = {part:.1%} (at most {refused:.0%})   {'ok' if is_good else 'MISSED'}",
        flush=True,
    )
    return is_good


async def at_limit(
    name: str,
    wire: str,
    most: float,
    refused: float,
    *,
    count: int = CHILDREN,
    ideal: float | None = None,
    **limits: Any,
) -> bool:
    with provider(**limits) as server:
        model = server.model(wire)
        async with Runtime([lead_of(count, model)]) as runtime:
            took, lost = await fan_out(runtime, count)
        await _close(model)
        rate, seconds = limits.get("rate", 1), limits.get("seconds", 0.3)
        best = (count - rate) / rate + seconds if ideal is None else ideal
        return row(name, took, best, lost, server.stats(), most, refused)


async def two_processes(rates: bool) -> bool:
    """Two processes on one database, each with half of the children."""
    limits: dict[str, Any] = {"parallel": 6, "seconds": 0.2} if rates else {"rate": 10, "tells": "retry-after"}
    with provider(**limits) as server, tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/app.db"
        async with Runtime.open(url):
            pass
        command = [sys.executable, "-m", "benchmarks.rates", "--part", server.url, url, str(CHILDREN // 2)]
        began = time.perf_counter()
        parts = [subprocess.Popen([*command, "6" if rates else "0"], stdout=subprocess.PIPE, text=True) for _ in "ab"]
        lost = sum([int((await asyncio.to_thread(part.communicate))[0]) for part in parts])
        took, stats = time.perf_counter() - began, server.stats()
        first, last = stats["arrivals"][0][0], stats["arrivals"][-1][0]
        if rates:
            print(f"{'two processes, 6 at once':<46} most at once {stats['most_busy']}", flush=True)
            return row("two processes, 6 at once", last - first, CHILDREN / 6 * 0.2, lost, stats, 1.4, 0.0) and took > 0
        return row("two processes, retry-after", last - first, 19.0, lost, stats, 1.25, 0.05)


async def part(url: str, database: str, count: int, parallel: int) -> None:
    """One of two processes: print the number of lost children."""
    rates = {"openai:*": Rate(parallel=parallel)} if parallel else None
    async with Runtime.open(database, [lead_of(count, Provider(url).model())], rates=rates) as runtime:
        print((await fan_out(runtime, count))[1])


async def fairness() -> bool:
    """One user has 300 children; another one's runs come between them."""
    with provider(rate=10, tells="headers", seconds=0.05) as server:
        model = server.model()
        single = Agent("single", model)
        async with Runtime([lead_of(300, model), single], rates={"openai:*": Rate(requests_per_minute=590)}) as runtime:
            crowd = runtime.stream("lead", "go", user_id="a")
            await asyncio.sleep(2)
            foreign: list[int] = []
            for _ in range(10):
                before = len(server.stats()["arrivals"])
                await runtime.run("single", "mine", user_id="b")
                since = [words for _, words, _ in server.stats()["arrivals"][before:]]
                foreign.append(since.index("mine"))
            await crowd.cancel()
        await _close(model)
    is_good = max(foreign) <= 3
    print(f"{'one user with 300 children, another with one run':<46} foreign requests before each: {foreign} (at most 3)   "
          f"{'ok' if is_good else 'MISSED'}", flush=True)  # fmt: skip
    return is_good


async def outage() -> bool:
    """A provider that is down for 30 s."""
    with provider(down=30.0, seconds=0.1) as server:
        model = server.model()
        async with Runtime([lead_of(CHILDREN, model)]) as runtime:
            took, lost = await fan_out(runtime, CHILDREN)
        await _close(model)
        arrivals = server.stats()["arrivals"]
    probes = [at for at, _, _ in arrivals if 1.0 < at < 30]
    back = min(at for at, _, accepted in arrivals if accepted)
    at_once = sum(back <= at < back + 0.1 for at, _, _ in arrivals)
    closest = min([later - at for at, later in zip(probes, probes[1:], strict=False)], default=30.0)
    is_good = lost == 0 and closest >= 2 and at_once == 1
    print(f"{'down for 30 s':<46} {took:6.1f} s   lost {lost}   probes {len(probes)}, at least {closest:.1f} s apart (2)   in the "
          f"first 100 ms after it {at_once} (1)   {'ok' if is_good else 'MISSED'}", flush=True)  # fmt: skip
    return is_good


async def cancelled() -> bool:
    with provider(down=1e9) as server:
        model = server.model()
        async with Runtime([lead_of(100, model)]) as runtime:
            run = runtime.stream("lead", "go")
            async for event in run:
                if event.kind == "inference_waiting":
                    break
            began = time.perf_counter()
            await run.cancel()
            took = time.perf_counter() - began
        await _close(model)
    print(
        f"{'cancel while 100 children wait':<46} {took * 1e3:6.1f} ms (at most 100)   {'ok' if took < 0.1 else 'MISSED'}",
        flush=True,
    )
    return took < 0.1


class NoGate:
    """A model without an account."""

    def __init__(self, model: Any) -> None:
        self._model, self.name = model, model.name

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        async for chunk in self._model.stream(request):
            yield chunk

    async def aclose(self) -> None:
        await self._model.aclose()


def without_gate(model: Any) -> Model:
    return ResilientModel(NoGate(model._model))  # pyright: ignore[reportPrivateUsage]


async def costs() -> bool:
    """What the gate costs when nothing is limited: one call after another, and a fan-out."""
    with provider(seconds=0.01) as server:
        models = [server.model(), without_gate(server.model())]
        request = ModelRequest(messages=(Message.user("hello"),))
        taken: list[list[float]] = [[], []]
        for _ in range(400):
            for place, model in enumerate(models):
                began = time.perf_counter()
                async for _ in model.stream(request):
                    pass
                taken[place].append(time.perf_counter() - began)
        gated, bare = [statistics.median(each[50:]) for each in taken]
        for model in models:
            await _close(model)
    part = gated / bare - 1
    print(f"{'gate without limits, of a call of 10 ms':<46} {part:+.1%} (at most 2 %)   "
          f"{'ok' if part <= 0.02 else 'MISSED'}", flush=True)  # fmt: skip
    ratios: list[float] = []
    with provider(seconds=1.0) as server:
        for _ in range(3):
            walls: list[float] = []
            for make in (lambda: server.model(), lambda: without_gate(server.model())):
                model = make()
                async with Runtime([lead_of(CHILDREN, model)]) as runtime:
                    walls.append((await fan_out(runtime, CHILDREN))[0])
                await _close(model)
            ratios.append(walls[0] / walls[1])
    ratio = min(ratios)
    print(f"{'fan-out of 200, calls of 1 s, without limits':<46} {ratio:.2f}x of no gate (at most 1.1)   "
          f"{'ok' if ratio <= 1.1 else 'MISSED'}", flush=True)  # fmt: skip
    return part <= 0.02 and ratio <= 1.1


async def _close(model: Any) -> None:
    await model.aclose()


CASES: dict[str, Any] = {
    "headers": lambda: at_limit("openai, headers", "openai", 1.25, 0.05, rate=10, tells="headers"),
    "retry-after": lambda: at_limit("openai, retry-after", "openai", 1.25, 0.05, rate=10, tells="retry-after"),
    "nothing": lambda: at_limit("openai, nothing told", "openai", 1.4, 1.0, rate=10),
    "503": lambda: at_limit(
        "openai, 503 and retry-after", "openai", 1.25, 0.05, rate=10, tells="retry-after", status=503
    ),
    "anthropic": lambda: at_limit("anthropic, headers", "anthropic", 1.25, 0.05, rate=10, tells="headers"),
    "529": lambda: at_limit(
        "anthropic, 529 and retry-after", "anthropic", 1.25, 0.05, rate=10, tells="retry-after", status=529
    ),
    "tokens": lambda: at_limit(
        "openai, 60,000 tokens a minute, headers",
        "openai",
        1.25,
        0.05,
        count=80,
        ideal=20.0,
        tokens=60_000,
        tells="headers",
    ),
    "parallel": lambda: at_limit(
        "openai, 8 at once, nothing told", "openai", 1.4, 1.0, ideal=CHILDREN / 8 * 0.5, parallel=8, seconds=0.5
    ),
    "processes": lambda: two_processes(rates=False),
    "slots": lambda: two_processes(rates=True),
    "fairness": fairness,
    "outage": outage,
    "cancel": cancelled,
    "costs": costs,
}


def main(chosen: Sequence[str]) -> int:
    unknown = [name for name in chosen if name not in CASES]
    if unknown:
        print(f"no such case: {', '.join(unknown)}; there are {', '.join(CASES)}")
        return 2
    os.environ["NO_PROXY"] = "127.0.0.1"
    results = [asyncio.run(CASES[name]()) for name in chosen or CASES]
    return 0 if all(results) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", nargs=4)
    parser.add_argument("cases", nargs="*")
    args = parser.parse_args()
    if args.part:
        asyncio.run(part(args.part[0], args.part[1], int(args.part[2]), int(args.part[3])))
    else:
        sys.exit(main(args.cases))
