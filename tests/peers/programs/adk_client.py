"""ADK's RemoteA2aAgent: python adk_client.py <url> <token>. Prints a line for each scenario."""

import asyncio
import sys
import warnings

warnings.simplefilter("ignore")

import httpx
from google.adk.agents.remote_a2a_agent import RemoteA2aAgent
from google.adk.runners import InMemoryRunner
from google.genai import types

url, token = sys.argv[1:]


async def ask(agent, *texts):
    """Say texts one after the other; after a question, the next one is its answer."""
    http = httpx.AsyncClient(headers={"authorization": f"Bearer {token}"}, timeout=30)
    card = f"{url}/a2a/{agent}/.well-known/agent-card.json"
    runner = InMemoryRunner(agent=RemoteA2aAgent(name=agent, agent_card=card, httpx_client=http))
    session = await runner.session_service.create_session(app_name=runner.app_name, user_id="u")
    said, calls = [], []
    for text in texts:
        part = types.Part(text=text)
        if calls:
            asked = calls[-1]
            given = types.FunctionResponse(id=asked.id, name=asked.name, response={"result": text})
            part = types.Part(function_response=given)
        content = types.Content(role="user", parts=[part])
        found, calls = [], []
        async for event in runner.run_async(user_id="u", session_id=session.id, new_message=content):
            if event.error_message:
                found.append(f"error: {event.error_message}")
            calls += event.get_function_calls()
            if event.content and not event.partial:
                found += [part.text for part in event.content.parts or () if part.text and not part.thought]
        said.append(calls[-1].name if calls else found[-1] if found else "")
    return said


async def stream():
    return (await ask("speaker", "hi"))[0]


async def conversation():
    return " then ".join(await ask("speaker", "hi", "again"))


async def question():
    return " then ".join(await ask("portal", "ask Which one?", "the red one"))


async def login():
    """ADK shows the question and sends no answer: that might be a credential."""
    return (await ask("portal", "login Which one?"))[0]


async def two():
    return ", ".join([one[0] for one in await asyncio.gather(ask("speaker", "a"), ask("speaker", "b"))])


async def main():
    for run in (stream, conversation, question, login, two):
        try:
            found = await run()
        except Exception as exc:
            found = f"FAILED {type(exc).__name__}: {exc}"
        print(f"{run.__name__}: {found}", flush=True)


asyncio.run(main())
