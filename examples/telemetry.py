"""The spans of a tree of agents, printed; log lines with the ids of the run and the call; and what it all cost.

pip install ".[otel,prices]"
python examples/telemetry.py
"""

import asyncio
import logging
import sys
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from retinue import Agent, Limits, Runtime, Telemetry, Usage, tool
from retinue.models import prices
from retinue.telemetry import JsonLogFormatter, RunLogFilter, RunLogSink
from retinue.testing import ScriptedModel, call, say

log = logging.getLogger("shop")


@tool
async def search(query: str) -> str:
    """Search the shelves."""
    log.info("searching")  # the filter below adds the ids of the run, the call and the span
    return f"three kinds of {query}"


def script(*turns: Any) -> ScriptedModel:
    """A script stands in for a model, under the name of one that has a price."""
    model = ScriptedModel(turns)
    model.name = "openai:gpt-4o-mini"
    return model


def spent(input_tokens: int, output_tokens: int) -> Usage:
    return Usage(requests=1, input_tokens=input_tokens, output_tokens=output_tokens)


searcher = Agent(
    "searcher", script(call("search", {"query": "rope"}), say("Three.", usage=spent(900, 20))), tools=[search]
)
buyer = Agent(
    "buyer",
    script(
        call("task", {"subagent_type": "searcher", "description": "rope"}), say("Take hemp.", usage=spent(1500, 60))
    ),
    subagents=[searcher],
)
captain = Agent(
    "captain",
    script(call("task", {"subagent_type": "buyer", "description": "buy rope"}), say("Aye.", usage=spent(2000, 40))),
    subagents=[buyer],
)


def show(spans: list[ReadableSpan], above: int | None = None, indent: str = "") -> None:
    for span in spans:
        parent = None if span.parent is None else span.parent.span_id
        if parent == above and span.context is not None:
            used = (span.attributes or {}).get("gen_ai.usage.input_tokens", "")
            print(f"{indent}{span.name}{f'  ({used} tokens in)' if used else ''}")
            show(spans, span.context.span_id, indent + "  ")


async def main() -> None:
    handler = logging.StreamHandler(sys.stdout)
    handler.addFilter(RunLogFilter())
    handler.setFormatter(JsonLogFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))  # yours sends to a collector
    runtime = Runtime([captain], sinks=[Telemetry(tracer_provider=provider), RunLogSink()], price=prices())
    result = await runtime.run("captain", "We need rope.", limits=Limits(cost=0.01))

    show(sorted(exporter.get_finished_spans(), key=lambda span: span.start_time or 0))
    print(f"{result.response} {result.usage.tokens} tokens, ${result.usage.cost:.6f}")


if __name__ == "__main__":
    asyncio.run(main())
