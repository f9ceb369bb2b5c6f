"""A spawned sub-agent has one conversation: over steps, runs and processes, for one user, one message at a time."""

from __future__ import annotations

import asyncio
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from retinue import (
    Agent,
    ConfigurationError,
    Decision,
    HarnessAgent,
    Limits,
    RunResult,
    RunStatus,
    Runtime,
    SubagentDeclaration,
    ToolContext,
    ToolResult,
    tool,
)
from retinue.stores import MemoryStore
from retinue.tasks.files import WorkspaceTaskRepository
from retinue.tasks.task import TaskScope
from retinue.testing import RecordingSink, ScriptedModel, call, fail, say
from retinue.workspace.local import LocalFilesystem
from tests.subagents.stage import Stage, harness, key_in, said, send, spawn, stage, told

GP = "general-purpose"


def last_lines(result: RunResult) -> list[str]:
    return [text.splitlines()[-1] for text in told(result)]


async def test_sending_goes_on_with_the_same_conversation(tmp_path: Path) -> None:
    agent = harness(tmp_path, spawn(GP, "one", label="a"), send("two", label="a"), send("three", label="a"))
    await Runtime([agent]).run("boss", "go")
    assert said(stage(agent).of_children[-1]) == ["one", "did one", "two", "did two", "three"]


async def test_a_sub_agent_spawned_without_a_task_begins_with_the_first_message(tmp_path: Path) -> None:
    agent = harness(tmp_path, spawn(GP, " \n", label="a"), send("one", label="a"))
    result = await Runtime([agent]).run("boss", "go")
    assert [text.splitlines()[-1] for text in told(result)] == ["status: accepted", "did one"]
    assert said(stage(agent).of_children[-1]) == ["one"]


async def test_two_sub_agents_of_one_kind_know_nothing_of_each_other(tmp_path: Path) -> None:
    agent = harness(tmp_path, [spawn(GP, "one", label="a"), spawn(GP, "two", label="b")], send("more", label="a"))
    await Runtime([agent]).run("boss", "go")
    heard = sorted([said(request) for request in stage(agent).of_children])
    assert heard == [["one"], ["one", "did one", "more"], ["two"]]


async def test_a_later_run_of_the_thread_goes_on_with_it(tmp_path: Path) -> None:
    agent = harness(
        tmp_path,
        spawn(GP, "one", label="a"),
        say("end"),
        lambda request: send("two", agent_key=key_in(request)),
        spawn(GP, "x", label="A"),
        call("agent_list"),
    )
    runtime = Runtime([agent])
    await runtime.run("boss", "go", thread_id="t")
    result = await runtime.run("boss", "go on", thread_id="t")
    assert said(stage(agent).of_children[-1]) == ["one", "did one", "two"]
    assert told(result) == [
        "agent_key: agent:general-purpose:<1>\nstatus: ok\nreply:\ndid two",
        "Error: Label already in use: A",
        f"Active subagents (1):\n- agent_key: agent:{GP}:<1>\n  agent_id: {GP}\n  label: a\n  spawn_depth: 1",
    ]


async def test_another_runtime_over_the_same_store_goes_on_with_it(tmp_path: Path) -> None:
    store = MemoryStore()
    declared = SubagentDeclaration("r", "d", inline="I review.")
    first = harness(tmp_path, spawn("r", "one", label="a"), subagents=[declared])
    await Runtime([first], store=store).run("boss", "go", thread_id="t", user_id="ann")
    second = harness(tmp_path, call("agent_list"), send("two", label="a"), subagents=[declared])
    result = await Runtime([second], store=store).run("boss", "go on", thread_id="t", user_id="ann")
    assert said(stage(second).of_children[0]) == ["one", "did one", "two"]
    assert last_lines(result) == ["  spawn_depth: 1", "did two"]


