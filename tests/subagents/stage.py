"""A harness whose model does as it is told, with sub-agents on the same model that answer what they are sent."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from retinue import HarnessAgent, ModelRequest, RunResult
from retinue.testing import ScriptedModel, call, say

_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")

Act = Callable[[ModelRequest], Any]


def is_child(request: ModelRequest) -> bool:
    return "# Subagent Context" in request.messages[0].text


def system(request: ModelRequest) -> str:
    return request.messages[0].text


def said(request: ModelRequest) -> list[str]:
    """The conversation, without the system message."""
    return [message.text for message in request.messages[1:]]


def offered(request: ModelRequest) -> list[str]:
    return [tool.name for tool in request.tools]


def echo(request: ModelRequest) -> Any:
    return say(f"did {request.messages[-1].text}")


class Stage(ScriptedModel):
    """The parent takes its turns one by one; a turn may be a function of the request. A child acts by `child`."""

    def __init__(self, *turns: Any, child: Act = echo) -> None:
        super().__init__(self._act)
        self.parent_turns, self._child = list(turns), child

    def _act(self, request: ModelRequest) -> Any:
        if is_child(request):
            return self._child(request)
        turn = self.parent_turns.pop(0)
        return turn(request) if callable(turn) else turn

    def go_on(self, *turns: Any) -> None:
        """More turns for the parent."""
        self.parent_turns += turns

    def act_as_child(self, child: Act) -> None:
        self._child = child

    @property
    def of_children(self) -> list[ModelRequest]:
        return [request for request in self.requests if is_child(request)]

    @property
    def of_parent(self) -> list[ModelRequest]:
        return [request for request in self.requests if not is_child(request)]


def harness(workspace: Path, *turns: Any, child: Act = echo, name: str = "boss", **options: Any) -> HarnessAgent:
    """A harness that takes these turns, and one to end with."""
    return HarnessAgent(name, Stage(*turns, say("end"), child=child), workspace=workspace, **options)


def stage(agent: HarnessAgent) -> Stage:
    assert isinstance(agent.model, Stage)
    return agent.model


def spawn(agent_id: str, task: str | None = None, id: str | None = None, **args: Any) -> Any:
    given = {"agent_id": agent_id, **({} if task is None else {"task": task}), **args}
    return call("agent_spawn", given, id=id)


def send(message: str, id: str | None = None, **args: Any) -> Any:
    return call("agent_send", {"message": message, **args}, id=id)


def told(result: RunResult) -> list[str]:
    """What the model was told by its tools, with ids as <1>, <2> in the order in which they come."""
    return plain([message.text for message in result.messages if message.role == "tool"])


def plain(texts: Iterable[str]) -> list[str]:
    known: dict[str, str] = {}
    return [_UUID.sub(lambda found: known.setdefault(found[0], f"<{len(known) + 1}>"), text) for text in texts]


def key_in(request: ModelRequest, number: int = -1) -> str:
    """The agent_key of an answer that the model has read."""
    keys = [
        line for message in request.messages for line in message.text.splitlines() if line.startswith("agent_key: ")
    ]
    return keys[number].removeprefix("agent_key: ")


def declare(
    workspace: Path, name: str, front: str = "description: d", body: str = "You are it.", folder: str = "subagents"
) -> Path:
    path = workspace / folder / f"{name}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"---\n{front}\n---\n{body}\n")
    return path


def write(workspace: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = workspace / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
