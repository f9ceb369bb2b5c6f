"""A boss with one worker, for tests of background tasks: what each says is up to the test."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from retinue import Agent, HarnessAgent, LocalFilesystem, RunResult, Runtime, ToolContext, ToolResult, tool
from retinue.tasks import TaskRecord, TaskRepository, TaskScope, TaskSettings, WorkspaceTaskRepository
from retinue.testing import ScriptedModel, call, say

QUICK = TaskSettings(heartbeat=0.05, orphan_after=0.4, sweep_every=0.1, look_every=0.02)

_PLAIN = (
    (r"task_[0-9a-f]{8}-[0-9a-f-]{27}", "<task>"),
    (r"agent:([\w-]+):[0-9a-f]{8}-[0-9a-f-]{27}", r"<key of \1>"),
    (r"sub-[0-9a-f]{8}-[0-9a-f-]{27}", "<session>"),
    (r"run_[0-9a-f]{20}", "<run>"),
    (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "<time>"),
    (r"started: \d\d:\d\dZ", "started: <time>"),
)


async def eventually(holds: Callable[[], object], seconds: float = 90) -> None:
    """Return when something holds."""
    async with asyncio.timeout(seconds):
        while not holds():  # noqa: ASYNC110 - anything can be asked for
            await asyncio.sleep(0.005)


def plain(text: str) -> str:
    """A text without what differs each time."""
    for pattern, name in _PLAIN:
        text = re.sub(pattern, name, text)
    return text


def task_id_in(text: str) -> str:
    found = re.search(r"^task_id: (\S+)$", text, re.MULTILINE)
    assert found, text
    return found[1]


def value_of(key: str, text: str) -> str:
    found = re.search(rf"^{key}: (.+)$", text, re.MULTILINE)
    assert found, text
    return found[1]


class Office:
    """Runs the boss, turn by turn. The worker does what its message says:

    `say <text>`, `wait <gate>` (until that gate is opened), `fail <text>`, `ask <question>` (a human), anything else
    is repeated.
    """

    def __init__(
        self, root: Path, settings: TaskSettings = QUICK, worker_tools: Sequence[Any] = (), **boss: Any
    ) -> None:
        self.root = root
        self.gates: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.worker_model = ScriptedModel(lambda request: self.worker_turn(request), "worker")
        self.worker_turn: Callable[[Any], Any] = self.work
        """What the worker does at each request."""
        self.model = ScriptedModel(self._turn, "boss")
        self.turns: list[Any] = []
        self.asked: list[str] = []
        self.begun: list[str] = []
        self.answers: dict[str, Any] = {}
        """What else the worker says, by message."""
        files = boss.pop("filesystem", None) or LocalFilesystem(root)
        self.repository: TaskRepository = boss.pop("task_repository", None) or WorkspaceTaskRepository(
            files, "boss", settings
        )
        self.worker = Agent("worker", self.worker_model, description="Works.", tools=[self._ask_tool(), *worker_tools])
        self.boss = HarnessAgent(
            "boss",
            self.model,
            filesystem=files,
            task_repository=self.repository,
            subagents=[self.worker],
            general_purpose=False,
            **boss,
        )
        self.runtime = Runtime([self.boss])

    async def __aenter__(self) -> Office:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.runtime.close(grace=1)

    async def run(self, *turns: Any, thread: str = "s1", user: str | None = None, **options: Any) -> RunResult:
        """A run of the boss with these turns and a last word. A turn may be a function of the request."""
        self.turns = [*turns, say("done")]
        return await self.runtime.run("boss", "go", thread_id=thread, user_id=user, **options)

    async def do(self, name: str, args: dict[str, Any] | None = None, **where: Any) -> str:
        """The answer to one tool call, in a run of its own."""
        result = await self.run(call(name, args or {}), **where)
        (answer,) = [message.text for message in result.messages if message.role == "tool"]
        return answer

    async def spawn(self, task: str, timeout_seconds: int | None = 0, **where: Any) -> str:
        """The answer of agent_spawn."""
        return await self.do(
            "agent_spawn", {"agent_id": "worker", "task": task, "timeout_seconds": timeout_seconds}, **where
        )

    async def start(self, task: str, **where: Any) -> str:
        """The id of a new background task."""
        return task_id_in(await self.spawn(task, **where))

    async def record(self, task_id: str, thread: str = "s1", user: str | None = None) -> TaskRecord:
        found = await self.repository.get(TaskScope("boss", thread, user), task_id)
        assert found is not None
        return found

    async def ended(self, task_id: str, thread: str = "s1", user: str | None = None) -> TaskRecord:
        return await self.until(task_id, lambda record: record.status.is_terminal, thread, user)

    async def until(
        self, task_id: str, holds: Callable[[TaskRecord], bool], thread: str = "s1", user: str | None = None
    ) -> TaskRecord:
        async with asyncio.timeout(90):
            while not holds(record := await self.record(task_id, thread, user)):  # noqa: ASYNC110 - the record tells
                await asyncio.sleep(0.005)
        return record

    def announced(self) -> list[str]:
        """What the boss was told of its tasks, ever; each request of the last run shows the messages before it."""
        told = [message.text for request in self.model.requests[-1:] for message in request.messages]
        return [plain(text) for text in told if text.startswith("<task-notification>")]

    async def _turn(self, request: Any) -> Any:
        turn = self.turns.pop(0)
        made = turn(request) if callable(turn) else turn
        return await made if asyncio.iscoroutine(made) else made

    async def work(self, request: Any) -> Any:
        last = request.messages[-1]
        if last.role == "tool":
            return say(f"report: {last.text}")
        self.begun.append(last.text)
        if last.text in self.answers:
            return self.answers[last.text]
        verb, _, rest = last.text.partition(" ")
        if verb == "wait":
            await self.gates[rest].wait()
            return say(f"waited for {rest}")
        if verb == "fail":
            raise RuntimeError(rest)
        if verb == "ask":
            turn = len(self.worker_model.requests)
            asked = enumerate(rest.split(" and "), 1)
            return [call("ask", {"question": question}, id=f"ask_{turn}_{number}") for number, question in asked]
        return say(rest if verb == "say" else last.text)

    def _ask_tool(self) -> Any:
        @tool
        async def ask(question: str, ctx: ToolContext) -> Any:
            """Ask a human."""
            self.asked.append(question)
            if ctx.resume_input is None:
                return ToolResult.suspended(question)
            if str(ctx.resume_input).startswith("wait "):
                await self.gates[str(ctx.resume_input)[5:]].wait()
            return f"{question} {ctx.resume_input}"

        return ask


def texts(result: RunResult, role: str = "tool") -> Sequence[str]:
    return [message.text for message in result.messages if message.role == role]
