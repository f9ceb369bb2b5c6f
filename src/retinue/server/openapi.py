"""The OpenAPI description, made from the table of endpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from ..core.events import AnyEvent
from .http import Endpoint

_ERRORS = {
    400: "The body is not JSON.",
    401: "No valid token.",
    403: "The token lacks the scope, or the page is of another site.",
    404: "There is no such resource, or it is not yours.",
    408: "The body took too long.",
    409: "The present state does not allow it.",
    413: "The body or the file is too large.",
    422: "A field or parameter is wrong, or there is none of that name.",
    429: "Too many requests or streams.",
    502: "A remote agent failed.",
    503: "The store or the owner of the run cannot be reached now, or the server ends.",
}
_WITH_BODY = {400, 408, 413}
_TO_CHANGE = {409, 502}
_ERROR = {"$ref": "#/components/schemas/Error"}
_REF = "#/components/schemas/{name}"


def describe(endpoints: Iterable[Endpoint], open_paths: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the description of all endpoints, and of the paths that need no token."""
    table = list(endpoints)
    kinds = [kind for one in table for kind in (one.body, one.query, one.returns, one.page, *one.more.values()) if kind]
    schemas, components = msgspec.json.schema_components([*kinds, AnyEvent], ref_template=_REF)
    schema_of = {repr(kind): schema for kind, schema in zip(kinds, schemas, strict=False)}
    components["Error"] = {
        "type": "object",
        "required": ["detail", "code"],
        "properties": {"detail": {"type": "string"}, "code": {"type": "string"}, "run_id": {"type": "string"}},
    }
    components["Event"] = schemas[-1]
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in table:
        path = re.sub(r"\{(\w+):\w+\}", r"{\1}", endpoint.path)
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, schema_of, components)
    for path, summary in (open_paths or {}).items():
        paths[path] = {"get": _open_operation(path, summary)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Retinue", "version": "1", "description": "Agents that delegate to sub-agents, over HTTP."},
        "security": [{"bearer": []}, {"key": []}, {"cookie": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                "cookie": {"type": "apiKey", "in": "cookie", "name": "retinue_session_<port>"},
            },
        },
    }


def _operation(endpoint: Endpoint, schema_of: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    responses: dict[str, Any] = {str(endpoint.status): _answer(endpoint, schema_of)}
    for status, kind in endpoint.more.items():
        responses[str(status)] = {"description": endpoint.summary, "content": _json(schema_of[repr(kind)])}
    for status in _errors_of(endpoint):
        responses[str(status)] = {"description": _ERRORS[status], "content": _json(_ERROR)}
    operation: dict[str, Any] = {
        "operationId": _name(endpoint.method, endpoint.path),
        "summary": endpoint.summary,
        "parameters": [*_path_parameters(endpoint), *_query_parameters(endpoint, components)],
        "responses": responses,
    }
    if endpoint.scope != "none":
        operation["description"] = f"Needs the scope `{endpoint.scope}`."
    if endpoint.body is not None:
        required = any(field.required for field in msgspec.structs.fields(endpoint.body))
        operation["requestBody"] = {"required": required, "content": _json(schema_of[repr(endpoint.body)])}
    elif endpoint.takes is not None:
        operation["requestBody"] = {"required": False, "content": {endpoint.takes: {"schema": {}}}}
    return operation


def _answer(endpoint: Endpoint, schema_of: dict[str, Any]) -> dict[str, Any]:
    if endpoint.status == 204:
        return {"description": endpoint.summary}
    schema: Any = {} if endpoint.returns is None else schema_of[repr(endpoint.returns)]
    if endpoint.media == "text/event-stream":
        one = schema or {"$ref": _REF.format(name="Event")}
        name = one["$ref"].rpartition("/")[2]
        schema = {"type": "string", "description": f"Each `data:` is one `{name}`.", "contentSchema": one}
    elif endpoint.media != "application/json":
        schema = {"type": "string"}
    content = {endpoint.media: {"schema": schema}}
    if endpoint.page is not None:
        content |= _json(schema_of[repr(endpoint.page)])
    return {"description": endpoint.summary, "content": content}


def _errors_of(endpoint: Endpoint) -> list[int]:
    """Return the statuses of the errors that an endpoint may answer with."""
    changes = endpoint.method != "GET"
    absent = set[int]() if endpoint.body or endpoint.takes else set(_WITH_BODY)
    if not changes:
        absent |= _TO_CHANGE
    if endpoint.media == "application/octet-stream":
        absent -= {413}
    if endpoint.scope == "none" and not changes:
        absent.add(403)
    if "{" not in endpoint.path and endpoint.query is None and not changes:
        absent.add(404)
    return [status for status in _ERRORS if status not in absent]


def _open_operation(path: str, summary: str) -> dict[str, Any]:
    status = {"type": "object", "required": ["status"], "properties": {"status": {"type": "string"}}}
    responses: dict[str, Any] = {"200": {"description": summary, "content": _json(status)}}
    if path == "/readyz":
        responses["503"] = {"description": "It does not, now.", "content": _json(_ERROR)}
    return {"operationId": _name("get", path), "summary": summary, "security": [], "responses": responses}


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _name(method: str, path: str) -> str:
    words = re.sub(r"\W+", "_", re.sub(r":\w+\}", "", path.removeprefix("/api/v1"))).strip("_")
    return f"{method.lower()}_{words}"


def _path_parameters(endpoint: Endpoint) -> list[dict[str, Any]]:
    names = re.findall(r"\{(\w+)(?::\w+)?\}", endpoint.path)
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}} for name in names
    ]


def _query_parameters(endpoint: Endpoint, components: dict[str, Any]) -> list[dict[str, Any]]:
    if endpoint.query is None:
        return []
    properties = components[endpoint.query.__name__]["properties"]
    found = [{"name": name, "in": "query", "schema": _present(schema)} for name, schema in properties.items()]
    if "after" in properties:
        header = {"type": "string", "description": "The last event the reader has, where `after` is not given."}
        found.append({"name": "last-event-id", "in": "header", "schema": header})
    return found


def _present(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a parameter that is there: it may be left out, but is never null."""
    given = [one for one in schema.get("anyOf", ()) if one != {"type": "null"}]
    return given[0] if len(given) == 1 else schema
