"""Python types to JSON and back: one codec a type, used by state keys, tool arguments and structured answers.

Scalars cost a type check. Dataclasses, TypedDicts, enums, dates and generics are msgspec's. Types of pydantic,
and those that msgspec cannot describe, are pydantic's, which is imported when the first of them is met.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import fields, is_dataclass
from functools import cache, cached_property
from types import UnionType
from typing import Annotated, Any, Protocol, get_args, get_origin

import msgspec

from .content import check_shape, to_json_value


class Codec(Protocol):
    """Both directions raise ValueError or TypeError with a reason when the value does not fit."""

    def encode(self, value: Any) -> Any: ...

    def decode(self, value: Any) -> Any: ...

    def schema(self) -> dict[str, Any]:
        """The JSON Schema of the encoded form; TypeError where there is none."""
        ...


class JsonCodec:
    """A kind that is JSON already: str, int, float, bool, bare list and dict; `object` is any value with a JSON form."""

    def __init__(self, kind: type, schema: dict[str, Any]) -> None:
        self._kind, self._schema = kind, schema

    def encode(self, value: Any) -> Any:
        kind = self._kind
        if kind is object:
            return to_json_value(value, exact=True)
        if type(value) is kind or (kind is float and type(value) is int):
            return value if kind is bool else to_json_value(value, exact=True)
        raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")

    def decode(self, value: Any) -> Any:
        return value if self._kind is object else self.encode(value)

    def schema(self) -> dict[str, Any]:
        return self._schema


class PlainCodec:
    """Types that msgspec understands: dataclasses, TypedDicts, enums, dates and generics, also with models inside."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._schema = msgspec.json.schema(kind, schema_hook=_foreign_schema)

    def encode(self, value: Any) -> Any:
        encoded = to_json_value(value, exact=True)
        self.decode(encoded)  # a value that cannot be read back must not be written
        return encoded

    def decode(self, value: Any) -> Any:
        return _with_defaults(msgspec.convert(value, self._kind, dec_hook=_decode_foreign, str_keys=True))

    def schema(self) -> dict[str, Any]:
        return self._schema


class ModelCodec:
    """Types that only pydantic understands."""

    def __init__(self, kind: Any) -> None:
        from pydantic import TypeAdapter
        from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

        try:
            self._adapter: TypeAdapter[Any] = TypeAdapter(kind)
        except (PydanticSchemaGenerationError, PydanticUserError, NameError) as exc:
            raise TypeError(str(exc).partition("\n")[0]) from exc

    def encode(self, value: Any) -> Any:
        return self._adapter.dump_python(value, mode="json", warnings="error")

    def decode(self, value: Any) -> Any:
        return self._adapter.validate_python(value)

    def schema(self) -> dict[str, Any]:
        return self._adapter.json_schema()


class LazyCodec:
    """A codec built at first use, so that declaring a key costs nothing."""

    def __init__(self, kind: Any) -> None:
        self._kind: Any = kind

    @cached_property
    def _codec(self) -> Codec:
        if _is_pydantic(self._kind):
            return ModelCodec(self._kind)
        try:
            return PlainCodec(self._kind)
        except (TypeError, NameError):
            return ModelCodec(self._kind)

    def encode(self, value: Any) -> Any:
        return self._codec.encode(value)

    def decode(self, value: Any) -> Any:
        return self._codec.decode(value)

    def schema(self) -> dict[str, Any]:
        return self._codec.schema()


_NAMES: dict[Any, str] = {
    str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object",
}  # fmt: skip
_JSON_CODECS: dict[Any, JsonCodec] = {kind: JsonCodec(kind, {"type": name}) for kind, name in _NAMES.items()}
_JSON_CODECS[Any] = _JSON_CODECS[object] = JsonCodec(object, {})


def codec_for(kind: Any) -> Codec:
    """Return the codec of a Python type."""
    try:
        return _JSON_CODECS.get(kind) or LazyCodec(kind)
    except TypeError:  # an unhashable annotation
        return LazyCodec(kind)


