"""The HTTP client of the task protocol."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from ..core.content import to_json_bytes
from ..core.decisions import Decision
from ..core.errors import DecisionRefused
from ..core.events import Event
from ..core.runs import Limits
from ..wire.sse import EventDecoder
from ..wire.task_protocol import (
    TASKS_PATH,
    RemoteTask,
    TaskCancel,
    TaskDecisions,
    TaskSubmission,
    decode_event,
    decode_task,
    task_path,
)
from .http_client import ANSWER_SECONDS, MOST_BYTES, NOT_OFFERED, Garbled, HttpClient


class HttpTaskClient(HttpClient):
    """The client of a task server. `submit` may be repeated with the same id."""

    async def submit(
        self, task_id: str, agent_id: str, text: str, context: dict[str, str], limits: Limits | None = None
    ) -> None:
        body = to_json_bytes(TaskSubmission(task_id, agent_id, text, dict(context), limits))
        status, data = await self.ask("POST", TASKS_PATH, body)
        if status == 409:
            return  # it has the task already, and may have ended it
        if status >= 400:
            raise self.refused(status, data, "did not take the task")

    async def state(self, task_id: str) -> RemoteTask:
        return await self._task(task_id, task_path(task_id))

    async def wait(self, task_id: str, seconds: float) -> RemoteTask:
        path = f"{task_path(task_id, 'wait')}?timeout_seconds={max(int(seconds), 1)}"
        return await self._task(task_id, path, seconds + 60)

    async def cancel(self, task_id: str, *, tasks: bool = False) -> None:
        """Ask the server to stop a task; its background tasks continue, unless `tasks` is true."""
        body = to_json_bytes(TaskCancel(tasks)) if tasks else b""
        status, data = await self.ask("POST", task_path(task_id, "cancel"), body)
        if status >= 400 and status != 404:
            raise self.refused(status, data, "did not take the cancel")

    async def resume(self, task_id: str, decisions: Mapping[str, Decision]) -> None:
        """Pass decisions on; raise DecisionRefused if the server refuses them. Idempotent for the same decisions."""
        status, data = await self.ask(
            "POST", task_path(task_id, "resume"), to_json_bytes(TaskDecisions(dict(decisions)))
        )
        if status in NOT_OFFERED:
            raise DecisionRefused(f"{self.url} takes no decisions: {status} {self.words(data)}")
        if status >= 400:
            raise DecisionRefused(f"{self.url} refused the decision: {status} {self.words(data)}")

    async def events(self, task_id: str, after: int) -> AsyncGenerator[list[Event]]:
        """Yield the events of a task after number `after` as they come, until the server ends the stream.

        EventsNotOffered where the server has none, ConnectionError where the stream breaks or cannot be read."""
        decoder = EventDecoder(MOST_BYTES)
        chunks = self.stream(f"{task_path(task_id, 'events')}?after={after}")
        try:
            async with aclosing(chunks):
                async for data in chunks:
                    if found := decoder.feed(data):
                        yield [decode_event(self.without_secrets(one)) for one in found]
        except ValueError as exc:
            reason = self.words(str(exc)) or type(exc).__name__
            raise ConnectionError(f"the events of {self.url} cannot be read ({reason})") from None

    async def _task(self, task_id: str, path: str, seconds: float = ANSWER_SECONDS) -> RemoteTask:
        status, data = await self.ask("GET", path, None, seconds)
        if status == 404:
            return RemoteTask("error", None, "the server does not know the task any more")
        if status >= 400:
            raise self.refused(status, data, "did not say how the task stands")
        try:
            task = decode_task(self.without_secrets(data))
        except ValueError as exc:
            problem = f"{self.url} did not answer as a task server ({self.words(str(exc))}): check the url"
            raise Garbled(problem) from None
        if task.task_id not in ("", task_id):  # a proxy mixes up the answers
            raise ConnectionError(f"{self.url} answered about another task")
        return task
