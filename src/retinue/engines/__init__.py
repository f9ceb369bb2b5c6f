"""Engines decide which worker does the next leg of a run."""

from __future__ import annotations

from typing import Any, cast

from ..core.engine import Engine
from ..core.errors import ConfigurationError


def open_engine(url: str) -> Engine:
    """Return the engine that `Runtime.open(engine=…)` names: `postgres` or `temporal://host:port/namespace?queue=prefix`."""
    if url == "postgres":
        from .postgres import PostgresEngine

        return PostgresEngine()
    if isinstance(cast("Any", url), str) and url.startswith("temporal:"):
        try:
            from .temporal import TemporalEngine
        except ModuleNotFoundError as exc:
            if exc.name is None or exc.name.partition(".")[0] != "temporalio":
                raise
            raise ConfigurationError('the Temporal engine needs: pip install "retinue[temporal]"') from exc
        return TemporalEngine(url)
    raise ConfigurationError(f"there is no engine {url!r}: write 'postgres' or 'temporal://host:port/namespace'")
