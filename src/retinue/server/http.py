"""Endpoints: one table describes them for the router, the checks before each handler, and OpenAPI."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import Response

from ..core.content import to_json_bytes
from ..core.errors import (
    ConfigurationError,
    DecisionRefused,
    ExecutionBackendError,
    FileMissing,
    FilesystemError,
    NoForkPlace,
    RetinueError,
    RunElsewhere,
    RunEnded,
    RuntimeClosed,
    StateError,
    StoreError,
    ThreadBusy,
    UnknownAgent,
    UnknownRun,
)
from .auth import User, token_in
from .sessions import cookie_in
from .shape_errors import explain

if TYPE_CHECKING:
    from ..core.stores import RunRecord
    from .service import Service

_log = logging.getLogger(__name__)

Scope = Literal["read", "run", "answer", "admin", "none"]
Handler = Callable[["Call"], Awaitable[Any]]

_DISCARDED = 8
"""A body of up to so many times the allowed size is read to its end, so that its client reads why it is refused."""
_READS = frozenset({"GET", "HEAD", "OPTIONS"})
_STATUS: tuple[tuple[type[Exception], int, str], ...] = (
    (UnknownAgent, 404, "unknown_agent"),
    (FileMissing, 404, "not_found"),
    (ThreadBusy, 409, "thread_busy"),
    (RunEnded, 409, "run_ended"),
    (DecisionRefused, 409, "decision_refused"),
    (RunElsewhere, 503, "owner_silent"),
    (RuntimeClosed, 503, "closing"),
    (ExecutionBackendError, 502, "backend_failed"),
    (ConfigurationError, 422, "invalid"),
    (StateError, 422, "invalid"),
    (FilesystemError, 422, "invalid"),
)


class ApiError(Exception):
    """An error with its HTTP status and a stable code."""

    def __init__(self, status: int, code: str, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status, self.code, self.detail, self.headers = status, code, detail, dict(headers or {})


def not_found(what: str) -> ApiError:
    """Return the one 404 for resources that do not exist and for those of other users."""
    hint = "; a sub-agent that a run waits for is found under its root run, by ns" if what == "run" else ""
    return ApiError(404, "not_found", f"there is no such {what}, or it is not yours{hint}")


class Endpoint(Struct, frozen=True, kw_only=True):
    """A method on a path, what it takes and what it gives."""

    method: str
    path: str
    handle: Handler
    summary: str
    scope: Scope = "read"
    query: type[Struct] | None = None
    """The parameters that it takes, none if left out; `prepare` refuses every other one."""
    own_query: bool = False
    """True if the handler reads the query itself, by the rules of another protocol."""
    body: type[Struct] | None = None
    """The type of the JSON body; the body may be left out where all its fields have defaults."""
    takes: str | None = None
    """The media type of a body that is not JSON."""
    status: int = 200
    returns: Any = None
    more: dict[int, Any] = {}
    """Other statuses of success, with what they return."""
    media: str = "application/json"
    page: Any = None
    """Of a stream: what it returns to a client that asks for JSON."""


class Endpoints(list[Endpoint]):
    """The endpoints of a module, in order. Used as a decorator, it adds a handler, whose docstring is the summary."""

    def __call__(self, method: str, path: str, **options: Any) -> Callable[[Handler], Handler]:
        def add(handle: Handler) -> Handler:
            self.append(Endpoint(method=method, path=path, handle=handle, summary=handle.__doc__ or "", **options))
            return handle

        return add


class Call:
    """A checked request to an endpoint: its user, path, query and body."""

    def __init__(self, request: Request, service: Service, user: User, scope: Scope, query: Any, body: Any) -> None:
        self.request, self.service, self.user, self.query, self.body = request, service, user, query, body
        self.runtime = service.runtime
        self._scope: Scope = scope

    def param(self, name: str) -> str:
        return self.request.path_params[name]

    async def run(self) -> RunRecord:
        """Return the run that the path names; raise unless it is the user's."""
        return await self.service.run_of(self.user, self.param("run_id"))

    def note_run(self, run_id: str) -> None:
        """Name the run that the request has started, for the access log."""
        self.request.state.run_id = run_id

    @property
    def wants_json(self) -> bool:
        """True if the client takes JSON and no stream of events."""
        accepted = self.request.headers.get("accept", "")
        return "application/json" in accepted and "text/event-stream" not in accepted

    @property
    def last_event(self) -> str | None:
        """The id of the last event that a reader of a stream has."""
        return self.request.headers.get("last-event-id")

    async def is_still_allowed(self) -> bool:
        """Return whether the credentials of the request are still valid; a stream asks from time to time."""
        return await still_allowed(self.service, headers_of(self.request), self.user, self._scope)


