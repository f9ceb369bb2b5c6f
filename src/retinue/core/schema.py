"""Python types as JSON: codecs, the JSON Schema of tool arguments and of structured answers, and the checks against it.

Scalars cost a type check. Dataclasses, TypedDicts, enums, dates and generics are msgspec's. Types of pydantic,
and those that msgspec cannot describe, are pydantic's, which is imported when the first of them is met.
"""

from __future__ import annotations

import inspect
import marshal
import types
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import fields, is_dataclass
from functools import cache, cached_property
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import jsonschema_rs
import msgspec
from msgspec import Struct

from .content import check_shape, sort_sets, to_json_text, to_json_value
from .errors import ConfigurationError, InvalidArguments

if TYPE_CHECKING:
    from pydantic import TypeAdapter


class JsonCodec:
    """A kind that is JSON already: str, int, float, bool, bare list and dict; `object` is any value with a JSON form.

    Like `TypeCodec`, it raises ValueError or TypeError with a reason when a value does not fit.
    """

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


class TypeCodec:
    """Any other type, read by msgspec or pydantic. Which one is found at first use, so that declaring a key costs nothing."""

    def __init__(self, kind: Any) -> None:
        self._kind: Any = kind
        self._schema: dict[str, Any] = {}

    @cached_property
    def _adapter(self) -> TypeAdapter[Any] | None:
        """The reader of pydantic; None if msgspec reads the type."""
        if not _is_pydantic(self._kind):
            with suppress(TypeError, NameError):
                self._schema = msgspec.json.schema(self._kind, schema_hook=_foreign_schema)
                return None
        from pydantic import TypeAdapter
        from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

        try:
            return TypeAdapter(self._kind)
        except (PydanticSchemaGenerationError, PydanticUserError, NameError) as exc:
            raise TypeError(str(exc).partition("\n")[0]) from exc

    @cached_property
    def _has_sets(self) -> bool:
        """False if the type certainly has no sets: pydantic describes each as a list of unique items."""
        try:
            return "uniqueItems" in to_json_text(self.schema())
        except (TypeError, ValueError, RuntimeError):  # it has no schema
            return True

    def encode(self, value: Any) -> Any:
        if self._adapter is not None:
            made = self._adapter.dump_python(value, mode="json", warnings="error")
            if self._has_sets and made.__class__ in (list, dict):
                sort_sets(value, made)
            return made
        encoded = to_json_value(value, exact=True)
        self.decode(encoded)  # a value that cannot be read back must not be written
        return encoded

    def decode(self, value: Any) -> Any:
        if self._adapter is not None:
            return self._adapter.validate_python(value)
        return _with_defaults(msgspec.convert(value, self._kind, dec_hook=_decode_foreign, str_keys=True))

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the encoded form; TypeError where there is none."""
        return self._schema if self._adapter is None else self._adapter.json_schema()


Codec = JsonCodec | TypeCodec


_SCALARS: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    Any: {},
    list: {"type": "array"},
    dict: {"type": "object"},
}
_JSON_CODECS = {kind: JsonCodec(object if kind is Any else kind, schema) for kind, schema in _SCALARS.items()}
_JSON_CODECS[object] = _JSON_CODECS[Any]


def codec_for(kind: Any) -> Codec:
    """Return the codec of a Python type."""
    try:
        return _JSON_CODECS.get(kind) or TypeCodec(kind)
    except TypeError:  # an unhashable annotation
        return TypeCodec(kind)


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
_FEW = 64
_MOST_CHECKED = 500
"""Items of a value whose errors are listed. Each item may have an error, and each error costs up to 35 µs."""
_DEEPEST_LISTED = 6
"""The depth of values whose errors are listed."""
_FOR_OTHERS = frozenset({"type", "enum", "const", "anyOf", "oneOf", "falseSchema"})


def isolate(value: Any) -> Any:
    """Return a copy that shares nothing mutable with the original, so that changing one never changes the other.

    Raise ValueError for a list or dict that is too deep or too large.
    """
    kind = value.__class__
    if kind in _ATOMS:
        return value
    if kind is dict and _is_flat(value):
        return value.copy()
    if kind is list or kind is dict:
        shape = check_shape(value)
        if shape.boxes > _MANY and shape.kinds <= _JSON_KINDS:
            with suppress(ValueError):  # something in it is no JSON
                return marshal.loads(marshal.dumps(value, 2))  # several times as fast; 2: without references
    return _copied(value)


def _is_flat(value: dict[Any, Any]) -> bool:
    """Return whether it is a small object of atoms, as the arguments of most calls are."""
    if len(value) > _FEW:
        return False
    for item in value.values():  # not `all`: a generator costs more than the rest
        if item.__class__ not in _ATOMS:
            return False
    return True


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


Decoder = Callable[[dict[str, Any]], dict[str, Any]]

_EMPTY = inspect.Parameter.empty
_JSON_ATOMS = (str, int, float, bool, type(None))


class Parameter(Struct, frozen=True):
    """One argument the model gives."""

    name: str
    type: Any
    default: Any
    description: str


def _refuse_reference(uri: str) -> Any:
    """Fetch nothing for a schema: it may be that of a stranger, who could have files and addresses read."""
    raise ValueError(f"{uri} is outside of the schema, and nothing is fetched")


def check_schema(schema: Mapping[str, Any], what: str) -> Any:
    """Return a validator for a JSON Schema; ConfigurationError names an invalid one."""
    try:
        return jsonschema_rs.validator_for(dict(schema), retriever=_refuse_reference)
    except (ValueError, jsonschema_rs.ReferencingError) as exc:
        raise ConfigurationError(f"{what}: not a valid JSON Schema: {exc}") from exc


class ArgumentCheck:
    """A compiled JSON Schema. Valid arguments cost a fraction of a microsecond; wrong ones are all listed.

    A schema that is known to be valid (`proven`) is compiled at the first call: most tools are never called.
    """

    __slots__ = ("_owner", "_schema", "_validator")

    def __init__(self, schema: Mapping[str, Any], owner: str, proven: bool = False) -> None:
        self._schema, self._owner = schema, owner
        self._validator = None if proven else self._compiled()

    def _compiled(self) -> Any:
        return check_schema(self._schema, f"tool {self._owner!r}: its parameters")

    def accepts(self, args: Any) -> bool:
        """Return whether the arguments fit the schema."""
        if self._validator is None:
            self._validator = self._compiled()
        return self._validator.is_valid(args)

    def problems(self, args: Any) -> list[str]:
        """Return every error of the arguments, each with its place; the first one only if the arguments are large."""
        if self.accepts(args):
            return []
        validator, text = self._validator or self._compiled(), to_json_text(self._schema)
        if _is_deep(args) and "$ref" in text:  # options in options: the time doubles with each
            return [f"it does not fit the schema; errors are listed for values up to {_DEEPEST_LISTED} deep"]
        if not has_more_items(args, _MOST_CHECKED):
            return [problem for error in validator.iter_errors(args) for problem in self._listed(error)]
        first = "it does not fit the schema"
        if not has_more_items(args, 10 * _MOST_CHECKED) and 'Of":' not in text:  # an error of options has all below it
            try:
                validator.validate(args)
            except jsonschema_rs.ValidationError as error:
                first = f"{where_in(error.instance_path)}{error.message}"[:300]
        return [f"{first}; all errors are listed for up to {_MOST_CHECKED} items"]

    def _listed(self, error: Any) -> list[str]:
        """Return an error with its place. If the value is meant for one option, return what does not fit that option."""
        words = error.message
        if isinstance(error.kind, jsonschema_rs.ValidationErrorKind.AnyOf):
            place, kinds = error.instance_path, self._kinds(error)
            meant = [found for found in error.kind.context if not any(_is_other(one, place) for one in found)]
            if len(meant) != 1 and kinds is None:
                meant = [found for found in error.kind.context if not all(_wants_null(one) for one in found)]
            if len(meant) == 1:
                return [problem for one in meant[0] for problem in self._listed(one)]
            if kinds is not None:
                words = f"{to_json_text(error.instance)} is not of type {' or '.join(kinds)}"
        return [f"{where_in(error.instance_path)}{words}"]

    def _kinds(self, error: Any) -> list[str] | None:
        """Return the types that would do, if each option has one."""
        options: Any = self._schema
        try:
            for part in error.schema_path:
                options = options[part]
            return [str(option["type"]) for option in options if option.get("type") != "null"]
        except (KeyError, IndexError, TypeError, AttributeError):  # a reference, or an option without a type
            return None


def _is_other(error: Any, place: Any) -> bool:
    """Return whether an error at this place says that an option is for other values."""
    return error.instance_path == place and error.kind.name in _FOR_OTHERS


def _wants_null(error: Any) -> bool:
    return error.kind.name == "type" and error.message.endswith('is not of type "null"')


def _is_deep(value: Any) -> bool:
    """Return whether a JSON value is nested too deeply to list its errors."""
    level = [value]
    for _ in range(_DEEPEST_LISTED + 1):
        level = [item for box in level for item in _items(box) if item.__class__ in (dict, list)]
        if not level:
            return False
    return True


def _items(box: Any) -> Any:
    if box.__class__ is dict:
        return box.values()
    return box if box.__class__ is list else ()


def has_more_items(value: Any, most: int) -> bool:
    """Return whether a JSON value has more items than that, in all its lists and objects."""
    count, boxes = 0, [value]
    while boxes and count <= most:
        box = boxes.pop()
        items = _items(box)
        count += len(items)
        if count <= most:
            boxes += [item for item in items if item.__class__ in (dict, list)]
    return count > most


def with_defaults(schema: Mapping[str, Any], args: dict[str, Any]) -> dict[str, Any]:
    """Return arguments with the defaults that their schema has for those that were omitted."""
    properties: dict[str, Any] = schema.get("properties", {})
    return {**{name: about["default"] for name, about in properties.items() if "default" in about}, **args}


def where_in(path: Any) -> str:
    """Return a place in a value, to be written before what is wrong there."""
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return f"{place.lstrip('.')}: " if place else ""


def describe(parameters: list[Parameter], open_ended: bool, owner: str) -> tuple[dict[str, Any], Decoder | None]:
    """Return the JSON Schema of the parameters and, if values must become Python objects, their decoder."""
    properties: dict[str, Any] = {}
    definitions: dict[str, Any] = {}
    codecs: dict[str, Codec] = {}
    for parameter in parameters:
        schema = _plain_schema(parameter.type)
        if schema is None:
            codec = codecs[parameter.name] = codec_for(parameter.type)
            schema = _rich_schema(codec, definitions, f"{owner}: parameter {parameter.name!r}")
        properties[parameter.name] = schema = schema.copy()
        if parameter.description:
            schema["description"] = parameter.description
        if parameter.default is not _EMPTY and isinstance(parameter.default, _JSON_ATOMS):
            schema["default"] = parameter.default
    whole: dict[str, Any] = {"type": "object", "properties": properties}
    if required := [parameter.name for parameter in parameters if parameter.default is _EMPTY]:
        whole["required"] = required
    if not open_ended:
        whole["additionalProperties"] = False
    if definitions:
        whole["$defs"] = definitions
    return whole, _decoder(codecs) if codecs else None


def _rich_schema(codec: Codec, definitions: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the schema of one parameter; its definitions move to those of the whole."""
    try:
        schema = _without_titles(codec.schema())
    except (TypeError, ValueError, NameError) as exc:
        raise ConfigurationError(f"{where} has no JSON Schema: {str(exc).partition(chr(10))[0]}") from exc
    for name, definition in schema.pop("$defs", {}).items():
        if definitions.setdefault(name, definition) != definition:
            raise ConfigurationError(f"{where}: another parameter has a different type named {name!r}: rename one")
    return schema


