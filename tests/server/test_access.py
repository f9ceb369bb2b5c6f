"""Attempts without the right to something: every endpoint of the table, and every stream."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
from starlette.routing import Route, WebSocketRoute

from retinue import HarnessAgent, Runtime
from retinue.errors import ConfigurationError, StoreError
from retinue.models import ModelRequest
from retinue.server import SCOPES, NoAuth, StoredTokens, TokenStore, create_app, page, sockets
from retinue.server.app import all_endpoints
from retinue.server.http import Endpoint
from retinue.storage.sql import SqlStore
from retinue.stores import StoreFilesystem
from retinue.testing import ScriptedModel, call, say
from retinue.testing.model import ScriptedTurn

from ..packing import pack_all
from ..waiting import until
from .agents import boss, speaker
from .serving import Site, asking, listening

OPEN = {"/healthz", "/ok", "/readyz", *(route.path for route in page.routes())}
"""The routes that anybody may use."""
SOCKETS = ("/api/v1/runs/{run_id}/events", "/api/v1/threads/{thread_id}/events", "/api/v1/events")
BODIES: dict[str, Any] = {
    "StartRun": {"agent": "speaker", "input": "x"},
    "Decisions": {"decisions": {"pay_1": {"action": "resume", "payload": {"approved": True}}}},
    "PatchThread": {"title": "x"},
    "ForkRun": {"after": 1, "input": "x"},
    "SendMessages": {"input": "x"},
    "TaskSubmission": {"task_id": "errand-2", "agent_id": "boss", "input": "go", "context": {}},
}
"""Bodies that would do something; others are empty."""


class CountingStore(SqlStore):
    """Counts the calls of its methods."""

    calls: Counter[str] = Counter()

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if callable(found) and not name.startswith("_") and name != "calls":
            CountingStore.calls[name] += 1
        return found


class World(NamedTuple):
    """A server with the suspended run of Ann, and what others hold."""

    url: str
    runtime: Runtime
    names: dict[str, str]
    """Values for the parameters of paths: Ann's."""
    ann: str
    admin: str
    """A token of Ann with all scopes."""
    bob: str
    revoked: str
    scoped: dict[str, str]
    """Tokens of Ann that lack one scope each, by that scope."""


@asynccontextmanager
async def world(tmp_path: Path) -> AsyncIterator[World]:
    url = f"sqlite:///{tmp_path}/served.db"
    spawn = call("agent_spawn", {"agent_id": "general-purpose", "task": "look", "timeout_seconds": 0}, id="spawn_1")

    def keep(request: ModelRequest) -> ScriptedTurn:
        return spawn if request.messages[-1].text == "keep" else say("kept")

    keeper = HarnessAgent("keeper", ScriptedModel(keep), filesystem=StoreFilesystem(url))
    runtime = Runtime.open(url, agents=[boss(), speaker("x"), keeper], recover=False)
    assert isinstance(runtime.store, SqlStore)
    runtime.store.__class__ = CountingStore
    tokens = TokenStore(runtime.store)
    async with runtime:
        app = create_app(runtime, auth=StoredTokens(runtime.store))
        secrets = {user: (await tokens.add(user))[1] for user in ("ann", "bob")}
        _, admin = await tokens.add("ann", SCOPES)
        revoked, secret = await tokens.add("ann", SCOPES)
        await tokens.revoke(revoked.token_id)
        scoped = {lacks: (await tokens.add("ann", set(SCOPES) - {lacks}))[1] for lacks in SCOPES}
        async with listening(app) as url, asking(url, secrets["ann"]) as site:
            started = await site.start("boss")
            await site.result(started["run_id"])
            await site.post("/tasks", {"task_id": "errand-1", "agent_id": "boss", "input": "go", "context": {}})
            assert (await site.get("/tasks/errand-1/wait")).body["awaiting"]
            await site.ask("PUT", "/api/v1/files/notes.txt", data=b"a secret")
            keeping = (await site.start("keeper", "keep"))["run_id"]
            await site.all_events(f"/api/v1/runs/{keeping}/events")
            (task,) = (await site.get(f"/api/v1/runs/{keeping}/tasks")).body["items"]
            names = {**started, "agent": "boss", "task_id": "errand-1", "path": "notes.txt"}
            names["background_task_id"] = task["task_id"]
            yield World(url, runtime, names, secrets["ann"], admin, secrets["bob"], secret, scoped)


def filled(path: str, names: dict[str, str]) -> str:
    return re.sub(r"\{(\w+)(?::\w+)?\}", lambda match: names.get(match[1], "something"), path)


