"""The ASGI application."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

from msgspec import Struct
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from ..core.errors import ConfigurationError, StoreError, as_tuple
from ..runtime import Runtime
from ..storage.sql import SqlStore
from ..subagents.harness import HarnessAgent, find_undivided
from ..wire.shapes import UserShape
from . import budgets, files, page, runs, sockets, tasks, threads
from .auth import Auth, HasFirstUser, OneToken, StoredTokens, token_in
from .compression import compress
from .http import (
    ApiError,
    Call,
    Endpoint,
    Endpoints,
    as_api_error,
    error_response,
    headers_of,
    json_response,
    prepare,
    remote_trace,
)
from .limits import UserLimits
from .openapi import describe
from .service import MAX_BODY, Service
from .sessions import SECONDS, cookie_in, cookie_name

if TYPE_CHECKING:
    from .a2a import Tasks

_access = logging.getLogger("retinue.access")


class A2AOptions(Struct, frozen=True, kw_only=True):
    """Settings of agents that are served over A2A."""

    base: str = ""
    """The address of the server, for cards that are asked for over gRPC; others name the address that was asked."""
    key: bytes | None = None
    """An EC key on P-256, as PEM, that signs the cards."""
    push_private: bool = False
    """True if push notifications may go to addresses of this machine and its network."""


_A2A_OPTIONS = A2AOptions()


def create_app(
    runtime: Runtime,
    *,
    auth: Auth | str | None = None,
    cors: Sequence[str] = (),
    rate: float | None = None,
    max_streams: int | None = None,
    max_body: int = MAX_BODY,
    hosts: Sequence[str] = (),
    a2a: A2AOptions | None = _A2A_OPTIONS,
    shared_files: bool = False,
) -> Starlette:
    """Return an ASGI application that serves the agents of a runtime, which the caller enters and closes.

    `auth`: a token, whose user is "local"; or an `Auth`, such as `NoAuth()` to let everybody in. Left out, the tokens of
    the runtime's database are used. `cors`: the origins of pages that may use it. `rate`: requests a second for each user.
    `max_streams`: open streams for each user. `max_body`: bytes of a request. `hosts`: the names by which it may be asked
    for; any if not given. `a2a`: how the agents are served over A2A, where `retinue[a2a]` is installed; None: not at all.
    `shared_files`: all users may work on the files of agents that do not give each user a part. Without it only one may: the
    user of a fixed token, or the first who had a token in the database.

    At the end of its lifespan it tells the readers of streams to connect again. An application that mounts it enters
    that itself: `async with runtime, app.router.lifespan_context(app)`.
    """
    if not isinstance(cast("Any", runtime), Runtime):
        raise ConfigurationError(f"create_app serves a Runtime, not {runtime!r:.80}: write create_app(Runtime([…]))")
    cors, hosts = as_tuple(cors, "create_app", "cors"), as_tuple(hosts, "create_app", "hosts")
    for name, value in (("rate", rate), ("max_streams", max_streams), ("max_body", max_body)):
        if value is not None and not (isinstance(cast("Any", value), int | float) and value > 0):
            raise ConfigurationError(f"create_app: {name} is a number above 0, not {value!r:.80}")
    auth, user_limits = _auth_of(runtime, auth), UserLimits(rate, max_streams)
    if not shared_files and not isinstance(auth, HasFirstUser) and (agent := shared_agent(runtime)) is not None:
        raise ConfigurationError(
            f"create_app: agent {agent.name!r} works in {agent.files!r} for all users, and {type(auth).__name__} may name "
            f"several, so each would see the files of the others: {HOW_TO_DIVIDE}, or give shared_files=True"
        )
    service = Service(runtime, auth, user_limits, max_body, frozenset(cors), shared_files=shared_files)
    service.description = describe(all_endpoints(), OPEN)
    routes: list[BaseRoute] = [_route(endpoint, service) for endpoint in all_endpoints()]
    routes += sockets.routes(service)
    routes += _open_routes(service)
    routes += page.routes()
    a2a_tasks = None if a2a is None or find_spec("a2a") is None else _add_a2a(service, a2a, routes)
    middleware: list[Middleware] = []
    if hosts:
        middleware.append(Middleware(KnownHosts, hosts=hosts))
    if cors:
        allowed = ["authorization", "content-type", "x-api-key", "last-event-id", "idempotency-key", "a2a-version"]
        middleware.append(
            Middleware(CORSMiddleware, allow_origins=list(cors), allow_methods=["*"], allow_headers=allowed)
        )

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        if a2a_tasks is not None and isinstance(runtime.store, SqlStore):
            a2a_tasks.push.start()
        yield
        service.close()

    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=middleware,
        exception_handlers={HTTPException: _refuse, Exception: _refuse},
    )
    app.router.redirect_slashes = False  # a path is right or wrong
    app.state.service, app.state.a2a = service, a2a_tasks
    return app


HOW_TO_DIVIDE = "give each user a part, with filesystem=SandboxFilesystem(folder, isolation='user')"


def shared_agent(runtime: Runtime) -> HarnessAgent | None:
    """Return an agent of a runtime that would show each user the files of the others."""
    found = [find_undivided(agent, runtime.agents) for agent in runtime.agents.values()]
    return next((agent for agent in found if agent is not None), None)


def _add_a2a(service: Service, options: A2AOptions, routes: list[BaseRoute]) -> Tasks:
    """Add the routes of A2A, and return what answers them."""
    from .a2a import Tasks
    from .a2a_cards import Cards
    from .a2a_http import endpoints
    from .a2a_push import Push

    cards = Cards(service, version("retinue"), options.base, options.key)
    tasks = Tasks(service, cards, Push(service, private=options.push_private))
    routes += [_route(endpoint, service) for endpoint in endpoints(tasks)]
    routes += cards.routes()
    return tasks


class KnownHosts:
    """Refuses requests under other names: a page could otherwise have its own name lead to this machine."""

    def __init__(self, app: ASGIApp, hosts: Iterable[str]) -> None:
        self._app, self._hosts = app, frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" or scope["type"] == "websocket":
            given = Headers(scope=scope).get("host", "").lower()
            if re.sub(r":\d+$", "", given) not in self._hosts:
                refusal = ApiError(421, "wrong_host", "the server is not known by this name")
                if scope["type"] == "http":
                    await error_response(refusal)(scope, receive, send)
                else:
                    await sockets.refuse(WebSocket(scope, receive, send), refusal)
                return
        await self._app(scope, receive, send)


def all_endpoints() -> list[Endpoint]:
    """Return the table of everything that is served and needs a token."""
    return [*runs.endpoint, *threads.endpoint, *tasks.endpoint, *files.endpoint, *budgets.endpoint, *endpoint]


def _auth_of(runtime: Runtime, auth: Auth | str | None) -> Auth:
    if isinstance(auth, str):
        return OneToken(auth)
    if auth is not None:
        if isinstance(auth, type) or not hasattr(auth, "user_of"):
            raise ConfigurationError(f"create_app: auth is a token or an Auth, such as NoAuth(), not {auth!r:.80}")
        return auth
    if isinstance(runtime.store, SqlStore):
        return StoredTokens(runtime.store)
    raise ConfigurationError("give create_app(auth=…): a token, or NoAuth() to let everybody in")


def _route(endpoint: Endpoint, service: Service) -> Route:
    async def handle(request: Request) -> Response:
        began = time.perf_counter()
        with service.request():
            try:
                call = await prepare(endpoint, request, service)
                with remote_trace(request.headers):
                    answer = await endpoint.handle(call)
                response = answer if isinstance(answer, Response) else json_response(answer, endpoint.status)
                response = await compress(request, response)
            except Exception as exc:
                response = error_response(exc, request.path_params.get("run_id"))
        seconds = time.perf_counter() - began
        service.metrics.count_request(request.method, endpoint.path, response.status_code, seconds)
        if _access.isEnabledFor(logging.INFO):
            run_id = getattr(request.state, "run_id", None) or request.path_params.get("run_id") or ""
            shown = (request.method, endpoint.path, response.status_code, seconds * 1000, quote(run_id[:80], "_"))
            _access.info("%s %s %d %.1f ms %s", *shown)
        return response

    return Route(endpoint.path, handle, methods=[endpoint.method])


async def _refuse(request: Request, exc: Exception) -> Response:
    if isinstance(exc, HTTPException) and exc.status_code in (404, 405):
        return error_response(_no_route(request))
    return error_response(as_api_error(exc))


def _no_route(request: Request) -> ApiError:
    """Return the error of a path that does not exist, or does not take the method of the request."""
    path = request.url.path[:200]
    partly = [
        one for one in request.app.routes if isinstance(one, Route) and one.matches(request.scope)[0] is Match.PARTIAL
    ]
    if methods := sorted({method for route in partly for method in route.methods or () if method != "HEAD"}):
        allowed = ", ".join(methods)
        problem = f"{request.method[:40]} is not a method of {path!r}: use {allowed}"
        return ApiError(405, "method_not_allowed", problem, {"allow": allowed})
    return ApiError(
        404,
        "no_route",
        f"there is no path {path!r}: GET {request.scope.get('root_path', '')}/openapi.json lists the paths",
    )


# --- life, figures, sessions


OPEN = {
    "/healthz": "Say that the process lives.",
    "/ok": "The same, as LangGraph's clients ask.",
    "/readyz": "Say that the server takes requests and reaches its store.",
}
"""The paths that need no token."""


def _open_routes(service: Service) -> Iterable[Route]:
    async def healthy(request: Request) -> Response:
        return json_response({"status": "ok"})

    async def ready(request: Request) -> Response:
        if service.closing.is_set():
            return error_response(ApiError(503, "closing", "the server ends"))
        try:
            await service.runtime.store.load_run("ready?")
        except StoreError as exc:
            return error_response(exc)
        return json_response({"status": "ready"})

    handlers: dict[str, Callable[[Request], Awaitable[Response]]] = {"/readyz": ready}
    return [Route(path, handlers.get(path, healthy)) for path in OPEN]


endpoint = Endpoints()


@endpoint("GET", "/metrics", scope="admin", media="text/plain")
async def metrics(call: Call) -> Response:
    """Figures, as Prometheus reads them."""
    lines = [*call.service.metrics.lines(), *await call.runtime.budgets.figures(), *call.runtime.gates.figures()]
    return Response("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")


@endpoint("GET", "/openapi.json", scope="none", returns=dict[str, Any])
async def openapi(call: Call) -> Any:
    """Describe all of this."""
    return {**call.service.description, "servers": [{"url": call.request.scope.get("root_path") or "/"}]}


@endpoint("GET", "/api/v1/session", scope="none", returns=UserShape)
async def whoami(call: Call) -> Any:
    """Show who asks."""
    return {"user_id": call.user.id, "scopes": sorted(call.user.scopes)}


@endpoint("POST", "/api/v1/session", scope="none", status=201, returns=UserShape)
async def begin_session(call: Call) -> Response:
    """Begin a session of a page with a token: its cookie holds for 30 days, without the scope `admin`, until its token or
    `DELETE` ends it."""
    headers = headers_of(call.request)
    token = token_in(headers)
    response = json_response(await whoami(call), 201)
    if token is not None:
        secret = await call.service.sessions.begin(call.user, token)
        secure = call.request.url.scheme == "https"
        name, age = cookie_name(headers), int(SECONDS)
        response.set_cookie(name, secret, age, httponly=True, samesite="strict", secure=secure, path="/")
    return response


@endpoint("DELETE", "/api/v1/session", scope="none", status=204)
async def end_session(call: Call) -> Response:
    """End the session of a page."""
    headers = headers_of(call.request)
    if (secret := cookie_in(headers)) is not None:
        await call.service.sessions.end(secret)
    response = Response(status_code=204)
    response.delete_cookie(cookie_name(headers), path="/", httponly=True, samesite="strict")
    return response


__all__ = ["create_app"]