def _decoder(codecs: dict[str, Codec]) -> Decoder:
    def decode(args: dict[str, Any]) -> dict[str, Any]:
        made = dict(args)
        for name, codec in codecs.items():
            if name in made:
                try:
                    made[name] = codec.decode(made[name])
                except (TypeError, ValueError) as exc:
                    raise InvalidArguments(f"{name}: {exc}") from None
        return made

    return decode


def _plain_schema(kind: Any) -> dict[str, Any] | None:
    """Return the schema of a type whose JSON form is its Python form, or None."""
    try:
        if (known := _SCALARS.get(kind)) is not None:
            return known
    except TypeError:
        return None
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is list and (item := _plain_schema(args[0])) is not None:
        return {"type": "array", "items": item}
    if origin is dict and args[0] is str and (item := _plain_schema(args[1])) is not None:
        return {"type": "object", "additionalProperties": item}
    if origin is Literal and all(isinstance(arg, _JSON_ATOMS) for arg in args):
        return {"enum": list(args)}
    if origin in (Union, types.UnionType):
        options = [_plain_schema(arg) for arg in args]
        if all(option is not None for option in options):
            return {"anyOf": options}
    return None


def _without_titles(schema: Any) -> Any:
    """Return a schema without the generated titles, which only cost tokens."""
    if isinstance(schema, dict):
        kept: dict[str, Any] = {}
        for key, value in typing.cast("dict[str, Any]", schema).items():
            if key in ("properties", "$defs") and isinstance(value, dict):
                items = typing.cast("dict[str, Any]", value).items()
                kept[key] = {name: _without_titles(item) for name, item in items}
            elif key != "title":
                kept[key] = _without_titles(value)
        return kept
    if isinstance(schema, list):
        return [_without_titles(item) for item in typing.cast("list[Any]", schema)]
    return schema
