"""Text and values from outside: cleaned or refused where they enter, so that every store can hold what a run holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from functools import cache
from gc import get_referents
from math import isfinite
from typing import Any, NamedTuple, cast

import msgspec
from msgspec.structs import replace

MAX_DEPTH = 100
"""Levels of lists and objects in a value. Python's own limit depends on the stack, so a value could pass it here and
not where it is stored."""
MAX_BYTES = 64 * 1024 * 1024
"""Bytes of one value or text as JSON."""
MAX_PARSED = 1024 * 1024
"""Characters of JSON from a model that are parsed at once: the longest answers that models are sold with have half as many."""
MAX_ITEMS = 100_000
"""Items of all lists and objects in a value: shared lists can make a small object large as JSON."""
MAX_BOXES = 40_000
"""Lists and objects in a value. To read and copy so many holds up the event loop for up to 50 ms."""
MAX_LONG = 10_000_000_000
"""The squares of the bits of all long integers in a value, added up: the time to write one grows with the square."""
_MAX_CLEANED = 100_000
"""Characters of a text, or ten times the items of a value, in which each half of a surrogate pair is looked at."""
MAX_ID_BYTES = 1000
"""Bytes of the id of a thread or user: a database has to index it."""


def clean_text(text: str) -> str:
    """Return text that can be written as UTF-8: half a surrogate pair becomes U+FFFD, in a long text "?"."""
    if text.__class__ is str and text.isascii() and len(text) <= MAX_BYTES:
        return text
    if type(text) is not str:
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance] - tools may give anything
            raise TypeError(f"expected text, got {type(text).__name__}")
        text = str.__str__(text)
    if len(text) > MAX_BYTES:
        raise ValueError(f"the text is too long: {len(text):,} characters, at most {MAX_BYTES:,}")
    try:
        text.encode()
    except UnicodeEncodeError:
        if len(text) > _MAX_CLEANED:
            return text.encode(errors="replace").decode()
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def is_no_type(given: object) -> bool:
    """Return whether a value given as a type is not a type, such as `3` or `[str]`."""
    return isinstance(given, str | int | float | bytes | list | dict | tuple | set)


def id_problem(value: str) -> str | None:
    """Return why an id cannot be stored, or None."""
    if value.isascii() and len(value) <= MAX_ID_BYTES and "\0" not in value:
        return None
    if "\0" in value:
        return "it contains a NUL character"
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        return "it contains half a surrogate pair"
    return f"it has {size:,} bytes, more than {MAX_ID_BYTES:,}" if size > MAX_ID_BYTES else None


def to_json_value(value: Any, *, exact: bool = False) -> Any:
    """Return a fresh copy of a value as plain JSON values.

    TypeError names a type that has no JSON form. ValueError is for a value that is too deep or too large, or contains
    itself. NaN and infinity become null and invalid text is cleaned; with `exact`, they are a ValueError too.
    """
    if value is None or value is True or value is False:
        return value
    if value.__class__ is str and (clean := clean_text(value)) == value:
        return clean
    if value.__class__ is dict and _is_plain(value):
        return value.copy()
    shape = check_shape(value)
    try:
        data = to_json_bytes(value)
    except UnicodeEncodeError:
        if exact or shape.items > _MAX_CLEANED // 10:
            raise ValueError("it contains text with half a surrogate pair") from None
        data = to_json_bytes(_cleaned(msgspec.to_builtins(value, enc_hook=_encode_foreign, str_keys=True)))
    except RecursionError:
        raise ValueError("it is nested too deeply, or contains itself") from None
    if len(data) > MAX_BYTES:
        raise ValueError(f"it is too large: {len(data):,} bytes as JSON, at most {MAX_BYTES:,}")
    if exact and b"null" in data and _has_no_number(value):
        raise ValueError("it contains NaN or infinity, which JSON does not have")
    try:
        made = _read(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict | list):  # a record may hold deep values
        check_shape(made)
    if not shape.kinds.isdisjoint(_SETS):
        sort_sets(value, made)
    return made


def parse_json(text: str) -> Any:
    """Return the value in JSON text from a model; ValueError if it is invalid, or deep or large."""
    if len(text) < MAX_DEPTH:  # so it is neither
        return _read(text)
    if len(text) > MAX_PARSED:
        raise ValueError(f"it is too large: more than {MAX_PARSED:,} characters")
    if text.count("[") + text.count("{") > 2 * MAX_BOXES:  # counting is cheap; parsing so many would take long
        raise ValueError(f"it is too large: more than {2 * MAX_BOXES:,} opening brackets")
    try:
        value = _read(text)
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep") from None
    check_shape(value)
    return value


def sort_sets(value: Any, made: Any) -> None:
    """Sort the lists in the JSON of a value that are sets in it: equal values have equal JSON, in every process."""
    pairs: Iterable[tuple[Any, Any]]
    if made.__class__ is list:
        pairs = zip(cast("list[Any]", value), made, strict=False) if isinstance(value, _LISTS) else ()
    elif value.__class__ is dict:
        pairs = zip(value.values(), made.values(), strict=False)
    else:  # a record
        pairs = [(getattr(value, name, None), item) for name, item in made.items()]
    for item, written in pairs:
        if written.__class__ in (list, dict):
            sort_sets(item, written)
    if isinstance(value, set | frozenset):
        try:
            made.sort()
        except TypeError:  # objects, or items of several kinds
            made.sort(key=to_json_bytes)


def _is_plain(value: dict[Any, Any]) -> bool:
    """Return whether it is a small object of short ASCII text, whole numbers and null: JSON as it is."""
    if len(value) > _SHORT:
        return False
    for key, item in value.items():
        if key.__class__ is not str or not key.isascii():
            return False
        kind = item.__class__
        if kind is str:
            if not item.isascii() or len(item) > _SHORT_TEXT:
                return False
        elif kind is int:
            if not -_SAFE < item < _SAFE:
                return False
        elif kind is not bool and item is not None:
            return False
    return True


def record_json(record: Any) -> Any:
    """Return a record of ours as plain JSON values. It may be large: its parts were checked where they entered."""
    return _read(to_json_anyway(record))


def to_json_text(value: Any) -> str:
    """Return compact JSON text; TypeError names the type that has no JSON form."""
    return to_json_bytes(value).decode()


def to_json_anyway(value: Any) -> bytes:
    """Return JSON text in UTF-8 of any record, with a note in place of what has no JSON form.

    The boundaries refuse values without a JSON form. If one slips through, the run must still be stored.
    """
    try:
        return to_json_bytes(value)
    except (TypeError, ValueError, RecursionError):
        return to_json_bytes(_storable(value, 0))


def _encode_foreign(value: Any) -> Any:
    dump: Callable[..., Any] | None = getattr(value, "model_dump", None)
    if dump is not None:
        made = dump(mode="json")
        if made.__class__ is dict:
            sort_sets(value, made)
        return made
    raise TypeError(f"a value of type {type(value).__name__} has no JSON form")


to_json_bytes: Callable[[Any], bytes] = msgspec.json.Encoder(enc_hook=_encode_foreign).encode
"""Return compact JSON text in UTF-8; TypeError names the type that has no JSON form."""
_read = msgspec.json.decode
_LISTS = (list, tuple, set, frozenset)
_SETS = frozenset({set, frozenset})


_ATOMS = frozenset({str, int, float, bool, type(None), bytes})
_TEXTS = frozenset({str, bytes})
_NUMBERS = _ATOMS - _TEXTS
_FLAT: dict[Any, frozenset[type]] = {dict: frozenset({dict}), list: frozenset({list})}
_SHORT, _SHORT_TEXT, _SAFE, _LONG = 64, 100_000, 2**53, 2**64
_PLAIN = frozenset({dict, *_LISTS})
_BOXES = (dict, *_LISTS, msgspec.Struct)


def _items(box: Any) -> Any:
    """Return the items of a list, the values of an object, or the fields of a record."""
    if isinstance(box, dict):
        return cast("dict[Any, Any]", box).values()
    if isinstance(box, msgspec.Struct):
        return msgspec.structs.astuple(box)
    if isinstance(box, _LISTS):
        return cast("list[Any]", box)
    fields: dict[str, Any] = getattr(box, "__dict__", {})  # a dataclass
    return fields.values()


class Shape(NamedTuple):
    """The number of items in a value, the number of its lists and objects, and their classes."""

    items: int
    boxes: int
    kinds: frozenset[type]


def check_shape(value: Any) -> Shape:
    """Raise ValueError for a value that is too deep or too large, before it is copied or encoded.

    An object that occurs several times counts each time. C functions do most of the work, because it blocks the event loop.
    """
    if (flat := _flat_shape(value)) is not None:
        return flat
    depth = count = size = boxes = long = 0
    kinds: set[type] = set()
    level: list[Any] = [value] if _is_box(value.__class__) else []
    while level:
        found = set(map(type, level))
        if found <= _PLAIN:
            count += sum(map(len, level))
            items = get_referents(*level) if count <= MAX_ITEMS else list[Any]()  # with the keys of objects
        else:
            items = list[Any]()
            for held in map(_items, level):
                count += len(held)
                items += held if count <= MAX_ITEMS else []
        if count > MAX_ITEMS:
            raise ValueError(f"it is too large: more than {MAX_ITEMS:,} items")
        if (boxes := boxes + len(level)) > MAX_BOXES:
            raise ValueError(f"it is too large: more than {MAX_BOXES:,} lists and objects")
        size += sum([len(item) for item in items if item.__class__ in _TEXTS])
        if size > MAX_BYTES:
            raise ValueError(f"it is too large: more than {MAX_BYTES:,} characters")
        classes = set(map(type, items))
        if int in classes and (long := long + _measure_long(items)) > MAX_LONG:
            raise ValueError("it is too large: it has too many digits in long integers")
        kinds |= found
        level = (
            []
            if classes <= _ATOMS
            else [item for item in items if item.__class__ not in _ATOMS and _is_box(item.__class__)]
        )
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} deep, or contains itself")
    return Shape(count, boxes, frozenset(kinds))


def _measure_long(items: list[Any]) -> int:
    """Return the sum of the squares of the bits of the long integers among these items."""
    integers = [item for item in items if item.__class__ is int]
    if -_LONG < min(integers) and max(integers) < _LONG:
        return 0
    return sum([number.bit_length() ** 2 for number in integers if not -_LONG < number < _LONG])


def _flat_shape(value: Any) -> Shape | None:
    """Return the shape of a short list or object of atoms, which most values are; None for anything else."""
    kinds = _FLAT.get(value.__class__)
    if kinds is None or len(value) > _SHORT:
        return None
    size = 0
    for item in get_referents(value):  # with the keys of an object
        kind = item.__class__
        if kind is str:
            size += len(item)
        elif kind is int:
            if not -_LONG < item < _LONG:
                return None
        elif kind not in _NUMBERS:
            return None
    return Shape(len(value), 1, kinds) if size < MAX_BYTES else None


@cache
def _is_box(kind: Any) -> bool:
    """Return whether values of that class hold others."""
    return issubclass(kind, _BOXES) or is_dataclass(kind)


def _cleaned(value: Any) -> Any:
    """Return plain JSON values with clean text."""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, Mapping):
        return {_cleaned(key): _cleaned(item) for key, item in cast("dict[Any, Any]", value).items()}
    return [_cleaned(item) for item in cast("list[Any]", value)] if isinstance(value, list | tuple) else value


def _has_no_number(value: Any) -> bool:
    if isinstance(value, float):
        return not isfinite(value)
    return isinstance(value, dict | list | tuple) and any(map(_has_no_number, _items(value)))


def _storable(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return clean_text(value[:MAX_BYTES])
    if depth > MAX_DEPTH:
        return "(nested too deeply)"
    below = depth + 1
    if isinstance(value, msgspec.Struct):
        return replace(value, **{name: _storable(getattr(value, name), below) for name in value.__struct_fields__})
    if isinstance(value, dict):
        found = cast("dict[Any, Any]", value).items()
        return {clean_text(str(key)): _storable(item, below) for key, item in found}
    if isinstance(value, _LISTS):
        return [_storable(item, below) for item in cast("list[Any]", value)]
    try:
        to_json_bytes(value)
    except (TypeError, ValueError, RecursionError):
        return f"({type(value).__name__}: it has no JSON form)"
    return value
