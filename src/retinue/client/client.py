"""Client: the methods of a runtime, for agents on a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Unpack, cast
from urllib.parse import quote

import msgspec

from ..core.agents import Agent
from ..core.concurrency import GRACE
from ..core.decisions import Decision
from ..core.errors import ConfigurationError, DecisionRefused, ServerError
from ..core.events import AnyEvent, as_namespace
from ..core.messages import Message
from ..core.runs import Out, RunResult
from ..core.state import as_persisted
from ..core.stores import ThreadSummary
from ..log.read import read_until
from ..runtime.run import Run, as_sent, check_loop, check_place, fork_place
from ..runtime.runtime import RunInput, RunOptions, as_input
from ..runtime.sync import LoopThread
from ..wire.parts import Mode, StreamPart, parts_of
from ..wire.resources import decisions_json, thread_from_json
from .connection import Connection, encode_body
from .runs import RemoteRun, RemoteRuns, Request, message_json, result_or_cancel

PATIENCE = 60.0
_UNSENT = {
    "model": "the model of the server's agent is used",
    "sinks": "iterate the events of the run",
    "user_id": "the server takes the user of the token",
    "run_id": "the server chooses it",
    "digest": "the server makes it",
}


class AgentInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An agent of a server."""

    name: str
    description: str = ""
    model: str | None = None
    tools: tuple[dict[str, str], ...] = ()
    subagents: tuple[str, ...] = ()
    handoffs: tuple[str, ...] = ()
    max_steps: int | None = None


