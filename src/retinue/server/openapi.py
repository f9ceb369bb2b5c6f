"""The OpenAPI description, made from the table of endpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from ..core.events import AnyEvent
from .http import Endpoint

_ERRORS = {
    400: "The body is not JSON.",
    401: "No valid token.",
    403: "The token lacks the scope.",
    404: "There is no such resource, or it is not yours.",
    409: "The present state does not allow it.",
    413: "The body is too large.",
    422: "A field or parameter is wrong.",
    429: "Too many requests.",
    502: "A remote agent failed.",
    503: "The store or the owner of the run cannot be reached now.",
}
_ERROR = {"$ref": "#/components/schemas/Error"}


def describe(endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    """Return the description of all endpoints."""
    table = list(endpoints)
    kinds = [kind for one in table for kind in (one.body, one.query, one.returns) if kind is not None]
    _, components = msgspec.json.schema_components([*kinds, AnyEvent], ref_template="#/components/schemas/{name}")
    components["Error"] = {
        "type": "object",
        "required": ["detail", "code"],
        "properties": {"detail": {"type": "string"}, "code": {"type": "string"}, "run_id": {"type": "string"}},
    }
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in table:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, components)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Retinue", "version": "1", "description": "Agents that delegate to sub-agents, over HTTP."},
        "security": [{"bearer": []}, {"key": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(endpoint: Endpoint, components: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": endpoint.summary}
    if endpoint.status != 204:
        schema: dict[str, Any] = {}
        if endpoint.returns is not None:
            schema = {"$ref": f"#/components/schemas/{endpoint.returns.__name__}"}
        elif endpoint.media != "application/json":
            schema = {"type": "string"}
        answer["content"] = {endpoint.media: {"schema": schema}}
    responses: dict[str, Any] = {str(endpoint.status): answer}
    if endpoint.path.endswith("/result"):
        responses["202"] = {"description": "The run still works.", "content": {"application/json": {"schema": {}}}}
    for status, text in _ERRORS.items():
        responses[str(status)] = {"description": text, "content": {"application/json": {"schema": _ERROR}}}
    name = re.sub(r"\W+", "_", endpoint.path.removeprefix("/api/v1").replace("{", "").replace("}", "")).strip("_")
    operation: dict[str, Any] = {
        "operationId": f"{endpoint.method.lower()}_{name}",
        "summary": endpoint.summary,
        "parameters": [*_path_parameters(endpoint), *_query_parameters(endpoint, components)],
        "responses": responses,
    }
    if endpoint.scope != "none":
        operation["description"] = f"Needs the scope `{endpoint.scope}`."
    if endpoint.body is not None:
        schema = {"$ref": f"#/components/schemas/{endpoint.body.__name__}"}
        required = any(field.required for field in msgspec.structs.fields(endpoint.body))
        operation["requestBody"] = {"required": required, "content": {"application/json": {"schema": schema}}}
    return operation


def _path_parameters(endpoint: Endpoint) -> list[dict[str, Any]]:
    names = re.findall(r"\{(\w+)(?::\w+)?\}", endpoint.path)
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]


def _query_parameters(endpoint: Endpoint, components: dict[str, Any]) -> list[dict[str, Any]]:
    if endpoint.query is None:
        return []
    properties = components[endpoint.query.__name__]["properties"]
    return [{"name": name, "in": "query", "schema": schema} for name, schema in properties.items()]