class Page(Struct, frozen=True):
    """The query of a list."""

    limit: Annotated[int, Meta(ge=1, le=1000)] = 50
    cursor: str | None = None


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    more = {"cache-control": "no-store", **(headers or {})}
    return Response(to_json_bytes(value), status, headers=more, media_type="application/json")


def error_response(error: Exception, run_id: str | None = None) -> Response:
    """Return the one shape of all errors."""
    known = as_api_error(error)
    body = {"detail": known.detail, "code": known.code}
    more: dict[str, Any] = {"places": error.places} if isinstance(error, NoForkPlace) else {}
    if isinstance(error, ThreadBusy):
        run_id = error.run_id
    if run_id:
        more["run_id"] = run_id
    return json_response(body | more, known.status, known.headers)


def as_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        codes = {404: "no_route", 405: "method_not_allowed"}
        return ApiError(error.status_code, codes.get(error.status_code, "refused"), error.detail, error.headers)
    if isinstance(error, UnknownRun):
        return not_found("run")
    if isinstance(error, StoreError):  # it names the place of the database, which is not for clients
        _log.warning("the store failed: %s", error)
        detail = "the store cannot be used now: try again; the log of the server has the reason"
        return ApiError(503, "store_unavailable", detail, {"retry-after": "1"})
    for kind, status, code in _STATUS:
        if isinstance(error, kind):
            return ApiError(status, code, str(error), {"retry-after": "1"} if status == 503 else None)
    if isinstance(error, RetinueError):
        return ApiError(422, "invalid", str(error))
    _log.error("a request failed: %s", error, exc_info=error)
    return ApiError(500, "internal", "the server failed; its log has the reason")


async def prepare(endpoint: Endpoint, request: Request, service: Service) -> Call:
    """Check a request in this order: credentials, scope, rate, origin, path, query, body."""
    headers = headers_of(request)
    user = await admit(service, headers, endpoint.scope)
    if request.method not in _READS:
        check_origin(service, headers)
    check_path(request)
    query = None if endpoint.own_query else read_query(request, endpoint.query)
    body = None if endpoint.body is None else decode_body(await read_bytes(request, service) or b"{}", endpoint.body)
    return Call(request, service, user, endpoint.scope, query, body)


def headers_of(request: HTTPConnection) -> dict[str, str]:
    return join_headers(request.headers.items())