class Client:
    """Runs the agents of a server: it has the methods of a `Runtime`, and its handles are those of a `Run`.

    `patience`: seconds for which the server may be away. Until then requests and streams of events try again, and
    nothing is started twice, lost or repeated. Use it with `async with` or `with`; otherwise it opens a connection for
    each request, and there is nothing to close.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        patience: float = PATIENCE,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._connection = Connection(url, token, headers or {}, patience)
        self._runs = RemoteRuns(self._connection)
        self._thread: LoopThread | None = None

    def __repr__(self) -> str:
        return f"<Client of {self._connection.url}>"

    async def __aenter__(self) -> Client:
        self._connection.open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __enter__(self) -> Client:
        """Use the client without `await`, through `run_sync`, `stream_sync` and `resume_sync`."""
        self._sync().call(self.__aenter__())
        return self

    def __exit__(self, *exc: object) -> None:
        thread, self._thread = self._sync(), None
        self._close_thread(thread)

    async def close(self) -> None:
        """Close the connections. Runs continue on the server."""
        thread, self._thread = self._thread, None
        if thread is not None:
            await asyncio.to_thread(self._close_thread, thread)
        self._connection.is_closed = True
        await self._connection.close()

    def _close_thread(self, thread: LoopThread) -> None:
        thread.wait_for_cancels()
        self._connection.is_closed = True
        thread.call(self._connection.close())
        thread.close()

    def _sync(self) -> LoopThread:
        if self._connection.is_closed:
            raise ConfigurationError("this client is closed")
        if self._thread is None:
            self._thread = LoopThread()
        return self._thread

    # --- starting runs

    def stream(self, agent: str | Agent[Out], input: RunInput, **options: Unpack[RunOptions]) -> Run[Out]:
        """Start a run and return its handle at once, which has its ids after `await run.stored()`.

        A refusal of the server, such as ThreadBusy or UnknownAgent, raises there, from the iteration and from `result`.
        """
        return self._start(agent, input, options, watch=True)

    async def run(self, agent: str | Agent[Out], input: RunInput, **options: Unpack[RunOptions]) -> RunResult[Out]:
        """Start a run and wait for its end. Cancelling the caller cancels the run."""
        return await result_or_cancel(self._start(agent, input, options, watch=False))

    def run_sync(self, agent: str | Agent[Out], input: RunInput, **options: Unpack[RunOptions]) -> RunResult[Out]:
        """Run an agent to its end without `await`. Ctrl-C cancels the run."""
        return self._sync().call(self.run(agent, input, **options))

    def stream_sync(self, agent: str | Agent, input: RunInput, **options: Unpack[RunOptions]) -> Iterator[AnyEvent]:
        """Start a run and yield its events without `await`. Leaving the iteration early cancels the run."""
        return self._sync().iterate(lambda: self.stream(agent, input, **options))

    def _start(self, agent: str | Agent[Out], input: RunInput, options: RunOptions, *, watch: bool) -> RemoteRun[Out]:
        body, given = dict[str, Any](options), as_input(input)
        for name, advice in _UNSENT.items():
            if body.pop(name, None):
                raise ConfigurationError(f"a client cannot send {name}: {advice}")
        for name in body.keys() - RunOptions.__annotations__.keys():
            raise ConfigurationError(f"a run has no option {name!r}: write {', '.join(RunOptions.__annotations__)}")
        check_loop()
        if isinstance(agent, Agent):
            self._runs.formats[agent.name] = agent.output_format
            agent = agent.name
        if (state := body.pop("state", None)) is not None:
            body["state"] = as_persisted(state).extensions
        body = {name: value for name, value in body.items() if value is not None}
        body |= {"agent": agent, "input": [message_json(message) for message in given]}
        return self._runs.start(Request("runs", encode_body(body), agent, body.get("thread_id", "")), watch=watch)

    # --- answering and reading

    def stream_resume(self, run_id: str, decisions: Mapping[str, Decision]) -> Run:
        """Answer a suspended run and return the handle of what follows. Keys are call ids, ticket ids or paths.

        A decision that does not fit changes nothing; DecisionRefused comes from the handle.
        """
        check_loop()
        return self._runs.start(_answer(run_id, decisions), watch=True)

    async def resume(self, run_id: str, decisions: Mapping[str, Decision]) -> RunResult:
        """Answer a suspended run and wait for its end, or for the next time it waits."""
        result = await result_or_cancel(self._runs.start(_answer(run_id, decisions), watch=False))
        if result.status.is_waiting and result.error is not None:
            raise DecisionRefused(result.error)
        return result

    def resume_sync(self, run_id: str, decisions: Mapping[str, Decision]) -> RunResult:
        """Answer a suspended run and wait for its end, or for the next time it waits, without `await`."""
        return self._sync().call(self.resume(run_id, decisions))

    async def fork(
        self,
        run_id: str,
        *,
        at: int | None = None,
        message_id: str | None = None,
        input: RunInput | None = None,
        decisions: Mapping[str, Decision] | None = None,
    ) -> Run:
        """Start a new run, on a new thread, that continues another as it was after event number `at`, or at a message.

        It is sent once: where no answer comes, ServerError says that the outcome is unknown.
        """
        place = fork_place(at, message_id)
        body: dict[str, Any] = {"message_id" if isinstance(place, str) else "after": place}
        if input is not None:
            body["input"] = [message_json(message) for message in as_input(input)]
        if decisions is not None:
            body["decisions"] = decisions_json(decisions)
        run = self._runs.start(
            Request(f"runs/{quote(run_id, safe='')}/fork", encode_body(body), run_id=run_id, repeats=False), watch=True
        )
        await run.stored()
        return run

    async def result(self, run_id: str) -> RunResult:
        """Wait until a run has ended or waits for a human, and return its result."""
        return await self._runs.result(run_id)

    async def cancel(
        self,
        run_id: str,
        *,
        ns: Sequence[str] = (),
        tasks: bool = False,
        grace: float = GRACE,
        reason: str = "cancelled",
    ) -> RunResult:
        """Stop a run and what it waits for, and wait for its end; background tasks only with `tasks`. With `ns`, stop only
        the run at that namespace below it."""
        return await self._runs.cancel(run_id, reason, grace, tasks, as_namespace(ns))

    async def send(self, run_id: str, input: RunInput, *, ns: Sequence[str] = ()) -> None:
        """Give a run messages while it works or waits; its model reads them with its next request. Raises RunEnded if no
        request follows."""
        await self._runs.send(run_id, as_sent(input), as_namespace(ns))

    async def cancel_task(self, run_id: str, task_id: str) -> str:
        """Stop one background task under a root run, wait a few seconds for its end, and return its status."""
        return await self._runs.cancel_task(run_id, task_id)

    def events(self, run_id: str, after: int = 0) -> AsyncIterator[AnyEvent]:
        """Iterate over the log of a run after event number `after`: stored events, then new ones.

        It ends when the run and every task under it have ended. A run that waits for a human is waited for.
        """
        return cast("AsyncIterator[AnyEvent]", read_until(self._runs.log(run_id).read(after), notices=True))

    def parts(
        self, run_id: str, modes: Mode | Iterable[Mode] = ("updates",), after: int = 0
    ) -> AsyncIterator[StreamPart]:
        """Iterate over the LangGraph-shaped parts of a run and all below it that come after event number `after`.

        Like `events`, it ends when the run and every task under it have ended.
        """
        return parts_of(self.events(run_id), modes, check_place(after))

    async def threads(self, *, status: str | None = None, search: str | None = None) -> list[ThreadSummary]:
        """Return the user's threads, the one used last first: those that stand like this, or have this text in their titles."""
        wanted = {name: value for name, value in {"status": status, "q": search}.items() if value is not None}
        return [thread_from_json(one) for one in await self._runs.items("threads", **wanted)]

    async def name_thread(self, thread_id: str, title: str) -> None:
        """Set the title of a thread."""
        await self._runs.name_thread(thread_id, title)

    async def messages(self, thread_id: str) -> tuple[Message, ...]:
        """Return the conversation of a thread, without messages that only the model reads."""
        try:
            items = await self._runs.items(f"threads/{quote(thread_id, safe='')}/messages")
        except ServerError as exc:
            if exc.code == "not_found":
                return ()
            raise
        return tuple(msgspec.convert(items, list[Message]))

    async def agents(self) -> dict[str, AgentInfo]:
        """Return the agents of the server by name."""
        items = msgspec.convert(await self._runs.items("agents"), list[AgentInfo])
        return {item.name: item for item in items}


def _answer(run_id: str, decisions: Mapping[str, Decision]) -> Request:
    return Request(
        f"runs/{quote(run_id, safe='')}/decisions", encode_body({"decisions": decisions_json(decisions)}), run_id=run_id
    )
