"""Markdown with YAML in front: its fields, each with the line it is on."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

from msgspec import Struct

from .declarations import Problem

MOST_BYTES = 256_000
"""A declaration is read whole and goes to a model: past this it is a mistake."""
MOST_YAML = 16_000


class Field(Struct, frozen=True):
    """One value of the front matter. Scalars are the text as written; nothing is guessed from it."""

    name: str
    value: str | list[Any] | dict[str, Any] | None
    line: int


class BadFile(Exception):
    """The file cannot be read as Markdown with front matter."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message, line)
        self.message, self.line = message, line


class FrontMatter:
    """The fields of a file and its body. Reading a field that is wrong notes a problem; `problems` has them all."""

    def __init__(self, data: bytes, where: str) -> None:
        self.where = where
        self.problems: list[Problem] = []
        yaml, self.body = _split(_text(data))
        self.fields = _parse(yaml)

    def fault(self, field: str, message: str, *, warning: bool = False) -> None:
        line = self.fields[field].line if field in self.fields else None
        self.problems.append(Problem(self.where, message, line, field, warning))

    def warn(self, field: str, message: str) -> None:
        self.fault(field, message, warning=True)

    def text(self, name: str, *, warning: bool = False) -> str | None:
        """A text, None where there is none."""
        value = self._value(name)
        if value is None or isinstance(value, str):
            return (value or "").strip() or None
        self.fault(name, f"must be text, not {_kind(value)}", warning=warning)
        return None

    def whole_number(self, name: str) -> int | None:
        """A whole number above 0; anything else is passed over with a warning."""
        value = self._value(name)
        if value is None:
            return None
        if isinstance(value, str) and value.isdecimal() and 0 < int(value) < 1_000_000:
            return int(value)
        self.warn(name, f"must be a whole number above 0, not {_shown(value)}; the default is used")
        return None

    def number(self, name: str) -> float | None:
        value = self._value(name)
        if value is None:
            return None
        number = as_number(value)
        if number is None or number <= 0:
            self.fault(name, f"must be a number above 0, not {_shown(value)}")
            return None
        return number

    def names(self, name: str) -> list[str] | None:
        """A list of names, as YAML or with commas; None where the field is absent or empty."""
        value = self._value(name)
        if value is None:
            return None
        given: list[Any] = value.split(",") if isinstance(value, str) else cast("list[Any]", value)
        if not isinstance(value, str | list) or not all(isinstance(item, str) for item in given):
            self.fault(name, f"must be a list of names, not {_kind(value)}")
            return None
        return [item.strip() for item in given if item.strip()] or None

    def mapping(self, name: str) -> dict[str, Any] | None:
        value = self._value(name)
        if value is None or isinstance(value, dict):
            return cast("dict[str, Any] | None", value)
        self.fault(name, f"must hold fields of its own, not {_kind(value)}", warning=True)
        return None

    def _value(self, name: str) -> Any:
        found = self.fields.get(name)
        return None if found is None else found.value


def as_number(value: Any) -> float | None:
    try:
        return float(value) if isinstance(value, str) else None
    except ValueError:
        return None


def _text(data: bytes) -> str:
    if len(data) > MOST_BYTES:
        raise BadFile(f"it has {len(data):,} bytes, over the limit of {MOST_BYTES:,}: shorten it")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise BadFile("it is not UTF-8 text: save it as UTF-8", data.count(b"\n", 0, exc.start) + 1) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _split(text: str) -> tuple[str, str]:
    """The YAML and the body. Only a line of its own that says `---` ends the front matter."""
    lines = text.split("\n")
    if not text.strip():
        raise BadFile("it is empty: begin with a line ---, then fields, then a line ---")
    if lines[0].rstrip() != "---":
        raise BadFile("it has no front matter: begin with a line ---, then fields, then a line ---", 1)
    for number, line in enumerate(lines[1:], 1):
        if line.rstrip() in ("---", "..."):
            return "\n".join(lines[1:number]), "\n".join(lines[number + 1 :]).strip()
    raise BadFile("its front matter is not closed: end it with a line ---", 1)


def _parse(yaml: str) -> dict[str, Field]:
    if len(yaml) > MOST_YAML:
        raise BadFile(f"its front matter has {len(yaml):,} characters, over the limit of {MOST_YAML:,}", 1)
    root = _compose(yaml)
    if root is None:
        raise BadFile("its front matter is empty: it needs at least a description", 1)
    value, line = _plain(root, 0), root.start_mark.line + 2
    if not isinstance(value, dict):
        raise BadFile(f"its front matter must hold fields such as `description: …`, not {_kind(value)}", line)
    fields: dict[str, Field] = {}
    for key, node in root.value:
        name = key.value
        if name in fields:
            raise BadFile(f"{name} is given twice, first in line {fields[name].line}", key.start_mark.line + 2)
        fields[name] = Field(name, _plain(node, 1), key.start_mark.line + 2)
    return fields


def _compose(yaml: str) -> Any:
    library = _yaml()
    try:
        return library.compose(yaml, Loader=getattr(library, "CSafeLoader", library.SafeLoader))
    except library.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        raise BadFile(f"not YAML: {exc.problem or exc.context}", None if mark is None else mark.line + 2) from None
    except (library.YAMLError, RecursionError) as exc:
        raise BadFile(f"not YAML: {' '.join(str(exc).split())[:200]}", 1) from None


@cache
def _yaml() -> Any:
    import yaml  # takes longer to load than most programs have declarations to read

    return yaml


def _plain(node: Any, depth: int) -> Any:
    """A node as text, lists and dicts. What is deeper than any field goes is not looked at."""
    if depth > 3:
        return "…"
    if node.id == "mapping":
        return {str(key.value): _plain(value, depth + 1) for key, value in node.value}
    if node.id == "sequence":
        return [_plain(item, depth + 1) for item in node.value]
    is_nothing = node.style is None and node.value in ("", "~", "null", "Null", "NULL")
    return None if is_nothing else node.value


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    return "a list" if isinstance(value, list) else "fields" if isinstance(value, dict) else f"the text {value[:60]!r}"


def _shown(value: Any) -> str:
    return repr(value[:60]) if isinstance(value, str) else _kind(value)
