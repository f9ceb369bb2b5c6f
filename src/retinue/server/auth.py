"""The user of a request: bearer tokens with a user and scopes, one fixed token, the header of a trusted proxy, or nobody."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from msgspec import Struct

from ..core.errors import ConfigurationError
from ..storage.database import Link
from ..storage.sql import SqlStore

SCOPES = ("read", "run", "answer", "admin")
LOCAL = "local"
"""The user of a server with one token, or with none. Runs that were started without a user are its runs."""
MAX_USER = 200
"""Characters of the name of a user."""
_PREFIX = "rtn_"
_REMEMBER_SECONDS = 5.0
"""Seconds for which a known token is not read from the database again: a revoked one works no longer than that."""


class User(Struct, frozen=True):
    """The user of a request."""

    id: str
    scopes: frozenset[str] = frozenset(SCOPES)


class Auth(Protocol):
    """Finds the user of a request."""

    async def user_of(self, headers: Mapping[str, str]) -> User | None:
        """Return the user whose credentials the headers carry; None if they carry none that are valid."""
        ...


@runtime_checkable
class HasFirstUser(Protocol):
    """An `Auth` that knows which of its users may work on files that are not divided by user."""

    async def first_user(self) -> str | None: ...


def token_in(headers: Mapping[str, str]) -> str | None:
    """Return the token of a request: a bearer token or `x-api-key`."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key") or None


class NoAuth:
    """Everybody is the local user."""

    is_ambient = True
    """A request needs no secret: pages of other sites must be kept from sending one."""

    async def user_of(self, headers: Mapping[str, str]) -> User | None:
        return User(LOCAL)

    async def first_user(self) -> str | None:
        return LOCAL


class OneToken:
    """One token, that of the local user, with all scopes."""

    def __init__(self, token: str) -> None:
        if not token or not token.isascii() or any(sign.isspace() for sign in token):
            raise ConfigurationError("a token is at least one character, all ASCII and none of them white space")
        self.hash = hash_token(token)

    async def user_of(self, headers: Mapping[str, str]) -> User | None:
        token = token_in(headers)
        return User(LOCAL) if token is not None and hmac.compare_digest(hash_token(token), self.hash) else None

    async def first_user(self) -> str | None:
        return LOCAL


class ProxyHeader:
    """The header in which a trusted proxy names the user. Every user has all scopes but admin."""

    is_ambient = True
    """The proxy may know the user by a cookie: pages of other sites must be kept from using it."""

    def __init__(self, name: str) -> None:
        self._name = name.lower()

    async def user_of(self, headers: Mapping[str, str]) -> User | None:
        user = headers.get(self._name, "").strip()
        return User(user, frozenset(SCOPES) - {"admin"}) if 0 < len(user) <= MAX_USER else None


class StoredTokens:
    """The tokens of a database, beside one fixed token if given."""

    def __init__(self, store: SqlStore, also: OneToken | None = None) -> None:
        self._tokens, self.also = TokenStore(store), also
        self._known: dict[str, tuple[float, User]] = {}

    async def first_user(self) -> str | None:
        """Return the user of the fixed token; without one, the user who had a token first."""
        return LOCAL if self.also is not None else next(iter(await self._tokens.users()), None)

    async def user_of(self, headers: Mapping[str, str]) -> User | None:
        if self.also is not None and (user := await self.also.user_of(headers)) is not None:
            return user
        token = token_in(headers)
        if token is None:
            return None
        hashed, now = hash_token(token), time.monotonic()
        until, user = self._known.get(hashed, (0.0, None))
        if user is not None and until > now:
            return user
        self._known.pop(hashed, None)
        user = await self._tokens.find(hashed)
        if user is not None:
            if len(self._known) > 10_000:
                self._known.clear()
            self._known[hashed] = now + _REMEMBER_SECONDS, user
        return user


def hash_token(token: str) -> str:
    """Return what is stored of a token. Tokens are random, so one round of SHA-256 is enough."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def check_scopes(given: Iterable[str]) -> frozenset[str]:
    scopes = frozenset(given)
    if unknown := sorted(scopes - set(SCOPES)):
        raise ConfigurationError(f"there is no scope {unknown[0]!r}: use some of {', '.join(SCOPES)}")
    if not scopes:
        raise ConfigurationError(f"a token needs a scope: use some of {', '.join(SCOPES)}")
    return scopes


class Token(Struct, frozen=True, kw_only=True):
    """A token as it is listed: without its secret, which is not stored."""

    token_id: str
    user_id: str
    scopes: tuple[str, ...]
    made_at: float
    revoked_at: float | None = None


class TokenStore:
    """The tokens of a database."""

    def __init__(self, store: SqlStore) -> None:
        self._database = store.database

    async def add(self, user_id: str, scopes: Iterable[str] = ("read", "run", "answer")) -> tuple[Token, str]:
        """Make a token; return it with its secret, which cannot be read again."""
        if not user_id.strip() or len(user_id) > MAX_USER or not user_id.isprintable():
            raise ConfigurationError(f"the user of a token has 1 to {MAX_USER} characters that can be printed")
        chosen = tuple(scope for scope in SCOPES if scope in check_scopes(scopes))
        secret, token_id = _PREFIX + secrets.token_urlsafe(32), f"tok_{secrets.token_hex(6)}"
        token = Token(token_id=token_id, user_id=user_id, scopes=chosen, made_at=time.time())
        values = (token_id, hash_token(secret), user_id, ",".join(chosen), token.made_at)

        def add(link: Link) -> None:
            link.run("INSERT INTO tokens (token_id, hash, user_id, scopes, made_at) VALUES (?, ?, ?, ?, ?)", *values)

        await self._database.write(add)
        return token, secret

    async def find(self, hashed: str) -> User | None:
        query = "SELECT user_id, scopes FROM tokens WHERE hash = ? AND revoked_at IS NULL"
        found = await self._database.rows(query, hashed)
        return User(found[0][0], frozenset(found[0][1].split(","))) if found else None

    async def list(self) -> list[Token]:
        query = "SELECT token_id, user_id, scopes, made_at, revoked_at FROM tokens ORDER BY made_at, token_id"
        return [
            Token(token_id=name, user_id=user, scopes=tuple(scopes.split(",")), made_at=made, revoked_at=revoked)
            for name, user, scopes, made, revoked in await self._database.rows(query)
        ]

    async def users(self) -> Sequence[str]:
        """Return the users who have a valid token, who had one first before the others."""
        found = await self.list()
        valid = {token.user_id for token in found if token.revoked_at is None}
        return list(dict.fromkeys([token.user_id for token in found if token.user_id in valid]))

    async def one_user_files(self) -> str | None:
        """Return the folder that a server of this database lets only one user work in."""
        found = await self._database.rows("SELECT place FROM one_user_files")
        return found[0][0] if found else None

    async def note_one_user_files(self, place: str | None) -> None:
        """Store which folder is for one user only, so that nobody makes a token for another user unaware."""

        def note(link: Link) -> None:
            link.run("DELETE FROM one_user_files")
            if place is not None:
                link.run("INSERT INTO one_user_files (place) VALUES (?) ON CONFLICT DO NOTHING", place)

        if await self.one_user_files() != place:
            await self._database.write(note)

    async def revoke(self, token_id: str) -> bool:
        """Revoke a token; return False if there is none of that id, or it was revoked before."""
        query = "UPDATE tokens SET revoked_at = ? WHERE token_id = ? AND revoked_at IS NULL RETURNING token_id"
        return bool(await self._database.write(lambda link: link.run(query, time.time(), token_id)))
