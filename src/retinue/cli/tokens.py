"""`retinue tokens`: who may use a server."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from ..core.errors import ConfigurationError
from ..wire.resources import iso
from .database import database_url, open_database
from .parsers import COMPLETED
from .text import clean, complain, moment, print_json, table

try:
    from ..server.auth import Token, TokenStore, check_scopes
except ModuleNotFoundError as exc:
    raise ConfigurationError('the server is not installed: pip install "retinue[server]"') from exc


async def add_token(args: argparse.Namespace) -> int:
    """Make a token, and print it as the last line: it cannot be read again."""
    scopes = check_scopes(scope.strip() for scope in args.scopes.split(",") if scope.strip())
    async with open_database(database_url(args), create=True) as store:
        tokens = TokenStore(store)
        others = [user for user in await tokens.users() if user != args.user]
        if not args.shared_files and others and (place := await tokens.one_user_files()) is not None:
            raise ConfigurationError(
                f"the files of {place}, which a server of this database serves, are for one user, now {others[0]!r}: agents "
                f"of {args.user!r} would read and overwrite them. Start the server with --shared-files if that is meant, "
                "then give --shared-files here, too"
            )
        token, secret = await tokens.add(args.user, scopes)
    if args.json:
        print_json({**_token_json(token), "token": secret})
    else:
        print(clean(f"{token.token_id} of {token.user_id} for {', '.join(token.scopes)}; it is shown only now:"))
        print(secret)
    return COMPLETED


async def list_tokens(args: argparse.Namespace) -> int:
    """List the tokens of a database, without their secrets."""
    async with open_database(database_url(args)) as store:
        found, place = await TokenStore(store).list(), store.place
    if args.json:
        print_json([_token_json(token) for token in found])
    elif found:
        rows = [("token", "user", "scopes", "made", "revoked")]
        for one in found:
            revoked = "" if one.revoked_at is None else moment(one.revoked_at)
            rows.append((one.token_id, one.user_id, ",".join(one.scopes), moment(one.made_at), revoked))
        print("\n".join(table(rows)))
    else:
        complain(f"{place} has no tokens yet")
    return COMPLETED


async def revoke_token(args: argparse.Namespace) -> int:
    """Revoke a token. Servers notice within seconds."""
    async with open_database(database_url(args)) as store:
        tokens = TokenStore(store)
        known = next((one for one in await tokens.list() if one.token_id == args.token_id), None)
        if known is None:
            raise ConfigurationError(f"there is no token {args.token_id!r} in {store.place}; see: retinue tokens list")
        is_new = await tokens.revoke(known.token_id)
    if args.json:
        print_json({"token_id": known.token_id, "user_id": known.user_id, "revoked": is_new})
    else:
        print(clean(f"{known.token_id} of {known.user_id} {'is revoked' if is_new else 'was revoked before'}"))
    return COMPLETED


def _token_json(token: Token) -> dict[str, Any]:
    return {**msgspec.to_builtins(token), "made_at": iso(token.made_at), "revoked_at": iso(token.revoked_at)}
