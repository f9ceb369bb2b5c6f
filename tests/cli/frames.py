"""Pictures of the terminal for the documentation: two frames of the demo, as SVG. `scripts/screenshots` calls it."""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

from .terminal import Terminal

_COLOURS = {
    "default": "#d6dbe3",
    "black": "#5c6570",
    "red": "#f0717b",
    "green": "#7fd08b",
    "brown": "#e3c26b",
    "yellow": "#e3c26b",
    "blue": "#79b0f5",
    "magenta": "#d39be6",
    "cyan": "#6fc9cf",
    "white": "#d6dbe3",
}
_WIDTH, _HEIGHT, _MARGIN = 8.4, 19, 16
"""Pixels of a cell, and around the whole."""


def svg(terminal: Terminal, rows: int) -> str:
    """Return the first rows of a screen as a picture, with no resource from elsewhere."""
    lines: list[str] = []
    for row in range(rows):
        spans = "".join(
            f'<tspan x="{_MARGIN + at * _WIDTH:.1f}" fill="{_COLOURS.get(colour, "#d6dbe3")}"{weight}>{escape(text)}</tspan>'
            for at, text, colour, weight in terminal.spans(row)
        )
        lines.append(f'<text y="{_MARGIN + (row + 0.75) * _HEIGHT:.1f}" xml:space="preserve">{spans}</text>')
    width, height = 2 * _MARGIN + 80 * _WIDTH, 2 * _MARGIN + rows * _HEIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" font-size="14" '
        "font-family=\"ui-monospace, 'JetBrains Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace\">"
        f'<rect width="100%" height="100%" rx="8" fill="#15191f"/>{"".join(lines)}</svg>\n'
    )


def main(folder: Path) -> None:
    terminal = Terminal("demo", rows=30)
    terminal.see("Question  lead › flights › fares › hold")
    (folder / "terminal-question.svg").write_text(svg(terminal, 22))
    while not terminal.sees_soon("you approved: hold hold_seat"):
        terminal.type("\x1ba")
    terminal.see("took over")
    terminal.see("├ ✓ trains", "◐ fares")
    (folder / "terminal-takeover.svg").write_text(svg(terminal, 22))
    terminal.end()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
