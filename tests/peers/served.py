"""Agents for the clients of other projects: those of the tests of the server, and one whose sub-agent asks."""

from __future__ import annotations

import os
from typing import Any

from retinue import A2AAgent, Agent, Runtime
from retinue.testing import ScriptedModel, call, say
from tests.server.served import agents


def _delegates(request: Any) -> Any:
    if request.messages[-1].role == "tool":
        return say(f"done: {request.messages[-1].text}")
    return call("task", {"subagent_type": "far", "description": request.messages[-1].text}, id="c1")


def runtime(url: str) -> Runtime:
    portal = Agent("portal", ScriptedModel(_delegates), subagents=[A2AAgent("far", os.environ["FAR_URL"])])
    return Runtime.open(url, [*agents, portal], on_close="leave", lease=8.0)