def _is_pydantic(kind: Any) -> bool:
    """Return whether pydantic must read the type: its models and dataclasses, and constraints written with its `Field`."""
    if hasattr(kind, "__pydantic_validator__") or hasattr(kind, "__get_pydantic_core_schema__"):
        return True
    if get_origin(kind) is Annotated:
        inner, *notes = get_args(kind)
        foreign = ("pydantic", "annotated_types")
        return _is_pydantic(inner) or any(type(note).__module__.partition(".")[0] in foreign for note in notes)
    return any(_is_pydantic(part) for part in get_args(kind))


def _decode_foreign(kind: type, value: Any) -> Any:
    validate: Callable[[Any], Any] | None = getattr(kind, "model_validate", None)
    if validate is None:
        raise TypeError(f"type {kind.__name__} cannot be read from JSON")
    return validate(value)


def _foreign_schema(kind: type) -> dict[str, Any]:
    describe: Callable[[], dict[str, Any]] | None = getattr(kind, "model_json_schema", None)
    schema = describe() if describe is not None else None
    if schema is None or "$defs" in schema:  # its references would point nowhere inside another schema
        raise TypeError(f"type {kind.__name__} cannot be described inside another")
    return schema


def default_of(kind: Any) -> Any:
    """Return a fresh default of a type; TypeError if it has none."""
    origin = get_origin(kind) or kind
    if kind is None or kind is type(None):
        return None
    if not callable(origin):
        raise TypeError(f"{kind!r} has no default")
    return origin()


def _with_defaults(value: Any) -> Any:
    """Return the value with the defaults of its dataclasses written into them.

    msgspec leaves defaults to the class, and would then leave them out when it writes the value.
    """
    kind = value.__class__
    if kind in (list, tuple, set, frozenset, dict):
        for item in value.values() if kind is dict else value:
            if not _has_no_defaults(item.__class__):
                _with_defaults(item)
    elif is_dataclass(kind) and hasattr(value, "__dict__"):
        for field in fields(kind):
            value.__dict__.setdefault(field.name, getattr(value, field.name))
            _with_defaults(value.__dict__[field.name])
    return value


@cache
def _has_no_defaults(kind: type) -> bool:
    """Return whether a value of that class and its items need no defaults written into them."""
    return kind not in (list, tuple, set, frozenset, dict) and not is_dataclass(kind)


_ATOMS = frozenset({str, int, float, bool, type(None), bytes, complex})
_JSON_KINDS = frozenset({list, dict})
_MANY = 1000
"""Lists and objects in a value that is copied at once instead of piece by piece."""


def isolate(value: Any) -> Any:
    """Return a copy that shares nothing mutable with the original, so that changing one never changes the other.

    Raise ValueError for a list or dict that is too deep or too large.
    """
    kind = value.__class__
    if kind in _ATOMS:
        return value
    if kind is list or kind is dict:
        shape = check_shape(value)
        if shape.boxes > _MANY and shape.kinds <= _JSON_KINDS:
            with suppress(ValueError):  # something in it is no JSON
                return marshal.loads(marshal.dumps(value, 2))  # several times as fast; 2: without references
    return _copied(value)


def _copied(value: Any) -> Any:
    kind = value.__class__
    if kind is list:
        return [item if _cannot_change(item.__class__) else _copied(item) for item in value]
    if kind is dict:
        return {key: item if _cannot_change(item.__class__) else _copied(item) for key, item in value.items()}
    return value if _cannot_change(kind) else deepcopy(value)


@cache
def _cannot_change(kind: type) -> bool:
    """Return whether it is an atom or a frozen record of atoms, which need not be copied."""
    if kind in _ATOMS:
        return True
    if not (issubclass(kind, msgspec.Struct) and kind.__struct_config__.frozen):
        return False
    return all(_is_atomic(field.type) for field in msgspec.structs.fields(kind))


def _is_atomic(hint: Any) -> bool:
    return hint in _ATOMS or (isinstance(hint, UnionType) and all(map(_is_atomic, get_args(hint))))
