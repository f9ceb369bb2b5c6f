"""Where things are kept, said in one string."""

from __future__ import annotations

import re

from ..core.errors import ConfigurationError
from ..core.stores import Durability, Store
from .memory import MemoryStore

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
    raise ConfigurationError(f"not a place to keep things: {without_secrets(url)!r}; use {_FORMS}")


def without_secrets(url: str) -> str:
    """A URL, or what was meant as one, as it may be shown: rather too much is hidden than too little."""
    hidden = re.sub(r":(?!//).*@", ":***@", url, flags=re.DOTALL)
    return re.sub(r"(?i)((?:password|passwd|pwd|secret|token|key)[^=&]*=)[^&]*", r"\1***", hidden)