def join_headers(given: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return headers by name. One that came twice has both values, so that neither can stand in for the other."""
    found: dict[str, str] = {}
    for name, value in given:
        between = "; " if name == "cookie" else ", "
        found[name] = f"{found[name]}{between}{value}" if name in found else value
    return found


def check_path(request: HTTPConnection) -> None:
    """Refuse ids that no resource can have and no database takes."""
    for name, value in request.path_params.items():
        if not is_text(value):
            raise not_found(name.removesuffix("_id"))


def is_text(value: str) -> bool:
    """Return whether a database can hold a text: it has no NUL, and no half of a surrogate pair."""
    return "\0" not in value and not any("\ud800" <= sign <= "\udfff" for sign in value)


async def admit(service: Service, headers: Mapping[str, str], scope: Scope) -> User:
    """Return the user of a request. Raise without credentials or the scope, after too many requests, or if the server is
    about to end."""
    user = await service.user_of(headers)
    if user is None:
        advice = "send a valid token as `Authorization: Bearer …` or `x-api-key`"
        raise ApiError(401, "unauthorized", advice, {"www-authenticate": "Bearer"})
    check_scope(user, scope)
    service.limits.count_request(user.id)
    if service.closing.is_set():
        raise ApiError(503, "closing", "the server ends: try again, here or elsewhere", {"retry-after": "1"})
    return user


def check_scope(user: User, scope: Scope) -> None:
    if scope != "none" and scope not in user.scopes:
        raise ApiError(403, "forbidden", f"this needs the scope {scope!r}, which the token does not have")


async def still_allowed(service: Service, headers: Mapping[str, str], user: User, scope: Scope = "read") -> bool:
    """Return whether the reader of an open stream may still read. A database that cannot be asked revokes nothing."""
    try:
        known = await service.user_of(headers)
    except StoreError:
        return True
    return known is not None and known.id == user.id and (scope == "none" or scope in known.scopes)


def check_origin(service: Service, headers: Mapping[str, str]) -> None:
    """Refuse requests from pages of other sites that carry our cookie, or that need no secret."""
    by_cookie = token_in(headers) is None and cookie_in(headers) is not None
    origin = headers.get("origin")
    if not by_cookie and (origin is None or not getattr(service.auth, "is_ambient", False)):
        return
    if origin is None or (origin not in service.origins and origin.partition("://")[2] != headers.get("host")):
        raise ApiError(403, "wrong_origin", "this must come from a page of this server, or of one that it knows")


def read_query(request: HTTPConnection, kind: type[Struct] | None) -> Any:
    """Return the query of a request; refuse a parameter that its path does not have, because it would do nothing."""
    given = dict(request.query_params)
    known = set[str]() if kind is None else {field.name for field in msgspec.structs.fields(kind)}
    if unknown := sorted(given.keys() - known):
        listed = f"the parameters here are {', '.join(sorted(known))}" if known else "this path takes no parameters"
        raise ApiError(422, "invalid_query", f"query: there is no parameter {unknown[0][:80]!r}; {listed}")
    if kind is None:
        return None
    if wrong := [name for name in sorted(given) if not is_text(given[name])]:
        raise ApiError(422, "invalid_query", f"query: {wrong[0]} has a character that is no text")
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as exc:
        raise ApiError(422, "invalid_query", f"query: {explain(str(exc), kind)}") from None
    except ValueError as exc:
        raise ApiError(422, "invalid_query", f"query: {exc}") from None


async def read_bytes(request: Request, service: Service) -> bytes:
    """Return the body of a request; raise if it is too large. At most the allowed size is kept in memory."""
    most, parts, size = service.max_body, list[bytes](), 0
    try:
        async with asyncio.timeout(service.body_seconds):
            async for part in request.stream():
                size += len(part)
                if size <= most:
                    parts.append(part)
                elif size > most * _DISCARDED:
                    break
    except TimeoutError:
        detail = f"the body did not come within {service.body_seconds:g} seconds"
        raise ApiError(408, "too_slow", detail, {"connection": "close"}) from None
    except ClientDisconnect:
        raise ApiError(400, "incomplete", "the client left before its body had come") from None
    if size > most:
        raise ApiError(413, "too_large", f"the body is larger than {most:,} bytes", {"connection": "close"})
    return b"".join(parts)


def decode_body(data: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as exc:
        raise ApiError(422, "invalid_body", f"body: {explain(str(exc), kind)}") from None
    except (ValueError, RecursionError) as exc:
        raise ApiError(400, "not_json", f"the body is not JSON: {exc}") from None


# --- trace context: the spans of a run hang under the span of the client that started it


def traced(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the part of a request's headers that tools read in `ctx.context`."""
    return {"traceparent": headers["traceparent"]} if "traceparent" in headers else {}


@contextmanager
def remote_trace(headers: Mapping[str, str]) -> Generator[None]:
    """Make the span that `traceparent` names the current one. Without OpenTelemetry this does nothing."""
    if "traceparent" not in headers or find_spec("opentelemetry") is None:
        yield
        return
    from opentelemetry.context import attach, detach
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    token = attach(TraceContextTextMapPropagator().extract(dict(headers)))
    try:
        yield
    finally:
        detach(token)
