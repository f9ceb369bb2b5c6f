"""Agents in a sandbox: their children stay in it, however they are declared, and what they did is there the next time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from retinue import (
    Agent,
    ConfigurationError,
    HarnessAgent,
    LocalFilesystem,
    RunResult,
    RunStatus,
    Runtime,
    SandboxFilesystem,
    SubagentDeclaration,
    ToolContext,
)
from retinue.tasks import TaskScope, TaskStatus
from retinue.testing import ScriptedModel, call, say

LOOK = "pwd; ls -d /root /home /var 2>/dev/null | wc -l; ls"


def shell_of(line: str) -> Any:
    return call("shell", {"command": line})


def obedient(request: Any) -> Any:
    """Runs the command it is sent, and reports what came of it."""
    last = request.messages[-1]
    return say(last.text) if last.role == "tool" else shell_of(last.text)


def sandboxed(files: SandboxFilesystem, *turns: Any, **options: Any) -> HarnessAgent:
    left = [*turns, say("end")]

    def act(request: Any) -> Any:
        is_child = "# Subagent Context" in request.messages[0].text
        turn = obedient if is_child else left.pop(0)
        return turn(request) if callable(turn) else turn

    return HarnessAgent("boss", ScriptedModel(act), filesystem=files, disable_shell=False, **options)


def spawn(agent_id: str, line: str = LOOK) -> Any:
    return call("agent_spawn", {"agent_id": agent_id, "task": line})


async def answers(agent: Agent, *others: Agent, **options: Any) -> list[str]:
    async with Runtime([agent, *others]) as runtime:
        result: RunResult = await runtime.run(agent, "go", **options)
    assert result.status is RunStatus.COMPLETED, result.error
    return [message.text for message in result.messages if message.role == "tool"]


@pytest.mark.parametrize("isolation", ["shared", "session"])
async def test_state_is_there_in_the_next_command_run_and_runtime(bwrap: None, root: Path, isolation: Any) -> None:
    def agent(*turns: Any) -> HarnessAgent:
        return sandboxed(SandboxFilesystem(root, isolation=isolation), *turns)

    write = call("write_file", {"path": "b.txt", "content": "two\n"})
    told = await answers(agent(shell_of("echo one >> log"), write, shell_of("cat log b.txt")), thread_id="s")
    assert told[-1] == "exit code: 0\none\ntwo\n"
    async with Runtime([again := agent(shell_of("cat log b.txt"), say("x"), shell_of("cat log b.txt"))]) as runtime:
        for _ in range(2):
            result = await runtime.run(again, "go", thread_id="s")
            assert [m.text for m in result.messages if m.role == "tool"][-1] == "exit code: 0\none\ntwo\n"
    assert (root / ("" if isolation == "shared" else "sessions/s") / "log").read_text() == "one\n"


async def test_file_tools_see_the_files_of_their_session(root: Path) -> None:
    def agent(*turns: Any) -> HarnessAgent:
        return HarnessAgent("boss", ScriptedModel([*turns, say("end")]), filesystem=files)

    files = SandboxFilesystem(root, isolation="session")
    (root / "AGENTS.md").write_text("RULES")
    await answers(agent(call("write_file", {"path": "a.txt", "content": "mine"})), thread_id="one")
    told = await answers(agent([call("list_files"), call("read_file", {"path": "a.txt"})]), thread_id="two")
    assert "a.txt (" not in told[0]
    assert told[1].startswith("not_found: a.txt")
    seen = await answers(again := agent([call("read_file", {"path": "a.txt"}), call("list_files")]), thread_id="one")
    assert seen[0].split() == ["1", "mine"]
    assert seen[1].splitlines() == ["a.txt (4 bytes)"]
    assert isinstance(again.model, ScriptedModel)
    assert "RULES" in again.model.requests[0].messages[0].text


async def test_long_results_are_kept_with_the_files_of_their_session(bwrap: None, root: Path) -> None:
    def agent(*turns: Any) -> HarnessAgent:
        return sandboxed(SandboxFilesystem(root, isolation="session"), *turns, tool_result_limit=1000)

    many = shell_of("seq 1 2000")
    told = await answers(agent(many), thread_id="one")
    path = told[0].split('the whole is in "')[1].split('"')[0]
    kept = root / "sessions/one" / path
    assert kept.read_text() == "exit code: 0\n" + "".join([f"{number}\n" for number in range(1, 2001)])
    reading = call("read_file", {"path": path, "limit": 2})
    assert "exit code: 0" in (await answers(agent(reading), thread_id="one"))[0]
    assert "not_found" in (await answers(agent(reading), thread_id="two"))[0]


@pytest.mark.parametrize("isolation", ["shared", "session"])
async def test_every_kind_of_declared_child_stays_inside(bwrap: None, root: Path, isolation: Any) -> None:
    (root / "defs/reviewer").mkdir(parents=True)
    (root / "defs/reviewer/AGENTS.md").write_text("You review.")
    (root / "subagents").mkdir()
    (root / "subagents/filed.md").write_text("---\ndescription: d\n---\n\nYou are filed.")
    declared = [
        SubagentDeclaration("isolated", "d", inline="x"),
        SubagentDeclaration("sharing", "d", inline="x", mode="shared"),
        SubagentDeclaration("reviewer", "d", workspace="defs/reviewer"),
        SubagentDeclaration("absolute", "d", workspace=root / "defs/reviewer"),
    ]
    names = ["general-purpose", "isolated", "sharing", "reviewer", "absolute", "filed"]
    files = SandboxFilesystem(root, isolation=isolation)
    agent = sandboxed(
        files,
        shell_of("echo 1 > top.txt"),
        [spawn(name, f"{LOOK}; touch {name}") for name in names],
        subagents=declared,
    )
    told = (await answers(agent, thread_id="s"))[1:]
    for name, text in zip(names, told, strict=True):
        assert "exit code: 0\n/workspace\n0\n" in text, (name, text)
        assert ("top.txt" in text) == (name in ("general-purpose", "sharing")), (name, text)
    made = root if isolation == "shared" else root / "sessions/s"
    for place in ("sharing", "agents/isolated/workspace/isolated", "defs/reviewer/absolute"):
        assert (made / place).exists()


async def test_a_definition_outside_is_refused(root: Path, outside: Path) -> None:
    agent = sandboxed(
        SandboxFilesystem(root),
        subagents=[SubagentDeclaration("x", "d", workspace=outside)],
        workspace_roots=[outside],
    )
    assert agent.catalog is not None
    assert "x" not in agent.catalog.entries
    assert "outside of the sandbox: move it in" in str(agent.catalog.problems[0])


async def test_a_factory_cannot_give_a_child_of_the_host(bwrap: None, root: Path, tmp_path: Path) -> None:
    def child(ctx: ToolContext, **options: Any) -> HarnessAgent:
        return HarnessAgent("child", ScriptedModel(obedient), disable_shell=False, **options)

    def bound(ctx: ToolContext) -> HarnessAgent:
        assert isinstance(ctx.agent, HarnessAgent)
        files = ctx.agent.files
        assert isinstance(files, SandboxFilesystem)
        return child(ctx, filesystem=files.for_run(ctx.run))

    def hidden(ctx: ToolContext) -> Agent:
        return Agent("hidden", ScriptedModel([]), subagents=[child(ctx, workspace=tmp_path)])

    def by_name(ctx: ToolContext) -> Agent:
        return Agent("by_name", ScriptedModel([]), subagents=["host"])

    factories: dict[str, Any] = {
        "by_name": by_name,
        "default": child,
        "elsewhere": lambda ctx: child(ctx, workspace=tmp_path),
        "unboxed": lambda ctx: child(ctx, filesystem=LocalFilesystem(root)),
        "wider": lambda ctx: child(ctx, filesystem=SandboxFilesystem(tmp_path)),
        "online": lambda ctx: child(ctx, filesystem=SandboxFilesystem(root, network=True)),
        "hidden": hidden,
        "bound": bound,
        "below": lambda ctx: child(ctx, filesystem=ctx.agent.files.below("part")),
    }
    host = HarnessAgent("host", ScriptedModel([]), workspace=tmp_path)
    for isolation in ("shared", "session"):
        files = SandboxFilesystem(root, isolation=isolation)
        agent = sandboxed(files, [spawn(name) for name in factories], subagent_factories=factories)
        told = dict(zip(factories, await answers(agent, host, thread_id="s"), strict=True))
        for name in ("default", "elsewhere", "unboxed", "wider", "online", "hidden", "by_name"):
            assert "outside of the sandbox of 'boss'" in told[name], (name, told[name])
        for name in ("bound", "below"):
            assert "exit code: 0\n/workspace\n0\n" in told[name], (name, told[name])


async def test_an_agent_in_code_cannot_be_of_the_host(root: Path, tmp_path: Path) -> None:
    host = HarnessAgent("host", ScriptedModel([]), workspace=tmp_path)
    files = SandboxFilesystem(root)

    def boss(**options: Any) -> HarnessAgent:
        return HarnessAgent("boss", ScriptedModel([call("agent_list"), say("x")]), filesystem=files, **options)

    for options in (
        {"subagents": [host]},
        {"handoffs": [host]},
        {"tools": [host.as_tool()]},
        {"subagents": [Agent("between", ScriptedModel([]), subagents=[host])]},
    ):
        with pytest.raises(ConfigurationError, match="agent 'host' works in .* outside of the sandbox of 'boss'"):
            Runtime([boss(**options)])
    between = Agent("between", ScriptedModel([]), handoffs=["host"])
    for options in ({"subagents": ["host"]}, {"handoffs": ["host"]}, {"subagents": [between]}):
        with pytest.raises(ConfigurationError, match="outside of the sandbox of 'boss'"):
            await Runtime([host, boss(**options)]).run("boss", "go")
    inside = HarnessAgent("inside", ScriptedModel([]), filesystem=files.below("part"))
    Runtime([boss(subagents=[inside, Agent("plain", ScriptedModel([]))])])


async def test_commands_neither_see_nor_forge_the_records_of_tasks(bwrap: None, root: Path) -> None:
    (root / "agents/boss/tasks").mkdir(parents=True)
    (root / "agents/boss/tasks/s.json").write_text('{"task": "secret"}')
    (root / "agents/boss/notes").mkdir()
    forge = "mkdir -p agents/other/tasks; echo x > agents/boss/tasks/s.json; mv agents away; rm -rf agents"
    agent = sandboxed(
        SandboxFilesystem(root),
        shell_of("cat agents/boss/tasks/* 2>/dev/null; grep -r secret . ; ls agents/boss"),
        shell_of(f"{forge}; echo 1 > agents/boss/notes/n; true"),
        spawn("nested"),
        subagents=[SubagentDeclaration("nested", "d", workspace="agents")],
    )
    told = await answers(agent, thread_id="other")
    assert told[0] == "exit code: 0\nnotes\ntasks\n"
    assert (root / "agents/boss/tasks/s.json").read_text() == '{"task": "secret"}'
    assert not (root / "agents/other").exists()
    assert "records of tasks are below it" in told[2]


async def test_background_tasks_are_recorded_with_the_sandbox(bwrap: None, root: Path) -> None:
    work = call("agent_spawn", {"agent_id": "general-purpose", "task": "echo done > made", "timeout_seconds": 0})

    def wait(request: Any) -> Any:
        task_id = request.messages[-1].text.partition("task_id: ")[2].split()[0]
        return call("task_output", {"task_id": task_id})

    agent = sandboxed(SandboxFilesystem(root, isolation="user"), work, wait)
    await answers(agent, thread_id="s", user_id="ann")
    assert agent.task_repository is not None
    (record,) = await agent.task_repository.list(TaskScope("boss", "s", "ann"))
    assert record.status is TaskStatus.COMPLETED
    assert (root / "users/ann/made").read_text() == "done\n"
    assert list((root / "agents/boss/tasks").iterdir())


async def test_a_runtime_refuses_a_sandboxed_shell_without_bwrap(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(root))
    with pytest.raises(ConfigurationError, match="no bwrap on the PATH: install it"):
        Runtime([sandboxed(SandboxFilesystem(root))])
    agent = HarnessAgent("boss", ScriptedModel([call("list_files"), say("x")]), filesystem=SandboxFilesystem(root))
    assert len(await answers(agent)) == 1
