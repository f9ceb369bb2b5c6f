"""python examples/local/delegate.py ["a question"]: a real language model, offline, gives work to a sub-agent.

The model is small (135 million parameters, about 40 words a second on one core) and often wrong. What it shows is that
everything between it and the answer is real: HTTP, streamed tokens, a tool call that the server constrains to the
agents there are, a child run by the same model, and its answer on the way back.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

from small import prepare, serving

from retinue import Agent, HookContext, Plugin, Registrar, RunResult, Runtime, StateCommand
from retinue.models import open_model
from retinue.plugins import OverrideSettings

ENDS = [".", "!", "?", "\n"]
"""One sentence is enough: left alone, the model would go on until it is cut off, and a cut answer is an error."""

QUESTION = "Write a poem about the sea."


class DelegateOnce(Plugin):
    """The first step must be a call, and the second must not: a model this small would never stop by itself."""

    name = "delegate_once"

    def register(self, r: Registrar) -> None:
        r.hook("before_inference", self.choose)

    def choose(self, ctx: HookContext) -> StateCommand:
        called = any(message.tool_calls for message in ctx.messages)
        settings = {"tool_choice": "none", "stop": ENDS} if called else {"tool_choice": "required"}
        return StateCommand().schedule(OverrideSettings(settings))


def make_parent(url: str) -> Agent:
    """A parent with two sub-agents; the same model answers for all of them."""
    model = open_model("llamacpp:smollm2-135m-instruct", base_url=url)
    short = {"temperature": 0, "max_tokens": 128, "repeat_penalty": 1.3, "stop": ENDS}
    poet = Agent("poet", model, "You write poems of two lines.", description="Writes a poem.", settings=short)
    cook = Agent(
        "cook", model, "You explain in one sentence how to cook.", description="Knows recipes.", settings=short
    )
    return Agent(
        "parent",
        model,
        "You give each request to the agent that fits. Copy the request into its prompt.",
        tools=[poet.as_tool(), cook.as_tool()],
        plugins=[DelegateOnce()],
        settings={"temperature": 0, "max_tokens": 160, "repeat_penalty": 1.2},
        max_steps=4,
    )


async def delegate(url: str, question: str) -> RunResult:
    parent = make_parent(url)
    async with Runtime([parent]) as runtime:
        run = runtime.stream("parent", question)
        events: Any = run
        async for event in events:
            match event.kind:
                case "tool_call_ready":
                    print(f"call    {event.tool_name} {event.args}")
                case "child_finished":
                    print(f"\nchild   {event.child_agent} {event.status}")
                case "text_delta" if event.ns:
                    print(event.delta, end="", flush=True)
                case _:
                    pass
        return await run.result()


def main() -> None:
    question = " ".join(sys.argv[1:]) or QUESTION
    prepare()
    began = time.monotonic()
    with serving() as url:
        print(f"server  up after {time.monotonic() - began:.1f} s")
        result = asyncio.run(delegate(url, question))
    print(f"answer  {result.status}: {result.response or result.error}")
    print(
        f"tokens  {result.usage.input_tokens} read, {result.usage.output_tokens} written, {time.monotonic() - began:.1f} s"
    )


if __name__ == "__main__":
    main()
