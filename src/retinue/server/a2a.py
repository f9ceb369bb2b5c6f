"""A2A: every agent of the server as an agent of the protocol. A task is a root run, its context the thread.

`Tasks` answers the requests of all transports. Beside the log, only the addresses of push notifications are stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

import msgspec
from a2a.server.context import ServerCallContext
from a2a.server.request_handlers.request_handler import RequestHandler
from a2a.types import a2a_pb2 as pb
from a2a.utils.errors import (
    A2AError,
    InternalError,
    InvalidParamsError,
    TaskNotCancelableError,
    TaskNotFoundError,
    UnsupportedOperationError,
    VersionNotSupportedError,
)
from a2a.utils.input_mode_validator import validate_input_modes
from a2a.utils.proto_utils import validate_proto_required_fields
from a2a.utils.task import apply_history_length, validate_history_length, validate_page_size
from google.protobuf.json_format import Error as JsonError
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message import DecodeError, Message
from msgspec import Struct

from ..core.agents import Agent
from ..core.content import clean_text
from ..core.errors import RetinueError, UnknownRun
from ..core.runs import limits_of_run, unique
from ..core.stores import RunRecord
from ..wire.a2a import (
    SUBMITTED,
    WORKING,
    Json,
    TaskProjection,
    read_decisions,
    read_message,
    state_of,
    time_text,
    waiting_state,
)
from ..wire.a2a_budget import read_limits
from ..wire.a2a_card import INPUT_MODES
from ..wire.resources import ID, decode_cursor, encode_cursor
from .a2a_cards import Cards
from .a2a_follow import follow_task, project_of, read_task
from .a2a_push import Push
from .auth import User
from .feeds import BEAT
from .http import ApiError, Scope, admit, as_api_error, check_scope, is_text, remote_trace, still_allowed, traced
from .runs import ends_of
from .service import Service

_PAGE = 50
_MOST_PARTS = 1000
_MOST_WORDS = 1000
_CONTENTS = frozenset({pb.Part.DESCRIPTOR.full_name, "google.protobuf.Struct"})
_log = logging.getLogger(__name__)
_TAKES = pb.AgentCard(default_input_modes=INPUT_MODES)

Update = pb.Task | pb.Message | pb.TaskStatusUpdateEvent | pb.TaskArtifactUpdateEvent


class Refused(A2AError):
    """A refusal that the transport reports in its own way: no valid token, a missing scope, too many requests."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.detail)  # pyright: ignore[reportUnknownMemberType]
        self.error = error


class Caller(Struct, frozen=True):
    """The user of a request and the agent that is asked."""

    user: User
    agent: Agent
    headers: Mapping[str, str]


class Sent(Struct, frozen=True):
    """A message that was accepted: the run that works on it, and the event after which its task is shown."""

    record: RunRecord
    shown_after: int | None


def to_update(given: Json) -> Update:
    """Return the record of the protocol for `{"task": …}`, `{"statusUpdate": …}` and the like."""
    made = ParseDict(given, pb.StreamResponse())
    return getattr(made, made.WhichOneof("payload") or "")


def as_a2a_error(exc: Exception) -> A2AError:
    """Return any error as one of the protocol. A value that is wrong is a mistake of the client."""
    if isinstance(exc, A2AError):
        return exc
    if isinstance(exc, UnknownRun):
        return TaskNotFoundError()
    if isinstance(exc, ApiError | RetinueError):
        known = as_api_error(exc)
        if known.status in (401, 403, 429, 502, 503):
            return Refused(known)
        return (InvalidParamsError if known.status < 500 else InternalError)(known.detail)
    if isinstance(exc, ValueError | JsonError | DecodeError | RecursionError):
        return InvalidParamsError(clean_text(str(exc)[:_MOST_WORDS]))  # it may repeat what was sent
    _log.error("an A2A request failed: %s", exc, exc_info=exc)
    return InternalError("the server failed; its log has the reason")


def check_texts(message: Message) -> None:
    """Raise InvalidParamsError if an id or another field has a character that no database takes. The content of messages
    may have any."""
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.full_name in _CONTENTS:
            continue
        values: Any = value if field.is_repeated else (value,)
        for one in values:
            if isinstance(one, Message):
                check_texts(one)
            elif isinstance(one, str) and not is_text(one):
                raise InvalidParamsError(f"{field.json_name} has a character that is no text")


