"""The reader: one agent, or one long change, on the whole screen. Esc returns to what was there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from prompt_toolkit.application import Application, in_terminal
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.layout import FormattedTextControl, HSplit, Layout, Window
from prompt_toolkit.styles import Style

from ..core.messages import Role
from ..wire.tree import CallNode, RunNode
from .columns import wrapped
from .paint import fragments
from .rows import Look, Row, call_row
from .text import clean, count

if TYPE_CHECKING:
    from .screen import Screen

_RESULT_LINES = 20


def transcript(run: RunNode, look: Look) -> list[Row]:
    """Return all that a run was given, said and did."""
    rows: list[Row] = [[("bold", line)] for line in wrapped(clean(run.task), look.columns, "")]
    for message in run.said:
        if message.role is not Role.ASSISTANT:
            continue
        if message.text.strip():
            rows += [[], *[[("", line)] for line in wrapped(clean(message.text.strip()), look.columns)]]
        for asked in message.tool_calls:
            call = run.calls.get(asked.id)
            if call is not None:
                rows += [[], *_call_rows(call, look, run)]
    if run.open_message is not None and run.open_message.text:
        rows += [[], *[[("", line)] for line in wrapped(clean("".join(run.open_message.text)), look.columns)]]
    if run.error:
        rows += [[], *[[("failed", line)] for line in wrapped(clean(run.error), look.columns)]]
    return rows


def _call_rows(call: CallNode, look: Look, run: RunNode) -> list[Row]:
    rows: list[Row] = [call_row(call, look, look.columns)]
    told = run.results.get(call.call_id) or next(
        (message for message in run.said if message.tool_call_id == call.call_id), None
    )
    lines = clean(told.text).split("\n") if told is not None else []
    for line in lines[:_RESULT_LINES]:
        rows += [[("dim", piece)] for piece in wrapped(line, look.columns, "    ")]
    if len(lines) > _RESULT_LINES:
        rows.append([("dim", f"    {count(len(lines) - _RESULT_LINES, 'more line')}")])
    return rows


async def read_on_screen(screen: Screen, title: str, lines: Callable[[], list[Row]]) -> None:
    """Show lines on the alternate screen until Esc or q."""
    place, keys = [0], KeyBindings()

    def shown() -> StyleAndTextTuples:
        height = max(screen.app.output.get_size().rows - 3, 1)
        rows = lines()
        place[0] = max(0, min(place[0], len(rows) - height))
        return fragments(rows[place[0] : place[0] + height])

    def scroll(by: int) -> Callable[[KeyPressEvent], None]:
        def act(event: KeyPressEvent) -> None:
            place[0] += by

        return act

    for key, by in (
        ("up", -1),
        ("down", 1),
        ("pageup", -20),
        ("pagedown", 20),
        ("home", -1_000_000),
        ("end", 1_000_000),
    ):
        keys.add(key)(scroll(by))

    @keys.add("escape")
    @keys.add("q")
    @keys.add("c-c")
    def _(event: KeyPressEvent) -> None:
        event.app.exit()

    rule = "-" if screen.look.ascii else "─"
    body = HSplit(
        [
            Window(FormattedTextControl([("bold", clean(title))]), height=1),
            Window(FormattedTextControl(lambda: [("dim", rule * screen.look.columns)]), height=1),
            Window(FormattedTextControl(shown)),
            Window(
                FormattedTextControl([("dim", "  ↑↓ PgUp PgDn  Esc back" if rule == "─" else "  Esc back")]), height=1
            ),
        ]
    )
    reader: Application[None] = Application(
        Layout(body),
        key_bindings=keys,
        full_screen=True,
        style=Style([]),
        refresh_interval=0.5,
        output=screen.app.output,
    )
    reader.ttimeoutlen = 0.05
    async with in_terminal():
        await reader.run_async(handle_sigint=False)
    screen.stale(now=True)
