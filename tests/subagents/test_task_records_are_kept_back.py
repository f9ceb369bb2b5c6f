"""What a model says can neither read nor write the records of background tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from retinue import HarnessAgent, RunStatus, Runtime, SubagentDeclaration
from retinue.testing import ScriptedModel, call, say

RECORD = '{"task_1": {"secret": "of another user"}}\n'


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "agents/boss/tasks").mkdir(parents=True)
    (tmp_path / "agents/boss/tasks/s1.json").write_text(RECORD)
    (tmp_path / "agents/boss/notes").mkdir()
    (tmp_path / "agents/boss/notes/a.md").write_text("a note\n")
    return tmp_path


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("read_file", {"path": "agents/boss/tasks/s1.json"}),
    ("read_file", {"path": "agents/x/../boss/tasks/./s1.json"}),
    ("read_file", {"path": "Agents/boss/TASKS/s1.json"}),
    ("write_file", {"path": "agents/boss/tasks/s1.json", "content": "{}"}),
    ("write_file", {"path": "agents/boss/tasks/new.json", "content": "{}"}),
    ("write_file", {"path": "agents/other/tasks/s1/x.txt", "content": "{}"}),
    ("edit_file", {"path": "agents/boss/tasks/s1.json", "old": "another", "new": "mine"}),
    ("list_files", {"path": "agents/boss/tasks"}),
    ("grep_files", {"pattern": "secret", "path": "agents/boss/tasks"}),
]


@pytest.mark.parametrize("who", ["the agent", "a child that shares its workspace"])
@pytest.mark.parametrize(("name", "args"), CALLS, ids=[f"{name}-{n}" for n, (name, _) in enumerate(CALLS)])
async def test_no_file_tool_enters_them(workspace: Path, who: str, name: str, args: dict[str, Any]) -> None:
    said: list[str] = []

    def model(request: Any) -> Any:
        is_child = "Subagent Context" in request.messages[0].text
        last = request.messages[-1]
        if who != "the agent" and not is_child:
            spawn = call("agent_spawn", {"agent_id": "helper", "task": "go"})
            return say("done") if last.role == "tool" else spawn
        if last.role == "tool":
            said.append(last.text)
            return say("done")
        return call(name, args)

    declared = SubagentDeclaration("helper", "Helps", inline="Help.", mode="shared")
    agent = HarnessAgent("boss", ScriptedModel(model), workspace=workspace, subagents=[declared])
    async with Runtime([agent]) as runtime:
        assert (await runtime.run("boss", "go", thread_id="other")).status is RunStatus.COMPLETED
    assert len(said) == 1
    refused = ("denied", "kept back", "not_found", "it is a folder, not a file")
    assert any(words in said[0] for words in refused)
    assert "another user" not in said[0]
    assert (workspace / "agents/boss/tasks/s1.json").read_text() == RECORD
    assert not (workspace / "agents/other").exists()


async def test_searches_pass_them_over_and_find_what_is_beside(workspace: Path) -> None:
    model = ScriptedModel(
        [
            [
                call("grep_files", {"pattern": "secret|note"}, id="a"),
                call("glob_files", {"pattern": "**/*.json"}, id="b"),
                call("read_file", {"path": "agents/boss/notes/a.md"}, id="c"),
            ],
            say("done"),
        ]
    )
    agent = HarnessAgent("boss", model, workspace=workspace)
    async with Runtime([agent]) as runtime:
        result = await runtime.run("boss", "go", thread_id="other")
    found = {message.tool_call_id: message.text for message in result.messages if message.role == "tool"}
    assert "agents/boss/notes/a.md:1: a note" in found["a"]
    assert "secret" not in found["a"]
    assert "s1.json" not in found["b"]
    assert "a note" in found["c"]
    assert json.loads((workspace / "agents/boss/tasks/s1.json").read_text())
