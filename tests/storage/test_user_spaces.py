"""Files in a store belong to a user: no tool, path, sub-agent or user id leads to those of another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from retinue import ConfigurationError, HarnessAgent, Runtime, StoreFilesystem, SubagentDeclaration
from retinue.testing import ScriptedModel, call, say

SECRET = "the code is 4711"
READS: list[tuple[str, dict[str, Any]]] = [
    ("read_file", {"path": "diary.md"}),
    ("read_file", {"path": "users/ann/diary.md"}),
    ("read_file", {"path": "../ann/diary.md"}),
    ("list_files", {"path": ""}),
    ("list_files", {"path": "agents"}),
    ("glob_files", {"pattern": "**/*"}),
    ("grep_files", {"pattern": "4711"}),
    ("edit_file", {"path": "diary.md", "old_text": "code", "new_text": "word"}),
]


@pytest.fixture
def files(tmp_path: Path) -> Iterator[StoreFilesystem]:
    with StoreFilesystem(f"sqlite:///{tmp_path}/files.db") as made:
        yield made


async def told(files: StoreFilesystem, user: str | None, *calls: Any, sub: bool = False) -> str:
    """What tools answer an agent of a user, or a sub-agent of it."""

    def turn(request: Any) -> Any:
        answered = sum(message.role == "tool" for message in request.messages)
        if "Subagent Context" not in request.messages[0].text and sub:
            task = {"agent_id": "general-purpose", "task": "go"}
            return say("done") if answered else call("agent_spawn", task)
        return calls[answered] if answered < len(calls) else say("done")

    model = ScriptedModel(turn)
    agent = HarnessAgent("clerk", model, filesystem=files)
    await Runtime([agent]).run("clerk", "Go.", user_id=user)
    return "\n".join([message.text for request in model.requests for message in request.messages])


WRITE = call("write_file", {"path": "diary.md", "content": SECRET})


@pytest.mark.parametrize("sub", [False, True])
@pytest.mark.parametrize("other", ["bob", "ANN", "ann/../ann", "../ann", "ann ", None])
async def test_nobody_reads_the_files_of_another(files: StoreFilesystem, other: str | None, sub: bool) -> None:
    await told(files, "ann", WRITE, sub=sub)
    assert SECRET in await told(files, "ann", call(*READS[0]))
    assert SECRET not in await told(files, other, *[call(*read) for read in READS], sub=sub)
    assert SECRET in await told(files, "ann", call(*READS[0]))


async def test_users_read_no_records_and_change_no_instructions(files: StoreFilesystem) -> None:
    files.write("AGENTS.md", b"Be kind.")
    files.write("agents/clerk/tasks/t.json", b'{"secret": 1}')
    seen = await told(
        files,
        "ann",
        call("write_file", {"path": "AGENTS.md", "content": "Be rude."}),
        call("list_files", {"path": "agents"}),
        call("read_file", {"path": "agents/clerk/tasks/t.json"}),
    )
    assert files.read("AGENTS.md") == b"Be kind."
    assert "Be kind." in seen
    assert "secret" not in seen


async def test_declared_sub_agents_stay_with_their_user(files: StoreFilesystem) -> None:
    declared = SubagentDeclaration("scribe", "Writes", inline="Write.", workspace=None)

    def turn(request: Any) -> Any:
        if any(message.role == "tool" for message in request.messages):
            return say("done")
        if "Subagent Context" in request.messages[0].text:
            return WRITE
        return call("agent_spawn", {"agent_id": "scribe", "task": "go"})

    agent = HarnessAgent("boss", ScriptedModel(turn), filesystem=files, subagents=[declared])
    await Runtime([agent]).run("boss", "Go.", user_id="ann")
    assert [entry.path for entry in files.walk()] == []


async def test_shared_files_are_shared_when_asked_for(tmp_path: Path) -> None:
    with StoreFilesystem(f"sqlite:///{tmp_path}/files.db", isolation="shared") as files:
        await told(files, "ann", WRITE)
        assert SECRET in await told(files, "bob", call(*READS[0]))


def test_the_space_of_a_user_cannot_be_opened_by_name(files: StoreFilesystem, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="not the name of a space"):
        StoreFilesystem(f"sqlite:///{tmp_path}/files.db", "default\x1fann")
    with pytest.raises(ConfigurationError, match="'shared' or 'user'"):
        StoreFilesystem(f"sqlite:///{tmp_path}/files.db", isolation="session")  # pyright: ignore[reportArgumentType]
