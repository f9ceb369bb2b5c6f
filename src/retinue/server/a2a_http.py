"""A2A over HTTP: JSON-RPC and HTTP+JSON, in versions 1.0 and 0.3."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Literal, cast, get_args

import msgspec
from a2a.compat.v0_3 import types as v03
from a2a.compat.v0_3.request_handler import RequestHandler03
from a2a.compat.v0_3.rest_handler import REST03Handler
from a2a.server.context import ServerCallContext
from a2a.types import a2a_pb2 as pb
from a2a.utils.error_handlers import build_error_details, build_rest_error_payload
from a2a.utils.errors import (
    JSON_RPC_ERROR_CODE_MAP,
    ContentTypeNotSupportedError,
    InvalidParamsError,
    InvalidRequestError,
    JSONParseError,
    MethodNotFoundError,
)
from a2a.utils.proto_utils import parse_params, to_stream_response
from google.api import annotations_pb2  # pyright: ignore[reportMissingTypeStubs]
from google.protobuf.json_format import MessageToDict, Parse, ParseDict
from google.protobuf.message_factory import GetMessageClass
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from ..core.concurrency import join
from ..core.content import to_json_bytes
from .a2a import Refused, Tasks, as_a2a_error
from .a2a_cards import base_of
from .feeds import BEAT, Batch
from .http import ApiError, Call, Endpoint, error_response, headers_of, json_response, not_found, read_bytes
from .streams import EventStream

_AGENT = "/a2a/{agent}"
_MEDIA = "application/a2a+json"
_HANDLERS = {"SendMessage": "on_message_send", "SendStreamingMessage": "on_message_send_stream"}
"""The methods of `Tasks` that are not named as their operation."""


class Operation(Struct, frozen=True):
    """An operation of the protocol: its name, its request, the method of `Tasks`, and its place in HTTP+JSON."""

    name: str
    request: Any
    handler: str
    method: str
    path: str
    streams: bool


def _operations() -> Iterator[Operation]:
    """Yield the operations of the protocol, from the description of its service."""
    service: Any = pb.DESCRIPTOR.services_by_name["A2AService"]
    for one in service.methods:
        rule = one.GetOptions().Extensions[annotations_pb2.http]
        method: str = rule.WhichOneof("pattern")
        path = getattr(rule, method).replace("=*", "")
        handler = _HANDLERS.get(one.name) or "on" + re.sub("([A-Z])", r"_\1", one.name).lower()
        request = GetMessageClass(one.input_type)
        yield Operation(one.name, request, handler, method.upper(), path, one.server_streaming)


OPERATIONS = {one.name: one for one in _operations()}
_OLD_NAMES = {
    "message/send": "SendMessage",
    "message/stream": "SendStreamingMessage",
    "tasks/get": "GetTask",
    "tasks/cancel": "CancelTask",
    "tasks/resubscribe": "SubscribeToTask",
    "tasks/pushNotificationConfig/set": "CreateTaskPushNotificationConfig",
    "tasks/pushNotificationConfig/get": "GetTaskPushNotificationConfig",
    "tasks/pushNotificationConfig/list": "ListTaskPushNotificationConfigs",
    "tasks/pushNotificationConfig/delete": "DeleteTaskPushNotificationConfig",
    "agent/getAuthenticatedExtendedCard": "GetExtendedAgentCard",
}
"""The operations by their names in JSON-RPC of version 0.3."""
_OLD_REQUESTS: dict[str, Any] = {
    kind.model_fields["method"].default: kind for kind in get_args(v03.A2ARequest.model_fields["root"].annotation)
}
"""The requests of JSON-RPC in version 0.3."""
_OLD_PATHS = (
    ("POST", "/v1/message:send", "on_message_send", False),
    ("POST", "/v1/message:stream", "on_message_send_stream", True),
    ("POST", "/v1/tasks/{id}:cancel", "on_cancel_task", False),
    ("POST", "/v1/tasks/{id}:subscribe", "on_subscribe_to_task", True),
    ("GET", "/v1/tasks/{id}:subscribe", "on_subscribe_to_task", True),
    ("GET", "/v1/tasks/{id}", "on_get_task", False),
    ("GET", "/v1/tasks/{id}/pushNotificationConfigs/{push_id}", "get_push_notification", False),
    ("POST", "/v1/tasks/{id}/pushNotificationConfigs", "set_push_notification", False),
    ("GET", "/v1/tasks/{id}/pushNotificationConfigs", "list_push_notifications", False),
    ("GET", "/v1/card", "on_get_extended_agent_card", False),
)


def endpoints(tasks: Tasks) -> list[Endpoint]:
    """Return the endpoints of A2A. Who asks is checked before each; what they may do, by `Tasks`."""
    found, rpc = list[Endpoint](), _rpc(tasks)

    def add(method: str, path: str, handle: Callable[[Call], Any], summary: str) -> None:
        found.append(Endpoint(method=method, path=path, handle=handle, scope="none", summary=summary, own_query=True))

    for path in (_AGENT, f"{_AGENT}/"):
        add("POST", path, rpc, "A2A: JSON-RPC, version 1.0 or 0.3.")
    old = REST03Handler(tasks)
    for method, path, name, streams in _OLD_PATHS:
        add(method, _AGENT + path, _old_rest(getattr(old, name), streams), f"A2A 0.3: {name.removeprefix('on_')}.")
    for one in sorted(
        OPERATIONS.values(), key=lambda one: ":" not in one.path.rpartition("}")[2]
    ):  # `{id}:cancel` first
        handle = _new_rest(tasks, one)
        for method in ("GET", "POST") if one.name == "SubscribeToTask" else (one.method,):
            add(method, _AGENT + one.path, handle, f"A2A: {one.name}.")
    return found


def _context(call: Call) -> ServerCallContext:
    agent = call.param("agent")
    if agent not in call.runtime.agents:
        raise not_found("agent")
    state = {"headers": headers_of(call.request), "user": call.user, "agent": agent, "base": base_of(call.request)}
    return ServerCallContext(state=state)


def _check_media(call: Call) -> None:
    media = call.request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media not in ("application/json", _MEDIA):
        raise ContentTypeNotSupportedError("a request has the content type application/json")


async def _respond(
    call: Call, events: AsyncGenerator[Any], encode: Callable[[Any], bytes], fail: Callable[[Exception], bytes]
) -> Response:
    """Return a stream of events, with a sign of life from time to time. What fails before the first of them raises."""
    first = await anext(events, None)

    async def next_event() -> Any:
        return await anext(events, None)

    async def batches() -> AsyncIterator[Batch]:
        update, coming = first, None
        try:
            while update is not None:
                yield Batch([], encoded=b"data: %b\n\n" % encode(update))
                coming = asyncio.create_task(next_event())
                while not await join([coming], BEAT):
                    yield Batch([])
                update = coming.result()
        except Exception as exc:
            yield Batch([], encoded=b"data: %b\n\n" % fail(exc))
        finally:
            if coming is not None:
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)
            with contextlib.suppress(RuntimeError):
                await events.aclose()

    return EventStream(call, batches())


def _shown(name: str, result: Any, request: Any) -> Any:
    """Return a result as JSON."""
    if result is None:
        return {}
    if name == "SendMessage":
        is_task = isinstance(result, pb.Task)
        result = pb.SendMessageResponse(task=result) if is_task else pb.SendMessageResponse(message=result)
    if name != "ListTasks":
        return MessageToDict(result)
    page = MessageToDict(result, always_print_fields_with_no_presence=True)
    if not request.include_artifacts:
        for task in page["tasks"]:
            task.pop("artifacts", None)
    return page


# --- JSON-RPC


class RpcRequest(Struct, frozen=True):
    """A request of JSON-RPC."""

    jsonrpc: Literal["2.0"]
    method: str
    id: str | int | None = None
    params: Any = {}


def _rpc(tasks: Tasks) -> Callable[[Call], Awaitable[Response]]:
    """Return the endpoint of JSON-RPC, for both versions."""
    handlers = {False: tasks, True: RequestHandler03(tasks)}

    async def handle(call: Call) -> Response:
        context = _context(call)
        request_id: Any = None
        try:
            _check_media(call)
            given = _read_rpc(await read_bytes(call.request, call.service))
            request_id, is_old = given.id, given.method in _OLD_NAMES
            operation = OPERATIONS.get(_OLD_NAMES.get(given.method, given.method))
            if operation is None:
                raise MethodNotFoundError(f"there is no method {given.method[:80]!r}")
            request = _read_old(given) if is_old else _read_new(given, operation)
            if not is_old:
                context.tenant = getattr(request, "tenant", "")
            found = getattr(handlers[is_old], operation.handler)(request, context)
            if not operation.streams:
                result = _old_json(await found) if is_old else _shown(operation.name, await found, request)
                return json_response({"jsonrpc": "2.0", "id": request_id, "result": result})

            def encode(update: Any) -> bytes:
                if is_old:
                    return update.model_dump_json(by_alias=True, exclude_none=True).encode()
                result = MessageToDict(to_stream_response(update))
                return to_json_bytes({"jsonrpc": "2.0", "id": request_id, "result": result})

            return await _respond(call, found, encode, lambda exc: to_json_bytes(_rpc_error(request_id, exc)))
        except ApiError:  # of HTTP: the body is too large, there is no such agent
            raise
        except Refused as exc:
            return error_response(exc.error)
        except Exception as exc:
            return json_response(_rpc_error(request_id, exc))

    return handle


def _read_rpc(data: bytes) -> RpcRequest:
    try:
        given = msgspec.json.decode(data, type=RpcRequest)
    except msgspec.ValidationError as exc:
        raise InvalidRequestError(f"the body is not one JSON-RPC request: {exc}") from None
    except (ValueError, RecursionError) as exc:
        raise JSONParseError(f"the body is not JSON: {exc}") from None
    if not isinstance(given.params, dict):
        raise InvalidParamsError("params is an object")
    return given


def _read_new(given: RpcRequest, operation: Operation) -> Any:
    return ParseDict(given.params, operation.request(), ignore_unknown_fields=True)


def _read_old(given: RpcRequest) -> Any:
    try:
        return _OLD_REQUESTS[given.method].model_validate(msgspec.structs.asdict(given))
    except ValueError as exc:
        raise InvalidParamsError(str(exc)) from None


def _rpc_error(request_id: Any, exc: Exception) -> dict[str, Any]:
    error = as_a2a_error(exc)
    code = JSON_RPC_ERROR_CODE_MAP.get(type(error), -32603)
    shown = {"code": code, "message": error.message, "data": build_error_details(error)}
    return {"jsonrpc": "2.0", "id": request_id, "error": shown}


def _old_json(result: Any) -> Any:
    if isinstance(result, list):
        return [_old_json(one) for one in cast("list[Any]", result)]
    return None if result is None else result.model_dump(mode="json", by_alias=True, exclude_none=True)


# --- HTTP+JSON


def _rest(answer: Callable[[Call, ServerCallContext], Awaitable[Response]]) -> Callable[[Call], Awaitable[Response]]:
    """Return an endpoint that answers with the errors of HTTP+JSON."""

    async def handle(call: Call) -> Response:
        try:
            return await answer(call, _context(call))
        except ApiError:  # of HTTP: the body is too large, there is no such agent
            raise
        except Refused as exc:
            return error_response(exc.error)
        except Exception as exc:
            payload = build_rest_error_payload(as_a2a_error(exc))
            if isinstance(exc, ContentTypeNotSupportedError):  # the SDK has 400
                payload["error"]["code"] = 415
            return json_response(payload, payload["error"]["code"])

    return handle


def _rest_failure(exc: Exception) -> bytes:
    return to_json_bytes(build_rest_error_payload(as_a2a_error(exc)))


def _new_rest(tasks: Tasks, operation: Operation) -> Callable[[Call], Awaitable[Response]]:
    @_rest
    async def handle(call: Call, context: ServerCallContext) -> Response:
        request = operation.request()
        if call.request.method == "POST":
            body = await read_bytes(call.request, call.service)
            if body:
                _check_media(call)
            Parse(body or b"{}", request, ignore_unknown_fields=True)
        else:
            parse_params(call.request.query_params, request)
        for name, value in call.request.path_params.items():
            if name != "agent":
                setattr(request, name, value)
        found = getattr(tasks, operation.handler)(request, context)
        if operation.streams:
            return await _respond(
                call, found, lambda update: to_json_bytes(MessageToDict(to_stream_response(update))), _rest_failure
            )
        media = _MEDIA if _MEDIA in call.request.headers.get("accept", "") else "application/json"
        body = to_json_bytes(_shown(operation.name, await found, request))
        return Response(body, headers={"cache-control": "no-store"}, media_type=media)

    return handle


def _old_rest(handler: Any, streams: bool) -> Callable[[Call], Awaitable[Response]]:
    """Return the endpoint of a path of HTTP+JSON in version 0.3."""

    @_rest
    async def handle(call: Call, context: ServerCallContext) -> Response:
        body = await read_bytes(call.request, call.service)

        async def receive() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        found = handler(Request(call.request.scope, receive), context)
        if streams:
            return await _respond(call, found, to_json_bytes, _rest_failure)
        return json_response(await found)

    return handle
