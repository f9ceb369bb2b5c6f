"""A harness on a workspace in a database: nodes that have nothing else in common."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from retinue import ConfigurationError, HarnessAgent, RunResult, Runtime, StoreFilesystem, SubagentDeclaration, tool
from retinue.stores import SqlTaskRepository
from retinue.tasks import TaskScope, TaskStatus
from retinue.testing import ScriptedModel, call, say
from tests.prepared import PYTHON
from tests.subagents.stage import Stage, offered, system
from tests.tasks.office import Office, eventually, plain, texts

from .node import task_records

ROOT = Path(__file__).parents[2]
KEEPER = b"""---
description: Keeps the stores.
---

You keep the stores.
"""

Node = Callable[[], StoreFilesystem]


@pytest.fixture
def node(database_url: str) -> Iterator[Node]:
    """The files of one more node."""
    with ExitStack() as opened:
        yield lambda: opened.enter_context(StoreFilesystem(database_url, "team"))


async def run(files: StoreFilesystem, model: ScriptedModel, **options: Any) -> RunResult:
    async with Runtime([HarnessAgent("boss", model, filesystem=files, **options)]) as runtime:
        return await runtime.run("boss", "go", thread_id="s1")


async def test_what_one_node_writes_guides_the_other(node: Node) -> None:
    here, there = node(), node()
    here.write("AGENTS.md", b"Quote every line.")
    here.write("subagents/keeper.md", KEEPER)
    first = Stage(say("done"))
    await run(there, first)
    assert "Quote every line." in system(first.requests[0])
    assert "keeper" in system(first.requests[0])
    here.write("AGENTS.md", b"Quote nothing.")
    here.delete("subagents/keeper.md")
    second = Stage(say("done"))
    await run(there, second)
    assert "Quote nothing." in system(second.requests[0])
    assert "keeper" not in system(second.requests[0])


async def test_a_child_works_in_a_folder_that_every_node_sees(node: Node) -> None:
    here, there = node(), node()
    here.write("subagents/keeper.md", KEEPER)

    def child(request: Any) -> Any:
        if request.messages[-1].role == "tool":
            return say(request.messages[-1].text)
        return call("write_file", {"path": "count.md", "content": "three\n"})

    spawn = {"agent_id": "keeper", "task": "Count."}
    result = await run(there, Stage(call("agent_spawn", spawn), say("done"), child=child))
    assert "wrote 1 line (6 bytes) to count.md" in texts(result)[0]
    assert here.read("agents/keeper/workspace/count.md") == b"three\n"


async def test_a_folder_that_defines_a_child_is_told_once(node: Node) -> None:
    files = node()
    files.write("defs/reviewer/AGENTS.md", b"You review.")
    declared = SubagentDeclaration("reviewer", "Reviews.", workspace="defs/reviewer")
    stage = Stage(call("agent_spawn", {"agent_id": "reviewer", "task": "Go."}), say("done"))
    await run(node(), stage, subagents=[declared])
    assert system(stage.of_children[0]).count("You review.") == 1


async def test_the_six_tools(node: Node) -> None:
    here, there = node(), node()
    here.write("notes/plan.md", b"one\ntwo\n")
    calls: list[tuple[str, dict[str, Any]]] = [
        ("read_file", {"path": "notes/plan.md"}),
        ("edit_file", {"path": "notes/plan.md", "old": "two", "new": "three"}),
        ("write_file", {"path": "notes/new.md", "content": "x\n"}),
        ("list_files", {"path": "notes"}),
        ("glob_files", {"pattern": "**/*.md"}),
        ("grep_files", {"pattern": "thr.e"}),
    ]
    model = ScriptedModel([*[call(name, args) for name, args in calls], say("done")])
    result = await run(there, model)
    assert texts(result) == [
        "     1\tone\n     2\ttwo",
        "replaced 1 occurrence in notes/plan.md, at line 2",
        "wrote 1 line (2 bytes) to notes/new.md",
        "notes/new.md (2 bytes)\nnotes/plan.md (10 bytes)",
        "notes/new.md\nnotes/plan.md",
        "notes/plan.md:2: three",
    ]
    assert here.read("notes/plan.md") == b"one\nthree\n"


async def test_a_long_result_is_read_on_another_node(node: Node) -> None:
    @tool
    def count() -> str:
        """Count."""
        return "x" * 5000

    await run(node(), ScriptedModel([call("count", {}, id="c1"), say("done")]), tools=[count], tool_result_limit=1000)
    assert node().read("tool_results/c1.txt") == b"x" * 5000


async def test_records_of_tasks_are_kept_back(node: Node) -> None:
    files = node()
    files.write("agents/boss/tasks/s1.json", b'{"secret": 1}')
    asked = [
        call("read_file", {"path": "agents/boss/tasks/s1.json"}),
        call("write_file", {"path": "agents/boss/tasks/s2.json", "content": "{}"}),
        call("grep_files", {"pattern": "secret"}),
        say("done"),
    ]
    result = await run(node(), ScriptedModel(asked), disable_subagents=True)
    assert ["kept back" in text for text in texts(result)] == [True, True, False]
    assert "secret" not in texts(result)[2].replace("'secret'", "")
    assert [entry.path for entry in files.walk("agents")] == ["agents/boss/tasks/s1.json"]


def test_there_is_no_shell(node: Node) -> None:
    with pytest.raises(
        ConfigurationError, match=r"no command can be run on the files of StoreFilesystem.*disable_shell"
    ):
        HarnessAgent("boss", ScriptedModel([]), filesystem=node(), disable_shell=False)


async def test_there_is_none_for_children_either(node: Node) -> None:
    stage = Stage(call("agent_spawn", {"agent_id": "general-purpose", "task": "Go."}), say("done"))
    await run(node(), stage)
    assert "shell" not in [*offered(stage.requests[0]), *offered(stage.of_children[0])]


@pytest.fixture(params=["workspace", "sql"])
async def offices(request: pytest.FixtureRequest, node: Node, database_url: str) -> AsyncIterator[list[Office]]:
    """Two nodes, with their tasks in files or in rows."""
    made: list[Office] = []
    for _ in range(2):
        files = node()
        records = task_records(request.param, database_url, files)
        made.append(Office(Path(), filesystem=files, task_repository=records))
    yield made
    for office in made:
        await office.runtime.close(grace=1)
        if isinstance(office.repository, SqlTaskRepository):
            await office.repository.close()


async def test_another_node_lists_and_reads_a_task(offices: list[Office]) -> None:
    here, there = offices
    task_id = await here.start("wait gate")
    assert plain(await there.do("task_list")).splitlines() == [
        "1 tracked task(s):",
        "- task_id: <task>  agent: worker  status: running  created: <time>",
    ]
    assert "status: running" in await there.do("task_output", {"task_id": task_id, "timeout": 50})
    here.gates["gate"].set()
    assert (await there.do("task_output", {"task_id": task_id})).endswith("Result:\nwaited for gate")


async def test_another_node_cancels_a_task(offices: list[Office]) -> None:
    here, there = offices
    task_id = await here.start("wait gate")
    await eventually(lambda: here.begun)
    assert "status: cancelled" in await there.do("task_cancel", {"task_id": task_id})
    assert (await here.record(task_id)).status is TaskStatus.CANCELLED


async def test_a_long_result_of_a_task_is_whole_on_another_node(offices: list[Office]) -> None:
    here, there = offices
    task_id = await here.start("say " + "long " * 2000)
    await there.ended(task_id)
    record = await there.record(task_id)
    assert record.result_file is not None
    assert await there.repository.read_result(record) == "long " * 2000
    assert await there.repository.get(TaskScope("boss", "s1", "ann"), task_id) is None


Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def process(database_url: str) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def start(kind: str) -> subprocess.Popen[str]:
        command = [PYTHON, "-m", "tests.storage.node", database_url, kind]
        made = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(made)
        return made

    yield start
    for made in started:
        made.kill()
        made.communicate()


@pytest.mark.parametrize("kind", ["workspace", "sql"])
async def test_a_process_of_its_own(database_url: str, process: Start, kind: str) -> None:
    """Its tasks are listed, awaited, cancelled, and given up on when it is killed."""
    finishing, cancelled, killed = [process(kind) for _ in range(3)]
    ids = [each.stdout.readline().strip() for each in (finishing, cancelled, killed) if each.stdout is not None]
    assert all(ids)
    with StoreFilesystem(database_url) as files:
        async with Office(Path(), filesystem=files, task_repository=task_records(kind, database_url, files)) as office:
            assert sorted(ids) == sorted(
                [record.task_id for record in await office.repository.list(TaskScope("boss", "s1"))]
            )
            assert "status: cancelled" in await office.do("task_cancel", {"task_id": ids[1]})
            killed.send_signal(signal.SIGKILL)
            assert finishing.stdin is not None
            finishing.stdin.write("go on\n")
            finishing.stdin.flush()
            answer = await office.do("task_output", {"task_id": ids[0]})
            assert answer.endswith("Result:\nwaited for there")
            lost = await office.ended(ids[2])
            assert lost.status is TaskStatus.FAILED
            assert "executor lost" in (lost.error_message or "")
            if isinstance(office.repository, SqlTaskRepository):
                await office.runtime.close(grace=1)
                await office.repository.close()