@pytest.mark.parametrize(
    ("thread_id", "user_id"), [("t", "bob"), ("t", None), ("other", "ann"), ("other", "bob")], ids=str
)
async def test_keys_and_labels_belong_to_one_user_and_session(
    tmp_path: Path, thread_id: str, user_id: str | None
) -> None:
    keys: list[str] = []

    def keep(request: Any) -> Any:
        keys.append(key_in(request))
        return say("end")

    agent = harness(
        tmp_path,
        spawn(GP, "one", label="a"),
        keep,
        call("agent_list"),
        send("x", label="a"),
        lambda _: send("x", agent_key=keys[0]),
        lambda _: call("agent_close", {"agent_key": keys[0]}),
        spawn(GP, "mine", label="a"),
        say("end"),
        send("two", label="a"),
    )
    runtime = Runtime([agent])
    await runtime.run("boss", "go", thread_id="t", user_id="ann")
    result = await runtime.run("boss", "go", thread_id=thread_id, user_id=user_id)
    key = f"agent:{GP}:<1>"
    assert told(result)[:4] == [
        "No active subagents.",
        "Error: Unknown label: a\nUse agent_list() to see your sub-agents.",
        f"Error: Unknown agent_key: {key}\nUse agent_list() to see your sub-agents.",
        f"Error: Unknown agent_key: {key}\nUse agent_list() to see your sub-agents.",
    ]
    assert last_lines(result)[4] == "did mine"
    await runtime.run("boss", "go", thread_id="t", user_id="ann")
    assert said(stage(agent).of_children[-1]) == ["one", "did one", "two"]


ODD = ["../x", "a/b", "..", ".", "a..b", ".x", "x" * 300, "a\\b", "a\nb", "~a", "%2e%2e", "c:/x", "会话1", "ü" * 200]


@pytest.mark.parametrize("thread_id", ODD, ids=lambda one: one[:8])
@pytest.mark.parametrize("stored", [False, True])
async def test_any_thread_id_has_sub_agents_and_tasks_within_the_workspace(
    tmp_path: Path, thread_id: str, stored: bool
) -> None:
    """The same ids as for any agent; files for them stay in the folder of task records."""
    folder, url = tmp_path / "deep" / "work", f"sqlite:///{tmp_path}/app.db" if stored else "memory:"
    agent = harness(folder, spawn(GP, "one", label="a"), spawn(GP, "two", timeout_seconds=0))
    async with Runtime.open(url, [agent]) as runtime:
        run = runtime.stream("boss", "go", thread_id=thread_id)
        assert (await run.result()).status is RunStatus.COMPLETED
        assert [event async for event in runtime.events(run.run_id)]
        stage(agent).go_on(send("three", label="a"), call("task_list", {}), say("end"))
        result = await runtime.run("boss", "go on", thread_id=thread_id)
        assert "did three" in told(result)[-2]
        assert told(result)[-1].count("task_id: ") == 1
        other = harness(folder, call("task_list", {}))
        async with Runtime([other]) as beside:
            assert "task_id" not in told(await beside.run("boss", "go", thread_id="x"))[0]
    made = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    (tasks,) = {path for path in made if not path.startswith("app.db") and not path.endswith(".lock")}
    assert tasks.startswith("deep/work/agents/boss/tasks/")
    records = await WorkspaceTaskRepository(LocalFilesystem(folder), "boss").everything()
    assert {record.parent_session_id for record in records} == {thread_id}


async def test_two_thread_ids_never_share_a_file_of_tasks(tmp_path: Path) -> None:
    """Also not one that is spelled like the file of another, nor where capital and small letters are one."""
    ids = ["a/b", "a%2Fb", "~" + sha256(b"a/b").hexdigest(), "c:x", "c%3Ax", "c%3Ax/", "A", "a", "a.json", "a.results"]
    ids += ["会话1", "会话2", "x" * 300, "x" * 301]
    agent = harness(tmp_path)
    runtime = Runtime([agent])
    await runtime.run("boss", "go")  # its one turn
    for thread_id in ids:
        stage(agent).go_on(spawn(GP, "one" + "x" * 5_000, timeout_seconds=0), say("end"))
        run = runtime.stream("boss", "go", thread_id=thread_id)
        await run.result()
        assert [event async for event in runtime.events(run.run_id)]
    repository = WorkspaceTaskRepository(LocalFilesystem(tmp_path), "boss")
    found = [await repository.list(TaskScope("boss", thread_id)) for thread_id in ids]
    assert [len(records) for records in found] == [1] * len(ids)
    assert all(record.result_file for (record,) in found)
    files = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert len({str(path).casefold() for path in files}) == len(files) == 2 * len(ids)


async def test_a_thread_id_that_no_agent_takes_is_refused_by_a_harness_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="NUL character"):
        await Runtime([harness(tmp_path)]).run("boss", "go", thread_id="a\0")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("thread_id", ["t", "a.b", "user@example.com:7", "2026-01-01T00:00+x=y", "_", "x" * 128])
async def test_an_ordinary_session_id_is_taken(tmp_path: Path, thread_id: str) -> None:
    assert (await Runtime([harness(tmp_path)]).run("boss", "go", thread_id=thread_id)).status is RunStatus.COMPLETED


