"""Rows in packs: what is read is what was written, however it was packed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from retinue import Event, Message, RunStatus
from retinue.core.content import to_json_bytes
from retinue.core.decisions import Decision
from retinue.core.events import ChildStarted, ReasoningDelta, StepStarted, TextDelta, ToolCallArgsDelta
from retinue.core.plugins import AddMessage, StopRun, UseSummary
from retinue.core.rows import Answer, Ending, Job, LogRow, Private, StoredRequest
from retinue.core.runs import Limits, RunIdentity
from retinue.storage import packs
from retinue.storage.deltas import decode_row, unpack_deltas
from retinue.storage.packs import pack_rows, unpack_events, unpack_rows
from retinue.storage.references import compress, expand
from retinue.storage.schema import DELTAS_KIND, ROWS_KIND
from retinue.testing.threads import step_rows

SHARED: dict[str, Any] = {"run_id": "r", "parent_run_id": "p", "agent": "a", "ns": ("tools:c",)}


def deltas(count: int, kind: type[Any] = TextDelta, first: int = 1, **more: Any) -> list[LogRow]:
    named = {"message_id": "m"} | SHARED | more
    return [LogRow(n, 0, kind(seq=n, at=n + 0.25, delta=f"{n} ü\n", **named)) for n in range(first, first + count)]


def steps(first: int, count: int = 1, private: Private | None = None) -> list[LogRow]:
    return [LogRow(n, 0, StepStarted(seq=n, step=1, **SHARED), private) for n in range(first, first + count)]


def back(rows: list[LogRow]) -> tuple[list[str], list[LogRow]]:
    """The kinds of the packs, and the rows in them."""
    packed = pack_rows("log", rows)
    assert [row[0] for row in packed] == ["log"] * len(packed)
    assert sum(row[4] for row in packed) == sum(row.event is not None for row in rows)
    found: list[LogRow] = []
    for _, seq, sub, _, held, body, private in packed:
        found += unpack_rows(seq, sub, held, body, private)
        assert (found[-1].seq, found[-1].sub) == (seq, sub)
    return [row[3] for row in packed], found


@pytest.mark.parametrize("kind", [TextDelta, ReasoningDelta])
def test_a_message_says_once_what_its_deltas_share(kind: type[Any]) -> None:
    rows = deltas(600, kind)
    events: list[Any] = [row.event for row in rows]
    (unset,) = {tuple([name for name in event.__struct_fields__ if not getattr(event, name)]) for event in events}
    assert unset == (), "a field is left at its default, so nobody would see that it got lost"
    body = pack_rows("log", rows)[0][5] or b""
    assert back(rows) == ([DELTAS_KIND] * 3, rows)
    assert expand(body).count(b'"run_id"') == 1
    assert len(body) < len(to_json_bytes(events[:256])) / 10


@pytest.mark.parametrize(
    "others",
    [
        pytest.param({"message_id": "other"}, id="another message"),
        pytest.param({"run_id": "other", "ns": ()}, id="another run"),
        pytest.param({"kind": ReasoningDelta}, id="another kind"),
    ],
)
def test_deltas_that_are_not_one_message_come_back_too(others: dict[str, Any]) -> None:
    rows = [row for n in range(1, 21, 2) for row in (*deltas(1, first=n), *deltas(1, first=n + 1, **others))]
    assert back(rows) == ([DELTAS_KIND], rows)


def test_deltas_and_other_rows_do_not_share_a_pack() -> None:
    args = [LogRow(n, 0, ToolCallArgsDelta(seq=n, call_id="c", delta="{", **SHARED)) for n in range(6, 11)]
    rows = [*deltas(3), *steps(4), *deltas(1, first=5), *args, *step_rows(11), LogRow(13, 1, None, Private(done=1))]
    assert back(rows) == ([DELTAS_KIND, ROWS_KIND, DELTAS_KIND, ROWS_KIND], rows)
    assert back([]) == ([], [])


def test_what_is_private_is_never_in_the_body() -> None:
    rows = [LogRow(0, 1, None, Private(kind="resumed", at=1.5)), *steps(1, 3, Private(writes={"hidden": 1}))]
    ((_, _, _, _, held, body, private),) = pack_rows("log", rows)
    assert held == 3
    assert b"hidden" in (private or b"")
    assert b"hidden" not in (body or b"")
    assert unpack_events(body or b"") == [row.event for row in rows[1:]]
    ((_, seq, sub, _, held, body, private),) = pack_rows("log", rows[:1])
    assert (seq, sub, held, body) == (0, 1, 0, None)


def test_private_parts_of_every_type_come_back() -> None:
    private = Private(
        kind="commit",
        run_id="r",
        at=1.5,
        identity=RunIdentity("r", "t", "a", depth=1),
        request=StoredRequest(limits=Limits(steps=3), context={"a": [1]}, model="m", timeout=2.5, detached=True),
        values={"a": {"b": 1}},
        foreign={"c": 2},
        answers=(Answer(("c1", "c2"), ("c2", "t"), Decision.resume({"x": 1}, id="d")),),
        writes={"k": [1, None]},
        revision=4,
        actions=(StopRun("x", "why"), AddMessage("hi"), UseSummary(2, "short")),
        jobs=(Job(1, "effect", "m:C", {"y": 1}, "before_tool", 2),),
        done=3,
        phase="step_start",
        call_id="c",
        offered=("a", "b"),
        blocked="no",
        limit="steps",
        admitted=True,
        asked_by="p#1",
        message=Message.user("hello"),
        messages=(Message.assistant("hi"),),
        output_tried=True,
        asked={"q": 1},
        abandoned=True,
        hooked=True,
        refused_handoff=True,
        detached=True,
        ending=Ending(RunStatus.FAILED, "error", "it broke", "code"),
        child=ChildStarted(call_id="c", child_run_id="r2", child_agent="b", child_ns=("x",)),
    )
    rows = [LogRow(1, 0, steps(1)[0].event, private), LogRow(1, 1, None, private)]
    assert back(rows) == ([ROWS_KIND], rows)


def test_a_pack_has_so_many_rows_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(pack_rows("log", steps(1, 600))) == 3
    assert back(steps(1, 600))[1] == steps(1, 600)
    monkeypatch.setattr(packs, "MOST_BYTES", 1_000)
    sizes = [len(row[5] or b"") for row in pack_rows("log", steps(1, 60))]
    assert all(1_000 <= size < 1_300 for size in sizes[:-1])
    assert back(steps(1, 60))[1] == steps(1, 60)


def test_a_delta_with_a_private_part_keeps_it() -> None:
    rows = [LogRow(1, 0, deltas(1)[0].event, Private(done=1)), *deltas(1, first=2)]
    assert back(rows) == ([ROWS_KIND, DELTAS_KIND], rows)


def test_a_pack_that_lost_something_cannot_be_read() -> None:
    body = pack_rows("log", deltas(5))[0][5] or b""
    whole = decode_row(expand(body))
    with pytest.raises(ValueError, match="longer than their texts"):
        unpack_deltas(replace(whole, texts=[whole.texts[0][:-5]]))
    with pytest.raises(ValueError, match="damaged"):
        unpack_events(compress(expand(body), least=0)[:-5])
    with pytest.raises(ValueError, match="truncated"):
        unpack_events(expand(body)[:-5])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda row: (row[0], 1, *row[2:]), "its last row is not at 3.1"),
        (lambda row: (row[0] + 1, *row[1:]), "it has the number 1, not 2"),
        (lambda row: (*row[:2], 2, *row[3:]), "it has the number 1, not 2"),
        (lambda row: (*row[:4], row[4].replace(b"[1,1,", b"[1,3,")), "row after 1.0 is missing"),
        (lambda row: (*row[:4], row[4].replace(b"[1,1,", b"[7,0,")), "an event that is missing"),
        (lambda row: (*row[:4], row[4].replace(b'"commit"', b'"unheard"')), "Invalid enum value"),
        (lambda row: (*row[:4], b"[["), "truncated"),
    ],
)
def test_a_pack_that_was_changed_is_refused(change: Any, problem: str) -> None:
    ((_, seq, sub, _, held, body, private),) = pack_rows("log", step_rows(1))
    row = (seq, sub, held, body, private)
    with pytest.raises((ValueError, msgspec.MsgspecError), match=problem):
        unpack_rows(*change(row))


def test_an_event_of_an_unknown_kind_is_public_but_not_folded() -> None:
    ((_, seq, sub, _, held, body, private),) = pack_rows("log", steps(1, 2))
    newer = (body or b"").replace(b'"step_started"', b'"from_the_future"', 1)
    events: list[Event] = unpack_events(newer)
    assert [event.kind for event in events] == ["unknown", "step_started"]
    with pytest.raises(ValueError, match="from_the_future"):
        unpack_rows(seq, sub, held, newer, private)
