"""Blocks and rows as text with the colours of a terminal: rich draws Markdown, the rest is done here."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from typing import TextIO

from prompt_toolkit.formatted_text import StyleAndTextTuples
from rich.console import Console
from rich.markdown import Markdown

from .board import Block
from .columns import cells
from .rows import Look, Row
from .text import clean, is_unicode

_CODES = {
    "dim": "2",
    "bold": "1",
    "reverse": "7",
    "working": "34",
    "needs": "1;33",
    "done": "32",
    "failed": "31",
    "stopped": "35",
    "waits": "33",
    "added": "32",
    "removed": "31",
}
STYLES = {
    "dim": "dim",
    "bold": "bold",
    "reverse": "reverse",
    "working": "ansiblue",
    "needs": "bold ansiyellow",
    "done": "ansigreen",
    "failed": "ansired",
    "stopped": "ansimagenta",
    "waits": "ansiyellow",
    "added": "ansigreen",
    "removed": "ansired",
}
"""The same for the library that paints rows again and again: the sixteen colours of the user, and no background."""


class Paint:
    """Turns finished blocks into the text of a terminal."""

    def __init__(self, stream: TextIO, *, colour: bool) -> None:
        self.colour = colour
        self.unicode = is_unicode(stream)

    def text(self, blocks: Iterable[Block], look: Look) -> str:
        """Return blocks as lines that a terminal shows."""
        lines: list[str] = []
        for block in blocks:
            lines += self._words(block.words, look) if block.words else [self.row(row) for row in block.rows]
            if block.gap:
                lines.append("")
        return "".join([f"{line}\n" for line in lines])

    def row(self, row: Row) -> str:
        if not self.colour:
            return "".join(text for _, text in row).rstrip()
        line = ""
        for style, text in row:
            codes = ";".join(_CODES[name] for name in style.split() if name in _CODES)
            line += f"\x1b[{codes}m{text}\x1b[0m" if codes and text else text
        return line.rstrip()

    def _words(self, words: str, look: Look) -> list[str]:
        """Return Markdown as lines: clean before and after, so that only colours are escape sequences."""
        console = Console(
            file=io.StringIO(),
            width=max(min(look.width - 1, 100), 20),
            force_terminal=self.colour,
            color_system="standard" if self.colour else None,
            no_color=not self.colour,
            legacy_windows=False,
            highlight=False,
            emoji=False,
            safe_box=True,
            _environ={},
        )
        theme = "ansi_dark" if self.colour else "bw"
        console.print(Markdown(clean(words), code_theme=theme, hyperlinks=False, inline_code_theme=theme))
        out = console.file
        assert isinstance(out, io.StringIO)
        return [line.rstrip() for line in out.getvalue().strip("\n").split("\n")]


def fragments(rows: Iterable[Row]) -> StyleAndTextTuples:
    """Return rows as prompt_toolkit paints them."""
    painted: StyleAndTextTuples = []
    for row in rows:
        for style, text in row:
            painted.append((" ".join(STYLES.get(name, "") for name in style.split()), text))
        painted.append(("", "\n"))
    return painted[:-1]


def is_colourful() -> bool:
    return not os.environ.get("NO_COLOR")


def pad(left: str, right: str, columns: int) -> str:
    """Return two texts at the two ends of a line."""
    return left + " " * max(columns - cells(left) - cells(right), 1) + right
