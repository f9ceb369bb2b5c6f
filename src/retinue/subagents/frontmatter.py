"""Markdown with YAML in front: its fields, each with the line it is on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from math import isfinite
from typing import Any, cast

from .declarations import Problem

MOST_BYTES = 256_000
"""The size of a declaration: more is a mistake, as all of it goes to a model."""
MOST_YAML = 16_000
DEEPEST = 3
"""The levels of fields that are read; deeper ones are skipped, however deep."""
_PLAIN_FIELD = re.compile(r"""^([A-Za-z]\w*:[ \t]+)([^\s"'\[{|>&*!#].*?)[ \t]*$""", re.MULTILINE)


class BadFile(Exception):
    """The file cannot be read as Markdown with front matter."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message, line)
        self.message, self.line = message, line


class FrontMatter:
    """The fields of a file and its body. Scalars are the text as written; nothing is guessed from it.

    Reading a field that is wrong notes a problem; `problems` has them all.
    """

    def __init__(self, data: bytes, where: str, *, lenient: bool = False) -> None:
        self.where = where
        self.problems: list[Problem] = []
        yaml, self.body = _split(_text(data))
        try:
            self.fields, self.lines = _read(yaml)
        except BadFile:
            if not lenient:
                raise
            # Claude Code does not quote plain values with `: ` in them.
            quoted = _PLAIN_FIELD.sub(lambda found: f"{found[1]}'{found[2].replace(chr(39), chr(39) * 2)}'", yaml)
            self.fields, self.lines = _read(quoted)

    def fault(self, field: str, message: str, *, warning: bool = False) -> None:
        """Note what is wrong with a field, or with one inside it, such as `workspace.mode`."""
        line = self.lines.get(field, self.lines.get(field.partition(".")[0]))
        self.problems.append(Problem(self.where, message, line, field, warning))

    def warn(self, field: str, message: str) -> None:
        self.fault(field, message, warning=True)

    def text(self, name: str, *, warning: bool = False) -> str | None:
        """Return a text; None if it is absent or empty."""
        value = self.fields.get(name)
        if value is None or isinstance(value, str):
            return (value or "").strip() or None
        self.fault(name, f"must be text, not {_kind(value)}", warning=warning)
        return None

    def whole_number(self, name: str) -> int | None:
        """Return a whole number above 0; anything else is ignored with a warning."""
        value = self.fields.get(name)
        if value is None:
            return None
        if isinstance(value, str) and value.isdecimal() and len(value) < 7 and int(value) > 0:
            return int(value)
        self.warn(name, f"must be a whole number above 0, not {shown(value)}; the default is used")
        return None

    def number(self, name: str) -> float | None:
        value, number = self.fields.get(name), as_number(self.fields.get(name))
        if value is None or (number is not None and number > 0):
            return number
        self.fault(name, f"must be a number above 0, not {shown(value)}")
        return None

    def names(self, name: str) -> list[str] | None:
        """Return a list of names, written as YAML or with commas; None if the field is absent or empty. `[]` is no names."""
        value = self.fields.get(name)
        if value is None:
            return None
        if isinstance(value, str):
            return [item.strip() for item in value.split(",") if item.strip()] or None
        if isinstance(value, list) and all(isinstance(item, str) for item in cast("list[Any]", value)):
            return [item.strip() for item in cast("list[str]", value) if item.strip()]
        self.fault(name, "must be a list of names, such as [first, second]")
        return None

    def mapping(self, name: str, example: str, *, warning: bool = False) -> dict[str, Any] | None:
        value = self.fields.get(name)
        if value is None or isinstance(value, dict):
            return cast("dict[str, Any] | None", value)
        self.fault(name, f"must be written as {name}: {example}, not as {_kind(value)}", warning=warning)
        return None


def as_number(value: Any) -> float | None:
    """Return a finite number, or None."""
    try:
        number = float(value) if isinstance(value, str) else None
    except ValueError:
        return None
    return number if number is not None and isfinite(number) else None


def _text(data: bytes) -> str:
    if len(data) > MOST_BYTES:
        raise BadFile(f"it has {len(data):,} bytes, over the limit of {MOST_BYTES:,}: shorten it")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise BadFile("it is not UTF-8 text: save it as UTF-8", data.count(b"\n", 0, exc.start) + 1) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _split(text: str) -> tuple[str, str]:
    """Return the YAML and the body. A line `---` of its own ends the front matter."""
    lines = text.split("\n")
    if not text.strip():
        raise BadFile("it is empty: begin with a line ---, then fields, then a line ---")
    if lines[0].rstrip() != "---":
        raise BadFile("it has no front matter: begin with a line ---, then fields, then a line ---", 1)
    for number, line in enumerate(lines[1:], 1):
        if line.rstrip() in ("---", "..."):
            return "\n".join(lines[1:number]), "\n".join(lines[number + 1 :]).strip()
    raise BadFile("its front matter is not closed: end it with a line ---", 1)


def _read(yaml: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the fields, and the line of each; those inside another as `workspace.mode`."""
    if len(yaml) > MOST_YAML:
        raise BadFile(f"its front matter has {len(yaml):,} characters, over the limit of {MOST_YAML:,}", 1)
    events = _events(yaml)
    next(events)
    if isinstance(next(events), _yaml().StreamEndEvent):
        raise BadFile("its front matter is empty: it needs at least a description", 1)
    reader, first = _Reader(events), next(events)
    value = reader.read_value(first, "", 0)
    if not isinstance(value, dict):
        problem = f"its front matter must hold fields such as `description: …`, not {_kind(value)}"
        raise BadFile(problem, _line(first))
    for _ in events:  # to the end: what follows may not be YAML
        pass
    return cast("dict[str, Any]", value), reader.lines


class _Reader:
    """Makes values from the events of a YAML parser.

    PyYAML's composer recurses as deep as the text, so a file that a model wrote could exhaust the stack. Aliases are
    refused for the same reason.
    """

    def __init__(self, events: Iterator[Any]) -> None:
        self._events = events
        self.lines: dict[str, int] = {}

    def read_value(self, event: Any, within: str, depth: int) -> Any:
        """Return the value that begins with an event: text, a list or a dict."""
        kind = event.__class__.__name__
        if kind == "ScalarEvent":
            return None if event.implicit[0] and event.value in ("", "~", "null", "Null", "NULL") else event.value
        if kind == "AliasEvent":
            raise BadFile(f"*{event.anchor} stands for a value given elsewhere: write the value itself", _line(event))
        if depth > DEEPEST:
            self._pass_over()
            return "…"
        return self._list(depth) if kind == "SequenceStartEvent" else self._mapping(within, depth)

    def _list(self, depth: int) -> list[Any]:
        items: list[Any] = []
        while (event := next(self._events)).__class__.__name__ != "SequenceEndEvent":
            items.append(self.read_value(event, "-.", depth + 1))
        return items

    def _mapping(self, within: str, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while (event := next(self._events)).__class__.__name__ != "MappingEndEvent":
            line = _line(event)
            if event.__class__.__name__ != "ScalarEvent":
                raise BadFile("the name of a field must be plain text", line)
            name = event.value
            if name in found:
                first = f", first in line {self.lines[within + name]}" if within + name in self.lines else ""
                raise BadFile(f"{within}{name} is given twice{first}", line)
            if not within.startswith("-"):
                self.lines[within + name] = line
            found[name] = self.read_value(next(self._events), f"{within}{name}.", depth + 1)
        return found

    def _pass_over(self) -> None:
        open_ones = 1
        while open_ones:
            kind = next(self._events).__class__.__name__
            open_ones += kind.endswith("StartEvent") - kind.endswith("EndEvent")


def _events(yaml: str) -> Iterator[Any]:
    library = _yaml()
    try:
        yield from library.parse(yaml, Loader=getattr(library, "CSafeLoader", library.SafeLoader))
    except library.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        raise BadFile(f"not YAML: {exc.problem or exc.context}", None if mark is None else mark.line + 2) from None
    except library.YAMLError as exc:
        raise BadFile(f"not YAML: {' '.join(str(exc).split())[:200]}", 1) from None


def _line(event: Any) -> int:
    return event.start_mark.line + 2


@cache
def _yaml() -> Any:
    import yaml  # only here: it is slow to load

    return yaml


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    return "a list" if isinstance(value, list) else "fields" if isinstance(value, dict) else f"the text {value[:60]!r}"


def shown(value: Any) -> str:
    return repr(value[:60]) if isinstance(value, str) else _kind(value)
