"""What a log is asked for: the bodies of the wishes in its inbox (decisions, cancels, larger grants), and the replies.

Invariant: anyone may put a wish into the inbox; only the owner of the log changes the run. The owner carries out each
wish once, in order of arrival. The reply is stored in the same transaction as its outcome.
"""

from __future__ import annotations

import contextlib

import msgspec
from msgspec import Struct

from ..core.concurrency import GRACE
from ..core.content import clean_text
from ..core.decisions import Decision
from ..core.runs import Limits, unique
from ..core.stores import Reply, Wish, WishKind


class Refusal(Struct, frozen=True, omit_defaults=True):
    """The reply to a wish: `refused` is empty if it was carried out."""

    refused: str = ""
    granted: Limits | None = None
    """The new grant of a placed child that asked for more."""


class CancelWish(Struct, frozen=True, omit_defaults=True):
    """The body of a cancel."""

    reason: str = "cancelled"
    tasks: bool = False
    grace: float = GRACE


class Wanted(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The amounts that a placed run wants to use in all, with everything under it."""

    children: int = 0
    steps: int = 2
    """The next step, and the closing turn."""
    tokens: float = 0
    cost: float = 0


encode_wanted = _encode = msgspec.json.Encoder().encode
decode_wanted = msgspec.json.Decoder(Wanted).decode
decode_decisions = msgspec.json.Decoder(dict[str, Decision]).decode
_read_cancel = msgspec.json.Decoder(CancelWish | str).decode
decode_reply = msgspec.json.Decoder(Refusal).decode


def make_wish(log_id: str, run_id: str, kind: WishKind, body: bytes = b"") -> Wish:
    return Wish(log_id=log_id, wish_id=f"{kind}_{unique()}", run_id=run_id, kind=kind, body=body)


def make_reply(wish: Wish, refused: str = "", granted: Limits | None = None) -> Reply:
    return Reply(wish.wish_id, _encode(Refusal(clean_text(refused), granted)))


def encode_cancel(reason: str, grace: float = GRACE, tasks: bool = False) -> bytes:
    return _encode(CancelWish(clean_text(reason), tasks, grace))


def read_cancel(wish: Wish) -> CancelWish:
    """Decode a cancel; an unreadable one counts as a plain cancel."""
    with contextlib.suppress(msgspec.MsgspecError, ValueError):
        said = _read_cancel(wish.body)
        return CancelWish(said) if isinstance(said, str) else said
    return CancelWish()
