"""Error responses of servers as ModelErrors that say what to do."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from math import isfinite
from typing import Any, cast

import msgspec

from ..core.errors import (
    ContextOverflow,
    ModelAccessDenied,
    ModelError,
    ModelNotFound,
    ModelRateLimited,
    ModelRefused,
    ModelRequestInvalid,
    ModelUnavailable,
)

_OVERFLOW = re.compile(
    r"context.{0,10}(length|window|size)|prompt is too long|too many (input )?tokens|input.{0,20}too long|exceeds? the maximum.{0,12}tokens"
    r"|exceeds? the (available )?context",
    re.I,
)
_NO_CREDIT = re.compile(r"insufficient_quota|credit balance", re.I)
_QUOTA = re.compile(r"insufficient_quota|billing|credit balance|payment", re.I)
_FILTER = re.compile(r"content_filter|content_policy|content management policy|safety system", re.I)
_TYPES: dict[str, int] = {
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "insufficient_quota": 429,
    "invalid_request_error": 400,
    "api_error": 500,
    "server_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
}
"""The status of an error inside a stream, by its type."""


def error_of_status(status: int, body: bytes, headers: Mapping[str, str], where: str) -> ModelError:
    """Return the error of a response whose status is not 200."""
    words, kind = _words_of(body, headers.get("content-type", ""))
    return _error(status, words, kind, f"{where} answered {status}", retry_after(headers))


def error_in_stream(error: Any, where: str = "the server") -> ModelError:
    """Return the error inside a response with status 200; one without details counts as a fault of the server."""
    words, kind = _words_of_object(error)
    code: Any = cast("dict[str, Any]", error).get("code") if isinstance(error, dict) else error
    status = _TYPES.get(kind) or (code if isinstance(code, int) else _TYPES.get(str(code)))
    made = _error(status or 500, words, kind, f"{where} reported an error", None)
    return made if status else type(made)(made.message)


def error_in_body(body: bytes, where: str) -> ModelError | None:
    """Return the error in the JSON body of a response with status 200, if there is one."""
    try:
        given: Any = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return None
    error: Any = cast("dict[str, Any]", given).get("error") if isinstance(given, dict) else None
    return None if error is None else error_in_stream(error, where)


def _error(status: int, words: str, kind: str, what: str, wait: float | None) -> ModelError:
    said = f" (the server said: {words})" if words else ""
    about = f"{kind} {words}"

    def made(error: type[ModelError], text: str) -> ModelError:
        return error(f"{text}{said}", status=status, retry_after=wait)

    if status in (400, 413, 422, 500) and _OVERFLOW.search(about):
        return made(
            ContextOverflow,
            "the conversation is longer than the model can read: shorten the input, or use a model that reads more",
        )
    if status in (400, 422) and _FILTER.search(about):
        return made(ModelRefused, "a filter of the provider refused the request: rephrase it")
    if status in (401, 403):
        return made(ModelAccessDenied, f"{what}: check the key and what it may use")
    if status == 404:
        return made(ModelNotFound, f"{what}: check the name of the model and base_url")
    if status == 402 or (status == 429 and _QUOTA.search(about)) or (status == 400 and _NO_CREDIT.search(about)):
        return made(ModelAccessDenied, f"{what}: the account has no credit left")
    if status == 429:
        return made(ModelRateLimited, f"{what}, too many requests: send fewer at once or raise the limit")
    if status >= 500 or status in (408, 409, 425):
        return made(ModelUnavailable, f"{what}, a fault of the server: try again later")
    if 300 <= status < 400:
        return made(ModelNotFound, f"{what}, a redirect, which is not followed: correct base_url")
    return made(ModelRequestInvalid, f"{what}: it does not take this request")


def _words_of(body: bytes, content_type: str) -> tuple[str, str]:
    try:
        given: Any = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        if "html" in content_type or body.lstrip()[:1] == b"<":
            return _html_words(body), ""
        return _plain(body.decode("utf-8", "replace")), ""
    if isinstance(given, list) and given:
        given = cast("list[Any]", given)[0]
    if isinstance(given, dict):
        return _words_of_object(cast("dict[str, Any]", given).get("error", cast("Any", given)))
    return _plain(str(cast("object", given))), ""


def _words_of_object(error: Any) -> tuple[str, str]:
    if not isinstance(error, dict):
        return _plain(str(error)), ""
    fields = cast("dict[str, Any]", error)
    words = fields.get("message") or fields.get("detail") or fields.get("error") or ""
    kinds = [str(fields[name]) for name in ("type", "code") if isinstance(fields.get(name), str)]
    known = [kind for kind in kinds if kind in _TYPES]
    # The code often says more than the type, so it decides if the type is unknown.
    kind = " ".join(kinds) if not known else known[0]
    code = fields.get("code")
    shown = str(words) if not isinstance(code, str) or code in str(words) else f"{words} [{code}]"
    return _plain(shown), kind


def _html_words(body: bytes) -> str:
    text = body[:4096].decode("utf-8", "replace")
    title = re.search(r"<title[^>]*>(.*?)</title>", text, re.S | re.I)
    named = f", {' '.join(title[1].split())!r}" if title else ""
    return _plain(f"an HTML page{named}")


def _plain(text: str) -> str:
    text = " ".join(text.split())
    return "".join([char if char.isprintable() else "?" for char in text])


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of `Retry-After`, given in milliseconds, seconds or as a date; 1 for a time that has passed."""
    try:
        if (milliseconds := headers.get("retry-after-ms")) is not None:
            return _bounded(float(milliseconds) / 1000)
        if (given := headers.get("retry-after")) is None:
            return None
        try:
            return _bounded(float(given))
        except ValueError:
            return _bounded(parsedate_to_datetime(given).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None


def _bounded(seconds: float) -> float | None:
    if not isfinite(seconds):
        return None
    return 1.0 if seconds < 0 else seconds
