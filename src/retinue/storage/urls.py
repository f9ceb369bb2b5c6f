"""URLs of stores."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..core.errors import ConfigurationError
from ..core.stores import Durability, Store
from .memory import MemoryStore

if TYPE_CHECKING:
    from .sql import Database

_FORMS = (
    "'memory:', 'sqlite:///app.db' (relative), 'sqlite:////data/app.db' (absolute) or "
    "'postgresql://user:password@host/database'"
)


def open_store(url: str, durability: Durability = "process") -> Store:
    """Return the store that a URL names. No file and no server is touched before it is used.

    What is written survives `kill -9`; with `durability="full"` a file also survives the loss of power. A PostgreSQL
    server has its own setting for that, which is left as it is.
    """
    if url == "memory:":
        return MemoryStore()
    if durability not in ("process", "full"):
        raise ConfigurationError(f"durability is 'process' or 'full', not {durability!r}")
    scheme, _, rest = url.partition("://")
    path = rest.removeprefix("/")
    if scheme == "sqlite" and rest.startswith("/") and path:
        from .sqlite import SqliteStore

        return SqliteStore(path, durability)
    if scheme in ("postgresql", "postgres"):
        try:
            from .postgres import PostgresStore
        except ImportError as exc:
            raise ConfigurationError("PostgreSQL storage needs: pip install 'retinue[postgres]'") from exc
        return PostgresStore(url, durability)
    raise ConfigurationError(f"not a place to keep things: {without_secrets(url)!r}; use {_FORMS}")


def database_of(given: str | Store, what: str) -> tuple[Database, bool]:
    """Return the database of a URL or a store, and whether it was opened here, so that it must be closed here."""
    from .sql import SqlStore

    store = open_store(given) if isinstance(given, str) else given
    if not isinstance(store, SqlStore):
        raise ConfigurationError(f"{what} needs a database, not {given!r}: use such as 'sqlite:///app.db'")
    return store.database, store is not given


def without_secrets(url: str) -> str:
    """Return a URL with its secrets hidden, rather too much than too little."""
    hidden = re.sub(r":(?!//).*@", ":***@", url, flags=re.DOTALL)
    return re.sub(r"(?i)((?:password|passwd|pwd|secret|token|key)[^=&]*=)[^&]*", r"\1***", hidden)
