"""A terminal that a person looks at: the program on a pseudo-terminal, its screen as pyte draws it."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from pathlib import Path
from typing import Any

import pyte

from .conftest import PROGRAM, started

TAKE_TERMINAL = "import fcntl, termios\nfcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
PATIENCE = 12.0


class Terminal:
    """Starts the command line, types, and waits for what is seen. Its lines include what has scrolled away."""

    def __init__(
        self,
        *args: str,
        columns: int = 80,
        rows: int = 30,
        env: dict[str, str] | None = None,
        state: Path | None = None,
    ) -> None:
        self._screen = pyte.HistoryScreen(columns, rows, history=5_000)
        self._stream = pyte.ByteStream(self._screen)
        self.raw = b""
        self.seen: set[str] = set()
        """Every line that was ever on the screen."""
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        files: dict[str, Any] = {"stdin": slave, "stdout": slave, "stderr": slave}
        home = {"XDG_STATE_HOME": str(state)} if state is not None else {}
        self._process: subprocess.Popen[bytes] = started(
            *args, **files, program=TAKE_TERMINAL + PROGRAM, start_new_session=True, env={**home, **(env or {})}
        )
        os.close(slave)
        self._columns = columns
        self._is_open = True

    @property
    def lines(self) -> list[str]:
        """Everything that the person can scroll to."""
        above = ["".join(line[at].data for at in range(self._columns)).rstrip() for line in self._screen.history.top]
        return [*above, *self.screen]

    @property
    def screen(self) -> list[str]:
        return [line.rstrip() for line in self._screen.display]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def spans(self, row: int) -> list[tuple[int, str, str, str]]:
        """Return a row as pieces of one colour: column, text, colour, and weight as SVG has it."""
        found: list[tuple[int, str, str, str]] = []
        line = self._screen.buffer[row]
        for at in range(self._columns):
            cell = line[at]
            if cell.data == " ":
                continue
            look = (cell.fg, ' font-weight="bold"' * cell.bold)
            if found and found[-1][2:] == look and found[-1][0] + len(found[-1][1]) == at:
                found[-1] = (found[-1][0], found[-1][1] + cell.data, *look)
            else:
                found.append((at, cell.data, *look))
        return found

    def _read(self, seconds: float) -> None:
        if not self._is_open:
            return
        if select.select([self._master], [], [], seconds)[0]:
            try:
                piece = os.read(self._master, 65_536)
            except OSError:  # the last writer is gone
                piece = b""
            if not piece:
                self._is_open = False
                return
            self.raw += piece
            self._stream.feed(piece)
            self.seen.update(self.screen)

    def see(self, *texts: str, gone: tuple[str, ...] = ()) -> str:
        """Wait until the screen shows all of this, and nothing of what is to be gone."""
        end = time.monotonic() + PATIENCE
        while True:
            shown = "\n".join(self.screen)
            if all(text in shown for text in texts) and not any(text in shown for text in gone):
                return shown
            assert self._is_open, f"the program ended; {texts} and not {gone} expected on\n{self.text}"
            assert time.monotonic() < end, f"{texts} and not {gone} expected on\n{self.text}"
            self._read(0.2)

    def see_times(self, text: str, times: int) -> None:
        """Wait until the person can find a text so many times."""
        end = time.monotonic() + PATIENCE
        while self.text.count(text) < times:
            assert self._is_open and time.monotonic() < end, f"{text!r} expected {times} times on\n{self.text}"  # noqa: PT018
            self._read(0.2)

    def sees_soon(self, text: str) -> bool:
        """Look for a while, as a person does before a key is pressed again."""
        end = time.monotonic() + 0.4
        while text not in self.text and self._is_open and time.monotonic() < end:
            self._read(0.1)
        return text in self.text

    def type(self, keys: str | bytes) -> None:
        os.write(self._master, keys.encode() if isinstance(keys, str) else keys)

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._screen.resize(rows, columns)
        self._columns = columns

    def end(self) -> int:
        """Read to the end of the program, and return its exit code."""
        end = time.monotonic() + PATIENCE
        while self._is_open:
            assert time.monotonic() < end, f"it does not end:\n{self.text}"
            self._read(0.2)
        os.close(self._master)
        return self._process.wait(timeout=PATIENCE)
