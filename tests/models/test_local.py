"""A real language model over real HTTP. Opt in: scripts/test -m local_model

It is small and often wrong, so what is asserted is that everything is valid and arrives, never what was chosen or said.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from retinue import Message, ModelRequest, RunStatus, Runtime, ToolDescriptor
from retinue.models import open_model
from retinue.models.resilience import close_model
from retinue.testing import hear

LOCAL = Path(__file__).parents[2] / "examples/local"
pytestmark = [pytest.mark.local_model, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    sys.path.insert(0, str(LOCAL))
    try:
        import small  # pyright: ignore[reportMissingImports]

        small.prepare()
        with small.serving() as address:
            yield address
    finally:
        sys.path.remove(str(LOCAL))


async def test_text_is_streamed_and_counted(url: str) -> None:
    model = open_model("llamacpp:small", base_url=url)
    request = ModelRequest(
        messages=(Message.user("What is the capital of France?"),), settings={"temperature": 0, "max_tokens": 24}
    )
    chunks = [chunk async for chunk in model.stream(request)]
    await close_model(model)
    assert len(chunks) > 3
    end: Any = chunks[-1]
    assert end.stop_reason in ("stop", "length")
    assert end.usage.input_tokens > 5
    assert 0 < end.usage.output_tokens <= 24


async def test_a_constrained_call_is_valid(url: str) -> None:
    schema = {
        "type": "object",
        "properties": {"animal": {"enum": ["cat", "dog"]}, "count": {"type": "integer", "maximum": 9}},
        "required": ["animal", "count"],
        "additionalProperties": False,
    }
    tool = ToolDescriptor("buy", "buy", "Buy animals.").with_parameters(schema)
    settings = {"temperature": 0, "max_tokens": 60, "tool_choice": "required"}
    model = open_model("llamacpp:small", base_url=url)
    heard = await hear(
        model, ModelRequest(messages=(Message.user("Two cats, please."),), tools=(tool,), settings=settings)
    )
    await close_model(model)
    [(_, name, args)] = heard.called
    assert name == "buy"
    assert args["animal"] in ("cat", "dog")
    assert isinstance(args["count"], int)
    assert heard.ends[0].stop_reason == "tool_calls"


async def test_it_picks_a_sub_agent_whose_answer_comes_back(url: str) -> None:
    import delegate  # pyright: ignore[reportMissingImports]

    async with Runtime([delegate.make_parent(url)]) as runtime:
        run = runtime.stream("parent", "Write a poem about the sea.")
        events: list[Any] = [event async for event in run]
        result = await run.result()
    assert result.status is RunStatus.COMPLETED, result.error
    call = next(event for event in events if event.kind == "tool_call_ready")
    assert call.tool_name in ("agent_run_poet", "agent_run_cook")
    assert call.args["prompt"]
    started = next(event for event in events if event.kind == "child_started")
    assert started.call_id == call.call_id
    assert f"agent_run_{started.child_agent}" == call.tool_name
    child = [event for event in events if event.ns == (f"tools:{call.call_id}",)]
    said = "".join([event.delta for event in child if event.kind == "text_delta"])
    finished = next(event for event in events if event.kind == "tool_call_finished")
    assert len([event for event in child if event.kind == "text_delta"]) > 3, "it is streamed"
    assert finished.message.text == said != ""
    assert child[-1].kind == "run_finished"
    assert result.usage.requests == 3
    assert result.usage.output_tokens > 10


def test_the_example_runs() -> None:
    out = subprocess.run([sys.executable, LOCAL / "delegate.py"], capture_output=True, text=True, timeout=300)
    assert out.returncode == 0, out.stderr
    assert "call    agent_run_" in out.stdout
    assert "answer  completed" in out.stdout
