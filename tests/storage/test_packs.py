"""Events as rows: what comes back is what was told, however it was packed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from retinue import Event
from retinue.core.codec import to_json_bytes
from retinue.core.events import ReasoningDelta, StepStarted, TextDelta, ToolCallArgsDelta
from retinue.storage.packs import PACK, events_in, rows_of

SHARED: dict[str, Any] = {"run_id": "r", "parent_run_id": "p", "agent": "a", "ns": ("tools:c",)}


def deltas(count: int, kind: type[Any] = TextDelta, first: int = 1, **more: Any) -> list[Event]:
    named = {"message_id": "m"} | SHARED | more
    return [kind(seq=n, at=n + 0.25, delta=f"{n} ü\n", **named) for n in range(first, first + count)]


def back(events: list[Event]) -> tuple[list[str], list[Event]]:
    """The kinds of the rows, and the events in them."""
    rows = rows_of("log", events)
    assert [row[0] for row in rows] == ["log"] * len(rows)
    assert sum(row[4] for row in rows) == len(events)
    found: list[Event] = []
    for row in rows:
        found += events_in(row[3])
        assert found[-1].seq == row[1]
    return [row[2] for row in rows], found


@pytest.mark.parametrize("kind", [TextDelta, ReasoningDelta])
def test_a_message_says_once_what_its_deltas_share(kind: type[Any]) -> None:
    told = deltas(600, kind)
    (every_field,) = {tuple([name for name in event.__struct_fields__ if not getattr(event, name)]) for event in told}
    assert every_field == (), "a field is left at its default, so nobody would see that it got lost"
    rows = rows_of("log", told)
    assert back(told) == ([PACK] * 3, told)
    assert rows[0][3].count(b'"run_id"') == 1
    assert len(rows[0][3]) < len(to_json_bytes(told[:256])) / 3


@pytest.mark.parametrize(
    "others",
    [
        pytest.param({"message_id": "other"}, id="another message"),
        pytest.param({"run_id": "other", "ns": ()}, id="another run"),
        pytest.param({"kind": ReasoningDelta}, id="another kind"),
    ],
)
def test_a_crowd_that_is_not_one_message_comes_back_too(others: dict[str, Any]) -> None:
    told = [event for n in range(1, 21, 2) for event in (*deltas(1, first=n), *deltas(1, first=n + 1, **others))]
    assert back(told) == ([PACK], told)


def test_few_and_others_have_rows_of_their_own() -> None:
    args: list[Event] = [ToolCallArgsDelta(seq=n, call_id="c", delta="{", **SHARED) for n in range(6, 11)]
    told = [*deltas(3), StepStarted(seq=4, step=1), *deltas(1, first=5), *args, StepStarted(seq=11, step=2)]
    assert back(told) == ([*["text_delta"] * 3, "step_started", PACK, "step_started"], told)
    assert back([]) == ([], [])


def test_what_was_packed_whole_is_read_still() -> None:
    told = deltas(5)
    assert events_in(to_json_bytes(told)) == told


def test_a_pack_that_lost_something_cannot_be_read() -> None:
    body = rows_of("log", deltas(5))[0][3]
    with pytest.raises(ValueError, match="shorter"):
        events_in(body.replace(b"2.25,", b""))
    with pytest.raises(msgspec.DecodeError):
        events_in(body[:-5])