async def attempt(site: Site, endpoint: Endpoint, names: dict[str, str], **headers: str) -> tuple[int, Any]:
    """Send what the endpoint would carry out for one who may."""
    body = None if endpoint.body is None else BODIES.get(endpoint.body.__name__, {})
    async with site.session.request(
        endpoint.method, filled(endpoint.path, names), json=body, headers=headers
    ) as response:
        if response.content_type == "text/event-stream":
            return response.status, None
        return response.status, await response.json() if response.content_type == "application/json" else None


async def knock(site: Site, path: str, **headers: str) -> tuple[int, str]:
    """Ask for a WebSocket; return the status and the reason with which it is closed at once, 101 if it is not."""
    async with site.session.ws_connect(path, headers=headers) as socket:
        await socket.send_str("{")
        message = await socket.receive(30)
        return (
            (101, "")
            if message.type is aiohttp.WSMsgType.TEXT
            else (message.data - sockets.REFUSED, message.extra or "")
        )


async def contents(runtime: Runtime) -> Any:
    """Return all that could be changed, but for leases, and for logs that are packed meanwhile: they are packed first."""
    assert isinstance(runtime.store, SqlStore)
    await pack_all(runtime.store)

    def read(link: Any) -> dict[str, Any]:
        tables = link.run("SELECT name FROM sqlite_master WHERE type = 'table' AND name <> 'logs'")
        return {name: sorted(link.run(f"SELECT * FROM {name}"), key=repr) for (name,) in tables}

    return await runtime.store.database.read(read)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"runtime": speaker("x")}, r"create_app serves a Runtime, not Agent\(.*: write create_app\(Runtime\("),
        ({"auth": 5}, r"auth is a token or an Auth, such as NoAuth\(\), not 5"),
        ({"auth": NoAuth}, "auth is a token or an Auth, .*, not <class"),
        ({"cors": "https://app.example"}, r"cors is a list, even of one: write \['https://app.example'\]"),
        ({"hosts": "app.example"}, "hosts is a list, even of one"),
        ({"rate": -1}, "rate is a number above 0, not -1"),
        ({"rate": "5"}, "rate is a number above 0, not '5'"),
        ({"max_streams": 0}, "max_streams is a number above 0, not 0"),
        ({"max_body": 0}, "max_body is a number above 0, not 0"),
    ],
)
def test_what_cannot_be_served_is_an_error_at_once(options: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"runtime": Runtime([speaker("x")]), "auth": "token-of-the-test", **options}
    with pytest.raises(ConfigurationError, match=words):
        create_app(given.pop("runtime"), **given)


def test_every_route_needs_a_token_but_those_listed() -> None:
    app = create_app(Runtime([speaker("x")]), auth="token-of-the-test", a2a=None)
    table = {(endpoint.method, endpoint.path) for endpoint in all_endpoints()}
    for route in app.routes:
        if isinstance(route, Route):
            methods = (route.methods or set()) - {"HEAD"}
            assert route.path in OPEN or {(method, route.path) for method in methods} <= table, route.path
        else:
            assert isinstance(route, WebSocketRoute)
            assert route.path in SOCKETS


async def test_no_attempt_without_a_valid_token_succeeds(tmp_path: Path) -> None:
    async with world(tmp_path) as there, asking(there.url, None) as site:
        before = await contents(there.runtime)
        attempts: list[dict[str, str]] = [
            {},
            {"authorization": "Bearer wrong-token"},
            {"authorization": "Bearer "},
            {"authorization": f"Basic {there.ann}"},
            {"authorization": f"Bearer {there.ann} "[:-6]},
            {"x-api-key": there.revoked},
            {"cookie": f"retinue_session_{there.url.rpartition(':')[2]}={there.ann}"},
            {"x-user": "ann"},
        ]
        for headers in attempts:
            for endpoint in all_endpoints():
                status, body = await attempt(site, endpoint, there.names, **headers)
                assert (status, body["code"]) == (401, "unauthorized"), (endpoint.path, headers)
            for path in SOCKETS:
                assert (await knock(site, filled(path, there.names), **headers))[0] == 401, (path, headers)
        assert await contents(there.runtime) == before


async def test_no_attempt_without_the_scope_succeeds(tmp_path: Path) -> None:
    async with world(tmp_path) as there, asking(there.url, None) as site:
        before = await contents(there.runtime)
        for endpoint in all_endpoints():
            if endpoint.scope != "none":
                token = there.scoped[endpoint.scope]
                status, body = await attempt(site, endpoint, there.names, authorization=f"Bearer {token}")
                assert (status, body["code"]) == (403, "forbidden"), endpoint.path
        answer = {"after": 1, **BODIES["Decisions"]}
        status, body, _ = await site.post(
            filled("/api/v1/runs/{run_id}/fork", there.names),
            answer,
            headers={"authorization": f"Bearer {there.scoped['answer']}"},
        )
        assert (status, body["code"]) == (403, "forbidden"), "a fork with decisions answers"
        for path in SOCKETS:
            status, _ = await knock(site, filled(path, there.names), authorization=f"Bearer {there.scoped['read']}")
            assert status == 403, path
        assert await contents(there.runtime) == before