class Tasks(RequestHandler):
    """Answers requests about tasks, of any agent and on any transport."""

    def __init__(self, service: Service, cards: Cards, push: Push) -> None:
        self.service, self.cards, self.push = service, cards, push

    # --- the caller and the request

    @contextlib.asynccontextmanager
    async def enter(self, context: ServerCallContext, scope: Scope, params: Any = None) -> AsyncGenerator[Caller]:
        """Check the user, the version and the request, and raise our errors as those of the protocol. HTTP has checked the
        user already; gRPC has not."""
        headers: Mapping[str, str] = context.state["headers"]
        runtime, user = self.service.runtime, context.state.get("user")
        try:
            if user is None:
                user = await admit(self.service, headers, "none")
            version = headers.get("a2a-version", "").strip()
            if version and version.split(".")[0] != "1" and not version.startswith("0.3"):
                raise VersionNotSupportedError(f"A2A version {version[:20]!r} is not served here: use 1.0 or 0.3")
            name = context.state.get("agent") or context.tenant or next(iter(runtime.agents), "")
            if name not in runtime.agents:
                raise InvalidParamsError(f"there is no agent {name[:64]!r}")
            check_scope(user, scope)
            if params is not None:
                validate_proto_required_fields(params)
                check_texts(params)
            yield Caller(user, runtime.agents[name], headers)
        except A2AError:
            raise
        except Exception as exc:
            raise as_a2a_error(exc) from exc

    async def record_of(self, caller: Caller, task_id: str) -> RunRecord:
        """Return the run of a task. A task of another user or another agent is not found."""
        try:
            record = await self.service.run_of(caller.user, task_id)
        except ApiError:
            raise TaskNotFoundError(f"there is no task {task_id[:80]!r}") from None
        identity = record.identity
        if identity.parent_run_id is not None or identity.agent != caller.agent.name:
            raise TaskNotFoundError(f"there is no task {task_id[:80]!r}")
        return record

    # --- messages

    async def on_message_send(self, params: pb.SendMessageRequest, context: ServerCallContext) -> pb.Task | pb.Message:
        async with self.enter(context, "none", params) as caller:
            sent = await self._send(caller, params)
            if params.configuration.return_immediately:
                found: Json = {"task": (await read_task(self.service, sent.record)).task()}
            else:  # if the server ends first, the task as it is
                projection = project_of(sent.record)
                async for _ in self._updates(sent, projection, None, until_idle=True):
                    pass
                found = projection.reply()
            update = _cut(to_update(found), params.configuration)
            assert isinstance(update, pb.Task | pb.Message)
            return update

    async def on_message_send_stream(
        self, params: pb.SendMessageRequest, context: ServerCallContext
    ) -> AsyncGenerator[Update]:
        async with self.enter(context, "none", params) as caller:
            with self._place(context, caller):
                sent = await self._send(caller, params)
                async for update in self._updates(sent, project_of(sent.record), caller, until_idle=True):
                    yield _cut(to_update(update), params.configuration)

    async def on_subscribe_to_task(
        self, params: pb.SubscribeToTaskRequest, context: ServerCallContext
    ) -> AsyncGenerator[Update]:
        async with self.enter(context, "read", params) as caller:
            record = await self.record_of(caller, params.id)
            if record.has_ended:
                raise UnsupportedOperationError("the task has ended: read it with GetTask")
            with self._place(context, caller):
                sent = Sent(record, await self.service.runtime.log(params.id).last())
                async for update in self._updates(sent, project_of(record), caller, until_idle=False):
                    yield to_update(update)

    def _place(self, context: ServerCallContext, caller: Caller) -> contextlib.AbstractContextManager[None]:
        """Hold one of the streams of a user. The streams of HTTP do so themselves."""
        return contextlib.nullcontext() if "user" in context.state else self.service.limits.stream(caller.user.id)

    async def _send(self, caller: Caller, params: pb.SendMessageRequest) -> Sent:
        validate_history_length(params.configuration)
        validate_input_modes(params.message, _TAKES)
        if len(params.message.parts) > _MOST_PARTS:
            raise InvalidParamsError(f"a message has at most {_MOST_PARTS} parts")
        if params.message.role == pb.Role.ROLE_AGENT:
            raise InvalidParamsError("a message to an agent has the role of a user")
        message, config = MessageToDict(params.message), None
        if params.configuration.HasField("task_push_notification_config"):
            config = params.configuration.task_push_notification_config
            check_scope(caller.user, "run")
            self.push.check(config)
        with remote_trace(caller.headers):
            return await (self._answer if params.message.task_id else self._start)(caller, message, config)

    async def _start(self, caller: Caller, message: Json, config: pb.TaskPushNotificationConfig | None) -> Sent:
        check_scope(caller.user, "run")
        runtime, thread_id, run_id = self.service.runtime, _chosen_thread(message), f"run_{unique()}"
        async with self.service.thread_for(caller.user, caller.agent.name, thread_id), self.push.added(run_id, config):
            run = runtime.stream(
                caller.agent.name,
                read_message(message),
                run_id=run_id,
                thread_id=thread_id,
                user_id=caller.user.id,
                context=traced(caller.headers),
                limits=limits_of_run(caller.agent.limits, read_limits(message.get("metadata", {})), over_network=True),
                when_busy="enqueue",
            )
            await run.stored()
        record = await self.record_of(caller, run_id)
        return Sent(record, 0 if record.queued else None)

    async def _answer(self, caller: Caller, message: Json, config: pb.TaskPushNotificationConfig | None) -> Sent:
        check_scope(caller.user, "answer")
        record = await self.record_of(caller, message["taskId"])
        if message.get("contextId", record.identity.thread_id) != record.identity.thread_id:
            raise InvalidParamsError("the task is of another context")
        if record.has_ended:
            raise UnsupportedOperationError("the task has ended: send the message without its id to go on")
        if record.result is None:
            raise UnsupportedOperationError("the task is at work and asks for nothing: wait for it, or cancel it")
        await self.service.run_to_continue(caller.user, record.identity.run_id, "task")
        projection, message_id = await read_task(self.service, record), message.get("messageId", "")
        if message_id and message_id in projection.answered_by:  # repeated by the client
            raise InvalidParamsError(
                f"message {message_id!r} has answered a question of this task before: give another answer an id of its own"
            )
        decisions = read_decisions(message, projection.questions)
        async with self.push.added(record.identity.run_id, config):
            run = self.service.runtime.stream_resume(record.identity.run_id, decisions, by=caller.user.id)
            await run.stored()
        return Sent(record, await run.place() + 1)

    # --- streams

    async def _updates(
        self, sent: Sent, projection: TaskProjection, reader: Caller | None, *, until_idle: bool
    ) -> AsyncIterator[Json]:
        """Yield the task, then what changes; or one message, if the run asks for that. It ends when the token of the reader
        of a stream is no longer valid."""
        now = asyncio.get_running_loop().time
        after, shown, checked = sent.shown_after, sent.shown_after == 0, now()
        if shown:
            yield {"task": projection.task()}
        held: list[Json] = []
        async with contextlib.aclosing(follow_task(self.service, sent.record, projection)) as events:
            async for seq, updates in events:
                if reader is not None and now() - checked >= BEAT:
                    checked = now()
                    if not await still_allowed(self.service, reader.headers, reader.user, "none"):
                        return
                if not shown and after is None:
                    held += updates
                    shown = bool(held) and not projection.wants_message
                    updates = [_first(projection, sent.record), *held] if shown else []
                elif not shown:
                    shown = seq >= (after or 0)
                    updates = [{"task": projection.task()}] if shown else []
                for update in updates:
                    yield update
                is_new = after is None or seq >= after or not seq
                if projection.has_ended or (until_idle and is_new and projection.is_settled):
                    break
        if not shown:
            yield projection.reply()

    # --- tasks

    async def on_get_task(self, params: pb.GetTaskRequest, context: ServerCallContext) -> pb.Task:
        async with self.enter(context, "read", params) as caller:
            validate_history_length(params)
            projection = await read_task(self.service, await self.record_of(caller, params.id))
            return apply_history_length(ParseDict(projection.task(), pb.Task()), params)

    async def on_cancel_task(self, params: pb.CancelTaskRequest, context: ServerCallContext) -> pb.Task:
        async with self.enter(context, "run", params) as caller:
            record = await self.record_of(caller, params.id)
            if record.has_ended:
                raise TaskNotCancelableError("the task has ended")
            # The cancel is carried out also if the client leaves.
            await self.service.spawn(self.service.runtime.cancel(params.id))
            projection = await read_task(self.service, await self.record_of(caller, params.id))
            return ParseDict(projection.task(), pb.Task())

    async def on_list_tasks(self, params: pb.ListTasksRequest, context: ServerCallContext) -> pb.ListTasksResponse:
        async with self.enter(context, "read", params) as caller:
            validate_history_length(params)
            if params.HasField("page_size"):
                validate_page_size(params.page_size)
            size = params.page_size or _PAGE
            found = await self._matching(caller, params)
            total = len(found)
            if params.page_token:
                before = decode_cursor(params.page_token)
                found = [(place, record) for place, record in found if place < before]
            tasks: list[pb.Task] = []
            for _, record in found[:size]:
                shown = (await read_task(self.service, record)).task()
                if not params.include_artifacts:
                    del shown["artifacts"]
                tasks.append(apply_history_length(ParseDict(shown, pb.Task()), params))
            token = encode_cursor(found[size - 1][0]) if len(found) > size else ""
            return pb.ListTasksResponse(tasks=tasks, next_page_token=token, page_size=size, total_size=total)

    async def _matching(self, caller: Caller, params: pb.ListTasksRequest) -> list[tuple[tuple[float, str], RunRecord]]:
        """Return the runs that a list asks for, the one that changed last first."""
        store = self.service.runtime.store
        records = await store.list_runs(params.context_id or None, **self.service.filters(caller.user))
        records = [one for one in records if one.identity.agent == caller.agent.name]
        if params.status:
            wanted = pb.TaskState.Name(params.status)
            records = [one for one in records if _state(one) == wanted]
        ends = await ends_of(self.service, records)
        found = [((ends.get(one.identity.run_id, one.started_at), one.identity.run_id), one) for one in records]
        if params.HasField("status_timestamp_after"):
            after = params.status_timestamp_after.ToNanoseconds() / 1e9
            found = [(place, one) for place, one in found if place[0] >= after]
        return sorted(found, key=lambda one: one[0], reverse=True)

    # --- push notifications and the card

    async def on_create_task_push_notification_config(
        self, params: pb.TaskPushNotificationConfig, context: ServerCallContext
    ) -> pb.TaskPushNotificationConfig:
        async with self.enter(context, "run", params) as caller:
            await self.record_of(caller, params.task_id)
            self.push.check(params)
            return await self.push.add(params.task_id, params, await self.service.runtime.log(params.task_id).last())

    async def on_get_task_push_notification_config(
        self, params: pb.GetTaskPushNotificationConfigRequest, context: ServerCallContext
    ) -> pb.TaskPushNotificationConfig:
        async with self.enter(context, "read", params) as caller:
            await self.record_of(caller, params.task_id)
            for config in await self.push.configs(params.task_id):
                if config.id == params.id:
                    return config
            raise TaskNotFoundError(f"the task has no push notification {params.id[:80]!r}")

    async def on_list_task_push_notification_configs(
        self, params: pb.ListTaskPushNotificationConfigsRequest, context: ServerCallContext
    ) -> pb.ListTaskPushNotificationConfigsResponse:
        async with self.enter(context, "read", params) as caller:
            await self.record_of(caller, params.task_id)
            return pb.ListTaskPushNotificationConfigsResponse(configs=await self.push.configs(params.task_id))

    async def on_delete_task_push_notification_config(
        self, params: pb.DeleteTaskPushNotificationConfigRequest, context: ServerCallContext
    ) -> None:
        async with self.enter(context, "run", params) as caller:
            await self.record_of(caller, params.task_id)
            await self.push.remove(params.task_id, params.id)

    async def on_get_extended_agent_card(
        self, params: pb.GetExtendedAgentCardRequest, context: ServerCallContext
    ) -> pb.AgentCard:
        async with self.enter(context, "none") as caller:
            return self.cards.card_of(caller.agent, context.state.get("base", ""))


def _chosen_thread(message: Json) -> str | None:
    """Return the thread that a message names as its context: an id that any client may choose for a thread."""
    try:
        return msgspec.convert(message.get("contextId") or None, ID | None)
    except msgspec.ValidationError as exc:
        raise InvalidParamsError(f"the context id cannot be used: {exc}") from None


def _cut(update: Update, config: pb.SendMessageConfiguration) -> Update:
    """Return an update with as much of the history as was asked for."""
    return apply_history_length(update, config) if isinstance(update, pb.Task) else update


def _state(record: RunRecord) -> str:
    if record.result is None:
        return SUBMITTED if record.queued else WORKING
    if not record.result.status.is_terminal:
        return waiting_state(record.result.suspended)
    return state_of(record.result.status, record.result.termination)


def _first(projection: TaskProjection, record: RunRecord) -> Json:
    """Return the task as it was before its first change."""
    first = {"state": SUBMITTED, "timestamp": time_text(record.started_at)}
    return {"task": {**projection.task(), "status": first, "artifacts": []}}
