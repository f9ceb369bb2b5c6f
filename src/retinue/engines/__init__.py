"""Engines decide which worker does the next leg of a run."""

from __future__ import annotations

from ..core.engine import Engine
from ..core.errors import ConfigurationError


def open_engine(url: str) -> Engine:
    """Return the engine that `Runtime.open(engine=…)` names: `postgres`."""
    if url == "postgres":
        from .postgres import PostgresEngine

        return PostgresEngine()
    raise ConfigurationError(f"there is no engine {url!r}: write 'postgres'")
