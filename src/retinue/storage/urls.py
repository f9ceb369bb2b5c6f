"""Where things are kept, said in one string."""

from __future__ import annotations

from ..core.errors import ConfigurationError
from ..core.stores import Durability, Store
from .memory import MemoryStore
from .sql import Database, SqlStore

_FORMS = "'memory:', 'sqlite:///app.db' (relative) or 'sqlite:////data/app.db' (absolute)"


def open_store(url: str, durability: Durability = "process") -> Store:
    """The store a URL names. No file is touched before it is used."""
    if url == "memory:":
        return MemoryStore()
    if durability not in ("process", "full"):
        raise ConfigurationError(f"durability is 'process' or 'full', not {durability!r}")
    scheme, _, rest = url.partition("://")
    path = rest.removeprefix("/")
    if scheme == "sqlite" and rest.startswith("/") and path:
        from .sqlite import SqliteStore

        return SqliteStore(path, durability)
    raise ConfigurationError(f"not a place to keep things: {url!r}; use {_FORMS}")


def database_of(given: str | Store, what: str) -> tuple[Database, bool]:
    """The database that a URL names or a store has, and whether it was made here and is to be closed here."""
    store = open_store(given) if isinstance(given, str) else given
    if not isinstance(store, SqlStore):
        raise ConfigurationError(f"{what} needs a database, not {given!r}: use such as 'sqlite:///app.db'")
    return store.database, store is not given
