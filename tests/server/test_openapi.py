"""The description says what is answered: statuses, types and fields, for every operation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_origin

import jsonschema_rs

from retinue import Runtime
from retinue.server import create_app
from retinue.server.app import OPEN, all_endpoints
from retinue.wire.resources import encode_cursor
from retinue.wire.shapes import Items

from .agents import speaker
from .serving import asking
from .test_access import SOCKETS, attempt, filled, knock, world

ROOT = Path(__file__).parents[2]
ORDER = {"PUT": 0, "GET": 1, "POST": 2, "PATCH": 2, "DELETE": 3}


def check(description: dict[str, Any], method: str, path: str, status: int, body: Any) -> None:
    """Raise unless an answer is as the description says."""
    answers = description["paths"][re.sub(r":\w+}", "}", path)][method.lower()]["responses"]
    assert str(status) in answers, (method, path, status, body)
    schema = answers[str(status)].get("content", {}).get("application/json", {}).get("schema")
    if schema is not None and body is not None:  # a stream has no body here
        whole = {**schema, "components": description["components"]}
        jsonschema_rs.validator_for(whole).validate(body)


async def test_every_answer_is_as_described(tmp_path: Path) -> None:
    seen: set[tuple[str, str, int]] = set()
    async with world(tmp_path) as there, asking(there.url, there.admin) as site:
        description = (await site.get("/openapi.json")).body
        described = {(method.upper(), path) for path, one in description["paths"].items() for method in one}
        table = {(one.method, re.sub(r":\w+}", "}", one.path)) for one in all_endpoints()}
        assert described == table | {("GET", path) for path in OPEN}
        missing = dict.fromkeys(there.names, "missing")
        # Deleting comes last; of the cancel, the messages and the decisions, all but one are refused for being too late.
        for names in (missing, there.names):
            for endpoint in sorted(all_endpoints(), key=lambda one: ORDER[one.method]):
                status, body = await attempt(site, endpoint, names)
                check(description, endpoint.method, endpoint.path, status, body)
                if endpoint.page is not None:
                    page = await site.get(filled(endpoint.path, names), headers={"accept": "application/json"})
                    assert page.status == status
                    check(description, endpoint.method, endpoint.path, status, page.body)
                seen.add((endpoint.method, endpoint.path, status))
                await site.get(f"/api/v1/runs/{there.names['run_id']}/result?wait=10")
        for path in OPEN:
            check(description, "GET", path, 200, (await site.get(path)).body)
            assert description["paths"][path]["get"]["security"] == []
    succeeded = {(method, path) for method, path, status in seen if status < 300}
    assert {(one.method, one.path) for one in all_endpoints()} - succeeded <= {
        ("POST", "/api/v1/runs/{run_id}/decisions"),
        ("POST", "/api/v1/runs/{run_id}/fork"),
        ("POST", "/api/v1/runs/{run_id}/messages"),
        ("POST", "/tasks/{task_id}/resume"),
    }


async def test_every_list_has_pages(tmp_path: Path) -> None:
    lists = [endpoint.path for endpoint in all_endpoints() if get_origin(endpoint.returns) is Items]
    assert len(lists) > 8
    long: set[str] = set()
    async with world(tmp_path) as there, asking(there.url, there.admin) as site:
        for path in lists:
            address = filled(path, there.names)
            for cursor in ("zzz", encode_cursor((1.0, "\0"))):
                refused = await site.get(f"{address}?cursor={cursor}")
                assert (refused.status, refused.body["code"]) == (422, "unknown_cursor"), (path, cursor)
            items: list[Any] = []
            query = "?limit=1"
            while query:
                page = (await site.get(address + query)).body
                assert len(page["items"]) <= 1 or path == "/api/v1/tasks", path  # a page of tasks covers runs
                items += page["items"]
                query = page["next_cursor"] and f"?limit=1&cursor={page['next_cursor']}"
            assert items == (await site.get(f"{address}?limit=1000")).body["items"], path
            if len(items) > 1:
                long.add(path)
    assert {"/api/v1/agents", "/api/v1/runs", "/api/v1/threads"} <= long


async def test_sockets_are_on_the_paths_of_streams(tmp_path: Path) -> None:
    async with world(tmp_path) as there, asking(there.url, there.admin) as site:
        for path in SOCKETS:
            assert (await knock(site, filled(path, there.names)))[0] == 101


def test_the_documentation_names_every_route() -> None:
    text = (ROOT / "docs/server.md").read_text()
    for endpoint in all_endpoints():
        *_, last = [part for part in endpoint.path.split("/") if "{" not in part]
        assert f"/{last}" in text, endpoint.path
    for path in (*OPEN, "/api/v1/events"):
        assert path in text


async def test_a_lifespan_that_ends_closes_the_streams() -> None:
    app = create_app(Runtime([speaker("x")]), auth="token-of-the-test")
    async with app.router.lifespan_context(app):
        assert not app.state.service.closing.is_set()
    assert app.state.service.closing.is_set()