async def test_another_users_resources_are_like_missing_ones(tmp_path: Path) -> None:
    """The answers, and the calls of the store, are the same: so nothing tells the two apart, time included."""
    async with world(tmp_path) as there, asking(there.url, there.bob) as site:
        before = await contents(there.runtime)
        missing = {name: f"{value[:-4]}0000" for name, value in there.names.items()}
        await site.get("/api/v1/session")
        tried = 0
        for endpoint in all_endpoints():
            owned = [name for name in re.findall(r"\{(\w+)", endpoint.path) if name != "agent"]
            if not owned or endpoint.method == "PUT":  # a user writes a file of its own
                continue
            tried += 1
            found: list[Any] = []
            for names in (there.names, missing):
                CountingStore.calls.clear()
                status, body = await attempt(site, endpoint, names)
                assert status == 404, endpoint.path
                said = json.dumps(body).replace(names[owned[0]], "…")
                found.append((said, dict(CountingStore.calls)))
            assert found[0] == found[1], endpoint.path
        assert tried > 15
        for path in SOCKETS[:2]:
            theirs, nothing = [await knock(site, filled(path, names)) for names in (there.names, missing)]
            assert theirs == nothing
            assert theirs[0] == 404
        async with site.session.ws_connect("/api/v1/events") as socket:
            for names in (there.names, missing):
                for name in ("run_id", "thread_id"):
                    await socket.send_json({"subscribe": "x", name: names[name]})
                    answer = await socket.receive_json()
                    assert answer["error"]["code"] == "not_found"
        for body in ({"agent": "speaker", "input": "x", "thread_id": there.names["thread_id"]},):
            assert (await site.post("/api/v1/runs", body)).status == 404
        assert (await site.post("/api/v1/threads", {"thread_id": there.names["thread_id"]})).status == 404
        for path in ("/api/v1/runs", "/api/v1/threads"):
            assert (await site.get(path)).body["items"] == []
        query = f"?thread_id={there.names['thread_id']}"
        assert (await site.get(f"/api/v1/runs{query}")).body["items"] == []
        assert await contents(there.runtime) == before


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/v1/runs", {"agent": "speaker", "input": "x", "thread_id": "ours", "when_busy": "enqueue"}),
        ("/tasks", {"task_id": "t3", "agent_id": "speaker", "input": "x", "context": {"session_id": "ours"}}),
    ],
)
async def test_two_users_who_begin_the_same_thread_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, body: Any
) -> None:
    """Bob's request finds no thread; then Ann begins it, before his run is stored."""
    real = SqlStore.user_of_thread
    async with world(tmp_path) as there, asking(there.url, there.ann) as ann, asking(there.url, there.bob) as bob:

        async def late(self: SqlStore, thread_id: str) -> Any:
            monkeypatch.setattr(SqlStore, "user_of_thread", real)
            assert await real(self, thread_id) is None
            await ann.start("boss", thread_id=thread_id)
            return None

        monkeypatch.setattr(SqlStore, "user_of_thread", late)
        assert (await bob.post(path, body)).status == 404
        await until(lambda: _has_ended(there.runtime, "ann", "suspended"))
        assert await there.runtime.store.list_runs("ours", user_id="bob") == []


async def _has_ended(runtime: Runtime, user: str, status: str) -> bool:
    return [run.status for run in await runtime.store.list_runs("ours", user_id=user)] == [status]


async def test_a_store_that_fails_does_not_say_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(self: SqlStore, *given: object, **more: object) -> Any:
        raise StoreError("postgresql://user@database.internal/app", "it is down", transient=True)

    async with world(tmp_path) as there, asking(there.url, there.ann) as site:
        for name in ("load_run", "user_of_thread", "list_runs"):
            monkeypatch.setattr(SqlStore, name, fail)
        for path in ("/readyz", "/api/v1/runs", "/api/v1/runs/run_x", "/api/v1/threads/t"):
            answer = await site.get(path)
            assert (answer.status, answer.body["code"]) == (503, "store_unavailable")
            assert "internal" not in str(answer.body)


async def test_the_store_notices_changes(tmp_path: Path) -> None:
    """The comparison that the tests above rely on."""
    async with world(tmp_path) as there, asking(there.url, there.ann) as site:
        before = await contents(there.runtime)
        await site.result((await site.start("speaker"))["run_id"])
        assert await contents(there.runtime) != before