async def test_messages_to_a_busy_sub_agent_wait_their_turn_and_see_what_came_before(tmp_path: Path) -> None:
    running, most = 0, 0

    async def child(request: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return say(f"did {request.messages[-1].text}")

    agent = harness(tmp_path, spawn(GP, label="a"), [send(text, label="a") for text in ("1", "2", "3")], child=child)
    result = await Runtime([agent]).run("boss", "go")
    assert most == 1
    assert last_lines(result) == ["status: accepted", "did 1", "did 2", "did 3"]
    assert said(stage(agent).of_children[-1]) == ["1", "did 1", "2", "did 2", "3"]


async def test_waiting_for_a_busy_sub_agent_does_not_keep_it_from_its_tools(tmp_path: Path) -> None:
    @tool
    async def look() -> str:
        """Look."""
        await asyncio.sleep(0)
        return "seen"

    def child(request: Any) -> Any:
        return call("look") if request.messages[-1].role == "user" else say("done")

    agent = harness(tmp_path, spawn(GP, label="a"), [send("x", label="a")] * 3, child=child, tools=[look])
    async with asyncio.timeout(90):
        result = await Runtime([agent]).run("boss", "go", limits=Limits(parallel=1))
    assert last_lines(result) == ["status: accepted", *["done"] * 3]


async def test_a_sub_agent_at_work_cannot_be_closed(tmp_path: Path) -> None:
    refused = asyncio.Event()

    def watch(event: Any) -> None:
        if event.kind == "tool_call_finished" and event.tool_name == "agent_close":
            refused.set()

    async def child(request: Any) -> Any:
        await refused.wait()
        return say("done")

    agent = harness(
        tmp_path,
        spawn(GP, label="a"),
        [send("x", label="a"), call("agent_close", {"label": "a"})],
        call("agent_close", {"label": "a"}),
        child=child,
    )
    result = await Runtime([agent], sinks=[watch]).run("boss", "go")
    assert told(result)[1:] == [
        f"agent_key: agent:{GP}:<1>\nstatus: ok\nreply:\ndone",
        f"Error: agent:{GP}:<1> is working on a message: wait for its answer first",
        f"agent_key: agent:{GP}:<1>\nstatus: closed",
    ]


async def test_a_sub_agent_that_is_closed_in_a_step_takes_no_message_in_it(tmp_path: Path) -> None:
    closing = [call("agent_close", {"label": "a"}), send("x", label="a"), call("agent_close", {"label": "a"})]
    agent = harness(tmp_path, spawn(GP, label="a"), closing, call("agent_list"))
    result = await Runtime([agent]).run("boss", "go")
    assert told(result)[1:] == [
        f"agent_key: agent:{GP}:<1>\nstatus: closed",
        "Error: Unknown label: a\nUse agent_list() to see your sub-agents.",
        "Error: Unknown label: a\nUse agent_list() to see your sub-agents.",
        "No active subagents.",
    ]


@tool
async def ask(ctx: ToolContext) -> Any:
    """Ask a human."""
    if ctx.resume_input is None:
        return ToolResult.suspended("may I?")
    return f"human said {ctx.resume_input}"


def asking(request: Any) -> Any:
    last = request.messages[-1]
    return call("ask", {}, id="inner") if last.text.startswith("ask") else say(f"did {last.text}")


async def test_a_child_that_waits_suspends_its_parent_and_goes_on_in_the_same_session(tmp_path: Path) -> None:
    agent = harness(
        tmp_path,
        [spawn(GP, "ask first", label="a", id="c1"), spawn(GP, "plain", id="c2")],
        send("and then", label="a"),
        child=asking,
        tools=[ask],
    )
    runtime = Runtime([agent])
    waiting = await runtime.run("boss", "go", thread_id="t")
    assert waiting.status is RunStatus.SUSPENDED
    assert {ticket.path: ticket.message for ticket in waiting.suspended.values()} == {("c1", "inner"): "may I?"}
    result = await runtime.resume(waiting.run_id, {"inner": Decision.resume("yes")})
    assert (result.status, result.response) == (RunStatus.COMPLETED, "end")
    assert told(result) == [
        f"agent_key: agent:{GP}:<1>\nagent_id: {GP}\nsession_id: sub-<1>\nstatus: ok\nreply:\ndid human said yes",
        f"agent_key: agent:{GP}:<2>\nagent_id: {GP}\nsession_id: sub-<2>\nstatus: ok\nreply:\ndid plain",
        f"agent_key: agent:{GP}:<1>\nstatus: ok\nreply:\ndid and then",
    ]
    assert said(stage(agent).of_children[-1]) == ["ask first", "", "human said yes", "did human said yes", "and then"]
    events: list[Any] = [event async for event in runtime.events(waiting.run_id)]
    begun = [event for event in events if event.kind == "run_started" and event.ns == ("tools:c1",)]
    assert len({event.run_id for event in begun}) == 1
    assert len([event for event in events if event.kind == "child_started"]) == 3


async def test_a_send_to_a_child_that_waits_suspends_too_and_goes_on(tmp_path: Path) -> None:
    agent = harness(
        tmp_path,
        spawn(GP, "plain", label="a"),
        send("ask now", label="a"),
        send("more", label="a"),
        child=asking,
        tools=[ask],
    )
    runtime = Runtime([agent])
    waiting = await runtime.run("boss", "go")
    assert waiting.status is RunStatus.SUSPENDED
    result = await runtime.resume(waiting.run_id, {"inner": Decision.resume("ok")})
    assert last_lines(result) == ["did plain", "did human said ok", "did more"]
    assert said(stage(agent).of_children[-1])[-2:] == ["did human said ok", "more"]


async def test_a_child_that_waits_takes_no_other_message_and_loses_nothing(tmp_path: Path) -> None:
    agent = harness(
        tmp_path,
        spawn(GP, "plain", label="a"),
        [send("ask now", label="a"), send("meanwhile", label="a"), call("agent_close", {"label": "a"})],
        send("more", label="a"),
        child=asking,
        tools=[ask],
    )
    runtime = Runtime([agent])
    waiting = await runtime.run("boss", "go")
    result = await runtime.resume(waiting.run_id, {"inner": Decision.resume("ok")})
    waits = f"Error: agent '{GP}' could not be run: it waits for a decision: send your message when it has gone on"
    assert told(result)[1:4] == [
        f"agent_key: agent:{GP}:<1>\nstatus: ok\nreply:\ndid human said ok",
        waits,
        f"Error: agent:{GP}:<1> is working on a message: wait for its answer first",
    ]
    assert said(stage(agent).of_children[-1]) == [
        "plain",
        "did plain",
        "ask now",
        "",
        "human said ok",
        "did human said ok",
        "more",
    ]


async def test_a_background_child_that_waits_takes_no_other_message_either(tmp_path: Path) -> None:
    agent = harness(
        tmp_path,
        spawn(GP, "plain", label="a"),
        send("ask now", label="a", timeout_seconds=0),
        say("end"),
        send("meanwhile", label="a"),
        call("agent_close", {"label": "a"}),
        say("end"),
        send("more", label="a"),
        child=asking,
        tools=[ask],
    )
    async with Runtime([agent]) as runtime:
        run = runtime.stream("boss", "go", thread_id="t")
        await run.result()
        waiting = await _waiting_child(run)
        result = await runtime.run("boss", "go", thread_id="t")
        assert told(result)[:2] == [
            f"Error: agent '{GP}' could not be run: it waits for a decision: send your message when it has gone on",
            f"Error: agent:{GP}:<1> waits for a decision: close it when it has gone on",
        ]
        assert (await runtime.resume(waiting, {"inner": Decision.resume("ok")})).response == "did human said ok"
        result = await runtime.run("boss", "go", thread_id="t")
        assert last_lines(result)[-1] == "did more"
    assert said(stage(agent).of_children[-1])[-3:] == ["human said ok", "did human said ok", "more"]


async def _waiting_child(run: Any) -> str:
    """The run id of the child that has come to wait."""
    async for event in run.follow():
        if event.kind == "run_finished" and event.status == "suspended":
            return event.run_id
    raise AssertionError("no child waits")


async def test_a_child_that_was_given_up_while_it_waited_can_be_sent_to_again(tmp_path: Path) -> None:
    agent = harness(
        tmp_path,
        spawn(GP, "plain", label="a"),
        say("end"),
        send("ask now", label="a"),
        send("again", label="a"),
        child=asking,
        tools=[ask],
    )
    runtime = Runtime([agent])
    await runtime.run("boss", "go", thread_id="t")
    waiting = await runtime.run("boss", "go", thread_id="t")
    assert waiting.status is RunStatus.SUSPENDED
    assert (await runtime.cancel(waiting.run_id)).status is RunStatus.CANCELLED
    result = await runtime.run("boss", "go", thread_id="t")
    assert last_lines(result) == ["did again"]


async def test_a_child_that_failed_can_be_sent_to_again(tmp_path: Path) -> None:
    def child(request: Any) -> Any:
        text = request.messages[-1].text
        return fail(OSError("down")) if text == "break" else say(f"did {text}")

    agent = harness(tmp_path, spawn(GP, "break", label="a"), send("try again", label="a"), child=child)
    result = await Runtime([agent]).run("boss", "go")
    assert last_lines(result) == ["error: OSError: down", "did try again"]
    assert said(stage(agent).of_children[-1]) == ["break", "try again"]


async def test_cancelling_the_parent_stops_its_children_and_ends_every_run(tmp_path: Path) -> None:
    both, begun, stopped = asyncio.Event(), list[str](), list[str]()

    async def child(request: Any) -> Any:
        begun.append(request.messages[-1].text)
        if len(begun) == 2:
            both.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            stopped.append(request.messages[-1].text)
            raise

    agent = harness(tmp_path, [spawn(GP, "a", label="x"), spawn(GP, "b")], child=child)
    sink = RecordingSink()
    runtime = Runtime([agent], sinks=[sink])
    run = runtime.stream("boss", "go", thread_id="t")
    await both.wait()
    result = await run.cancel()
    assert result.status is RunStatus.CANCELLED
    assert sorted(stopped) == ["a", "b"]
    assert [event.status for event in sink.of("run_finished")] == ["cancelled"] * 3
    stage(agent).act_as_child(lambda request: say("free again"))
    assert (await runtime.run("boss", "go", thread_id="t")).response == "end"
    stage(agent).go_on(spawn(GP, "c", label="x"), say("end"))
    assert last_lines(await runtime.run("boss", "go", thread_id="t")) == ["free again"]


async def test_a_nested_harness_keeps_its_own_sub_agents_between_messages(tmp_path: Path) -> None:
    inner = Stage(
        spawn(GP, "deep", label="d"),
        say("inner first"),
        call("agent_list"),
        send("deeper", label="d"),
        say("inner second"),
    )

    def make(ctx: ToolContext) -> HarnessAgent:
        return HarnessAgent("inner", inner, workspace=tmp_path)

    agent = harness(
        tmp_path, spawn("inner", "one", label="i"), send("two", label="i"), subagent_factories={"inner": make}
    )
    result = await Runtime([agent]).run("boss", "go")
    assert last_lines(result) == ["inner first", "inner second"]
    assert said(inner.of_children[-1]) == ["deep", "did deep", "deeper"]
    listed = inner.of_parent[3].messages[-1].text.splitlines()
    assert (listed[0], listed[2:]) == ("Active subagents (1):", [f"  agent_id: {GP}", "  label: d", "  spawn_depth: 2"])


async def test_what_a_child_answers_as_a_type_is_told_as_json(tmp_path: Path) -> None:
    typed = Agent("typed", ScriptedModel([say('{"n": 3}')]), output=dict[str, int])
    agent = harness(tmp_path, spawn("typed", "x"), subagents=[typed])
    assert last_lines(await Runtime([agent]).run("boss", "go")) == ['{"n":3}']


async def test_messages_of_one_step_arrive_in_the_order_of_their_calls(sqlite_url: str, tmp_path: Path) -> None:
    heard, rounds = list[str](), 10

    def work(request: Any) -> Any:
        heard.append(request.messages[-1].text)
        return say(f"heard {request.messages[-1].text}")

    def lead(request: Any) -> Any:
        turns = sum(message.role == "assistant" for message in request.messages)
        if turns == 0:
            return call("agent_spawn", {"agent_id": "worker", "label": "w", "task": "zero"}, id="s")
        if turns <= rounds:
            return [
                call("agent_send", {"label": "w", "message": f"{turns}-{number}"}, id=f"m{turns}-{number}")
                for number in range(3)
            ]
        return say("done")

    worker = Agent("worker", ScriptedModel(work))
    boss = HarnessAgent(
        "boss",
        ScriptedModel(lead),
        subagents=[worker],
        workspace=tmp_path / "ws",
        general_purpose=False,
        max_steps=rounds + 2,
    )
    async with Runtime.open(sqlite_url, [boss]) as runtime, asyncio.timeout(90):
        result = await runtime.run("boss", "go", thread_id="t")
    assert result.status is RunStatus.COMPLETED
    assert heard == ["zero", *[f"{turn}-{number}" for turn in range(1, rounds + 1) for number in range(3)]]
