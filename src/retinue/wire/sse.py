"""Server-sent events: a decoder from chunks of bytes to the data of complete events."""

from __future__ import annotations

MAX_EVENT = 16 * 1024 * 1024
"""The largest event in bytes; a longer one ends the stream with an error."""


class EventTooLong(ValueError):
    """An event has no end within `MAX_EVENT` bytes."""


class EventDecoder:
    """Decodes bytes as they arrive. `feed` keeps the data and drops names, ids and comments."""

    __slots__ = ("_held", "_max", "_rest", "_size")

    def __init__(self, max_event: int = MAX_EVENT) -> None:
        self._rest: list[bytes] = []
        self._size = 0
        self._max = max_event
        self._held = b""
        """A carriage return at the end of a chunk, which may be the first half of a line end."""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of the events that are complete now."""
        return [found for block in self.split(data) if (found := data_of(block))]

    def split(self, data: bytes) -> list[bytes]:
        """Return the blocks of lines that are complete now, for `read_event`."""
        if self._held or b"\r" in data:
            data = self._unify(data)
        # A blank line may be split between chunks, so the last byte of the rest is part of the search.
        last = self._rest[-1][-1:] if self._rest else b""
        if b"\n\n" not in data and not (last == b"\n" and data[:1] == b"\n"):
            if data:
                self._rest.append(data)
                self._size += len(data)
                if self._size > self._max:
                    raise EventTooLong(f"an event has more than {self._max} bytes")
            return []
        self._rest.append(data)
        blocks = b"".join(self._rest).split(b"\n\n")
        rest = blocks.pop()
        self._rest, self._size = [rest] if rest else [], len(rest)
        return [block for block in blocks if block]

    def finish(self) -> list[bytes]:
        """Return the data of a last event without its blank line, if there is one."""
        rest, self._rest, self._size, self._held = b"".join(self._rest), [], 0, b""
        found = data_of(rest)
        return [found] if found else []

    def _unify(self, data: bytes) -> bytes:
        data = self._held + data
        self._held = b""
        if data.endswith(b"\r"):
            data, self._held = data[:-1], b"\r"
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def read_event(block: bytes) -> tuple[str, str, bytes]:
    """Return the name, the id and the data of an event; empty if it has none."""
    fields = {b"event": b"", b"id": b""}
    for line in block.split(b"\n"):
        name, _, value = line.partition(b":")
        if name in fields:
            fields[name] = value.removeprefix(b" ")
    return fields[b"event"].decode(errors="replace"), fields[b"id"].decode(errors="replace"), data_of(block)


def data_of(block: bytes) -> bytes:
    if block.startswith(b"data: ") and b"\n" not in block:
        return block[6:]
    lines: list[bytes] = []
    for line in block.removeprefix(b"\xef\xbb\xbf").split(b"\n"):
        if line.startswith(b"data:"):
            lines.append(line[6:] if line.startswith(b"data: ") else line[5:])
    return lines[0] if len(lines) == 1 else b"\n".join(lines)
