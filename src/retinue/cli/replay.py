"""A run as a file: `retinue run --record FILE` writes its events, `retinue replay FILE` shows them again.

The first line says what the file is, every other is an event as clients read it. Private parts of a log are not in it;
what was said is, as it was said.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, TextIO

import msgspec

from ..core.errors import ConfigurationError
from ..core.events import Event, event_from_bytes, event_to_json
from .interrupt import Interrupt, make_view
from .parsers import COMPLETED
from .text import complain

_FORMAT = 1
_LONGEST_PAUSE = 3.0
"""Seconds: a person who took an hour to answer is not waited for again."""

Record = Callable[[Event], None]


@contextmanager
def recording(path: str | None) -> Generator[Record | None]:
    """Write the events of a run to a file, each as it comes."""
    if path is None:
        yield None
        return
    try:
        file = open(path, "x", encoding="utf-8")
    except FileExistsError:
        raise ConfigurationError(f"--record: there is a file {path!r}: give a name that is free") from None
    except OSError as exc:
        raise ConfigurationError(f"--record: cannot write {path!r}: {exc.strerror}") from exc
    try:
        yield Recorder(path, file).write
    finally:
        with suppress(OSError):  # of a full disk, of which the person was told
            file.close()


class Recorder:
    """Writes events to a file. If that fails, the run goes on without it."""

    def __init__(self, path: str, file: TextIO) -> None:
        self._path, self._file, self._is_broken = path, file, False
        self._line({"retinue_record": _FORMAT, "made_at": datetime.now(UTC).isoformat(timespec="seconds")})

    def write(self, event: Event) -> None:
        if not self._is_broken:
            self._line(event_to_json(event))

    def _line(self, value: dict[str, Any]) -> None:
        try:
            self._file.write(f"{json.dumps(value)}\n")
            self._file.flush()
        except OSError as exc:
            self._is_broken = True
            complain(f"--record {self._path}: {exc.strerror}: the record ends here, the run goes on")


def read_record(path: str) -> Iterator[Event]:
    """Yield the events of a record; raise ConfigurationError that names the line where it is none."""
    try:
        file = open(path, encoding="utf-8")
    except OSError as exc:
        raise ConfigurationError(f"cannot read {path!r}: {exc.strerror}") from exc
    with file:
        try:
            header = json.loads(file.readline())
            version = header["retinue_record"]
        except (ValueError, TypeError, KeyError) as exc:
            raise ConfigurationError(f"{path!r} is no record of a run: retinue run … --record FILE makes one") from exc
        if version != _FORMAT:
            raise ConfigurationError(f"{path!r} has record format {version}: this version of retinue reads {_FORMAT}")
        for number, line in enumerate(file, 2):
            try:
                yield event_from_bytes(line.encode())
            except (msgspec.MsgspecError, ValueError, TypeError) as exc:
                what = "the record is cut off here" if not line.endswith("\n") else f"this is no event: {exc}"
                raise ConfigurationError(f"{path!r}, line {number}: {what}") from exc


async def replay(args: argparse.Namespace, interrupt: Interrupt) -> int:
    """Show a recorded run as it was, or faster."""
    before: float | None = None
    async with make_view(args) as view:
        interrupt.clean_up = view.close
        for event in read_record(args.file):
            pause = 0.0 if before is None else min(event.at - before, _LONGEST_PAUSE) / args.speed
            before = event.at
            if pause > 0 and not args.json:
                await interrupt.sleep(pause)
            if interrupt.happened:
                return interrupt.code
            view.show(event)
            view.tick()
    return COMPLETED
