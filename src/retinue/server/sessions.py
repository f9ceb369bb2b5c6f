"""The sessions of pages: a page trades its token for a cookie, so that a browser holds no token.

A session has the scopes of its token without `admin`, lasts 30 days and ends with its token. Only a hash of it is stored.
"""

from __future__ import annotations

import hmac
import re
import secrets
import time
from collections.abc import Mapping
from typing import Protocol

from ..storage.database import Link
from ..storage.sql import SqlStore
from .auth import Auth, OneToken, StoredTokens, User, hash_token

SECONDS = 30 * 86_400.0
_MOST_HELD = 10_000
_REMEMBER_SECONDS = 5.0
"""Seconds for which a known session is not read from the database again, as for tokens."""


def cookie_name(headers: Mapping[str, str]) -> str:
    """Return the name of the cookie on this port: a browser sends the cookies of a host to all its ports."""
    port = re.search(r":(\d{1,5})$", headers.get("host", ""))
    return f"retinue_session_{port[1]}" if port else "retinue_session"


def cookie_in(headers: Mapping[str, str]) -> str | None:
    """Return the session that a request carries."""
    wanted = cookie_name(headers)
    for pair in headers.get("cookie", "").split(";"):
        name, _, value = pair.strip().partition("=")
        if name == wanted and value:
            return value
    return None


class Sessions(Protocol):
    """The open sessions of a server."""

    async def begin(self, user: User, token: str) -> str:
        """Begin a session of the user of a token; return its secret."""
        ...

    async def user_of(self, secret: str) -> User | None:
        """Return the user of a session that is open, and whose token is valid."""
        ...

    async def end(self, secret: str) -> None:
        """End a session."""
        ...


def sessions_of(auth: Auth, store: object) -> Sessions:
    """Return where the sessions of a server are: in its database, if the tokens are known there."""
    if isinstance(store, SqlStore) and isinstance(auth, StoredTokens | OneToken):
        return StoredSessions(store, auth.also if isinstance(auth, StoredTokens) else auth)
    return HeldSessions(auth)


def _new_secret() -> str:
    return f"rts_{secrets.token_urlsafe(32)}"


def _without_admin(user: User) -> User:
    return User(user.id, user.scopes - {"admin"})


class HeldSessions:
    """Sessions in memory. Each holds its token, so that the server asks its `Auth` again each time."""

    def __init__(self, auth: Auth) -> None:
        self._auth = auth
        self._open: dict[str, tuple[float, str]] = {}

    async def begin(self, user: User, token: str) -> str:
        now = time.monotonic()
        self._open = {name: one for name, one in self._open.items() if one[0] > now}
        while len(self._open) >= _MOST_HELD:
            del self._open[next(iter(self._open))]
        secret = _new_secret()
        self._open[hash_token(secret)] = now + SECONDS, token
        return secret

    async def user_of(self, secret: str) -> User | None:
        until, token = self._open.get(hash_token(secret), (0.0, ""))
        if until <= time.monotonic():
            return None
        user = await self._auth.user_of({"authorization": f"Bearer {token}"})
        return None if user is None else _without_admin(user)

    async def end(self, secret: str) -> None:
        self._open.pop(hash_token(secret), None)


class StoredSessions:
    """Sessions in a database: they outlive the process, and every server of the database knows them."""

    def __init__(self, store: SqlStore, fixed: OneToken | None) -> None:
        self._database, self._fixed = store.database, fixed
        self._known: dict[str, tuple[float, User]] = {}

    async def begin(self, user: User, token: str) -> str:
        secret, now = _new_secret(), time.time()
        scopes = ",".join(sorted(_without_admin(user).scopes))
        values = (hash_token(secret), hash_token(token), user.id, scopes, now + SECONDS)

        def add(link: Link) -> None:
            link.run("DELETE FROM sessions WHERE until < ?", now)
            link.run("INSERT INTO sessions (hash, token_hash, user_id, scopes, until) VALUES (?, ?, ?, ?, ?)", *values)

        await self._database.write(add)
        return secret

    async def user_of(self, secret: str) -> User | None:
        hashed, now = hash_token(secret), time.monotonic()
        until, user = self._known.get(hashed, (0.0, None))
        if user is not None and until > now:
            return user
        self._known.pop(hashed, None)
        user = await self._find(hashed)
        if user is not None:
            if len(self._known) > _MOST_HELD:
                self._known.clear()
            self._known[hashed] = now + _REMEMBER_SECONDS, user
        return user

    async def _find(self, hashed: str) -> User | None:
        query = """SELECT user_id, scopes, token_hash, (SELECT COUNT(*) FROM tokens WHERE tokens.hash = token_hash
        AND revoked_at IS NULL) FROM sessions WHERE hash = ? AND until > ?"""
        for user_id, scopes, token_hash, valid in await self._database.rows(query, hashed, time.time()):
            is_fixed = self._fixed is not None and hmac.compare_digest(token_hash, self._fixed.hash)
            if valid or is_fixed:
                return User(user_id, frozenset(filter(None, scopes.split(","))))
        return None

    async def end(self, secret: str) -> None:
        self._known.pop(hash_token(secret), None)
        await self._database.write(lambda link: link.run("DELETE FROM sessions WHERE hash = ?", hash_token(secret)))
