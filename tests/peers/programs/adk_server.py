"""An agent of ADK behind `to_a2a`: python adk_server.py <port>"""

import asyncio
import sys

import uvicorn
from google.adk.a2a.utils.agent_to_a2a import to_a2a
from google.adk.agents import BaseAgent
from google.adk.events import Event
from google.genai import types


class Words(BaseAgent):
    async def _run_async_impl(self, ctx):
        text = "".join(part.text or "" for part in ctx.user_content.parts)
        verb, _, rest = text.partition(" ")
        if verb == "hang":
            await asyncio.Event().wait()
        if verb in ("ask", "login"):
            name = "ask_the_user" if verb == "ask" else "adk_request_credential"
            asked = types.FunctionCall(id="q1", name=name, args={"question": rest})
            parts = [types.Part(text=rest), types.Part(function_call=asked)]
            content = types.Content(role="model", parts=parts)
            yield Event(
                author=self.name, invocation_id=ctx.invocation_id, content=content, long_running_tool_ids={"q1"}
            )
            return
        if any(part.function_call for event in ctx.session.events for part in event.content.parts):
            rest = f"You said {text}."
        words = rest.split()
        for number, word in enumerate(words):
            await asyncio.sleep(0.05)
            piece = f" {word}" if number else word
            content = types.Content(role="model", parts=[types.Part(text=piece)])
            yield Event(author=self.name, invocation_id=ctx.invocation_id, content=content, partial=True)
        content = types.Content(role="model", parts=[types.Part(text=rest)])
        yield Event(author=self.name, invocation_id=ctx.invocation_id, content=content)


port = int(sys.argv[1])
app = to_a2a(Words(name="words", description="Says words."), host="127.0.0.1", port=port)
uvicorn.run(app, port=port, log_level="warning")
