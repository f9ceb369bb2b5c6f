"""A parameter that a path does not have would do nothing, so it is refused and the answer names those it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec.structs import fields

from retinue.server.app import all_endpoints

from .serving import asking
from .test_access import SOCKETS, contents, filled, knock, world


async def test_every_path_refuses_a_parameter_that_it_does_not_have(tmp_path: Path) -> None:
    async with world(tmp_path) as there, asking(there.url, there.admin) as site:
        before = await contents(there.runtime)
        description = (await site.get("/openapi.json")).body
        for endpoint in all_endpoints():
            answer = await site.ask(endpoint.method, f"{filled(endpoint.path, there.names)}?aftr=1")
            known = sorted(field.name for field in fields(endpoint.query)) if endpoint.query else []
            listed = f"the parameters here are {', '.join(known)}" if known else "this path takes no parameters"
            body: Any = {"detail": f"query: there is no parameter 'aftr'; {listed}", "code": "invalid_query"}
            run_id = {"run_id": there.names["run_id"]} if "{run_id}" in endpoint.path else {}
            assert (answer.status, answer.body) == (422, body | run_id), (endpoint.method, endpoint.path)
            described = description["paths"][endpoint.path.replace(":path", "")][endpoint.method.lower()]
            assert sorted(one["name"] for one in described["parameters"] if one["in"] == "query") == known
            assert "422" in described["responses"]
        assert await contents(there.runtime) == before
        for path in SOCKETS:
            status, reason = await knock(site, f"{filled(path, there.names)}?aftr=1")
            assert (status, reason[:36]) == (422, "query: there is no parameter 'aftr';"), path


async def test_a_query_is_not_told_to_those_without_a_token(tmp_path: Path) -> None:
    async with world(tmp_path) as there, asking(there.url, None) as site:
        assert (await site.get("/api/v1/runs?aftr=1")).status == 401


async def test_an_error_names_what_may_be_written_at_its_place(tmp_path: Path) -> None:
    """Fields and values are listed; a wrong path or method says which are right."""
    async with world(tmp_path) as there, asking(there.url, there.admin) as site:
        run_id = there.names["run_id"]
        before = await contents(there.runtime)
        start: dict[str, Any] = {"agent": "nobody", "input": "x"}
        role = [{"role": "robot", "content": "x"}]
        decisions = {"decisions": {"c1": {"action": "shrug"}}}
        limits = "children, cost, depth, parallel, seconds, steps, tokens"
        for method, path, body, status, detail in (
            ("POST", "/runs", start | {"limits": {"step": 1}}, 422, f"at `$.limits`; known here: {limits}"),
            ("POST", "/runs", start | {"thread": "x"}, 422, "unknown field `thread`; known here: agent, "),
            ("POST", "/runs", start | {"input": role}, 422, "'robot' - at `$.input[0].role`; known here: "),
            (
                "POST",
                f"/runs/{run_id}/decisions",
                decisions,
                422,
                "`$.decisions[...].action`; known here: answer, approve, cancel, ",
            ),
            ("GET", "/runs?status=done", None, 422, "'done' - at `$.status`; known here: cancelled, completed, "),
            (
                "GET",
                f"/runs/{run_id}/events?kinds=nope",
                None,
                422,
                "no event kind 'nope'; the kinds are run_started, ",
            ),
            (
                "GET",
                f"/runs/{run_id}/events?after=x",
                None,
                422,
                "'x' is not the number of an event: give a whole number",
            ),
            ("DELETE", "/runs", None, 405, "DELETE is not a method of '/api/v1/runs': use GET, POST"),
            ("GET", "/rums", None, 404, "there is no path '/api/v1/rums': GET /openapi.json lists the paths"),
        ):
            answer = await site.ask(method, f"/api/v1{path}", body)
            assert answer.status == status, answer.body
            assert detail in answer.body["detail"]
        assert await contents(there.runtime) == before
