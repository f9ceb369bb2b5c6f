"""A runtime, or a client of a server that has one: the same code uses either."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, cast

from msgspec.structs import replace

from retinue import Agent, Runtime
from retinue.client import Client
from retinue.core.events import Event, event_from_json, event_to_json

from ..server.serving import TOKEN, serving


@asynccontextmanager
async def home(kind: str, url: str, agents: Iterable[Agent]) -> AsyncIterator[Runtime]:
    """Return what runs these agents. The type of a runtime fits both."""
    runtime = Runtime.open(url, agents)
    if kind == "local":
        async with runtime:
            yield runtime
        return
    async with serving(runtime) as site, Client(site.url, token=TOKEN) as client:
        yield cast("Runtime", client)


def normal(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Return events as JSON without times, with ids by the order in which they come."""
    names: dict[str, str] = {}

    def rename(match: re.Match[str]) -> str:
        return names.setdefault(match[0], f"{match[1]}_{len(names)}")

    def walk(value: Any) -> Any:
        if isinstance(value, str):
            return re.sub(r"\b(run|thread|decision|ticket)_[0-9a-zA-Z_]{8,}", rename, value)
        if isinstance(value, dict):
            return {walk(name): walk(one) for name, one in cast("dict[str, Any]", value).items()}
        return [walk(one) for one in cast("list[Any]", value)] if isinstance(value, list) else value

    return [walk(event_to_json(replace(event, at=0.0))) for event in events]


def read_back(events: Iterable[Event]) -> list[Event]:
    """Return events as they are after a way through JSON."""
    return [event_from_json(event_to_json(event)) for event in events]
