"""The runs of a server: started, answered, cancelled and read over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any
from urllib.parse import quote, urlencode

import msgspec
from msgspec.structs import replace

from ..core.concurrency import FIRST_PAUSE, GRACE
from ..core.errors import ConfigurationError, RetinueError, RunEnded, ServerError, ThreadBusy, UnknownAgent, UnknownRun
from ..core.events import Namespace
from ..core.messages import Message, Role
from ..core.output import OutputFormat
from ..core.runs import Out, RunResult, unique
from ..log.fanout import Budget
from ..log.read import leg_of, read_until
from ..runtime.run import Opened, Run, result_at
from .connection import ANSWER_SECONDS, Connection, encode_body
from .events import HttpLog, RemoteLog

WAIT = 20
"""Seconds for which one request waits for a result."""


class Request(msgspec.Struct, frozen=True):
    """A request that starts or continues a run."""

    path: str
    body: bytes
    agent: str = ""
    thread_id: str = ""
    run_id: str = ""
    repeats: bool = True


class RemoteRun(Run[Out]):
    """A run on a server, whose ids are known only once it is accepted."""

    async def cancel(self, reason: str = "cancelled", grace: float = GRACE, *, tasks: bool = False) -> RunResult[Out]:
        await self._open()
        return await super().cancel(reason, grace, tasks=tasks)

    def abandon(self) -> None:
        """Stop waiting for it."""
        self._end.cancel()


class RemoteRuns:
    """The requests that handles send to the server."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._budget = connection, Budget()
        self.formats: dict[str, OutputFormat | None] = {}
        """The output types of agents that callers gave as objects."""

    # --- starting and answering

    def start(self, request: Request, *, watch: bool) -> RemoteRun[Any]:
        """Send a request at once; with `watch`, read the events of its run."""
        opened: asyncio.Future[Opened | None] = asyncio.get_running_loop().create_future()

        async def work() -> RunResult[Any]:
            try:
                answer = await self._send(request)
                run.run_id, run.thread_id = answer["run_id"], answer["thread_id"]
                first = answer.get("after", 0)
                log = RemoteLog(self.log(run.run_id), first, self._budget)
                opened.set_result((log, first))
                if watch:
                    async for _ in read_until(log.read(first), leg_of(run.run_id)):
                        pass
                return await self.result(run.run_id, request.agent)
            except asyncio.CancelledError:
                if not self._connection.is_closed:
                    raise
                raise self._connection.closed() from None

        end = self._connection.spawn(work())
        run = RemoteRun[Any](request.run_id, request.thread_id, request.agent, self, end, opened)
        return run

    async def _send(self, request: Request) -> dict[str, Any]:
        key = None if request.run_id else unique()  # answers have ids of their own
        try:
            missing = UnknownRun(request.run_id) if request.run_id else None
            _, answer = await self._connection.ask(
                "POST", request.path, request.body, key=key, repeats=request.repeats, missing=missing
            )
            return answer
        except ServerError as exc:
            if exc.code == "thread_busy":
                raise ThreadBusy(request.thread_id, exc.run_id or "") from None
            if exc.code == "unknown_agent":
                raise UnknownAgent(request.agent, await self._known_agents()) from None
            raise

    async def _known_agents(self) -> tuple[str, ...]:
        with contextlib.suppress(RetinueError):  # a token may start runs and not read
            return tuple([item["name"] for item in await self.items("agents")])
        return ()

    def log(self, run_id: str) -> HttpLog:
        return HttpLog(self._connection, run_id, self._has_ended)

    # --- what handles need

    async def wait_until_stored(self, run_id: str, end: asyncio.Future[Any]) -> None:
        """Nothing to wait for: a run has an id here once it is stored."""

    async def result(self, run_id: str, agent: str = "") -> RunResult:
        """Wait for the result of a run. Its output has the type of its agent, if a caller has given that."""
        found = await self._result(run_id, WAIT)
        while found is None:
            await asyncio.sleep(FIRST_PAUSE)  # a server that is about to end answers at once
            found = await self._result(run_id, WAIT)
        if found.output is None or not any(self.formats.values()):
            return found
        form = self.formats.get(agent or (await self._ask(run_id, ""))[1]["agent"])
        try:
            return found if form is None else replace(found, output=form.decode(found.output))
        except (TypeError, ValueError) as exc:
            raise ConfigurationError(f"the agent on the server has another output type: {exc}") from None

    async def _has_ended(self, run_id: str) -> bool:
        result = await self._result(run_id, 0)
        return result is not None and result.status.is_terminal

    async def _result(self, run_id: str, wait: int) -> RunResult[Any] | None:
        """Return the result of a run; None while it works."""
        status, body = await self._ask(run_id, f"/result?wait={wait}")
        return None if status == 202 else msgspec.convert(body, RunResult[Any])

    async def cancel(self, run_id: str, reason: str, grace: float, tasks: bool, ns: Namespace = ()) -> RunResult:
        body = {"tasks": tasks, "reason": reason, "grace": grace, **({"ns": ns} if ns else {})}
        await self._ask(run_id, "/cancel", "POST", body=encode_body(body), seconds=ANSWER_SECONDS + grace)
        return await (result_at(read_until(self.log(run_id).read()), ns, grace) if ns else self.result(run_id))

    async def send(self, run_id: str, messages: tuple[Message, ...], ns: Namespace = ()) -> None:
        body = {"input": [message_json(message) for message in messages], **({"ns": ns} if ns else {})}
        try:
            await self._ask(run_id, "/messages", "POST", body=encode_body(body))
        except ServerError as exc:
            if exc.code == "run_ended":
                raise RunEnded("|".join((run_id, *ns)), exc.detail) from None
            raise

    async def cancel_task(self, run_id: str, task_id: str) -> str:
        path, body = f"tasks/{quote(task_id, safe='')}/cancel", encode_body({"run_id": run_id})
        missing = ConfigurationError(f"run {run_id!r} has no background task {task_id!r}")
        return (await self._connection.ask("POST", path, body, missing=missing))[1]["status"]

    async def _ask(self, run_id: str, path: str, method: str = "GET", **options: Any) -> tuple[int, dict[str, Any]]:
        path = f"runs/{quote(run_id, safe='')}{path}"
        return await self._connection.ask(method, path, missing=UnknownRun(run_id), **options)

    # --- lists

    async def name_thread(self, thread_id: str, title: str) -> None:
        await self._connection.ask("PATCH", f"threads/{quote(thread_id, safe='')}", encode_body({"title": title}))

    async def items(self, path: str, **query: str) -> list[dict[str, Any]]:
        """Return a list of the server, page after page."""
        items: list[dict[str, Any]] = []
        cursor, wanted = "", urlencode(query | {"limit": 1000})
        while True:
            _, page = await self._connection.ask("GET", f"{path}?{wanted}{cursor}")
            items += page["items"]
            if page["next_cursor"] is None:
                return items
            cursor = f"&cursor={quote(page['next_cursor'], safe='')}"


async def result_or_cancel(run: RemoteRun[Out]) -> RunResult[Out]:
    """Wait for a run that belongs to this caller: cancelling the caller cancels the run, if the server can be reached."""
    try:
        return await run.result()
    except asyncio.CancelledError:
        with contextlib.suppress(RetinueError, TimeoutError):
            async with asyncio.timeout(GRACE):
                await run.cancel("the caller was cancelled")
        run.abandon()
        raise


def message_json(message: Message) -> dict[str, Any]:
    if message.role is Role.TOOL or message.tool_calls:
        raise ConfigurationError("a client cannot send tool calls and their results: continue their thread instead")
    parts = msgspec.to_builtins(message.parts)
    more = {"id": message.id, "name": message.name, "visibility": message.visibility.value}
    return {"role": message.role.value, "parts": parts, **{name: one for name, one in more.items() if one is not None}}
