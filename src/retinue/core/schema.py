"""JSON Schema of tool arguments and of structured answers, and the checks against it.

Plain JSON types are described here, which is quick and needs no conversion. Anything richer (dataclasses, models,
enums, dates, `Annotated` constraints) is described and converted by its codec.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union

import jsonschema_rs
import msgspec
from msgspec import Struct

from .codec import Codec, codec_for
from .content import to_json_text
from .errors import ConfigurationError, InvalidArguments

Decoder = Callable[[dict[str, Any]], dict[str, Any]]

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

    def require(self, args: Any) -> None:
        """Raise InvalidArguments where the arguments break the schema."""
        if self._validator is None:
            self._validator = self._compiled()
        if not self._validator.is_valid(args):
            raise InvalidArguments("; ".join(self.problems(args)))

    __call__ = require

    def problems(self, args: Any) -> list[str]:
        """Return every error of the arguments, each with its place."""
        errors = (self._validator or self._compiled()).iter_errors(args)
        return [f"{_where(error.instance_path)}{error.message}" for error in errors]


def with_defaults(schema: Mapping[str, Any], args: dict[str, Any]) -> dict[str, Any]:
    """Return arguments with the defaults that their schema has for those that were omitted."""
    properties: dict[str, Any] = schema.get("properties", {})
    return {**{name: about["default"] for name, about in properties.items() if "default" in about}, **args}


def _where(path: Any) -> str:
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
        properties[parameter.name] = _annotated(schema, parameter)
    whole = _object(properties, parameters, open_ended)
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


def _object(properties: dict[str, Any], parameters: list[Parameter], open_ended: bool) -> dict[str, Any]:
    required = [parameter.name for parameter in parameters if parameter.default is _EMPTY]
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        schema["required"] = required
    if not open_ended:
        schema["additionalProperties"] = False
    return schema


def _annotated(schema: dict[str, Any], parameter: Parameter) -> dict[str, Any]:
    schema = schema.copy()
    if parameter.description:
        schema["description"] = parameter.description
    if parameter.default is not _EMPTY and isinstance(parameter.default, _JSON_ATOMS):
        schema["default"] = parameter.default
    return schema


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


OUTPUT_TRIES = 3
"""The number of times that the model reads what is wrong with its answer before the run fails."""

_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)```", re.S)


class OutputFormat:
    """A type as the shape of an answer."""

    def __init__(self, kind: Any, owner: str) -> None:
        self.kind = kind
        self._codec = codec_for(kind)
        try:
            self.schema = self._codec.schema()
        except (TypeError, ValueError, NameError) as exc:
            raise ConfigurationError(f"{owner}: output type {kind!r} has no JSON Schema: {exc}") from exc

    @property
    def instructions(self) -> str:
        """The instructions for the model."""
        return f"Give your final answer as JSON only, fitting this JSON Schema:\n{to_json_text(self.schema)}"

    def read(self, text: str) -> Any:
        """Return the typed answer in a text; ValueError says what is wrong with it."""
        if self.kind is str:
            return text
        fenced = _FENCED.search(text)
        try:
            value = msgspec.json.decode((fenced[1] if fenced else text).strip())
        except ValueError as exc:
            raise ValueError(f"it is not JSON: {exc}") from None
        try:
            return self._codec.decode(value)
        except (TypeError, ValueError) as exc:
            raise ValueError(str(exc)) from None

    def encode(self, value: Any) -> Any:
        return None if value is None else self._codec.encode(value)

    def decode(self, value: Any) -> Any:
        """Return the value that `encode` was given; ValueError or TypeError says why it does not fit."""
        return None if value is None else self._codec.decode(value)
