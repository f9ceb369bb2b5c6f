"""The address of a PostgreSQL database: the parameters of a connection, and the parts that may be shown."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote, unquote

import psycopg
from psycopg.conninfo import conninfo_to_dict

from ..core.errors import ConfigurationError, StoreError

_SCHEMA = "retinue"
_SCHEMA_NAME = re.compile(r"(?!pg_)[a-z_][a-z0-9_]{0,62}")
_PATIENCE: dict[str, Any] = {
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
    "fallback_application_name": "retinue",
}
"""Timeouts, unless the URL sets others."""
_LASTING = (
    "authentication failed",
    "does not exist",
    "pg_hba.conf",
    "no password supplied",
    "not permitted",
    "permission denied",
    "not support SSL",
    "certificate",
    ": invalid ",
)
"""Parts of messages about failed connections that retrying does not help."""
_PASSING = ("08", "25006", "53", "57", "58")
"""SQL states that are transient: connections, resources, a server that stops or changes."""
_RIVALS = ("23505", "40", "55P03")
"""SQL states of conflicts with others who change the same rows."""


class PostgresAddress:
    """A URL, read. `place` is what may be shown of it: the password is not in it."""

    def __init__(self, url: str) -> None:
        try:
            bare, self.schema = _without_schema(url)
            given = conninfo_to_dict(bare)
        except (psycopg.Error, ValueError):
            given = {"host": "@"}
        if "@" in str(given.get("host", "")):  # what the driver says of such a URL quotes parts of the password
            raise ConfigurationError(
                "the PostgreSQL URL cannot be read; use 'postgresql://user:password@host:5432/database', with every "
                "special character of the password percent-encoded, and '?schema=name' for a schema of your choice"
            )
        if not _SCHEMA_NAME.fullmatch(self.schema):
            raise ConfigurationError(f"not the name of a schema: {self.schema!r}; use small letters, digits and _")
        self.parameters: dict[str, Any] = {**_PATIENCE, **given}
        self._secrets = [str(given[name]) for name in ("password", "sslpassword") if given.get(name)]
        self.place = _place(given) + ("" if self.schema == _SCHEMA else f"?schema={self.schema}")

    def __repr__(self) -> str:
        return f"PostgresAddress({self.place!r})"

    def problem(self, error: Exception) -> Exception:
        """Turn an error of the driver into a StoreError of one line; return other errors as they are."""
        if isinstance(error, UnicodeEncodeError):
            return StoreError(self.place, f"it cannot store what is not text: {error}")
        if not isinstance(error, psycopg.Error):
            return error
        said, state = self._shown(error), error.sqlstate or ""
        if state.startswith(_RIVALS):
            return StoreError(self.place, f"{said}: somebody else was faster, try again", transient=True)
        if state.startswith(_PASSING) or (not state and _is_of_connection(error, said)):
            return StoreError(self.place, f"{said}: is the server up, and can it take more?", transient=True)
        if isinstance(error, psycopg.OperationalError) and not state:
            return StoreError(self.place, f"{said}: check user, password and database of its URL")
        return StoreError(self.place, f"{said}: is it a Retinue database?")

    def _shown(self, error: Exception) -> str:
        lines = [" ".join(line.split()) for line in str(error).splitlines()]
        said = " ".join([line for line in lines if not line.startswith("Is the server")])[:300] or type(error).__name__
        for secret in self._secrets:
            said = said.replace(secret, "***")
        return said


def _is_of_connection(error: psycopg.Error, said: str) -> bool:
    if not isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
        return False
    return not any(word in said for word in _LASTING)


def _without_schema(url: str) -> tuple[str, str]:
    """The URL as PostgreSQL knows it, and the schema it names, which PostgreSQL has no option for."""
    bare, _, query = url.partition("?")
    options = query.split("&") if query else []
    named = [unquote(option.partition("=")[2]) for option in options if option.startswith("schema=")]
    others = "&".join(option for option in options if not option.startswith("schema="))
    return f"{bare}?{others}" if others else bare, named[-1] if named else _SCHEMA


def _place(given: dict[str, Any]) -> str:
    def part(name: str, before: str = "", after: str = "") -> str:
        value = given.get(name)
        return f"{before}{quote(str(value), safe=',:[]')}{after}" if value else ""

    return f"postgresql://{part('user', after='@')}{part('host')}{part('port', before=':')}/{part('dbname')}"
