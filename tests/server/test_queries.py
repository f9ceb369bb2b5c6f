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
            status, body = await knock(site, f"{filled(path, there.names)}?aftr=1")
            assert (status, body["code"]) == (422, "invalid_query"), path


async def test_a_query_is_not_told_to_those_without_a_token(tmp_path: Path) -> None:
    async with world(tmp_path) as there, asking(there.url, None) as site:
        assert (await site.get("/api/v1/runs?aftr=1")).status == 401
