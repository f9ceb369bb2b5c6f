"""Credentials: which parts of headers are secret, and how texts of others lose them."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping
from urllib.parse import quote, unquote

REDACTED = "[redacted]"

_SECRET_HEADER = re.compile(r"auth|key|token|cookie|secret|pass|credential|sign|session", re.I)
_LONG = 20
"""A value this long without a space is taken for a credential, whatever its header is called."""


def secrets_of(headers: Mapping[str, str]) -> tuple[str, ...]:
    """Return the credentials in headers, with and without their scheme, in the spellings that servers echo."""
    found: set[str] = set()
    for header, value in headers.items():
        bare = value.partition(" ")[2].strip()
        if _SECRET_HEADER.search(header):
            found |= {value, bare, *_cookies(header, value), *_password(value)}
        elif len(value) >= _LONG and " " not in value and "/" not in value:
            found.add(value)
    return sort_secrets(found)


def sort_secrets(found: Iterable[str]) -> tuple[str, ...]:
    """Return the secrets among these, quoted and unquoted, the longest first, because one may contain another."""
    known = {secret for secret in found if len(secret) > 3}
    spelled = {
        text for secret in known for text in (secret, quote(secret, safe=""), unquote(secret), json.dumps(secret)[1:-1])
    }
    return tuple(sorted({text for text in spelled if len(text) > 3}, key=len, reverse=True))


def redact(text: str, secrets: Iterable[str]) -> str:
    """Return a text without these secrets. Redact before cutting, else half of one could stay."""
    for secret in secrets:
        text = text.replace(secret, REDACTED)
    return text


def _cookies(header: str, value: str) -> Iterable[str]:
    if "cookie" not in header.lower():
        return ()
    return [cookie.partition("=")[2].strip() for cookie in value.split(";")]


def _password(value: str) -> Iterable[str]:
    """Return the login in a value for basic authentication, as base64 hides it from nobody."""
    scheme, _, coded = value.partition(" ")
    if scheme.lower() != "basic":
        return ()
    try:
        login = base64.b64decode(coded, validate=True).decode()
    except ValueError:
        return ()
    return login, login.partition(":")[2]
