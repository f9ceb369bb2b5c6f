"""Commands to the owner of a log, and their replies: in memory, and as the wishes of a stored inbox.

Invariant: any process may put a wish into the inbox; only the owner of the log changes the run. The owner carries out each
wish once. The reply is stored in the same transaction as its outcome.

An owner of an older version may read the wishes: the kinds and the fields of a body stay, and what is new has a kind of
its own, which such an owner refuses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ..core.concurrency import GRACE
from ..core.content import clean_text
from ..core.decisions import Decision
from ..core.events import Namespace
from ..core.messages import Message
from ..core.runs import Limits, unique
from ..core.stores import Reply as StoredReply
from ..core.stores import Wish, WishKind

NOT_FOUND, NOT_REACHABLE, RUN_ENDED = "not_found", "not_reachable", "run_ended"
"""The codes of refusals: the log has no such run; no command reaches the run on its server; the run has ended."""


class Reply(Struct, frozen=True, omit_defaults=True):
    """The owner's reply to a command: `refused` is empty if it was carried out."""

    refused: str = ""
    granted: Limits | None = None
    """The new grant of a placed child that asked for more."""
    place: int = 0
    """Of decisions: the number of the last event before the leg that they have started."""
    code: str = ""
    """A name for the reason of a refusal."""


class Wanted(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The amounts that a placed run wants to use in all, with everything under it."""

    children: int = 0
    steps: int = 2
    """The next step, and the closing turn."""
    tokens: float = 0
    cost: float = 0


class Decide(Struct, frozen=True):
    """Continue a run with decisions: the root of the log, or a background child."""

    run_id: str
    decisions: Mapping[str, Decision]


class Cancel(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Stop a run and what it waits for: the root of the log, or the run at a namespace. Background tasks only with `tasks`."""

    reason: str = "cancelled"
    tasks: bool = False
    grace: float = GRACE
    ns: Namespace = ()


class Say(Struct, frozen=True, omit_defaults=True):
    """Give a run at work messages, which have ids: a message that comes twice counts once."""

    messages: tuple[Message, ...]
    ns: Namespace = ()


class CancelTask(Struct, frozen=True):
    """Stop a background task."""

    task_id: str


class WidenGrant(Struct, frozen=True):
    """Grant a placed child more of the limits above it."""

    run_id: str
    wanted: Wanted


Command = Decide | Cancel | CancelTask | Say | WidenGrant

_encode = msgspec.json.Encoder().encode
_read_decisions = msgspec.json.Decoder(dict[str, Decision]).decode
_read_wanted = msgspec.json.Decoder(Wanted).decode
_read_say = msgspec.json.Decoder(Say).decode
_read_cancel = msgspec.json.Decoder(Cancel | str).decode
decode_reply = msgspec.json.Decoder(Reply).decode


def make_wish(log_id: str, command: Command) -> Wish:
    """Return the stored form of a command. The decisions of a command are checked before."""
    match command:
        case Decide():
            return _wish(log_id, command.run_id, "decide", _encode(command.decisions))
        case Cancel():
            kind = "cancel_run" if command.ns else "cancel"
            return _wish(log_id, log_id, kind, _encode(replace(command, reason=clean_text(command.reason))))
        case CancelTask():
            return _wish(log_id, command.task_id, "cancel_task")
        case Say():
            return _wish(log_id, log_id, "message", _encode(command))
        case WidenGrant():
            return _wish(log_id, command.run_id, "grant", _encode(command.wanted))


def _wish(log_id: str, run_id: str, kind: WishKind, body: bytes = b"") -> Wish:
    return Wish(log_id=log_id, wish_id=f"{kind}_{unique()}", run_id=run_id, kind=kind, body=body)


def read_wish(wish: Wish) -> Command:
    """Return the command of a wish. Raises ValueError if it cannot be read; an unreadable cancel counts as a plain one."""
    match wish.kind:
        case "cancel":
            return replace(_cancel_of(wish), ns=())
        case "cancel_run":
            cancel = _cancel_of(wish)
            if not cancel.ns:
                raise ValueError("a cancel of one run names its namespace")
            return cancel
        case "cancel_task":
            return CancelTask(wish.run_id)
        case "message":
            return _read_say(wish.body)
        case "grant":
            return WidenGrant(wish.run_id, _read_wanted(wish.body))
        case "decide":
            return Decide(wish.run_id, _read_decisions(wish.body))
    raise ValueError(f"this version does not know wishes of the kind {wish.kind!r}")


def _cancel_of(wish: Wish) -> Cancel:
    with contextlib.suppress(msgspec.MsgspecError, ValueError):
        said = _read_cancel(wish.body)
        return Cancel(reason=said) if isinstance(said, str) else said
    return Cancel()


def read_cancel(wish: Wish) -> Cancel:
    """Return the command of a cancel of the root run."""
    return replace(_cancel_of(wish), ns=())


def stored(wish_id: str, reply: Reply) -> StoredReply:
    return StoredReply(wish_id, _encode(replace(reply, refused=clean_text(reply.refused))))
