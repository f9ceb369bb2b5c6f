"""Threads in a database: their messages, which results refer to, and the rows of lists."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec
from msgspec.structs import replace

from ..core.content import to_json_anyway
from ..core.errors import StoreError
from ..core.messages import Message
from ..core.runs import RunResult, Usage
from ..core.stores import IDLE, STATUSES, ThreadSummary, ThreadUpdate
from .database import ConditionFailed, Link
from .references import LEAST, LEAST_AT_WORK, Gapped, encode_excerpt, expand, pack_messages, unpack_messages

_decode_messages = msgspec.json.Decoder(list[Message]).decode


def decode_packs(packs: Sequence[tuple[int, int, bytes]]) -> list[Message]:
    """Return the messages of a thread; raise one of UNREADABLE if some are missing or damaged."""
    messages: list[Message] = []
    for last, held, body in packs:
        some = _decode_messages(expand(body))
        if len(some) != held or last - held != len(messages):
            raise ValueError(f"its messages {len(messages) + 1} to {last} are missing or damaged")
        messages += some
    return messages


def keep_messages(link: Link, thread_id: str, upto: int) -> None:
    """Note that rows refer to the first messages of a thread."""
    link.run("UPDATE threads SET kept = ? WHERE thread_id = ? AND kept < ?", upto, thread_id, upto)


_HAS_LENGTH = (
    "SELECT 1 FROM (SELECT COALESCE(MAX(last), 0) AS last FROM messages WHERE thread_id = ?) AS found WHERE last = ?"
)


class ThreadWrite:
    """Writes a thread, without the messages that are stored already. If a log `left` it, the thread is released.

    Messages at places that rows refer to never change: places only grow, except that what nobody refers to may be
    replaced by a thread that is saved whole.
    """

    def __init__(self, place: str, update: ThreadUpdate, left: str | None = None) -> None:
        self.record, self.keep = update.record, update.keep
        self.refers = False
        """True if rows that are written with the thread refer to its messages."""
        self._place, self._left = place, left
        self._state = to_json_anyway(update.record.state)

    @cached_property
    def messages(self) -> list[bytes]:
        """The new messages as JSON. They are encoded in the thread of the lane."""
        return [to_json_anyway(message) for message in self.record.messages[self.keep :]]

    @cached_property
    def _packs(self) -> list[tuple[str, int, int, bytes]]:
        return [(self.record.thread_id, *pack) for pack in pack_messages(self.keep + 1, self.messages, LEAST_AT_WORK)]

    def __call__(self, link: Link) -> None:
        try:
            link.require(_HAS_LENGTH, self.record.thread_id, self.keep)
        except ConditionFailed:
            self._write_whole(link)
        else:
            self._write(link, self.keep, self._packs)

    def _write(self, link: Link, keep: int, packs: Sequence[tuple[str, int, int, bytes]]) -> None:
        thread_id, refers = self.record.thread_id, len(self.record.messages) if self.refers else 0
        link.run_two(
            "DELETE FROM messages WHERE thread_id = ? AND last > ?",
            (thread_id, keep),
            "INSERT INTO threads (thread_id, user_id, state, kept, saved_at) VALUES (?, ?, ?, ?, wall_seconds()) "
            "ON CONFLICT (thread_id) DO UPDATE SET user_id = excluded.user_id, state = excluded.state, "
            "kept = CASE WHEN threads.kept > excluded.kept THEN threads.kept ELSE excluded.kept END, "
            "saved_at = excluded.saved_at, holder = NULLIF(threads.holder, ?)",
            (thread_id, self.record.user_id, self._state, refers, self._left or ""),
        )
        link.insert("messages (thread_id, last, held, body)", packs)

    def _write_whole(self, link: Link) -> None:
        """Write a thread that has other messages than those before the new ones."""
        if kept := self._kept(link):
            self._check_kept(link, kept)
        everything = [to_json_anyway(message) for message in self.record.messages]
        self._write(link, 0, [(self.record.thread_id, *pack) for pack in pack_messages(1, everything)])

    def _kept(self, link: Link) -> int:
        return link.value("SELECT kept FROM threads WHERE thread_id = ?", self.record.thread_id) or 0

    def _check_kept(self, link: Link, kept: int) -> None:
        """Raise StoreError unless the messages that rows refer to stay as they are."""
        thread_id, stored = self.record.thread_id, list[bytes]()
        query = "SELECT held, body FROM messages WHERE thread_id = ? ORDER BY last"
        for held, body in link.run(query, thread_id):
            stored += unpack_messages(body, held)
        if stored[:kept] != [to_json_anyway(message) for message in self.record.messages[:kept]]:
            problem = f"the first {kept} messages of thread {thread_id!r} cannot be changed: runs that are stored refer to them"
            raise StoreError(self._place, problem)


_NO_RESPONSE, _NO_MESSAGES = b'"response":null', b'"messages":[],"suspended":{}}'


def referring(result: RunResult, thread_id: str, first: int, messages: Sequence[bytes]) -> bytes:
    """Encode a result whose messages are those of a thread after the `first`: it refers to them, and to its response."""
    gaps: list[int] = []
    bare, response = replace(result, messages=()), b""
    if result.response and result.messages[-1:] and result.messages[-1].text == result.response:
        response = to_json_anyway(result.response)
    at = messages[-1].find(response) if len(response) > LEAST else -1
    body = to_json_anyway(replace(bare, response=None) if at >= 0 else bare)
    if not messages or not body.endswith(_NO_MESSAGES):
        return to_json_anyway(result)
    before = 0
    if at >= 0:
        before = body.index(_NO_RESPONSE) + len(_NO_RESPONSE) - len(b"null")
        body = b'%b""%b' % (body[:before], body[before + len(b"null") :])
        before += 1
        gaps += [before, 1, first + len(messages), at + 1, len(response) - 2]
    end = len(body) - len(_NO_MESSAGES) + len(b'"messages":[')
    gaps += [end - before, 1, first + 1, first + len(messages), 0]
    return encode_excerpt(Gapped(body, gaps), [thread_id], LEAST_AT_WORK)


def literally(text: str) -> str:
    """Return a text as a pattern of LIKE that is met by nothing else."""
    return re.sub(r"([!%_])", r"!\1", text)


def thread_summary(
    used_at: float,
    thread_id: str,
    user_id: str | None,
    changed_at: float,
    title: str | None,
    rank: int | None,
    questions: int,
    children: int,
    *usage: Any,
) -> ThreadSummary:
    return ThreadSummary(
        thread_id=thread_id,
        user_id=user_id,
        used_at=used_at,
        changed_at=changed_at,
        title=title or "",
        status=IDLE if rank is None else STATUSES[rank],
        questions=questions,
        children=children,
        usage=Usage(**dict(zip(Usage.__struct_fields__, usage, strict=True))),
    )
