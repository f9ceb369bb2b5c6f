"""Strategies for hostile input: text, values, ids and bytes that somebody chose to do harm."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

ODD_TEXT = [
    "", "\0", "\ud800", "\udfff", "\ud83d\ude00", "a\ud800b", "\ufeff", "\u2028", "\u202e", "\r\n", "\x1b[2J",
    "..", "../../etc/passwd", "a/b", "a:b", "a|b", "a~2", "~", "tools:a", "ticket_a", "call_run_1", "__proto__",
    "{}", "[DONE]", "null", "%s%n", "{0}", "\\", "'", '"', "x" * 300, "x" * 5000, "ü" * 200, "data: x\n\n", "run_finished",
]  # fmt: skip
"""Texts that have broken something somewhere."""


def texts(longest: int = 40) -> st.SearchStrategy[str]:
    """Return any text, with halves of surrogate pairs and control characters."""
    anything = st.text(st.characters(codec=None, categories=None), max_size=longest)
    return st.sampled_from(ODD_TEXT) | anything | st.lists(st.sampled_from(ODD_TEXT), max_size=4).map("".join)


def _cycle(_: object) -> Any:
    made: list[Any] = []
    made.append({"again": made})
    return made


def _deep(levels: int) -> Any:
    made: Any = 1
    for level in range(levels):
        made = [made] if level % 2 else {"a": made}
    return made


def _wide(levels: int) -> Any:
    made: Any = "x"
    for _ in range(levels):
        made = [made, made]
    return made


def values() -> st.SearchStrategy[Any]:
    """Return values that may have a JSON form or not."""
    numbers = st.integers() | st.floats() | st.sampled_from([math.nan, math.inf, -math.inf, 2**64, -(2**70), 10**4000])
    others = st.sampled_from(
        [None, True, b"\xff\x00", Path("/x"), object(), int, {1, 2}, 1j, range(3), ValueError("x")]
    )
    shapes = st.none().map(_cycle) | st.sampled_from([50, 99, 101, 200, 3000]).map(_deep) | st.just(60).map(_wide)
    leaves = texts() | numbers | others | shapes
    keys: st.SearchStrategy[Any] = texts() | st.integers() | st.floats() | st.none() | st.tuples(st.integers())
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(texts(), inner, max_size=3)
            | st.dictionaries(keys, inner, max_size=2)
            | st.tuples(inner, inner)
        ),
        max_leaves=6,
    )


def ids() -> st.SearchStrategy[str]:
    return texts(300) | st.sampled_from(["a", "a~1", "a~2", "b", "x" * 256, "x" * 257, "x" * 100_000])


def damaged(pieces: list[bytes]) -> st.SearchStrategy[bytes]:
    """Return a stream of events in which some are dropped, doubled, exchanged, cut, or have bytes changed."""

    @st.composite
    def make(draw: st.DrawFn) -> bytes:
        made = list(pieces)
        for _ in range(draw(st.integers(0, 4))):
            place = draw(st.integers(0, max(len(made) - 1, 0)))
            what = draw(st.integers(0, 6))
            if what == 0 and made:
                del made[place]
            elif what == 1 and made:
                made.insert(place, made[-1 - place])
            elif what == 2 and made:
                made[place] = made[place][: draw(st.integers(0, len(made[place])))]
            elif what == 3 and made and made[place]:
                at = draw(st.integers(0, len(made[place]) - 1))
                made[place] = made[place][:at] + bytes([draw(st.integers(0, 255))]) + made[place][at + 1 :]
            elif what == 4:
                made.insert(place, draw(st.binary(max_size=60)))
            elif what == 5 and made:
                made[place] = _replaced(draw, made[place])
            else:
                made.insert(place, b"data: " + draw(st.sampled_from(ODD_EVENTS)) + b"\n\n")
        return b"".join(made)

    return make()


ODD_EVENTS = [
    b"{}", b"[]", b"null", b"1", b'"x"', b"{", b"[DONE]", b'{"choices": null}', b'{"choices": [{}]}', b'{"error": {}}',
    b'{"error": "x"}', b'{"type": "error"}', b'{"type": "\xed\xa0\x80"}', b'{"type": "\\ud800"}', b"\xff\xfe", b"NaN",
    b'{"a":' * 5000, b"[" * 20_000, b'{"type": "message_stop"}', b'{"type": "ping"}', b'{"usage": {"prompt_tokens": -5}}',
    b'{"choices": [{"delta": {"tool_calls": [{"index": -1, "id": "", "function": {"arguments": "{"}}]}}]}',
    b'{"choices": [{"delta": {"tool_calls": [{"index": 99999999999999999999}]}}]}', b'{"choices": [{"index": 1e999}]}',
    b'{"choices": [{"delta": {"content": [{"text": 5}]}, "finish_reason": 7}]}', b'{"type": "response.completed"}',
    b'{"type": "response.output_text.delta", "delta": {"x": 1}}', b'{"type": "content_block_delta", "index": 7}',
]  # fmt: skip

_VALUES = [
    b"null",
    b"-1",
    b"1e400",
    b"[]",
    b"{}",
    b'"\\u0000"',
    b"[" * 2000 + b"]" * 2000,
    b"99999999999999999999",
    b"true",
]


def _replaced(draw: st.DrawFn, piece: bytes) -> bytes:
    """Put another value in place of one in the JSON of an event."""
    places = [at for at in range(len(piece)) if piece[at : at + 1] == b":" and at > 5]
    if not places:
        return piece
    at = draw(st.sampled_from(places)) + 1
    end = at
    while end < len(piece) and piece[end : end + 1] not in (b",", b"}", b"]", b"\n"):
        end += 1
    return piece[:at] + draw(st.sampled_from(_VALUES)) + piece[end:]
